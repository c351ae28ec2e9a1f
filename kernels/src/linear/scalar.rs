//! The reference.

use super::PANEL;

pub(super) fn panel(x: &[f32], x_stride: usize, rows: usize, panel: &[f32], y: &mut [f32], y_stride: usize, n: usize) {
    let inputs = panel.len() / PANEL;
    for r in 0..rows {
        let mut sums = [0.0f32; PANEL];
        for (x, w) in x[r * x_stride..][..inputs].iter().zip(panel.as_chunks::<PANEL>().0) {
            for i in 0..PANEL {
                sums[i] += x * w[i];
            }
        }
        y[r * y_stride..][..n].copy_from_slice(&sums[..n]);
    }
}
