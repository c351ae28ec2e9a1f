//! Recording what a forward pass computes, under the names that the engine's ops have.

use rollout::model::Trace;
use tch::{Kind, Tensor};

use super::inputs::{BlockInputs, Inputs};
use super::to_vec_f32;

/// Writes the ops of one block into a trace, if one is kept. Rows at padding are left out.
pub(super) struct Tracer<'a> {
    trace: Option<&'a mut Trace>,
    prefix: &'a str,
    segment_ids: &'a [i32],
}

impl<'a> Tracer<'a> {
    /// `prefix` is what the ops' names begin with, such as `layers.3.`; `segment_ids` `[T]` are negative at padding.
    pub fn new(trace: Option<&'a mut Trace>, prefix: &'a str, segment_ids: &'a [i32]) -> Self {
        Self { trace, prefix, segment_ids }
    }

    pub fn is_on(&self) -> bool {
        self.trace.is_some()
    }

    /// A tensor `[T, ..]`.
    pub fn rows(&mut self, op: &str, x: &Tensor) {
        let Some(trace) = &mut self.trace else { return };
        let real: Vec<i64> = (0..).zip(self.segment_ids).filter(|(_, s)| **s >= 0).map(|(t, _)| t).collect();
        let real = x.index_select(0, &Tensor::from_slice(&real).to_device(x.device()));
        trace.numbers(format!("{}{op}", self.prefix), &row_shape(x, 1), to_vec_f32(&real));
    }

    /// Whole blocks, `[B, NB, ..]`; nothing where rows are padded, whose blocks would be too.
    pub fn blocks(&mut self, op: &str, x: &Tensor) {
        if let Some(trace) = self.trace.as_mut().filter(|_| self.segment_ids.iter().all(|s| *s >= 0)) {
            trace.numbers(format!("{}{op}", self.prefix), &row_shape(x, 2), to_vec_f32(x));
        }
    }

    /// A layer whose samples are all shorter than a block: entries would be `width` wide, an indexer's keys `key_width`.
    pub fn no_blocks(&mut self, width: i64, key_width: Option<i64>) {
        let Some(trace) = &mut self.trace else { return };
        trace.numbers(format!("{}compressed_kv", self.prefix), &[width as usize], Vec::new());
        if let Some(key_width) = key_width {
            trace.numbers(format!("{}indexer.keys", self.prefix), &[key_width as usize], Vec::new());
            trace.numbers(format!("{}indexer.scores", self.prefix), &[], Vec::new());
            let rows = self.segment_ids.iter().filter(|segment| **segment >= 0).map(|_| Vec::new());
            trace.choices(format!("{}indexer.topk", self.prefix), rows);
        }
    }

    /// Experts `[T, K]` with their weights.
    pub fn experts(&mut self, chosen: &[i64], weight_tk: &Tensor) {
        let Some(trace) = &mut self.trace else { return };
        let k = weight_tk.size()[1] as usize;
        let weights = to_vec_f32(weight_tk);
        let mut ordered = Vec::new();
        let mut rows = Vec::new();
        let all = chosen.chunks_exact(k).zip(weights.chunks_exact(k)).zip(self.segment_ids);
        for ((experts, weights), _) in all.filter(|(_, segment)| **segment >= 0) {
            let mut pairs: Vec<(i64, f32)> = experts.iter().copied().zip(weights.iter().copied()).collect();
            pairs.sort_by_key(|(expert, _)| *expert);
            rows.push(pairs.iter().map(|(expert, _)| *expert as u32).collect());
            ordered.extend(pairs.iter().map(|(_, weight)| weight));
        }
        trace.choices(format!("{}router.experts", self.prefix), rows);
        trace.numbers(format!("{}router.weights", self.prefix), &[k], ordered);
    }

    /// An indexer's scores of the blocks that each position sees, if it made them, and the blocks that were `picked`,
    /// `[B, L, NB]`, by their numbers within the sample.
    pub fn picks(&mut self, score: Option<&Tensor>, picked: &Tensor, blocks: &BlockInputs, inputs: &Inputs) {
        let Some(trace) = &mut self.trace else { return };
        let nb = blocks.num_blocks as usize;
        let visible = to_vec_f32(&blocks.visible.to_kind(Kind::Float));
        let picked = to_vec_f32(&picked.to_kind(Kind::Float));
        let scores = score.map(to_vec_f32);
        let mut shown = Vec::new();
        let mut rows = Vec::new();
        for q in (0..self.segment_ids.len()).filter(|q| self.segment_ids[*q] >= 0) {
            let at = q * nb..(q + 1) * nb;
            if let Some(scores) = &scores {
                let seen = scores[at.clone()].iter().zip(&visible[at.clone()]).filter(|(_, seen)| **seen > 0.0);
                shown.extend(seen.map(|(score, _)| score));
            }
            let row = q / inputs.row_len as usize;
            let ordinals = &blocks.host.ordinals[row * nb..(row + 1) * nb];
            let taken = picked[at].iter().zip(ordinals).filter(|(taken, _)| **taken > 0.0);
            rows.push(taken.map(|(_, ordinal)| *ordinal as u32).collect());
        }
        if scores.is_some() {
            trace.numbers(format!("{}indexer.scores", self.prefix), &[], shown);
        }
        trace.choices(format!("{}indexer.topk", self.prefix), rows);
    }
}

/// The shape behind the first `num_leading` dimensions.
fn row_shape(x: &Tensor, num_leading: usize) -> Vec<usize> {
    x.size()[num_leading..].iter().map(|&n| n as usize).collect()
}
