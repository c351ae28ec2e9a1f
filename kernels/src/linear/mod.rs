//! Matrix products `y = x W^T` with a weight packed once for the kernel: f32, bf16, FP8 (e4m3 with a scale per tile) or
//! MXFP4 (e2m1 with a scale per 32 inputs). Shapes: R rows, K inputs, O outputs; x `[R, K]`, W `[O, K]`, y `[R, O]`.
//!
//! The layout is the same for all formats: panels of sixteen outputs; in a panel, cells of sixteen dwords, dword i
//! holding the next one, two, four or eight weights of output i. So one load of a cell feeds all lanes, and codes turn
//! into f32 by shifts and table look-ups in registers.

mod format;
mod tile;

use crate::lanes::LANES;
use crate::pool::ColumnPart;
use crate::quant::{FP8_TILE, Fp8, MXFP4_BLOCK, Mxfp4, num_tiles};

pub use tile::{ProductFn, Scratch};

/// Outputs that are computed together: one panel of the packed weight.
pub const PANEL: usize = LANES;

/// Every backend this machine can run: `scalar`, the reference, first; the fastest last.
pub fn backends() -> Vec<(&'static str, ProductFn)> {
    tile::backends()
}

/// Sixteen dwords of weights, one per output of a panel; one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Cell([u32; PANEL]);

/// What the dwords of a cell hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packed {
    F32,
    Bf16,
    E4m3,
    E2m1,
}

impl Packed {
    /// Bits of a weight.
    fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::Bf16 => 16,
            Self::E4m3 => 8,
            Self::E2m1 => 4,
        }
    }

    /// Weights in a dword.
    fn group(self) -> usize {
        32 / self.bits()
    }
}

#[derive(Clone, Debug)]
struct Storage {
    format: Packed,
    /// `[O / PANEL, K / group]`, what is beyond O and K being zeros.
    cells: Vec<Cell>,
    /// e8m0, `[O / PANEL, K / block]`; empty where the format has none.
    scales: Vec<[u8; PANEL]>,
}

/// A weight matrix in the kernel's layout.
#[derive(Clone, Debug)]
pub struct Linear {
    outputs: usize,
    inputs: usize,
    packed: Storage,
}

/// Whether the kernels give the values of FP8 codes exactly: no code is NaN, and no scale is above 2^7.
pub fn fp8_is_exact(codes: &[u8], scales: &[u8]) -> bool {
    codes.iter().all(|code| code & 0x7f != 0x7f) && scales.iter().all(|&scale| scale <= 127 + 7)
}

/// Rows of inputs, `stride` values apart, or a choice of them.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    data: &'a [f32],
    width: usize,
    stride: usize,
    num_rows: usize,
    chosen: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    /// Contiguous rows of `width` values.
    ///
    /// # Panics
    /// When the rows are not whole.
    pub fn new(data: &'a [f32], width: usize) -> Self {
        assert!(data.len().is_multiple_of(width.max(1)), "{} values are not rows of {width}", data.len());
        Self { data, width, stride: width, num_rows: data.len() / width.max(1), chosen: None }
    }

    /// `width` values from column `from` of each of the contiguous rows of `stride` values.
    ///
    /// # Panics
    /// When the rows are not whole, or too short.
    pub fn columns(data: &'a [f32], stride: usize, from: usize, width: usize) -> Self {
        assert!(data.len().is_multiple_of(stride.max(1)), "{} values are not rows of {stride}", data.len());
        assert!(from + width <= stride, "columns {from}..{} of rows of {stride}", from + width);
        Self {
            data: data.get(from..).unwrap_or(&[]),
            width,
            stride,
            num_rows: data.len() / stride.max(1),
            chosen: None,
        }
    }

    /// The rows `chosen`, in that order.
    pub fn choose(self, chosen: &'a [u32]) -> Self {
        Self { num_rows: chosen.len(), chosen: Some(chosen), ..self }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.num_rows
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.num_rows == 0
    }

    #[inline]
    fn row(&self, r: usize) -> &'a [f32] {
        let r = self.chosen.map_or(r, |chosen| chosen[r] as usize);
        &self.data[r * self.stride..][..self.width]
    }
}

impl Linear {
    fn empty(outputs: usize, inputs: usize, format: Packed, block: usize) -> Self {
        let num_panels = outputs.div_ceil(PANEL);
        let cells = vec![Cell([0; PANEL]); num_panels * inputs.div_ceil(format.group())];
        let num_scales = if block == 0 { 0 } else { num_panels * inputs.div_ceil(block) };
        Self { outputs, inputs, packed: Storage { format, cells, scales: vec![[127; PANEL]; num_scales] } }
    }

