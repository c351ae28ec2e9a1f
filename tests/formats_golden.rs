//! Number formats and small ops against the recorded tables: MXFP4, e8m0 scales, Sinkhorn, rotary tables, router scores,
//! Muon's Newton-Schulz iteration.

use std::path::Path;

use kernels::hyper_connection::{Gates, mappings};
use kernels::quant::{
    E2M1, Fp8, MXFP4_BLOCK, Mxfp4, dequantize_fp8, dequantize_mxfp4, e4m3_code, e4m3_value, e8m0_value, mxfp4_to_fp8,
    quantize_fp8, quantize_mxfp4,
};
use kernels::rope::Rotation;
use kernels::router;
use rollout::model::{LayerKind, ModelConfig};
use tch::Tensor;
use trainer::optimizer::newton_schulz;

use crate::golden::{Recorded, max_abs_diff};
use crate::program::root;

fn formats() -> Recorded {
    Recorded::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v4/formats/formats.safetensors"))
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn golden_v4_values_of_e2m1_and_e8m0() {
    let table = formats();
    assert_eq!(bits(&E2M1), bits(&table.f32("e2m1.decode").expect("recorded").1));
    let want = table.f32("e8m0.decode").expect("recorded").1;
    let got: Vec<f32> = (0..=255).map(e8m0_value).collect();
    assert_eq!(bits(&got[..255]), bits(&want[..255]));
    assert!(got[255].is_nan() && want[255].is_nan());
}

#[test]
fn golden_v4_codes_round_to_nearest_ties_to_even() {
    let table = formats();
    let (inputs, codes) = (table.f32("e2m1.encode_in").expect("recorded").1, table.bytes("e2m1.encode_out"));
    let mut compared = 0;
    for (&x, &want) in inputs.iter().zip(&codes) {
        // The scale follows the largest value of a block: a 6 beside it makes it 1, and beyond 6 it would change.
        if x.abs() <= 6.0 {
            let mut block = [0.0; MXFP4_BLOCK];
            (block[0], block[1], block[MXFP4_BLOCK - 1]) = (x, 6.0, x);
            let Mxfp4 { codes, scales } = quantize_mxfp4(&block);
            assert_eq!(scales, [127], "{x}");
            assert_eq!(codes[0], want | 7 << 4, "{x:e} at an even column");
            assert_eq!(codes[MXFP4_BLOCK / 2 - 1], want << 4, "{x:e} at an odd column");
            compared += 1;
        }
    }
    assert!(compared > 450, "only {compared} of {} inputs lie within 6", inputs.len());
}

#[test]
fn golden_v4_scales_are_the_least_power_of_two_that_holds_the_block() {
    let table = formats();
    let (amax, want) = (table.f32("scale.amax").expect("recorded").1, table.f32("scale.fp4_ceil").expect("recorded").1);
    for (amax, want) in amax.into_iter().zip(want) {
        for (at, sign) in [(0, 1.0), (MXFP4_BLOCK - 1, -1.0)] {
            let mut block = [0.0; MXFP4_BLOCK];
            block[at] = sign * amax;
            let scale = e8m0_value(quantize_mxfp4(&block).scales[0]);
            assert_eq!(scale, want, "amax {amax:e}");
        }
    }
}

#[test]
fn golden_v4_packed_blocks() {
    let table = formats();
    let (_, weight) = table.f32("fp4.weight").expect("recorded");
    let packed = quantize_mxfp4(&weight);
    assert_eq!(packed.codes, table.bytes("fp4.packed"));
    assert_eq!(packed.scales, table.bytes("fp4.scale"));
    let (_, values) = table.f32("fp4.dequant").expect("recorded");
    assert_eq!(bits(&dequantize_mxfp4(&packed)), bits(&values));
    // What codes can say, they say again.
    assert_eq!(dequantize_mxfp4(&quantize_mxfp4(&values)), values);
    // Codes that another writer packed: every value is one of the sixteen, times its block's scale.
    let other = Mxfp4 { codes: table.bytes("fp4to8.packed"), scales: table.bytes("fp4to8.scale") };
    let values = dequantize_mxfp4(&other);
    for (row, block) in values.chunks_exact(MXFP4_BLOCK).enumerate() {
        let scale = e8m0_value(other.scales[row]);
        assert!(block.iter().all(|v| E2M1.contains(&(v / scale))), "block {row}");
    }
}

#[test]
fn golden_v4_e4m3() {
    let table = formats();
    let want = table.f32("e4m3fn.decode").expect("recorded").1;
    for (code, want) in (0..=255).zip(want) {
        let got = e4m3_value(code);
        assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{code:#x}: {got} for {want}");
    }
    let (inputs, codes) = (table.f32("e4m3fn.encode_in").expect("recorded").1, table.bytes("e4m3fn.encode_out"));
    for (&x, &want) in inputs.iter().zip(&codes) {
        assert_eq!(e4m3_code(x), want, "{x:e}");
    }
}

#[test]
fn golden_v4_fp8_tiles() {
    let table = formats();
    let (amax, want) = (table.f32("scale.amax").expect("recorded").1, table.f32("scale.fp8_ceil").expect("recorded").1);
    for (amax, want) in amax.into_iter().zip(want) {
        assert_eq!(e8m0_value(quantize_fp8(&[0.0, -amax], 1, 2).scales[0]), want, "amax {amax:e}");
    }
    for name in table.names().iter().filter_map(|name| name.strip_suffix(".weight")).filter(|n| n.starts_with("fp8.")) {
        let (shape, weight) = table.f32(&format!("{name}.weight")).expect("recorded");
        let fp8 = quantize_fp8(&weight, shape[0], shape[1]);
        assert_eq!(fp8.codes, table.bytes(&format!("{name}.q")), "{name}");
        assert_eq!(fp8.scales, table.bytes(&format!("{name}.scale")), "{name}");
        let (_, values) = table.f32(&format!("{name}.dequant")).expect("recorded");
        assert_eq!(bits(&dequantize_fp8(&fp8, shape[0], shape[1])), bits(&values), "{name}");
        // What codes can say, they say again.
        let again = quantize_fp8(&values, shape[0], shape[1]);
        assert_eq!(dequantize_fp8(&again, shape[0], shape[1]), values, "{name}");
    }
}

#[test]
fn golden_v4_mxfp4_is_held_by_fp8_exactly() {
    let table = formats();
    let fp4 = Mxfp4 { codes: table.bytes("fp4to8.packed"), scales: table.bytes("fp4to8.scale") };
    let fp8 = mxfp4_to_fp8(&fp4, 128, 256).expect("the scales lie near each other");
    assert_eq!(fp8, Fp8 { codes: table.bytes("fp4to8.q"), scales: table.bytes("fp4to8.tile_scale") });
    assert_eq!(dequantize_fp8(&fp8, 128, 256), dequantize_mxfp4(&fp4));
    // Scales 2^30 apart in one tile: no FP8 scale holds both.
    let mut wide = fp4;
    wide.scales[0] += 30;
    assert_eq!(mxfp4_to_fp8(&wide, 128, 256), None);
}

#[test]
fn golden_v4_sinkhorn() {
    let table = formats();
    for (n, iters, eps) in [(4, 20, 1e-6), (4, 1, 1e-6), (2, 3, 1e-3)] {
        let name = format!("sinkhorn.n{n}_i{iters}");
        let (_, inputs) = table.f32(&format!("{name}.in")).expect("recorded");
        let (_, want) = table.f32(&format!("{name}.out")).expect("recorded");
        let base = vec![0.0; (2 + n) * n];
        let gates = Gates { scale: &[1.0; 3], base: &base, num_streams: n, sinkhorn_iters: iters, eps };
        let mut largest = 0.0f32;
        for (input, want) in inputs.chunks_exact(n * n).zip(want.chunks_exact(n * n)) {
            let mut z = vec![0.0; 2 * n];
            z.extend_from_slice(input);
            mappings(&mut z, &gates);
            largest = largest.max(max_abs_diff(&z[2 * n..], want));
        }
        assert!(largest < 1e-6, "{name} differs by {largest:e}");
    }
}

#[test]
fn golden_v4_rotary_tables() {
    let table = formats();
    // The release's rotary numbers on an otherwise small model.
    let mut config = ModelConfig::load(&root().join("recipes/quickstart_base/config.json")).expect("a configuration");
    (config.head_dim, config.index_head_dim, config.qk_rope_head_dim) = (64, 64, 64);
    assert_eq!((config.rope_theta, config.compress_rope_theta), (10000.0, 160000.0));
    let scaling = config.rope_scaling.as_ref().expect("YaRN");
    assert_eq!((scaling.factor, scaling.original_max_position_embeddings), (16.0, 65536.0));
    let (_, positions) = table.i32("rope.positions").expect("recorded");
    for (kind, name) in
        [(LayerKind::Window, "main"), (LayerKind::Csa, "compress"), (LayerKind::Hca { ratio: 128 }, "compress")]
    {
        let recorded = |part: &str| table.f32(&format!("rope.{name}.{part}")).expect("recorded").1;
        let frequencies = config.rope_frequencies(kind);
        for (p, (got, want)) in frequencies.iter().zip(recorded("inv_freq")).enumerate() {
            assert!((got - want).abs() <= 1e-6 * want, "{name}: frequency {p} is {got:e}, recorded {want:e}");
        }
        let (cos, sin) = (recorded("cos"), recorded("sin"));
        let pairs = frequencies.len();
        for (row, &position) in positions.iter().enumerate() {
            let mut rotation = Rotation::default();
            // The angles of the recorded frequencies: a frequency's last bit is an angle of 0.1 at the far end.
            rotation.set(position as usize, &recorded("inv_freq"));
            let mut x: Vec<f32> = [1.0, 0.0].repeat(pairs);
            rotation.apply(&mut x, 2 * pairs);
            let (got_cos, got_sin): (Vec<f32>, Vec<f32>) = x.as_chunks::<2>().0.iter().map(|&[c, s]| (c, s)).unzip();
            let diff = max_abs_diff(&got_cos, &cos[row * pairs..][..pairs])
                .max(max_abs_diff(&got_sin, &sin[row * pairs..][..pairs]));
            assert!(diff < 1e-6, "{name}: position {position} differs by {diff:e}");
            rotation.apply_inverse(&mut x, 2 * pairs);
            assert!(max_abs_diff(&x, &[1.0, 0.0].repeat(pairs)) < 1e-6, "{name}: {position} and back");
        }
    }
}

#[test]
fn golden_v4_router_scores() {
    let table = formats();
    let (_, inputs) = table.f32("sqrtsoftplus.in").expect("recorded");
    let mut scores = vec![0.0; inputs.len()];
    let (_, want) = table.f32("sqrtsoftplus.out").expect("recorded");
    router::score(&inputs, &mut scores);
    for ((x, got), want) in inputs.iter().zip(scores).zip(want) {
        assert!((got - want).abs() <= 2e-6 * want.abs() + 1e-30, "score({x}) is {got:e}, recorded {want:e}");
    }
}

/// Recorded in f64; ours is f32. The last iterations draw singular values to 1, and entries stay below 1, so what is left
/// is f32's rounding (6e-8) along the smallest singular value of the input, raised at most 3.4445^8 * 2^2 = 8e4-fold.
#[test]
fn golden_v4_newton_schulz() {
    let table = formats();
    let mut num_cases = 0;
    for name in table.names() {
        let Some(case) = name.strip_prefix("muon_ns.").and_then(|name| name.strip_suffix(".in")) else { continue };
        let (shape, input) = table.f32(&name).expect("recorded");
        let (_, want) = table.f32(&format!("muon_ns.{case}.out")).expect("recorded");
        let matrix = Tensor::from_slice(&input).view_([shape[0] as i64, shape[1] as i64]);
        let got = Vec::<f32>::try_from(newton_schulz(&matrix).view(-1)).expect("f32");
        let diff = max_abs_diff(&got, &want);
        println!("{case}: f32 differs from f64 by {diff:.1e}");
        assert!(diff < 2e-6, "{case} differs by {diff:e}");
        num_cases += 1;
    }
    assert!(num_cases > 0, "{} has no case of Newton-Schulz", table.path.display());
}
