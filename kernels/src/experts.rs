//! The grouped product over experts (v4/SPEC section 7): tokens are ordered by expert, each expert's weights meet all of
//! its rows at once, and rows are read and results added where they lie.
//! Shapes: R rows, D width, K experts per token, I the experts' width, P = R * K pairs of a row and an expert.

use std::ops::Range;

use crate::activation::swiglu;
use crate::linear::{self, Linear, Rows};
use crate::math::add_scaled;
use crate::pool::ColumnPart;

/// The pairs of a batch, ordered by expert, then by row.
#[derive(Debug, Default)]
pub struct Pairs {
    runs: Vec<(usize, Range<usize>)>,
    row: Vec<u32>,
    weight: Vec<f32>,
    next: Vec<usize>,
}

impl Pairs {
    /// Orders the choices `expert_idx(r)` of each row, with their weights `[R, K]`.
    pub fn order<'a>(&mut self, num_experts: usize, weight: &[f32], k: usize, expert_idx: impl Fn(usize) -> &'a [u16]) {
        let num_rows = weight.len() / k;
        self.next.clear();
        self.next.resize(num_experts, 0);
        for r in 0..num_rows {
            for &expert in expert_idx(r) {
                self.next[usize::from(expert)] += 1;
            }
        }
        self.runs.clear();
        let mut from = 0;
        for (expert, next) in self.next.iter_mut().enumerate() {
            let to = from + *next;
            if to > from {
                self.runs.push((expert, from..to));
            }
            *next = from;
            from = to;
        }
        self.row.resize(weight.len(), 0);
        self.weight.resize(weight.len(), 0.0);
        for (r, weight) in weight.chunks_exact(k).enumerate() {
            for (&expert, weight) in expert_idx(r).iter().zip(weight) {
                let at = self.next[usize::from(expert)];
                self.next[usize::from(expert)] += 1;
                self.row[at] = r as u32;
                self.weight[at] = *weight;
            }
        }
    }

    /// Of each expert that has rows, in ascending order: itself and its pairs.
    pub fn runs(&self) -> &[(usize, Range<usize>)] {
        &self.runs
    }

    /// The row of each pair: `[P]`.
    pub fn rows(&self) -> &[u32] {
        &self.row
    }

    /// The weight of each pair: `[P]`.
    pub fn weights(&self) -> &[f32] {
        &self.weight
    }
}

/// The weights of one expert.
#[derive(Clone, Copy, Debug)]
pub struct Expert<'a> {
    /// `W1 [I, D]`.
    pub gate: &'a Linear,
    /// `W3 [I, D]`.
    pub up: &'a Linear,
    /// `W2 [D, I]`.
    pub down: &'a Linear,
}

/// A thread's own buffers.
#[derive(Debug, Default)]
pub struct Scratch {
    linear: linear::Scratch,
    /// A product that is not a result yet.
    product: Vec<f32>,
}

impl Scratch {
    fn product(&mut self, len: usize) -> (&mut [f32], &mut linear::Scratch) {
        self.product.resize(len, 0.0);
        (&mut self.product, &mut self.linear)
    }
}

impl Expert<'_> {
    /// `hidden = silu(x W1^T) * (x W3^T)`, clamped at `limit`, for rows x: some columns of `[_, I]`.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn hidden(self, x: Rows<'_>, limit: f32, hidden: &mut ColumnPart<'_>, scratch: &mut Scratch) {
        let columns = hidden.columns();
        let (up, linear) = scratch.product(x.len() * columns.len());
        self.gate.forward(x, hidden, linear);
        self.up.forward(x, &mut ColumnPart::new(up, columns.clone()), linear);
        for (r, up) in up.chunks_exact(columns.len().max(1)).enumerate() {
            swiglu(hidden.row(r, columns.clone()), up, limit);
        }
    }
}

/// [`Expert::hidden`] of all pairs, each from its row of `x` `[R, D]`: some columns of `[P, I]`.
///
/// # Panics
/// As [`Linear::forward`].
pub fn hidden<'a>(
    pairs: &Pairs,
    expert: impl Fn(usize) -> Expert<'a>,
    x: Rows<'_>,
    limit: f32,
    hidden: &mut ColumnPart<'_>,
    scratch: &mut Scratch,
) {
    for (idx, run) in &pairs.runs {
        let rows = x.choose(&pairs.row[run.clone()]);
        expert(*idx).hidden(rows, limit, &mut hidden.rows(run.clone()), scratch);
    }
}

