//! RMSNorm (arXiv:1910.07467), with a weight or without.

use crate::lanes::Lanes;
use crate::math::dot;

vectorised! {
    /// `x = weight * x / sqrt(mean(x^2) + eps)` for each row of `x` `[R, D]`; `weight` is `[D]`.
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn rms_norm(lanes s; x: &mut [f32], weight: &[f32], eps: f32) {
        assert!(x.len().is_multiple_of(weight.len()), "{} values are not rows of {}", x.len(), weight.len());
        for row in x.chunks_exact_mut(weight.len()) {
            let scale = inverse_rms(s, row, eps);
            for (x, w) in row.iter_mut().zip(weight) {
                *x = *x * scale * w;
            }
        }
    }
}

vectorised! {
    /// `x = x / sqrt(mean(x^2) + eps)` for each row of `width` values.
    ///
    /// # Panics
    /// When `x` is not whole rows.
    pub fn rms_norm_unweighted(lanes s; x: &mut [f32], width: usize, eps: f32) {
        assert!(x.len().is_multiple_of(width), "{} values are not rows of {width}", x.len());
        for row in x.chunks_exact_mut(width) {
            let scale = inverse_rms(s, row, eps);
            for x in row {
                *x *= scale;
            }
        }
    }
}

#[inline(always)]
pub(crate) fn inverse_rms<S: Lanes>(s: S, row: &[f32], eps: f32) -> f32 {
    1.0 / (dot(s, row, row) / row.len() as f32 + eps).sqrt()
}
