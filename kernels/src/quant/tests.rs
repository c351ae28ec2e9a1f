//! The quantisers in use against the reference, at values around every border between codes.

use super::*;
use proptest::prelude::*;

/// Around the borders between codes, scaled over the whole range of f32, and between them.
fn value() -> impl Strategy<Value = f32> {
    let border =
        prop::sample::select(vec![0.0f32, 0.25, 0.5, 0.75, 1.0, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 0.0078125]);
    let near = (border, -2i32..=2, -126i32..120, any::<bool>()).prop_map(|(x, ulps, exponent, negative)| {
        let x = f32::from_bits(x.to_bits().saturating_add_signed(ulps)) * 2f32.powi(exponent);
        if negative { -x } else { x }
    });
    prop_oneof![near, -8.0f32..8.0, any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite())]
}

/// Blocks whose values lie within reach of one scale.
fn values(n: usize) -> impl Strategy<Value = Vec<f32>> {
    let near = (-20i32..20, prop::collection::vec(-520.0f32..520.0, n)).prop_map(|(exponent, values)| {
        values.into_iter().map(|v| (v * 8.0).round() / 64.0 * 2f32.powi(exponent)).collect()
    });
    prop_oneof![prop::collection::vec(value(), n), near]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn mxfp4_is_the_reference_s(values in values(3 * MXFP4_BLOCK)) {
        let mut want = Mxfp4 { codes: vec![0; values.len() / 2], scales: vec![0; values.len() / MXFP4_BLOCK] };
        scalar::quantize(&values, &mut want.codes, &mut want.scales);
        prop_assert_eq!(quantize_mxfp4(&values), want);
        let bits: Vec<u16> = values.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        let rounded: Vec<f32> = bits.iter().map(|&b| f32::from_bits(u32::from(b) << 16)).collect();
        prop_assert_eq!(quantize_mxfp4_bf16(&bits), quantize_mxfp4(&rounded));
    }

    #[test]
    fn fp8_is_the_reference_s(values in values(130), rows in prop::sample::select(vec![1usize, 2, 65, 130])) {
        // Wide and narrow: in both directions a tile is cut off.
        let columns = values.len() / rows;
        let mut want = Fp8 { codes: vec![0; values.len()], scales: vec![0; num_tiles(rows, columns)] };
        scalar::quantize_fp8(&values, columns, &mut want.codes, &mut want.scales);
        prop_assert_eq!(quantize_fp8(&values, rows, columns), want);
    }
}

#[test]
fn what_is_not_finite_is_refused() {
    for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 64];
        values[40] = broken;
        assert!(std::panic::catch_unwind(|| quantize_mxfp4(&values)).is_err(), "{broken}");
        assert!(std::panic::catch_unwind(|| quantize_fp8(&values, 8, 8)).is_err(), "{broken}");
    }
}
