//! Attention of one row over its window and its compressed entries, with one sink per head (v4/SPEC section 4).
//! Shapes: H heads, c channels, one shared key/value head: queries `[H, c]`, entries `[_, c]`.

use crate::math::{add_scaled, dot, exp, max, sum};

vectorised! {
    /// `out[h] = sum_j softmax_j(q[h] . kv_j / sqrt(c)) kv_j` over `window` (all of it) and the `picks` of `entries`;
    /// `exp(sink[h])` joins the softmax's denominator.
    ///
    /// `scores` is scratch. Window first, then picks in their order: one summation order whatever the batch.
    ///
    /// # Panics
    /// When the sizes do not fit.
    pub fn attend(
        q: &[f32], window: &[f32], entries: &[f32], picks: &[u32], sink: &[f32], scores: &mut Vec<f32>, out: &mut [f32],
    ) {
        let c = q.len() / sink.len();
        assert!(window.len().is_multiple_of(c) && out.len() == q.len(), "window {} out {}", window.len(), out.len());
        let num_window = window.len() / c;
        let scale = 1.0 / (c as f32).sqrt();
        let entry = |pick: u32| &entries[pick as usize * c..][..c];
        scores.resize(num_window + picks.len(), 0.0);
        for ((q, out), &sink) in q.chunks_exact(c).zip(out.chunks_exact_mut(c)).zip(sink) {
            for (score, kv) in scores.iter_mut().zip(window.chunks_exact(c)) {
                *score = dot(q, kv) * scale;
            }
            for (score, &pick) in scores[num_window..].iter_mut().zip(picks) {
                *score = dot(q, entry(pick)) * scale;
            }
            let top = max(scores).max(sink);
            for score in scores.iter_mut() {
                *score = exp(*score - top);
            }
            let inverse = 1.0 / (sum(scores) + exp(sink - top));
            out.fill(0.0);
            for (p, kv) in scores.iter().zip(window.chunks_exact(c)) {
                add_scaled(out, p * inverse, kv);
            }
            for (p, &pick) in scores[num_window..].iter().zip(picks) {
                add_scaled(out, p * inverse, entry(pick));
            }
        }
    }
}
