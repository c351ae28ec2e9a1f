//! A tensor in host memory, in the number format that it is stored or computed in.

use std::collections::BTreeMap;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use kernels::quant::{FP8_TILE, MXFP4_BLOCK};
use kernels::quant::{
    Fp8, Mxfp4, dequantize_fp8, dequantize_mxfp4, mxfp4_to_fp8, quantize_fp8, quantize_mxfp4, quantize_mxfp4_bf16,
};

use super::Format;

/// The largest e8m0 scale of FP8: 448 times a larger one is no f32.
pub(super) const MAX_FP8_SCALE: u8 = 246;
/// The largest e8m0 scale of MXFP4: 6 times a larger one is no f32.
pub(super) const MAX_MXFP4_SCALE: u8 = 252;

/// A tensor in host memory, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: TensorData,
}

/// The elements of a [`HostTensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// Plain values.
    F32(Vec<f32>),
    /// Plain values of 16 bits.
    Bf16(Vec<bf16>),
    /// Hash-routing tables.
    I64(Vec<i64>),
    /// FP8 of a matrix `[rows, columns]`: an e4m3 code a value and one e8m0 scale per tile of 128 by 128.
    Fp8 {
        /// `rows * columns` bytes.
        codes: Vec<u8>,
        /// `ceil(rows / 128) * ceil(columns / 128)` bytes.
        scales: Vec<u8>,
    },
    /// MXFP4 of a matrix `[rows, columns]`: two e2m1 codes a byte (low nibble: even column) and one e8m0 scale per 32
    /// columns.
    Mxfp4 {
        /// `rows * columns / 2` bytes.
        codes: Vec<u8>,
        /// `rows * columns / 32` bytes.
        scales: Vec<u8>,
    },
}

/// The tensors of a checkpoint by name.
pub type Weights = BTreeMap<String, HostTensor>;

impl HostTensor {
    /// A tensor of plain values.
    ///
    /// # Panics
    /// When `values` does not fill `shape`.
    pub fn f32(shape: &[usize], values: Vec<f32>) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "values do not fill shape {shape:?}");
        Self { shape: shape.to_vec(), data: TensorData::F32(values) }
    }

    /// The plain values.
    ///
    /// # Panics
    /// When the tensor holds something else.
    pub fn as_f32(&self) -> &[f32] {
        match &self.data {
            TensorData::F32(v) => v,
            other => panic!("expected f32 values, found {}", other.kind()),
        }
    }

    /// The values that the elements stand for, as f32. Tables of integers stay what they are.
    pub fn into_f32(self) -> Self {
        let data = match self.data {
            TensorData::Bf16(values) => TensorData::F32(values.into_iter().map(bf16::to_f32).collect()),
            TensorData::Fp8 { codes, scales } => {
                TensorData::F32(dequantize_fp8(&Fp8 { codes, scales }, self.shape[0], self.shape[1]))
            }
            TensorData::Mxfp4 { codes, scales } => TensorData::F32(dequantize_mxfp4(&Mxfp4 { codes, scales })),
            plain @ (TensorData::F32(_) | TensorData::I64(_)) => plain,
        };
        Self { shape: self.shape, data }
    }

    /// The tensor in another format; one that is in it already keeps its codes.
    ///
    /// Where `format` cannot hold the values they are rounded: to nearest, ties to even. MXFP4 goes to FP8 exactly
    /// where FP8 can hold it (v4/SPEC 9.2).
    ///
    /// # Panics
    /// When a vector, or a matrix whose rows are not whole blocks, is asked for in a block format.
    pub fn into_format(self, format: Format) -> Self {
        if self.data.format() == format {
            return self;
        }
        let shape = self.shape.clone();
        if let (TensorData::Mxfp4 { codes, scales }, Format::Fp8) = (&self.data, format) {
            let m = Mxfp4 { codes: codes.clone(), scales: scales.clone() };
            if let Some(Fp8 { codes, scales }) = mxfp4_to_fp8(&m, shape[0], shape[1]) {
                return Self { shape, data: TensorData::Fp8 { codes, scales } };
            }
        }
        if let (TensorData::Bf16(values), Format::Mxfp4, true) = (&self.data, format, format.fits(&shape)) {
            let Mxfp4 { codes, scales } = quantize_mxfp4_bf16(values.reinterpret_cast());
            return Self { shape, data: TensorData::Mxfp4 { codes, scales } };
        }
        let TensorData::F32(values) = self.into_f32().data else { panic!("a table of integers has no other format") };
        let data = match format {
            Format::F32 => TensorData::F32(values),
            Format::Bf16 => TensorData::Bf16(values.into_iter().map(bf16::from_f32).collect()),
            Format::Fp8 => {
                let Fp8 { codes, scales } = quantize_fp8(&values, shape[0], shape[1]);
                TensorData::Fp8 { codes, scales }
            }
            Format::Mxfp4 => {
                assert!(format.fits(&shape), "a matrix of shape {shape:?} is not made of whole blocks");
                let Mxfp4 { codes, scales } = quantize_mxfp4(&values);
                TensorData::Mxfp4 { codes, scales }
            }
            Format::I64 => panic!("values are no table of integers"),
        };
        Self { shape, data }
    }

    /// Whether every value is a number that f32 holds with room for its codes: what readers ask for.
    pub fn is_readable(&self) -> bool {
        match &self.data {
            TensorData::F32(values) => values.iter().all(|v| v.is_finite()),
            TensorData::Bf16(values) => values.iter().all(|v| v.is_finite()),
            TensorData::I64(_) => true,
            TensorData::Fp8 { scales, .. } => scales.iter().all(|scale| *scale <= MAX_FP8_SCALE),
            TensorData::Mxfp4 { scales, .. } => scales.iter().all(|scale| *scale <= MAX_MXFP4_SCALE),
        }
    }

    /// Little-endian bytes of the elements, codes before scales: what checksums are made over.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.data {
            TensorData::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::I64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::Fp8 { codes, scales } | TensorData::Mxfp4 { codes, scales } => {
                [codes.as_slice(), scales].concat()
            }
        }
    }
}

