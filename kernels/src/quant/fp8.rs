//! FP8: e4m3 codes with one power-of-two scale per tile of 128 by 128 (v4/SPEC 9.2), and the exact cast from MXFP4.
//! Shapes: R rows, C columns; codes `[R, C]`, scales `[ceil(R/128), ceil(C/128)]` e8m0 bytes.

use super::{MXFP4_BLOCK, Mxfp4, dequantize_mxfp4, e8m0_value, scalar, vector};

/// Rows, and columns, that share a scale.
pub const FP8_TILE: usize = 128;

/// A matrix in FP8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fp8 {
    /// One e4m3 byte a value, row-major.
    pub codes: Vec<u8>,
    /// One e8m0 byte (2^(b - 127)) per tile, row-major; tiles at the right and lower edge may be smaller.
    pub scales: Vec<u8>,
}

/// The value of an e4m3 byte ("fn": no infinities, `0x7f` and `0xff` are NaN).
pub fn e4m3_value(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, m) => m as f32 / 512.0,
        (e, m) => f32::from_bits((e + 120) << 23 | m << 20),
    };
    if byte >> 7 == 1 { -magnitude } else { magnitude }
}

/// The e4m3 code nearest to `x`, ties to the even code; values beyond 448 saturate. `x` is not NaN.
pub fn e4m3_code(x: f32) -> u8 {
    scalar::e4m3_code(x)
}

/// Quantises a row-major matrix `[rows, columns]`.
///
/// The scale of a tile is `2^ceil(log2(amax / 448))` with amax at least `1e-4` (the release's rule), so nothing
/// saturates; codes round to nearest, ties to even.
///
/// # Panics
/// When the values do not fill the shape, or one of them is not finite.
pub fn quantize_fp8(values: &[f32], rows: usize, columns: usize) -> Fp8 {
    assert_eq!(values.len(), rows * columns, "values do not fill [{rows}, {columns}]");
    let mut out = Fp8 { codes: vec![0; values.len()], scales: vec![0; num_tiles(rows, columns)] };
    let (band, num_scales) = (FP8_TILE * columns, columns.div_ceil(FP8_TILE));
    let bands = values.chunks(band.max(1)).zip(out.codes.chunks_mut(band.max(1)));
    for ((values, codes), scales) in bands.zip(out.scales.chunks_mut(num_scales.max(1))) {
        vector::quantize_fp8_band(values, columns, codes, scales);
    }
    out
}

/// The values that the codes of a matrix `[rows, columns]` stand for.
///
/// # Panics
/// When codes and scales do not fill the shape.
pub fn dequantize_fp8(m: &Fp8, rows: usize, columns: usize) -> Vec<f32> {
    assert_eq!(m.codes.len(), rows * columns, "codes do not fill [{rows}, {columns}]");
    assert_eq!(m.scales.len(), num_tiles(rows, columns), "scales do not fill [{rows}, {columns}]");
    let mut out = vec![0.0; m.codes.len()];
    scalar::dequantize_fp8(&m.codes, &m.scales, columns, &mut out);
    out
}

/// The same values in FP8, or `None` where FP8 cannot hold them all (the release's lossless cast, v4/SPEC 9.2).
///
/// The tile's scale is its largest MXFP4 scale over 2^6, so that a code of 6 becomes 384; exact as long as the scales
/// of a tile lie within about 2^11 of each other.
///
/// # Panics
/// When the codes do not fill `[rows, columns]`.
pub fn mxfp4_to_fp8(m: &Mxfp4, rows: usize, columns: usize) -> Option<Fp8> {
    let values = dequantize_mxfp4(m);
    assert_eq!(values.len(), rows * columns, "codes do not fill [{rows}, {columns}]");
    let mut largest = vec![0u8; num_tiles(rows, columns)];
    let tile = |row: usize, column: usize| row / FP8_TILE * columns.div_ceil(FP8_TILE) + column / FP8_TILE;
    for (block, &scale) in m.scales.iter().enumerate() {
        let (row, column) = (block * MXFP4_BLOCK / columns, block * MXFP4_BLOCK % columns);
        let largest = &mut largest[tile(row, column)];
        *largest = scale.max(*largest);
    }
    let scales = largest.iter().map(|scale| scale.checked_sub(6)).collect::<Option<Vec<u8>>>()?;
    let mut codes = vec![0; values.len()];
    for (at, (code, &value)) in codes.iter_mut().zip(&values).enumerate() {
        let scale = e8m0_value(scales[tile(at / columns, at % columns)]);
        *code = e4m3_code(value / scale);
        if e4m3_value(*code) * scale != value {
            return None;
        }
    }
    Some(Fp8 { codes, scales })
}

/// Scales of a matrix.
pub fn num_tiles(rows: usize, columns: usize) -> usize {
    rows.div_ceil(FP8_TILE) * columns.div_ceil(FP8_TILE)
}
