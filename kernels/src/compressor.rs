//! Pools a block of tokens into one compressed entry (v4/SPEC 4.2). Shapes: m candidates, e channels.

use crate::math::exp;

/// Channels that are pooled together.
const CHANNELS: usize = 16;

/// Candidates of a block: rows of `kv` and `gate`, `stride` values each, of which the entry's channels start at `from`.
#[derive(Clone, Copy, Debug)]
pub struct Candidates<'a> {
    /// `[m, stride]`.
    pub kv: &'a [f32],
    /// `[m, stride]`.
    pub gate: &'a [f32],
    /// Values of a row.
    pub stride: usize,
    /// Where the entry's channels start in a row.
    pub from: usize,
}

impl<'a> Candidates<'a> {
    #[inline(always)]
    fn rows(self, channel: usize, width: usize) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
        let at = move |row: &'a [f32]| &row[self.from + channel..][..width];
        let rows = self.kv.chunks_exact(self.stride).zip(self.gate.chunks_exact(self.stride));
        rows.map(move |(kv, gate)| (at(kv), at(gate)))
    }
}

vectorised! {
    /// `out = sum_j softmax_j(gate_j) * kv_j`, channel by channel, over the candidates of two sources, the first's first.
    ///
    /// # Panics
    /// When there is no candidate.
    pub fn pool(candidates: [Candidates<'_>; 2], out: &mut [f32]) {
        assert!(candidates.iter().any(|c| !c.kv.is_empty()), "a block has at least one token");
        let mut channel = 0;
        while channel < out.len() {
            let width = CHANNELS.min(out.len() - channel);
            let rows = || candidates.iter().flat_map(|c| c.rows(channel, width));
            let mut top = [f32::NEG_INFINITY; CHANNELS];
            for (_, gate) in rows() {
                for (top, &gate) in top.iter_mut().zip(gate) {
                    *top = if gate > *top { gate } else { *top };
                }
            }
            let (mut weighted, mut total) = ([0.0f32; CHANNELS], [0.0f32; CHANNELS]);
            for (kv, gate) in rows() {
                for i in 0..width {
                    let p = exp(gate[i] - top[i]);
                    weighted[i] = p.mul_add(kv[i], weighted[i]);
                    total[i] += p;
                }
            }
            for i in 0..width {
                out[channel + i] = weighted[i] / total[i];
            }
            channel += width;
        }
    }
}