    /// Where weight `[o, k]` lies: its cell, and its lowest bit in the dword of its output.
    fn place(&self, o: usize, k: usize) -> (usize, usize) {
        let format = self.packed.format;
        let cell = o / PANEL * self.inputs.div_ceil(format.group()) + k / format.group();
        (cell, k % format.group() * format.bits())
    }

    /// Puts the bits of weight `[o, k]` into its place.
    fn set(&mut self, o: usize, k: usize, bits: u32) {
        let (cell, shift) = self.place(o, k);
        self.packed.cells[cell].0[o % PANEL] |= bits << shift;
    }

    /// The bits of weight `[o, k]`.
    fn get(&self, o: usize, k: usize) -> u32 {
        let (cell, shift) = self.place(o, k);
        self.packed.cells[cell].0[o % PANEL] >> shift & (u32::MAX >> (32 - self.packed.format.bits()))
    }

    /// Packs a row-major `[O, K]` matrix.
    ///
    /// # Panics
    /// When the values do not fill the shape.
    pub fn from_f32(outputs: usize, inputs: usize, values: &[f32]) -> Self {
        assert_eq!(values.len(), outputs * inputs, "values do not fill [{outputs}, {inputs}]");
        let mut out = Self::empty(outputs, inputs, Packed::F32, 0);
        for (o, row) in values.chunks_exact(inputs.max(1)).enumerate() {
            let panel = &mut out.packed.cells[o / PANEL * inputs..][..inputs];
            for (cell, v) in panel.iter_mut().zip(row) {
                cell.0[o % PANEL] = v.to_bits();
            }
        }
        out
    }

    /// Packs a row-major `[O, K]` matrix of bf16, given by their bits.
    ///
    /// # Panics
    /// When the values do not fill the shape.
    pub fn from_bf16(outputs: usize, inputs: usize, bits: &[u16]) -> Self {
        assert_eq!(bits.len(), outputs * inputs, "values do not fill [{outputs}, {inputs}]");
        let mut out = Self::empty(outputs, inputs, Packed::Bf16, 0);
        for (at, &bits) in bits.iter().enumerate() {
            out.set(at / inputs, at % inputs, bits.into());
        }
        out
    }

    /// Packs an FP8 matrix; the codes stay codes. `None` where [`fp8_is_exact`] says no.
    ///
    /// # Panics
    /// When codes or scales do not fill the shape.
    pub fn from_fp8(outputs: usize, inputs: usize, m: &Fp8) -> Option<Self> {
        assert_eq!(m.codes.len(), outputs * inputs, "codes do not fill [{outputs}, {inputs}]");
        assert_eq!(m.scales.len(), num_tiles(outputs, inputs), "scales do not fill [{outputs}, {inputs}]");
        if !fp8_is_exact(&m.codes, &m.scales) {
            return None;
        }
        let mut out = Self::empty(outputs, inputs, Packed::E4m3, FP8_TILE);
        for (at, &code) in m.codes.iter().enumerate() {
            out.set(at / inputs, at % inputs, code.into());
        }
        let num_scales = inputs.div_ceil(FP8_TILE);
        for (at, scales) in out.packed.scales.iter_mut().enumerate() {
            let (panel, tile) = (at / num_scales, at % num_scales);
            scales.fill(m.scales[panel * PANEL / FP8_TILE * num_scales + tile]);
        }
        Some(out)
    }

    /// Packs an MXFP4 matrix; the codes stay codes. A scale of 255, which stands for NaN, gives products that are not
    /// finite.
    ///
    /// # Panics
    /// When the codes do not fill the shape, or rows are not whole blocks.
    pub fn from_mxfp4(outputs: usize, inputs: usize, m: &Mxfp4) -> Self {
        assert!(inputs.is_multiple_of(MXFP4_BLOCK), "rows of {inputs} are not whole blocks of {MXFP4_BLOCK}");
        assert_eq!(m.codes.len() * 2, outputs * inputs, "codes do not fill [{outputs}, {inputs}]");
        assert_eq!(m.scales.len() * MXFP4_BLOCK, outputs * inputs, "scales do not fill [{outputs}, {inputs}]");
        let mut out = Self::empty(outputs, inputs, Packed::E2m1, MXFP4_BLOCK);
        // Four bytes hold the eight codes of a dword, the first in the lowest bits, as the kernel wants them.
        for (at, codes) in m.codes.as_chunks::<4>().0.iter().enumerate() {
            let (o, g) = (at * 8 / inputs, at * 8 % inputs / 8);
            out.packed.cells[o / PANEL * inputs / 8 + g].0[o % PANEL] = u32::from_le_bytes(*codes);
        }
        let num_scales = inputs / MXFP4_BLOCK;
        for (at, &scale) in m.scales.iter().enumerate() {
            let (o, block) = (at / num_scales, at % num_scales);
            out.packed.scales[o / PANEL * num_scales + block][o % PANEL] = scale;
        }
        out
    }