impl TensorData {
    /// The format of the elements.
    pub fn format(&self) -> Format {
        match self {
            Self::F32(_) => Format::F32,
            Self::Bf16(_) => Format::Bf16,
            Self::I64(_) => Format::I64,
            Self::Fp8 { .. } => Format::Fp8,
            Self::Mxfp4 { .. } => Format::Mxfp4,
        }
    }

    /// What the elements are, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32 values",
            Self::Bf16(_) => "bf16 values",
            Self::I64(_) => "i64 values",
            Self::Fp8 { .. } => "FP8 codes",
            Self::Mxfp4 { .. } => "MXFP4 codes",
        }
    }
}

impl Format {
    /// The shape that a file gives the elements of a tensor of this shape: MXFP4 has two in a byte.
    pub fn stored_shape(self, shape: &[usize]) -> Vec<usize> {
        match self {
            Self::Mxfp4 => vec![shape[0], shape[1] / 2],
            Self::F32 | Self::Bf16 | Self::I64 | Self::Fp8 => shape.to_vec(),
        }
    }

    /// The shape of a matrix's scales, in a format that has scales.
    pub fn scale_shape(self, shape: &[usize]) -> Option<[usize; 2]> {
        match self {
            Self::F32 | Self::Bf16 | Self::I64 => None,
            Self::Fp8 => Some([shape[0].div_ceil(FP8_TILE), shape[1].div_ceil(FP8_TILE)]),
            Self::Mxfp4 => Some([shape[0], shape[1] / MXFP4_BLOCK]),
        }
    }

    /// Bytes of a tensor of this shape, scales included.
    pub fn num_bytes(self, shape: &[usize]) -> usize {
        let width = match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::I64 => 8,
            Self::Fp8 | Self::Mxfp4 => 1,
        };
        let scales = self.scale_shape(shape).map_or(0, |[rows, columns]| rows * columns);
        width * self.stored_shape(shape).iter().product::<usize>() + scales
    }

    /// Whether a tensor of this shape can be held: FP8 wants a matrix, MXFP4 one whose rows are whole blocks.
    pub fn fits(self, shape: &[usize]) -> bool {
        match self {
            Self::F32 | Self::Bf16 | Self::I64 => true,
            Self::Fp8 => shape.len() == 2,
            Self::Mxfp4 => shape.len() == 2 && shape[1].is_multiple_of(MXFP4_BLOCK),
        }
    }
}
