//! Every backend and both forms of a product against plain sums, at sizes around lanes, groups, blocks and tiles.

use super::*;
use crate::pool::Columns;
use crate::quant::{dequantize_fp8, dequantize_mxfp4, quantize_fp8, quantize_mxfp4};
use proptest::prelude::*;

fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let h = (i ^ seed.rotate_left(16)).wrapping_mul(0x9e37_79b9);
            ((h ^ h >> 15).wrapping_mul(0x85eb_ca6b) >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A matrix in each format that can hold its shape, with the values that it stands for.
fn in_all_formats(outputs: usize, inputs: usize, seed: u32) -> Vec<(Linear, Vec<f32>)> {
    let plain = values(outputs * inputs, seed);
    let bits: Vec<u16> = plain.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
    let bf16 = bits.iter().map(|&b| f32::from_bits(u32::from(b) << 16)).collect();
    let fp8 = quantize_fp8(&plain, outputs, inputs);
    let mut all = vec![
        (Linear::from_bf16(outputs, inputs, &bits), bf16),
        (Linear::from_fp8(outputs, inputs, &fp8).expect("no NaN"), dequantize_fp8(&fp8, outputs, inputs)),
    ];
    if inputs.is_multiple_of(MXFP4_BLOCK) {
        let mut m = quantize_mxfp4(&plain);
        // Scales as far apart as they can be, too.
        let far = [0, 1, 2, 250, 254].map(|scale| (seed as usize % m.scales.len().max(1), scale));
        if let Some((at, scale)) = far.get(seed as usize % 7).filter(|_| !m.scales.is_empty()) {
            m.scales[*at] = *scale;
        }
        all.push((Linear::from_mxfp4(outputs, inputs, &m), dequantize_mxfp4(&m)));
    }
    all.push((Linear::from_f32(outputs, inputs, &plain), plain));
    all
}

/// `y = x W^T`, each output one chain of fused multiply-adds: what every backend must give, to the bit.
fn reference(x: &[f32], w: &[f32], inputs: usize) -> Vec<f32> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).fold(0.0f32, |sum, (x, w)| x.mul_add(*w, sum));
    x.chunks_exact(inputs).flat_map(|x| w.chunks_exact(inputs).map(move |w| dot(x, w))).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    // Which zero and which NaN is not the product's to choose.
    x.iter().map(|x| if x.is_nan() { f32::NAN } else { x + 0.0 }.to_bits()).collect()
}

fn run(kernels: ProductFn, w: &Linear, x: &[f32]) -> Vec<f32> {
    let rows = Rows::new(x, w.inputs());
    let mut y = vec![f32::NAN; rows.len() * w.outputs()];
    w.forward_with(kernels, rows, &mut ColumnPart::new(&mut y, 0..w.outputs()), &mut Scratch::default());
    y
}

proptest! {
    #[test]
    fn every_backend_gives_the_bits_of_one_chain_of_multiply_adds(
        rows in 1usize..30, outputs in 1usize..80, inputs in 1usize..140, seed: u32,
    ) {
        let inputs = if seed.is_multiple_of(3) { inputs.next_multiple_of(MXFP4_BLOCK) } else { inputs };
        let x = values(rows * inputs, !seed);
        for (w, plain) in in_all_formats(outputs, inputs, seed) {
            let want = bits(&reference(&x, &plain, inputs));
            for (name, kernels) in backends() {
                prop_assert_eq!(&bits(&run(kernels, &w, &x)), &want, "{} {:?}", name, w.packed.format);
            }
        }
    }

    #[test]
    fn packing_is_undone(outputs in 1usize..300, inputs in 1usize..5, blocks in 0usize..6, seed: u32) {
        let inputs = if blocks == 0 { inputs } else { blocks * MXFP4_BLOCK };
        let plain = values(outputs * inputs, seed);
        let w = Linear::from_f32(outputs, inputs, &plain);
        prop_assert_eq!((w.to_f32(), w.to_bf16(), w.to_fp8(), w.to_mxfp4()), (Some(plain.clone()), None, None, None));
        let halves: Vec<u16> = plain.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        prop_assert_eq!(Linear::from_bf16(outputs, inputs, &halves).to_bf16(), Some(halves));
        let fp8 = quantize_fp8(&plain, outputs, inputs);
        prop_assert_eq!(Linear::from_fp8(outputs, inputs, &fp8).and_then(|w| w.to_fp8()), Some(fp8));
        if blocks > 0 {
            let m = quantize_mxfp4(&plain);
            prop_assert_eq!(Linear::from_mxfp4(outputs, inputs, &m).to_mxfp4(), Some(m));
        }
    }
}

/// Sizes beyond a block of rows and of inputs, cut among threads, chosen rows, rows within wider ones.
#[test]
fn large_products_cut_in_any_way_give_the_same_bits() {
    let (rows, outputs, inputs) = (101, 83, 544);
    let x = values(rows * inputs, 5);
    for (w, plain) in in_all_formats(outputs, inputs, 9) {
        let want = bits(&reference(&x, &plain, inputs));
        for (name, kernels) in backends() {
            assert_eq!(bits(&run(kernels, &w, &x)), want, "{name}");
            for num_threads in 1..5 {
                let mut y = vec![f32::NAN; rows * (outputs + 32)];
                let columns = Columns::new(&mut y, outputs + 32, PANEL, num_threads);
                for t in 0..num_threads {
                    let rows = Rows::new(&x, inputs);
                    let mut part = columns.take(t);
                    w.forward_with(kernels, rows, &mut part.within(16..16 + outputs), &mut Scratch::default());
                }
                let got: Vec<f32> = y.chunks_exact(outputs + 32).flat_map(|y| &y[16..outputs + 16]).copied().collect();
                assert_eq!(bits(&got), want, "{name}, {num_threads} threads");
            }
            for num_chosen in [1, 2, 3, 4, 5, 6, 7, 40] {
                let chosen: Vec<u32> = (0..num_chosen).map(|i| (i * 37 + 11) % rows as u32).collect();
                let wide: Vec<f32> =
                    x.chunks_exact(inputs).flat_map(|x| [&[f32::NAN; 2], x, &[f32::NAN]].concat()).collect();
                let rows = Rows::columns(&wide, inputs + 3, 2, inputs).choose(&chosen);
                let mut y = vec![f32::NAN; chosen.len() * outputs];
                w.forward_with(kernels, rows, &mut ColumnPart::new(&mut y, 0..outputs), &mut Scratch::default());
                for (y, &r) in y.chunks_exact(outputs).zip(&chosen) {
                    assert_eq!(bits(y), want[r as usize * outputs..][..outputs], "{name}, row {r} of {num_chosen}");
                }
            }
        }
    }
}

#[test]
fn fp8_that_the_kernels_cannot_hold_exactly_is_refused() {
    let m = |code, scale| Fp8 { codes: vec![0, code], scales: vec![scale] };
    assert!(Linear::from_fp8(1, 2, &m(0x7e, 134)).is_some());
    assert!(Linear::from_fp8(1, 2, &m(0x7f, 127)).is_none());
    assert!(Linear::from_fp8(1, 2, &m(0xff, 127)).is_none());
    assert!(Linear::from_fp8(1, 2, &m(0x7e, 135)).is_none());
}