    /// O.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// K.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes of the packed weight.
    pub fn num_bytes(&self) -> usize {
        size_of_val(&*self.packed.cells) + size_of_val(&*self.packed.scales)
    }

    /// The plain matrix back, row-major: what was packed, for checksums. `None` where it is held in another format.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let all = (0..self.outputs).flat_map(|o| (0..self.inputs).map(move |k| (o, k)));
        (self.packed.format == Packed::F32).then(|| all.map(|(o, k)| f32::from_bits(self.get(o, k))).collect())
    }

    /// The bits of the bf16 matrix back, row-major. `None` where it is held in another format.
    pub fn to_bf16(&self) -> Option<Vec<u16>> {
        let all = (0..self.outputs).flat_map(|o| (0..self.inputs).map(move |k| (o, k)));
        (self.packed.format == Packed::Bf16).then(|| all.map(|(o, k)| self.get(o, k) as u16).collect())
    }

    /// The codes back, row-major: what was packed. `None` where it is held in another format.
    pub fn to_fp8(&self) -> Option<Fp8> {
        if self.packed.format != Packed::E4m3 {
            return None;
        }
        let all = (0..self.outputs).flat_map(|o| (0..self.inputs).map(move |k| (o, k)));
        let codes = all.map(|(o, k)| self.get(o, k) as u8).collect();
        let num_scales = self.inputs.div_ceil(FP8_TILE);
        let tiles = (0..self.outputs.div_ceil(FP8_TILE)).map(|row| row * FP8_TILE / PANEL * num_scales);
        let scales = tiles.flat_map(|first| &self.packed.scales[first..][..num_scales]).map(|lanes| lanes[0]).collect();
        Some(Fp8 { codes, scales })
    }

    /// The codes back, row-major: what was packed, for checksums. `None` where it is held in another format.
    pub fn to_mxfp4(&self) -> Option<Mxfp4> {
        if self.packed.format != Packed::E2m1 {
            return None;
        }
        let (cells, num_scales) = (self.inputs / 8, self.inputs / MXFP4_BLOCK);
        let dwords = (0..self.outputs).flat_map(|o| {
            let panel = &self.packed.cells[o / PANEL * cells..][..cells];
            panel.iter().map(move |cell| cell.0[o % PANEL])
        });
        let codes = dwords.flat_map(u32::to_le_bytes).collect();
        let scales = (0..self.outputs).flat_map(|o| {
            let panel = &self.packed.scales[o / PANEL * num_scales..][..num_scales];
            panel.iter().map(move |lanes| lanes[o % PANEL])
        });
        Some(Mxfp4 { codes, scales: scales.collect() })
    }

    /// The columns of `y` of `x W^T`: all of them or, when threads share the work, those of one thread.
    ///
    /// # Panics
    /// When rows or columns do not fit, or the columns do not begin at a panel.
    pub fn forward(&self, x: Rows<'_>, y: &mut ColumnPart<'_>, scratch: &mut Scratch) {
        self.forward_with(tile::product, x, y, scratch);
    }

    /// [`Linear::forward`] on one of [`backends`].
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward_with(&self, product: ProductFn, x: Rows<'_>, y: &mut ColumnPart<'_>, scratch: &mut Scratch) {
        let columns = y.columns();
        assert_eq!(x.width, self.inputs, "rows of {} for {} inputs", x.width, self.inputs);
        if columns.is_empty() || x.is_empty() {
            return;
        }
        assert_eq!(x.len(), y.num_rows(), "{} rows into {}", x.len(), y.num_rows());
        assert!(columns.end <= self.outputs, "columns {columns:?} of {} outputs", self.outputs);
        assert!(columns.start.is_multiple_of(PANEL), "columns {columns:?} do not begin at a panel");
        assert!(
            columns.end.is_multiple_of(PANEL) || columns.end == self.outputs,
            "columns {columns:?} of {} do not end with a panel",
            self.outputs
        );
        product(&mut tile::Work { weight: self, x, y }, scratch);
    }
}

#[cfg(test)]
mod tests;
