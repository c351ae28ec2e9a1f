//! The quantisers without branches, so that loops over values become vectors; the same codes as `scalar`, to the bit.

use super::scalar::scale_byte;
use super::{FP8_TILE, MXFP4_BLOCK, e8m0_value};

/// The bits of `|x|` are ordered as the magnitudes are.
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;

#[inline(always)]
fn largest_magnitude(values: &[f32]) -> u32 {
    values.iter().fold(0u32, |largest, v| largest.max(v.to_bits() & MAGNITUDE))
}

/// The e2m1 code nearest to `x`, ties to the even code; values beyond 6 saturate.
#[inline(always)]
fn e2m1_code(x: f32) -> u8 {
    let bits = x.to_bits();
    let a = f32::from_bits(bits & MAGNITUDE);
    // From 1 on one bit of mantissa stays: rounded on the bits, 1.0 is code 2. Below, codes are multiples of one half.
    let normal = (((bits & MAGNITUDE) + 0x1f_ffff + (bits >> 22 & 1)) >> 22).wrapping_sub(126 << 1);
    // Adding 2^22 rounds to halves.
    let small = (a + 4_194_304.0).to_bits() & 3;
    let code = if a < 1.0 { small } else { normal };
    code.min(7) as u8 | (bits >> 28 & 8) as u8
}

/// The e4m3 code nearest to `x`, ties to the even code; values beyond 448 saturate.
#[inline(always)]
fn e4m3_code(x: f32) -> u8 {
    let bits = x.to_bits();
    let magnitude = (bits & MAGNITUDE).min(448.0f32.to_bits());
    let normal = ((magnitude + 0x7_ffff + (magnitude >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Below 2^-6 codes are multiples of 2^-9: adding 2^14 rounds to them.
    let small = (f32::from_bits(magnitude) + 16_384.0).to_bits() & 15;
    let code = if magnitude < (1.0f32 / 64.0).to_bits() { small } else { normal };
    code as u8 | (bits >> 24 & 0x80) as u8
}

vectorised! {
    /// See [`quantize_mxfp4`](super::quantize_mxfp4): the codes of whole blocks, and their scales.
    pub fn quantize(values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
        let outputs = codes.as_chunks_mut::<{ MXFP4_BLOCK / 2 }>().0.iter_mut().zip(scales);
        for (block, (codes, scale)) in values.as_chunks().0.iter().zip(outputs) {
            *scale = quantize_block(block, codes);
        }
    }
}

vectorised! {
    /// [`quantize`] of bf16 values, given by their bits.
    pub fn quantize_bf16(bits: &[u16], codes: &mut [u8], scales: &mut [u8]) {
        let outputs = codes.as_chunks_mut::<{ MXFP4_BLOCK / 2 }>().0.iter_mut().zip(scales);
        for (bits, (codes, scale)) in bits.as_chunks::<MXFP4_BLOCK>().0.iter().zip(outputs) {
            let mut block = [0.0; MXFP4_BLOCK];
            for (value, &bits) in block.iter_mut().zip(bits) {
                *value = f32::from_bits(u32::from(bits) << 16);
            }
            *scale = quantize_block(&block, codes);
        }
    }
}

/// The codes of a block; returns its scale.
#[inline(always)]
fn quantize_block(block: &[f32; MXFP4_BLOCK], codes: &mut [u8; MXFP4_BLOCK / 2]) -> u8 {
    let largest = largest_magnitude(block);
    assert!(largest < INFINITY, "a block holds a value that is not finite");
    let scale = scale_byte(f32::from_bits(largest).max(6.0 * f32::MIN_POSITIVE), 6.0);
    let inverse = 1.0 / e8m0_value(scale); // a power of two: the product is exact
    let mut one_each = [0u8; MXFP4_BLOCK];
    for i in 0..MXFP4_BLOCK {
        one_each[i] = e2m1_code(block[i] * inverse);
    }
    for i in 0..MXFP4_BLOCK / 2 {
        codes[i] = one_each[2 * i] | one_each[2 * i + 1] << 4;
    }
    scale
}

vectorised! {
    /// See [`quantize_fp8`](super::quantize_fp8): the codes of one band of at most [`FP8_TILE`] rows, and its scales.
    pub fn quantize_fp8_band(values: &[f32], columns: usize, codes: &mut [u8], scales: &mut [u8]) {
        for (tile, scale) in scales.iter_mut().enumerate() {
            let columns_of_tile = tile * FP8_TILE..columns.min((tile + 1) * FP8_TILE);
            let rows = values.chunks_exact(columns).map(|row| &row[columns_of_tile.clone()]);
            let mut largest = 0;
            for row in rows.clone() {
                largest = largest.max(largest_magnitude(row));
            }
            assert!(largest < INFINITY, "a matrix holds a value that is not finite");
            *scale = scale_byte(f32::from_bits(largest).max(1e-4), 448.0);
            let inverse = 1.0 / e8m0_value(*scale); // a power of two: the product is exact
            for (row, codes) in rows.zip(codes.chunks_exact_mut(columns)) {
                for (value, code) in row.iter().zip(&mut codes[columns_of_tile.clone()]) {
                    *code = e4m3_code(value * inverse);
                }
            }
        }
    }
}
