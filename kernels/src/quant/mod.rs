//! MXFP4: e2m1 codes with one power-of-two scale per 32 columns (v4/SPEC 9.2; OCP Microscaling formats); FP8 beside it.
//! Shapes: R rows, C columns; codes `[R, C/2]` bytes, scales `[R, C/32]` e8m0 bytes.

mod fp8;
mod scalar;
mod vector;

pub use fp8::{FP8_TILE, Fp8, dequantize_fp8, e4m3_code, e4m3_value, mxfp4_to_fp8, num_tiles, quantize_fp8};

/// Columns that share a scale.
pub const MXFP4_BLOCK: usize = 32;

/// The values of the sixteen e2m1 codes.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A matrix in MXFP4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mxfp4 {
    /// Two codes a byte; the low nibble is the even column.
    pub codes: Vec<u8>,
    /// One e8m0 byte (2^(b - 127)) per [`MXFP4_BLOCK`] columns.
    pub scales: Vec<u8>,
}

/// Quantises a row-major matrix whose rows are whole blocks.
///
/// The scale is `2^ceil(log2(amax / 6))` with amax at least `6 * 2^-126`, so nothing saturates (the release's rule,
/// not OCP's); codes round to nearest, ties to even.
///
/// # Panics
/// When the values are not whole blocks, or one of them is not finite.
pub fn quantize_mxfp4(values: &[f32]) -> Mxfp4 {
    let mut out = Mxfp4 { codes: vec![0; values.len() / 2], scales: vec![0; values.len() / MXFP4_BLOCK] };
    quantize_mxfp4_into(values, &mut out.codes, &mut out.scales);
    out
}

/// [`quantize_mxfp4`] into buffers of one's own: half a byte of codes a value, one scale a block.
///
/// # Panics
/// As [`quantize_mxfp4`], and when the buffers do not fit.
pub fn quantize_mxfp4_into(values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    let num_blocks = values.len() / MXFP4_BLOCK;
    assert!(values.len().is_multiple_of(MXFP4_BLOCK), "{} values are not whole blocks of {MXFP4_BLOCK}", values.len());
    assert_eq!((codes.len(), scales.len()), (values.len() / 2, num_blocks), "codes and scales of {num_blocks} blocks");
    vector::quantize(values, codes, scales);
}

/// [`quantize_mxfp4`] of bf16 values, given by their bits.
///
/// # Panics
/// As [`quantize_mxfp4`].
pub fn quantize_mxfp4_bf16(bits: &[u16]) -> Mxfp4 {
    assert!(bits.len().is_multiple_of(MXFP4_BLOCK), "{} values are not whole blocks of {MXFP4_BLOCK}", bits.len());
    let mut out = Mxfp4 { codes: vec![0; bits.len() / 2], scales: vec![0; bits.len() / MXFP4_BLOCK] };
    vector::quantize_bf16(bits, &mut out.codes, &mut out.scales);
    out
}

/// The values that the codes stand for.
///
/// # Panics
/// When codes and scales do not belong together.
pub fn dequantize_mxfp4(m: &Mxfp4) -> Vec<f32> {
    assert_eq!(m.codes.len(), m.scales.len() * MXFP4_BLOCK / 2, "codes and scales do not belong together");
    let mut out = vec![0.0; m.codes.len() * 2];
    scalar::dequantize(&m.codes, &m.scales, &mut out);
    out
}

/// The value of an e8m0 byte, `2^(byte - 127)`; 255 is NaN.
pub fn e8m0_value(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22), // 2^-127 is subnormal
        255 => f32::NAN,
        b => f32::from_bits(u32::from(b) << 23),
    }
}

#[cfg(test)]
mod tests;
