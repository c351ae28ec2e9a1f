//! Matrix products `y = x W^T` with a weight packed once for the kernel (f32, or MXFP4 codes).
//! Shapes: R rows, K inputs, O outputs; x `[R, K]`, W `[O, K]`, y `[R, O]`.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;

use crate::quant::{E2M1, MXFP4_BLOCK, Mxfp4, e8m0_value};

/// Outputs that are computed together: one panel of the packed weight.
pub const PANEL: usize = 16;

/// Multiplies R rows by one panel `[K, PANEL]`: `y[r, ..n] = x[r] . panel`, rows `x_stride` and `y_stride` apart.
///
/// Every output is one sum over K in ascending order, so it does not depend on R.
pub type PanelFn = fn(x: &[f32], x_stride: usize, rows: usize, panel: &[f32], y: &mut [f32], y_stride: usize, n: usize);

/// Every backend this machine can run: `scalar`, the reference, first; the fastest last.
pub fn backends() -> Vec<(&'static str, PanelFn)> {
    let mut table: Vec<(&'static str, PanelFn)> = vec![("scalar", scalar::panel)];
    #[cfg(target_arch = "x86_64")]
    table.extend(avx2::probe());
    table
}

fn panel_fn() -> PanelFn {
    #[cfg(target_arch = "x86_64")]
    if crate::backend() == crate::Backend::Avx2
        && let Some((_, f)) = avx2::probe()
    {
        return f;
    }
    scalar::panel
}

/// A weight matrix in the kernel's layout.
#[derive(Clone, Debug)]
pub struct Linear {
    outputs: usize,
    inputs: usize,
    panels: Panels,
}

#[derive(Clone, Debug)]
enum Panels {
    /// `[O / PANEL, K, PANEL]`, the last panel padded with zeros.
    F32(Vec<f32>),
    /// Codes `[O / PANEL, K, PANEL / 2]`, low nibble the even output, and e8m0 scales `[O / PANEL, K / 32, PANEL]`.
    Mxfp4 { codes: Vec<u8>, scales: Vec<u8> },
}

impl Linear {
    /// Packs a row-major `[O, K]` matrix.
    ///
    /// # Panics
    /// When the values do not fill the shape.
    pub fn from_f32(outputs: usize, inputs: usize, values: &[f32]) -> Self {
        assert_eq!(values.len(), outputs * inputs, "values do not fill [{outputs}, {inputs}]");
        let mut data = vec![0.0; outputs.div_ceil(PANEL) * inputs * PANEL];
        for (o, row) in values.chunks_exact(inputs).enumerate() {
            let panel = &mut data[o / PANEL * inputs * PANEL..][..inputs * PANEL];
            for (k, v) in row.iter().enumerate() {
                panel[k * PANEL + o % PANEL] = *v;
            }
        }
        Self { outputs, inputs, panels: Panels::F32(data) }
    }

    /// Packs an MXFP4 matrix; the codes stay codes.
    ///
    /// # Panics
    /// When the codes do not fill the shape, or rows are not whole blocks.
    pub fn from_mxfp4(outputs: usize, inputs: usize, m: &Mxfp4) -> Self {
        assert!(inputs.is_multiple_of(MXFP4_BLOCK), "rows of {inputs} are not whole blocks of {MXFP4_BLOCK}");
        assert_eq!(m.codes.len() * 2, outputs * inputs, "codes do not fill [{outputs}, {inputs}]");
        assert_eq!(m.scales.len() * MXFP4_BLOCK, outputs * inputs, "scales do not fill [{outputs}, {inputs}]");
        let num_panels = outputs.div_ceil(PANEL);
        let mut codes = vec![0u8; num_panels * inputs * PANEL / 2];
        let mut scales = vec![0u8; num_panels * inputs / MXFP4_BLOCK * PANEL];
        for o in 0..outputs {
            let (panel, lane) = (o / PANEL, o % PANEL);
            for k in 0..inputs {
                let code = m.codes[(o * inputs + k) / 2] >> (4 * (k % 2)) & 15;
                codes[((panel * inputs + k) * PANEL + lane) / 2] |= code << (4 * (lane % 2));
            }
            for b in 0..inputs / MXFP4_BLOCK {
                scales[(panel * inputs / MXFP4_BLOCK + b) * PANEL + lane] = m.scales[o * inputs / MXFP4_BLOCK + b];
            }
        }
        Self { outputs, inputs, panels: Panels::Mxfp4 { codes, scales } }
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
        match &self.panels {
            Panels::F32(data) => data.len() * 4,
            Panels::Mxfp4 { codes, scales } => codes.len() + scales.len(),
        }
    }

    /// The plain matrix back, row-major: what was packed, for checksums. `None` where it is held as codes.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let Panels::F32(data) = &self.panels else { return None };
        let mut out = Vec::with_capacity(self.outputs * self.inputs);
        for o in 0..self.outputs {
            let panel = &data[o / PANEL * self.inputs * PANEL..];
            out.extend((0..self.inputs).map(|k| panel[k * PANEL + o % PANEL]));
        }
        Some(out)
    }

    /// The codes back, row-major: what was packed, for checksums. `None` where it is held as plain values.
    pub fn to_mxfp4(&self) -> Option<Mxfp4> {
        let Panels::Mxfp4 { codes, scales } = &self.panels else { return None };
        let inputs = self.inputs;
        let mut out = Mxfp4 {
            codes: vec![0; self.outputs * inputs / 2],
            scales: Vec::with_capacity(self.outputs * inputs / MXFP4_BLOCK),
        };
        for o in 0..self.outputs {
            let (panel, lane) = (o / PANEL, o % PANEL);
            for k in 0..inputs {
                let code = codes[((panel * inputs + k) * PANEL + lane) / 2] >> (4 * (lane % 2)) & 15;
                out.codes[(o * inputs + k) / 2] |= code << (4 * (k % 2));
            }
            let blocks = 0..inputs / MXFP4_BLOCK;
            out.scales.extend(blocks.map(|b| scales[(panel * inputs / MXFP4_BLOCK + b) * PANEL + lane]));
        }
        Some(out)
    }

    /// `y = x W^T` for contiguous rows.
    ///
    /// `unpacked` is scratch for one panel.
    ///
    /// # Panics
    /// When x or y is too short for its rows.
    pub fn forward(&self, x: &[f32], y: &mut [f32], unpacked: &mut Vec<f32>) {
        self.forward_strided(x, self.inputs, y, self.outputs, x.len() / self.inputs, unpacked);
    }

    /// `y = x W^T` for rows that lie `x_stride` and `y_stride` values apart.
    ///
    /// # Panics
    /// When x or y is too short for its rows.
    pub fn forward_strided(
        &self,
        x: &[f32],
        x_stride: usize,
        y: &mut [f32],
        y_stride: usize,
        rows: usize,
        unpacked: &mut Vec<f32>,
    ) {
        if rows == 0 {
            return;
        }
        assert!(x_stride >= self.inputs && x.len() >= (rows - 1) * x_stride + self.inputs, "x is too short");
        assert!(y_stride >= self.outputs && y.len() >= (rows - 1) * y_stride + self.outputs, "y is too short");
        let run = panel_fn();
        let size = self.inputs * PANEL;
        for p in 0..self.outputs.div_ceil(PANEL) {
            let panel = match &self.panels {
                Panels::F32(data) => &data[p * size..][..size],
                Panels::Mxfp4 { codes, scales } => {
                    unpacked.resize(size, 0.0);
                    let scales = &scales[p * size / MXFP4_BLOCK..][..size / MXFP4_BLOCK];
                    unpack(&codes[p * size / 2..][..size / 2], scales, unpacked);
                    &*unpacked
                }
            };
            let n = PANEL.min(self.outputs - p * PANEL);
            run(x, x_stride, rows, panel, &mut y[p * PANEL..], y_stride, n);
        }
    }
}

