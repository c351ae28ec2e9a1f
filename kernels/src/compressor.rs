//! Pools a block of tokens into one compressed entry (v4/SPEC 4.2). Shapes: m candidates, e channels.

use crate::math::exp;
use crate::pages::PagedRows;

/// Channels that are pooled together.
const CHANNELS: usize = 16;

/// Candidates of a block: the first `len` of some rows, whose values and gates for the entry's channels start at `kv` and
/// at `gate`.
#[derive(Clone, Copy, Debug)]
pub struct Candidates<'a> {
    /// Where they lie.
    pub rows: PagedRows<'a>,
    /// m.
    pub len: usize,
    /// The first value of a row.
    pub kv: usize,
    /// The first gate of a row.
    pub gate: usize,
}

impl<'a> Candidates<'a> {
    #[inline(always)]
    fn rows(self, channel: usize, width: usize) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
        (0..self.len).map(move |i| {
            let row = self.rows.row(i);
            (&row[self.kv + channel..][..width], &row[self.gate + channel..][..width])
        })
    }
}

vectorised! {
    /// `out = sum_j softmax_j(gate_j) * kv_j`, channel by channel, over the candidates of two sources, the first's first.
    ///
    /// # Panics
    /// When there is no candidate.
    pub fn pool(candidates: [Candidates<'_>; 2], out: &mut [f32]) {
        assert!(candidates.iter().any(|c| c.len > 0), "a block has at least one token");
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
