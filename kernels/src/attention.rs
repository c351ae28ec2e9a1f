//! Attention of one row over its window and its compressed entries, with one sink per head (v4/SPEC section 4).
//! Shapes: H heads, c channels, one shared key/value head: queries `[H, c]`, entries `[_, c]`.

use std::ops::Range;

use crate::lanes::{LANES, Lanes, load, store};
use crate::math::{dots, exp, max, sum};
use crate::pages::PagedRows;

/// Heads that are done together, so that keys are read once for all of them.
const HEADS: usize = 4;

/// What a row attends to: a range of the window, then some of the compressed entries.
#[derive(Clone, Debug)]
pub struct Keys<'a> {
    /// `[_, c]`.
    pub window: PagedRows<'a>,
    /// Rows of `window`.
    pub range: Range<usize>,
    /// `[_, c]`, of which `picks` names those that count.
    pub entries: PagedRows<'a>,
    /// Rows of `entries`.
    pub picks: &'a [u32],
}

/// Buffers of [`attend`], which live from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    scores: Vec<f32>,
    /// Empty between calls: only its memory is kept.
    rows: Vec<&'static [f32]>,
}

impl Scratch {
    /// Makes room for `num_keys` keys.
    pub fn reserve(&mut self, num_keys: usize) {
        self.scores.reserve((HEADS * num_keys).saturating_sub(self.scores.len()));
        self.rows.reserve(num_keys);
    }
}

/// The memory of a list for entries of another lifetime; collecting in place allocates nothing.
fn recycled<'to>(mut list: Vec<&[f32]>) -> Vec<&'to [f32]> {
    list.clear();
    list.into_iter().map(|_| &[][..]).collect()
}

/// `out[h] = sum_j softmax_j(q[h] . kv_j / sqrt(c)) kv_j` over `keys`; `exp(sink[h])` joins the softmax's
/// denominator.
///
/// Window first, then picks in their order: one summation order whatever the batch.
///
/// # Panics
/// When the sizes do not fit.
pub fn attend(q: &[f32], keys: Keys<'_>, sink: &[f32], scratch: &mut Scratch, out: &mut [f32]) {
    let mut rows = recycled(std::mem::take(&mut scratch.rows));
    rows.extend(keys.range.clone().map(|i| keys.window.row(i)));
    rows.extend(keys.picks.iter().map(|&pick| keys.entries.row(pick as usize)));
    attend_rows(q, &rows, sink, &mut scratch.scores, out);
    scratch.rows = recycled(rows);
}

vectorised! {
    /// [`attend`] to these rows of c channels.
    ///
    /// # Panics
    /// When the sizes do not fit.
    pub fn attend_rows(lanes s; q: &[f32], rows: &[&[f32]], sink: &[f32], scores: &mut Vec<f32>, out: &mut [f32]) {
        let c = q.len() / sink.len();
        assert!(out.len() == q.len() && rows.iter().all(|row| row.len() == c), "rows of {c}, {} out", out.len());
        let mut done = 0;
        while done < sink.len() {
            let heads = if sink.len() - done >= HEADS { HEADS } else { 1 };
            let channels = done * c..(done + heads) * c;
            let (q, sink, out) = (&q[channels.clone()], &sink[done..done + heads], &mut out[channels]);
            if heads == HEADS {
                attend_together::<S, HEADS>(s, q, rows, sink, scores, out);
            } else {
                attend_together::<S, 1>(s, q, rows, sink, scores, out);
            }
            done += heads;
        }
    }
}

#[inline(always)]
fn attend_together<S: Lanes, const N: usize>(
    s: S,
    q: &[f32],
    rows: &[&[f32]],
    sink: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let c = q.len() / N;
    let scale = 1.0 / (c as f32).sqrt();
    let num_keys = rows.len();
    scores.resize(N * num_keys, 0.0);
    let mut heads: [&[f32]; N] = [&[]; N];
    for n in 0..N {
        heads[n] = &q[n * c..][..c];
    }
    for (j, row) in rows.iter().enumerate() {
        let scored = dots(s, heads, row);
        for n in 0..N {
            scores[n * num_keys + j] = scored[n] * scale;
        }
    }
    for n in 0..N {
        let scores = &mut scores[n * num_keys..][..num_keys];
        let top = max(scores).max(sink[n]);
        for score in scores.iter_mut() {
            *score = exp(*score - top);
        }
        let inverse = 1.0 / (sum(scores) + exp(sink[n] - top));
        for score in scores.iter_mut() {
            *score *= inverse;
        }
    }
    let mut weights: [&[f32]; N] = [&[]; N];
    for n in 0..N {
        weights[n] = &scores[n * num_keys..][..num_keys];
    }
    let mut from = 0;
    while from < c {
        let width = (c - from).min(LANES);
        let mut sums = [s.zero(); N];
        for (j, row) in rows.iter().enumerate() {
            add_key(s, &mut sums, weights, j, &row[from..from + width]);
        }
        for n in 0..N {
            store(s, &mut out[n * c + from..][..width], sums[n]);
        }
        from += width;
    }
}

/// `sums[n] += weights[n][j] * kv`.
#[inline(always)]
fn add_key<S: Lanes, const N: usize>(s: S, sums: &mut [S::V; N], weights: [&[f32]; N], j: usize, kv: &[f32]) {
    let kv = load(s, kv);
    for n in 0..N {
        sums[n] = s.fma(s.splat(weights[n][j]), kv, sums[n]);
    }
}
