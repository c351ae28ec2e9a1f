//! The lightning indexer: which compressed blocks a token attends to (v4/SPEC section 5).
//! Shapes: n index heads, e channels, B blocks.

use std::ops::Range;

use crate::lanes::{LANES, Lanes, store};
use crate::pages::PagedRows;

/// Blocks that lie side by side.
pub const PANEL: usize = LANES;

/// Index heads that are done together, so that keys are read once for all of them.
const HEADS: usize = 4;

/// Keys of blocks `[B, e]`, sixteen side by side as the kernel's lanes want them: a panel `[e, 16]` is a row of pages.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a> {
    panels: PagedRows<'a>,
    len: usize,
}

impl<'a> Keys<'a> {
    /// The first `len` keys in `panels`; what lies beyond is not read into a score.
    pub fn new(panels: PagedRows<'a>, len: usize) -> Self {
        assert!(panels.width().is_multiple_of(LANES), "panels of {} values", panels.width());
        Self { panels, len }
    }

    /// B.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn width(&self) -> usize {
        self.panels.width() / LANES
    }

    /// The keys one after the other, `[B, e]`.
    pub fn to_rows(&self) -> Vec<f32> {
        let rows = (0..self.len).flat_map(|b| {
            let panel = self.panels.row(b / LANES);
            (0..self.width()).map(move |channel| panel[channel * LANES + b % LANES])
        });
        rows.collect()
    }
}

/// Keys `[B, e]` in panels.
pub fn to_panels(keys: &[f32], width: usize) -> Vec<f32> {
    let mut panels = vec![0.0; keys.len().div_ceil(PANEL * width) * PANEL * width];
    for (b, key) in keys.chunks_exact(width).enumerate() {
        put_key(&mut panels[b / PANEL * PANEL * width..][..PANEL * width], b, key);
    }
    panels
}

/// Puts key `b` into its panel.
///
/// # Panics
/// When the key does not fit.
pub fn put_key(panel: &mut [f32], b: usize, key: &[f32]) {
    assert_eq!(panel.len(), key.len() * LANES, "channels of a key");
    for (column, value) in panel.chunks_exact_mut(LANES).zip(key) {
        column[b % LANES] = *value;
    }
}

vectorised! {
    /// `score[b] = sum_n weight[n] * relu(q[n] . key[b])` for the blocks of a range: q `[n, e]`, weight `[n]`.
    ///
    /// # Panics
    /// When there are no such blocks, they do not begin at a multiple of sixteen, or the sizes do not fit.
    pub fn scores(lanes s; q: &[f32], weight: &[f32], keys: Keys<'_>, blocks: Range<usize>, scores: &mut [f32]) {
        let e = keys.width();
        assert!(blocks.start.is_multiple_of(LANES) && blocks.end <= keys.len, "blocks {blocks:?} of {}", keys.len);
        assert!(q.len() == weight.len() * e && scores.len() == blocks.len(), "{} scores", scores.len());
        for (p, scores) in (blocks.start / LANES..).zip(scores.chunks_mut(LANES)) {
            let panel = keys.panels.row(p).as_chunks::<LANES>().0;
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
    use crate::pages::OwnedRows;

    #[test]
    fn scores_are_those_of_the_formula_from_any_panel_on() {
        for (num_blocks, width, num_heads) in [(1, 5, 3), (16, 8, 4), (53, 32, 9)] {
            let value = |i: usize| ((i * 37 + 11) % 29) as f32 / 7.0 - 2.0;
            let rows: Vec<f32> = (0..num_blocks * width).map(value).collect();
            let (q, weight): (Vec<f32>, Vec<f32>) =
                ((5..5 + num_heads * width).map(value).collect(), (3..3 + num_heads).map(value).collect());
            // Two panels in a page.
            let panels = OwnedRows::new(&to_panels(&rows, width), width * LANES, 3 * width * LANES);
            let keys = Keys::new(panels.view(), num_blocks);
            assert_eq!((keys.len(), keys.to_rows()), (num_blocks, rows.clone()));
            for from in (0..num_blocks).step_by(LANES) {
                let mut got = vec![f32::NAN; num_blocks - from];
                scores(&q, &weight, keys, from..num_blocks, &mut got);
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
