//! The lightning indexer: which compressed blocks a token attends to (v4/SPEC section 5).
//! Shapes: n index heads, e channels, B blocks.

use std::ops::Range;

use crate::lanes::{LANES, Lanes, store};

/// Index heads that are done together, so that keys are read once for all of them.
const HEADS: usize = 4;

/// Keys of blocks `[B, e]`, sixteen side by side as the kernel's lanes want them.
#[derive(Clone, Debug)]
pub struct Keys {
    width: usize,
    len: usize,
    /// `[B / 16, e, 16]`; what is beyond B are zeros.
    panels: Vec<f32>,
}

impl Keys {
    /// No key of `width` channels yet.
    pub fn new(width: usize) -> Self {
        Self { width, len: 0, panels: Vec::new() }
    }

    /// B.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a key.
    ///
    /// # Panics
    /// When it has another width.
    pub fn push(&mut self, key: &[f32]) {
        assert_eq!(key.len(), self.width, "channels of a key");
        let (panel, lane) = (self.len / LANES * LANES * self.width, self.len % LANES);
        if lane == 0 {
            self.panels.resize(panel + LANES * self.width, 0.0);
        }
        for (channel, value) in key.iter().enumerate() {
            self.panels[panel + channel * LANES + lane] = *value;
        }
        self.len += 1;
    }

    /// Makes room for `more` keys.
    pub fn reserve(&mut self, more: usize) {
        let panels = (self.len + more).div_ceil(LANES);
        self.panels.reserve((panels * LANES * self.width).saturating_sub(self.panels.len()));
    }

    /// The keys one after the other, `[B, e]`.
    pub fn to_rows(&self) -> Vec<f32> {
        let rows = (0..self.len).flat_map(|b| {
            let panel = &self.panels[b / LANES * LANES * self.width..];
            (0..self.width).map(move |channel| panel[channel * LANES + b % LANES])
        });
        rows.collect()
    }
}

vectorised! {
    /// `score[b] = sum_n weight[n] * relu(q[n] . key[b])` for the blocks of a range: q `[n, e]`, weight `[n]`.
    ///
    /// # Panics
    /// When there are no such blocks, they do not begin at a multiple of sixteen, or the sizes do not fit.
    pub fn scores(lanes s; q: &[f32], weight: &[f32], keys: &Keys, blocks: Range<usize>, scores: &mut [f32]) {
        let e = keys.width;
        assert!(blocks.start.is_multiple_of(LANES) && blocks.end <= keys.len, "blocks {blocks:?} of {}", keys.len);
        assert!(q.len() == weight.len() * e && scores.len() == blocks.len(), "{} scores", scores.len());
        let panels = keys.panels[blocks.start * e..].chunks_exact(LANES * e);
        for (panel, scores) in panels.zip(scores.chunks_mut(LANES)) {
            let panel = panel.as_chunks::<LANES>().0;
            let mut sum = s.zero();
            let mut n = 0;
            while n + HEADS <= weight.len() {
                sum = add_heads::<S, HEADS>(s, &q[n * e..], &weight[n..], panel, sum);
                n += HEADS;
            }
            while n < weight.len() {
                sum = add_heads::<S, 1>(s, &q[n * e..], &weight[n..], panel, sum);
                n += 1;
            }
            store(s, scores, sum);
        }
    }
}

/// Adds the terms of N heads to the sums of sixteen blocks.
#[inline(always)]
fn add_heads<S: Lanes, const N: usize>(s: S, q: &[f32], weight: &[f32], panel: &[[f32; LANES]], mut sum: S::V) -> S::V {
    let e = panel.len();
    let mut rows: [&[f32]; N] = [&[]; N];
    for n in 0..N {
        rows[n] = &q[n * e..][..e];
    }
    let mut dots = [s.zero(); N];
    for (channel, keys) in panel.iter().enumerate() {
        let keys = s.load(keys);
        for n in 0..N {
            dots[n] = s.fma(s.splat(rows[n][channel]), keys, dots[n]);
        }
    }
    for n in 0..N {
        sum = s.fma(s.splat(weight[n]), s.relu(dots[n]), sum);
    }
    sum
}

/// The `k` blocks with the highest scores, in ascending block order; ties go to the lower block.
///
/// Selection takes linear time (quickselect), and the result does not depend on the order of the work.
pub fn top_k(scores: &[f32], k: usize, picks: &mut Vec<u32>) {
    picks.clear();
    picks.extend(0..scores.len() as u32);
    if k < scores.len() {
        let better = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
        picks.select_nth_unstable_by(k, better);
        picks.truncate(k);
        picks.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_those_of_the_formula_from_any_panel_on() {
        for (num_blocks, width, num_heads) in [(1, 5, 3), (16, 8, 4), (53, 32, 9)] {
            let value = |i: usize| ((i * 37 + 11) % 29) as f32 / 7.0 - 2.0;
            let rows: Vec<f32> = (0..num_blocks * width).map(value).collect();
            let (q, weight): (Vec<f32>, Vec<f32>) =
                ((5..5 + num_heads * width).map(value).collect(), (3..3 + num_heads).map(value).collect());
            let mut keys = Keys::new(width);
            rows.chunks(width).for_each(|key| keys.push(key));
            assert_eq!((keys.len(), keys.to_rows()), (num_blocks, rows.clone()));
            for from in (0..num_blocks).step_by(LANES) {
                let mut got = vec![f32::NAN; num_blocks - from];
                scores(&q, &weight, &keys, from..num_blocks, &mut got);
                for (got, key) in got.iter().zip(rows[from * width..].chunks(width)) {
                    let dot = |q: &[f32]| q.iter().zip(key).map(|(a, b)| f64::from(a * b)).sum::<f64>().max(0.0);
                    let want: f64 = q.chunks(width).zip(&weight).map(|(q, w)| f64::from(*w) * dot(q)).sum();
                    assert!((f64::from(*got) - want).abs() < 1e-3, "{got} {want}");
                }
            }
        }
    }

    #[track_caller]
    fn check(scores: &[f32], k: usize, want: &[u32]) {
        let mut picks = Vec::new();
        top_k(scores, k, &mut picks);
        assert_eq!(picks, want);
    }

    #[test]
    fn fewer_blocks_than_k_are_all_taken() {
        check(&[1.0, -5.0], 4, &[0, 1]);
        check(&[], 4, &[]);
    }

    #[test]
    fn the_best_are_taken_and_ties_go_to_the_lower_block() {
        check(&[0.0, 3.0, 1.0, 3.0, 2.0], 2, &[1, 3]);
        check(&[0.0, 0.0, 0.0, 0.0], 2, &[0, 1]);
        check(&[1.0, 2.0, 1.0, 1.0], 2, &[0, 1]);
    }
}