/// `y[row] += weight * (hidden W2^T)` for all pairs, `hidden` being `[P, I]`: some columns of `[R, D]`. A row takes its
/// experts in ascending order.
///
/// # Panics
/// As [`Linear::forward`].
pub fn add_outputs<'a>(
    pairs: &Pairs,
    expert: impl Fn(usize) -> Expert<'a>,
    hidden: &[f32],
    y: &mut ColumnPart<'_>,
    scratch: &mut Scratch,
) {
    let columns = y.columns();
    for (idx, run) in &pairs.runs {
        let down = expert(*idx).down;
        let hidden = &hidden[run.start * down.inputs()..run.end * down.inputs()];
        let (product, linear) = scratch.product(run.len() * columns.len());
        down.forward(Rows::new(hidden, down.inputs()), &mut ColumnPart::new(product, columns.clone()), linear);
        for (pair, product) in run.clone().zip(product.chunks_exact(columns.len().max(1))) {
            add_scaled(y.row(pairs.row[pair] as usize, columns.clone()), pairs.weight[pair], product);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::PANEL;
    use crate::pool::{Columns, Parts, Pool};
    use proptest::prelude::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32).map(|i| ((i ^ seed).wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    proptest! {
        /// Every row alone, expert by expert, gives the bits of the whole batch on any number of threads.
        #[test]
        fn a_batch_is_its_rows_one_by_one(
            num_rows in 1usize..20, num_experts in 2usize..7, d in 1usize..40, inter in 1usize..40,
            num_threads in 1usize..4, seed in any::<u32>(),
        ) {
            let k = 2;
            let weights: Vec<[Linear; 3]> = (0..num_experts as u32).map(|e| [
                Linear::from_f32(inter, d, &values(inter * d, seed ^ e)),
                Linear::from_f32(inter, d, &values(inter * d, seed ^ (e + 100))),
                Linear::from_f32(d, inter, &values(d * inter, seed ^ (e + 200))),
            ]).collect();
            let expert = |e: usize| Expert { gate: &weights[e][0], up: &weights[e][1], down: &weights[e][2] };
            let chosen: Vec<u16> = (0..num_rows)
                .flat_map(|r| [r, r + 1 + seed as usize % (num_experts - 1)].map(|e| (e % num_experts) as u16))
                .collect();
            let (x, weight) = (values(num_rows * d, !seed), values(num_rows * k, seed / 3));

            let mut pairs = Pairs::default();
            pairs.order(num_experts, &weight, k, |r| &chosen[r * k..][..k]);
            let mut pool = Pool::new(num_threads, "test");
            let mut scratch: Vec<Scratch> = (0..num_threads).map(|_| Scratch::default()).collect();
            let (mut h, mut y) = (vec![0.0; num_rows * k * inter], vec![0.5; num_rows * d]);
            {
                let (h, s) = (Columns::new(&mut h, inter, PANEL, num_threads), Parts::new(&mut scratch, 1, num_threads));
                pool.run(&|t| hidden(&pairs, expert, Rows::new(&x, d), 2.0, &mut h.take(t), &mut s.take(t)[0]));
            }
            {
                let (y, s) = (Columns::new(&mut y, d, PANEL, num_threads), Parts::new(&mut scratch, 1, num_threads));
                pool.run(&|t| add_outputs(&pairs, expert, &h, &mut y.take(t), &mut s.take(t)[0]));
            }

            for (r, (x, y)) in x.chunks_exact(d).zip(y.chunks_exact(d)).enumerate() {
                let mut choices: Vec<usize> = (0..k).collect();
                choices.sort_by_key(|&i| chosen[r * k + i]);
                let mut want = vec![0.5; d];
                for i in choices {
                    let (e, mut scratch) = (expert(chosen[r * k + i].into()), linear::Scratch::default());
                    let (mut gate, mut up, mut out) = (vec![0.0; inter], vec![0.0; inter], vec![0.0; d]);
                    e.gate.forward(Rows::new(x, d), &mut ColumnPart::new(&mut gate, 0..inter), &mut scratch);
                    e.up.forward(Rows::new(x, d), &mut ColumnPart::new(&mut up, 0..inter), &mut scratch);
                    swiglu(&mut gate, &up, 2.0);
                    e.down.forward(Rows::new(&gate, inter), &mut ColumnPart::new(&mut out, 0..d), &mut scratch);
                    add_scaled(&mut want, weight[r * k + i], &out);
                }
                prop_assert_eq!(y, &want[..], "row {}", r);
            }
        }
    }
}
