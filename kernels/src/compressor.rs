//! Pools a block of tokens into one compressed entry (v4/SPEC 4.2). Shapes: m candidates, e channels.

use crate::math::exp;

vectorised! {
    /// `out = sum_j softmax_j(gate_j) * kv_j`, channel by channel, over the candidates `(kv, gate)`, each `[e]`.
    ///
    /// # Panics
    /// When there is no candidate.
    pub fn pool(candidates: &[(&[f32], &[f32])], out: &mut [f32]) {
        assert!(!candidates.is_empty(), "a block has at least one token");
        for ch in 0..out.len() {
            let mut top = f32::NEG_INFINITY;
            for (_, gate) in candidates {
                top = if gate[ch] > top { gate[ch] } else { top };
            }
            let (mut weighted, mut total) = (0.0, 0.0);
            for (kv, gate) in candidates {
                let p = exp(gate[ch] - top);
                weighted += p * kv[ch];
                total += p;
            }
            out[ch] = weighted / total;
        }
    }
}
