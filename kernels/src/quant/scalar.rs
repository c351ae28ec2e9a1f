//! The reference: readable beside v4/SPEC 9.2. The quantisers in use are those of `vector`, held against these.

use super::{E2M1, FP8_TILE, MXFP4_BLOCK, e4m3_value, e8m0_value};

#[cfg(test)]
pub(super) fn quantize(values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    let blocks = values.chunks_exact(MXFP4_BLOCK).zip(codes.chunks_exact_mut(MXFP4_BLOCK / 2)).zip(scales);
    for ((block, codes), scale) in blocks {
        let amax = block.iter().fold(0.0f32, |a, v| a.max(v.abs()));
        assert!(block.iter().all(|v| v.is_finite()), "a block holds a value that is not finite");
        *scale = scale_byte(amax.max(6.0 * f32::MIN_POSITIVE), 6.0);
        let inverse = 1.0 / e8m0_value(*scale); // a power of two: the product is exact
        for (pair, byte) in block.as_chunks::<2>().0.iter().zip(codes) {
            *byte = code(pair[0] * inverse) | code(pair[1] * inverse) << 4;
        }
    }
}

/// `2^ceil(log2(amax / largest))` as an e8m0 byte, from the bits of the f32 product (the release's arithmetic).
pub(super) fn scale_byte(amax: f32, largest: f32) -> u8 {
    let bits = (amax * (1.0 / largest)).to_bits();
    let exponent = (bits >> 23) & 0xff;
    (exponent + u32::from(bits & 0x7f_ffff != 0)) as u8
}

/// The e2m1 code nearest to `x`, ties to the even code; values beyond 6 saturate.
#[cfg(test)]
fn code(x: f32) -> u8 {
    let a = x.abs();
    // Borders between neighbours; a tie goes to the neighbour whose mantissa bit is 0.
    let magnitude = if a <= 0.25 {
        0
    } else if a < 0.75 {
        1
    } else if a <= 1.25 {
        2
    } else if a < 1.75 {
        3
    } else if a <= 2.5 {
        4
    } else if a < 3.5 {
        5
    } else if a <= 5.0 {
        6
    } else {
        7
    };
    magnitude | u8::from(x.is_sign_negative()) << 3
}

pub(super) fn dequantize(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let blocks = codes.chunks_exact(MXFP4_BLOCK / 2).zip(out.chunks_exact_mut(MXFP4_BLOCK)).zip(scales);
    for ((codes, out), &scale) in blocks {
        let scale = e8m0_value(scale);
        for (&byte, pair) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *pair = [E2M1[usize::from(byte & 15)] * scale, E2M1[usize::from(byte >> 4)] * scale];
        }
    }
}

#[cfg(test)]
pub(super) fn quantize_fp8(values: &[f32], columns: usize, codes: &mut [u8], scales: &mut [u8]) {
    assert!(values.iter().all(|v| v.is_finite()), "a matrix holds a value that is not finite");
    let mut amax = vec![1e-4f32; scales.len()];
    for (row, values) in values.chunks_exact(columns).enumerate() {
        let amax = &mut amax[row / FP8_TILE * columns.div_ceil(FP8_TILE)..];
        for (amax, values) in amax.iter_mut().zip(values.chunks(FP8_TILE)) {
            *amax = values.iter().fold(*amax, |a, v| a.max(v.abs()));
        }
    }
    for (scale, &amax) in scales.iter_mut().zip(&amax) {
        *scale = scale_byte(amax, 448.0);
    }
    for (row, (values, codes)) in values.chunks_exact(columns).zip(codes.chunks_exact_mut(columns)).enumerate() {
        let scales = &scales[row / FP8_TILE * columns.div_ceil(FP8_TILE)..];
        for ((values, codes), &scale) in values.chunks(FP8_TILE).zip(codes.chunks_mut(FP8_TILE)).zip(scales) {
            let inverse = 1.0 / e8m0_value(scale); // a power of two: the product is exact
            for (value, code) in values.iter().zip(codes) {
                *code = e4m3_code(value * inverse);
            }
        }
    }
}

/// The e4m3 code nearest to `x`, ties to the even code; values beyond 448 saturate.
pub(super) fn e4m3_code(x: f32) -> u8 {
    let a = x.abs().min(448.0);
    let magnitude = if a < 1.0 / 64.0 {
        // Subnormals are multiples of 2^-9; the eighth is the smallest normal, whose code is 8.
        (a * 512.0).round_ties_even() as u32
    } else {
        let bits = a.to_bits();
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
    };
    magnitude as u8 | u8::from(x.is_sign_negative()) << 7
}

pub(super) fn dequantize_fp8(codes: &[u8], scales: &[u8], columns: usize, out: &mut [f32]) {
    let values: [f32; 256] = std::array::from_fn(|code| e4m3_value(code as u8));
    for (row, (codes, out)) in codes.chunks_exact(columns).zip(out.chunks_exact_mut(columns)).enumerate() {
        let scales = &scales[row / FP8_TILE * columns.div_ceil(FP8_TILE)..];
        for ((codes, out), &scale) in codes.chunks(FP8_TILE).zip(out.chunks_mut(FP8_TILE)).zip(scales) {
            let scale = e8m0_value(scale);
            for (&code, out) in codes.iter().zip(out) {
                *out = values[usize::from(code)] * scale;
            }
        }
    }
}
