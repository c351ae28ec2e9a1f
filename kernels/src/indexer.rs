//! The lightning indexer: which compressed blocks a token attends to (v4/SPEC section 5).
//! Shapes: n index heads, e channels, B blocks.

use crate::math::{dot, dots};

/// Index heads that are done together, so that a key is read once for all of them.
const HEADS: usize = 4;

vectorised! {
    /// `score[b] = sum_n weight[n] * relu(q[n] . key[b])`: q `[n, e]`, weight `[n]`, keys `[B, e]`, scores `[B]`.
    pub fn scores(lanes s; q: &[f32], weight: &[f32], keys: &[f32], scores: &mut [f32]) {
        let e = q.len() / weight.len();
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(e)) {
            *score = 0.0;
            let mut n = 0;
            while n + HEADS <= weight.len() {
                let heads = [&q[n * e..][..e], &q[(n + 1) * e..][..e], &q[(n + 2) * e..][..e], &q[(n + 3) * e..][..e]];
                for (dot, w) in dots(s, heads, key).into_iter().zip(&weight[n..]) {
                    *score = w.mul_add(relu(dot), *score);
                }
                n += HEADS;
            }
            for (q, w) in q[n * e..].chunks_exact(e).zip(&weight[n..]) {
                *score = w.mul_add(relu(dot(s, q, key)), *score);
            }
        }
    }
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
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