vectorised! {
    /// Decodes one panel `[K, PANEL]` of MXFP4 codes.
    pub fn unpack(codes: &[u8], scales: &[u8], out: &mut [f32]) {
        let blocks = codes.chunks_exact(MXFP4_BLOCK * PANEL / 2).zip(out.chunks_exact_mut(MXFP4_BLOCK * PANEL));
        for ((codes, out), scales) in blocks.zip(scales.as_chunks::<PANEL>().0) {
            let scales: [f32; PANEL] = std::array::from_fn(|i| e8m0_value(scales[i]));
            for (codes, out) in codes.as_chunks::<{ PANEL / 2 }>().0.iter().zip(out.as_chunks_mut::<PANEL>().0) {
                for i in 0..PANEL / 2 {
                    out[2 * i] = E2M1[usize::from(codes[i] & 15)] * scales[2 * i];
                    out[2 * i + 1] = E2M1[usize::from(codes[i] >> 4)] * scales[2 * i + 1];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{dequantize_mxfp4, quantize_mxfp4};
    use proptest::prelude::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| {
                let h = (i ^ seed.rotate_left(16)).wrapping_mul(0x9e37_79b9);
                ((h ^ h >> 15).wrapping_mul(0x85eb_ca6b) >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    proptest! {
        #[test]
        fn every_backend_matches_scalar(rows in 1usize..15, n in 1usize..=PANEL, inputs in 0usize..70, seed: u32) {
            let (x, w) = (values(rows * inputs, seed), values(inputs * PANEL, !seed));
            let run = |f: PanelFn| {
                let mut y = vec![f32::NAN; rows * n];
                f(&x, inputs, rows, &w, &mut y, n, n);
                y
            };
            let want = run(scalar::panel);
            for (name, f) in backends() {
                for (got, want) in run(f).iter().zip(&want) {
                    prop_assert!((got - want).abs() <= 1e-5, "{name}: {got} {want}");
                }
            }
        }

        #[test]
        fn a_row_does_not_depend_on_its_neighbours(rows in 1usize..20, outputs in 1usize..40, seed: u32) {
            let inputs = 64;
            let w = Linear::from_f32(outputs, inputs, &values(outputs * inputs, seed));
            let x = values(rows * inputs, !seed);
            let mut all = vec![0.0; rows * outputs];
            w.forward(&x, &mut all, &mut Vec::new());
            for r in 0..rows {
                let mut one = vec![0.0; outputs];
                w.forward(&x[r * inputs..][..inputs], &mut one, &mut Vec::new());
                prop_assert_eq!(&one, &all[r * outputs..][..outputs]);
            }
        }

        #[test]
        fn codes_give_the_same_product_as_their_values(outputs in 1usize..40, blocks in 1usize..4, seed: u32) {
            let inputs = blocks * MXFP4_BLOCK;
            let m = quantize_mxfp4(&values(outputs * inputs, seed));
            let packed = Linear::from_mxfp4(outputs, inputs, &m);
            let plain = Linear::from_f32(outputs, inputs, &dequantize_mxfp4(&m));
            let x = values(3 * inputs, !seed);
            let (mut a, mut b) = (vec![0.0; 3 * outputs], vec![0.0; 3 * outputs]);
            packed.forward(&x, &mut a, &mut Vec::new());
            plain.forward(&x, &mut b, &mut Vec::new());
            prop_assert_eq!(a, b);
            prop_assert_eq!(packed.to_mxfp4(), Some(m));
            prop_assert_eq!(plain.to_mxfp4(), None);
        }
    }

    #[test]
    fn packing_is_undone() {
        let w = values(37 * 24, 7);
        assert_eq!(Linear::from_f32(37, 24, &w).to_f32(), Some(w));
    }
}
