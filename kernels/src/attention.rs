//! Attention of one row over its window and its compressed entries, with one sink per head (v4/SPEC section 4).
//! Shapes: H heads, c channels, one shared key/value head: queries `[H, c]`, entries `[_, c]`.

use crate::lanes::{LANES, Lanes, load, store};
use crate::math::{dots, exp, max, sum};

/// Heads that are done together, so that keys are read once for all of them.
pub const HEADS: usize = 4;

/// What a row attends to: all of the window, then some of the compressed entries.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a> {
    /// `[_, c]`.
    pub window: &'a [f32],
    /// `[_, c]`, of which `picks` names those that count.
    pub entries: &'a [f32],
    /// Rows of `entries`.
    pub picks: &'a [u32],
}

vectorised! {
    /// `out[h] = sum_j softmax_j(q[h] . kv_j / sqrt(c)) kv_j` over `keys`; `exp(sink[h])` joins the softmax's
    /// denominator.
    ///
    /// `scores` is scratch. Window first, then picks in their order: one summation order whatever the batch.
    ///
    /// # Panics
    /// When the sizes do not fit.
    pub fn attend(lanes s; q: &[f32], keys: Keys<'_>, sink: &[f32], scores: &mut Vec<f32>, out: &mut [f32]) {
        let c = q.len() / sink.len();
        assert!(keys.window.len().is_multiple_of(c) && out.len() == q.len(), "{} queries, {} out", q.len(), out.len());
        let mut done = 0;
        while done < sink.len() {
            let heads = if sink.len() - done >= HEADS { HEADS } else { 1 };
            let channels = done * c..(done + heads) * c;
            let (q, sink, out) = (&q[channels.clone()], &sink[done..done + heads], &mut out[channels]);
            if heads == HEADS {
                attend_together::<S, HEADS>(s, q, keys, sink, scores, out);
            } else {
                attend_together::<S, 1>(s, q, keys, sink, scores, out);
            }
            done += heads;
        }
    }
}

#[inline(always)]
fn attend_together<S: Lanes, const N: usize>(
    s: S,
    q: &[f32],
    keys: Keys<'_>,
    sink: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let c = q.len() / N;
    let window = keys.window;
    let num_window = window.len() / c;
    let num_keys = num_window + keys.picks.len();
    let scale = 1.0 / (c as f32).sqrt();
    let entry = |pick: u32| &keys.entries[pick as usize * c..][..c];
    scores.resize(N * num_keys, 0.0);
    let mut heads: [&[f32]; N] = [&[]; N];
    for n in 0..N {
        heads[n] = &q[n * c..][..c];
    }
    for (j, kv) in window.chunks_exact(c).enumerate() {
        let scored = dots(s, heads, kv);
        for n in 0..N {
            scores[n * num_keys + j] = scored[n] * scale;
        }
    }
    for (j, &pick) in keys.picks.iter().enumerate() {
        let scored = dots(s, heads, entry(pick));
        for n in 0..N {
            scores[n * num_keys + num_window + j] = scored[n] * scale;
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
    let mut rows: [&[f32]; N] = [&[]; N];
    for n in 0..N {
        rows[n] = &scores[n * num_keys..][..num_keys];
    }
    let mut from = 0;
    while from < c {
        let width = (c - from).min(LANES);
        let mut sums = [s.zero(); N];
        for (j, kv) in window.chunks_exact(c).enumerate() {
            add_key(s, &mut sums, rows, j, &kv[from..from + width]);
        }
        for (j, &pick) in keys.picks.iter().enumerate() {
            add_key(s, &mut sums, rows, num_window + j, &entry(pick)[from..from + width]);
        }
        for n in 0..N {
            store(s, &mut out[n * c + from..][..width], sums[n]);
        }
        from += width;
    }
}

/// `sums[n] += scores[n][j] * kv`.
#[inline(always)]
fn add_key<S: Lanes, const N: usize>(s: S, sums: &mut [S::V; N], scores: [&[f32]; N], j: usize, kv: &[f32]) {
    let kv = load(s, kv);
    for n in 0..N {
        sums[n] = s.fma(s.splat(scores[n][j]), kv, sums[n]);
    }
}
