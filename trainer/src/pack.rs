//! Packing: samples of any length become microbatches of rows, with what the policy needs to keep them apart.
//! Shapes: B rows, L input positions a row (padded), M tokens a compressed block, NB blocks a row (padded),
//! K experts per token. Positions are flat where a name says `flat`: `row * L + column`.

use datasets::Sample;
use serde::{Deserialize, Serialize};

/// How samples are put together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PackConfig {
    /// Most input positions of one forward and backward pass, padding included (`B * L`). What bounds the memory of a
    /// step; the loss does not depend on it. A single row longer than this still makes a microbatch of its own.
    pub microbatch_tokens: usize,
    /// Most input positions of a row that holds several samples. Rows are never longer than the longest sample: a
    /// longer row would spend attention on pairs of tokens that cannot see each other. A sample longer than this gets
    /// a row of its own.
    pub row_tokens: usize,
}

impl Default for PackConfig {
    fn default() -> Self {
        Self { microbatch_tokens: 4096, row_tokens: 4096 }
    }
}

/// One sample's place in a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which row.
    pub row: usize,
    /// The column of its first position.
    pub start: usize,
    /// Its input positions: one fewer than its tokens.
    pub len: usize,
    /// Its index in the samples that were packed.
    pub sample_idx: usize,
}

/// The recorded choices of one discrete part of the model, for every position of a microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Layers that were recorded.
    pub num_layers: usize,
    /// Slots per position and layer.
    pub width: usize,
    /// `[num_layers, B, L, width]`, row-major; -1 where a slot is unused and at padding.
    pub idx: Vec<i64>,
}

/// Rows of packed samples, in host memory. Vectors are `[B, L]`, row-major; entry `(b, l)` reads `token_ids` and
/// predicts `targets`. Padding has segment -1 and zeros elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct Microbatch {
    /// Rows, `B`.
    pub num_rows: usize,
    /// Positions of a row, `L`: the longest row's.
    pub row_len: usize,
    /// The token that is read.
    pub token_ids: Vec<i64>,
    /// Position within the sample, from 0.
    pub positions: Vec<i64>,
    /// Index into `segments`, or -1.
    pub segment_ids: Vec<i32>,
    /// The token that is predicted.
    pub targets: Vec<i64>,
    /// Whether the prediction is trained on.
    pub loss_mask: Vec<bool>,
    /// Advantage of the prediction.
    pub advantages: Vec<f32>,
    /// The engine's log-probability of the target.
    pub rollout_logprobs: Vec<f32>,
    /// The samples, in row order.
    pub segments: Vec<Segment>,
    /// Expert choices, if every sample brought them.
    pub routing: Option<Choices>,
    /// Indexer selections (block numbers within the sample), if every sample brought them.
    pub indexer: Option<Choices>,
}

/// The complete blocks of a microbatch at one compression ratio. Each sample is compressed on its own and its partial
/// tail is dropped (V4 report, 3.4.3), so what a block holds does not depend on the packing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Tokens per block, `M`.
    pub ratio: usize,
    /// Blocks of a row, `NB`: the most of any row.
    pub num_blocks: usize,
    /// `[B, NB, M]`: flat position of each token of the block; 0 at padding.
    pub flat_idx: Vec<i64>,
    /// `[B, NB]`: the block's number within its sample; 0 at padding.
    pub ordinals: Vec<i64>,
    /// `[B, NB]`: the block's segment, or -1.
    pub segment_ids: Vec<i32>,
}

/// Packs samples into microbatches, each sample whole and exactly once.
///
/// First-fit decreasing: samples from the longest to the shortest (ties in their given order), each into the first row
/// with room; then consecutive rows, which are alike in length, into one microbatch as long as `B * L` stays within
/// [`PackConfig::microbatch_tokens`]. The same samples give the same microbatches.
///
/// # Panics
/// When a sample has fewer than two tokens (it predicts nothing), or its per-token fields do not have one entry fewer
/// than its tokens.
pub fn pack(samples: &[Sample], config: &PackConfig) -> Vec<Microbatch> {
    let len_of = |s: usize| samples[s].tokens.len() - 1;
    for (s, sample) in samples.iter().enumerate() {
        let n = sample.tokens.len();
        assert!(n >= 2, "sample {s} has {n} tokens; one that predicts something has at least 2");
        for (field, len) in [
            ("loss_mask", sample.loss_mask.len()),
            ("advantages", sample.advantages.len()),
            ("rollout_logprobs", sample.rollout_logprobs.len()),
        ] {
            assert_eq!(len, n - 1, "sample {s}: `{field}` does not have one entry per prediction");
        }
    }
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|&s| std::cmp::Reverse(len_of(s))); // stable
    let Some(&longest) = order.first() else { return Vec::new() };
    let capacity = len_of(longest).min(config.row_tokens).min(config.microbatch_tokens);

    let mut rows: Vec<(usize, Vec<usize>)> = Vec::new();
    for &s in &order {
        let len = len_of(s);
        match rows.iter_mut().find(|(used, _)| used + len <= capacity) {
            Some((used, row)) => {
                *used += len;
                row.push(s);
            }
            None => rows.push((len, vec![s])),
        }
    }
    // A row opened early may have been filled up later: sort again, so that a microbatch pads little.
    rows.sort_by_key(|(used, _)| std::cmp::Reverse(*used));

    let mut microbatches = Vec::new();
    let mut rest = rows.as_slice();
    while let Some((longest, _)) = rest.first() {
        let num_rows = (config.microbatch_tokens / longest).clamp(1, rest.len());
        let (now, later) = rest.split_at(num_rows);
        microbatches.push(Microbatch::new(samples, now.iter().map(|(_, row)| row.as_slice())));
        rest = later;
    }
    microbatches
}

impl Microbatch {
    /// Where multi-token prediction is trained, `[B, L]`: at positions whose target is followed, within the sample, by
    /// one that is trained on.
    pub fn mtp_mask(&self) -> Vec<bool> {
        let mut mask = vec![false; self.loss_mask.len()];
        for segment in &self.segments {
            let from = segment.row * self.row_len + segment.start;
            let last = from + segment.len - 1;
            mask[from..last].copy_from_slice(&self.loss_mask[from + 1..=last]);
        }
        mask
    }

    /// Lays the samples of `rows` (indices into `samples`) out side by side.
    fn new<'a>(samples: &[Sample], rows: impl Iterator<Item = &'a [usize]>) -> Self {
        let mut segments = Vec::new();
        let (mut num_rows, mut row_len) = (0, 0);
        for row in rows {
            let mut start = 0;
            for &sample_idx in row {
                let len = samples[sample_idx].tokens.len() - 1;
                segments.push(Segment { row: num_rows, start, len, sample_idx });
                start += len;
            }
            row_len = row_len.max(start);
            num_rows += 1;
        }
        let n = num_rows * row_len;
        let mut mb = Self {
            num_rows,
            row_len,
            token_ids: vec![0; n],
            positions: vec![0; n],
            segment_ids: vec![-1; n],
            targets: vec![0; n],
            loss_mask: vec![false; n],
            advantages: vec![0.0; n],
            rollout_logprobs: vec![0.0; n],
            segments: Vec::new(),
            routing: None,
            indexer: None,
        };
        for (id, seg) in segments.iter().enumerate() {
            let sample = &samples[seg.sample_idx];
            let at = seg.row * row_len + seg.start;
            for t in 0..seg.len {
                mb.token_ids[at + t] = i64::from(sample.tokens[t]);
                mb.targets[at + t] = i64::from(sample.tokens[t + 1]);
                mb.positions[at + t] = t as i64;
                mb.segment_ids[at + t] = id as i32;
            }
            mb.loss_mask[at..at + seg.len].copy_from_slice(&sample.loss_mask);
            mb.advantages[at..at + seg.len].copy_from_slice(&sample.advantages);
            mb.rollout_logprobs[at..at + seg.len].copy_from_slice(&sample.rollout_logprobs);
        }
        mb.routing = choices(&segments, row_len, n, |s| {
            let c = samples[s].routing.as_deref()?;
            let idx = c.expert_idx.iter().map(|&e| i64::from(e)).collect();
            Some((c.num_layers, c.num_experts_per_token, idx))
        });
        mb.indexer = choices(&segments, row_len, n, |s| {
            let c = samples[s].indexer.as_deref()?;
            let idx = c.block_idx.iter().map(|&b| if b == u32::MAX { -1 } else { i64::from(b) }).collect();
            Some((c.num_layers, c.top_k, idx))
        });
        mb.segments = segments;
        mb
    }

    /// Positions that hold a token, padding left out.
    pub fn num_tokens(&self) -> usize {
        self.segments.iter().map(|s| s.len).sum()
    }

    /// Predictions that are trained on.
    pub fn num_loss_tokens(&self) -> usize {
        self.loss_mask.iter().filter(|&&m| m).count()
    }

    /// The complete blocks of `ratio` tokens of every sample.
    pub fn blocks(&self, ratio: usize) -> Blocks {
        let mut per_row = vec![0; self.num_rows];
        for s in &self.segments {
            per_row[s.row] += s.len / ratio;
        }
        let num_blocks = per_row.iter().copied().max().unwrap_or(0);
        let n = self.num_rows * num_blocks;
        let mut blocks =
            Blocks { ratio, num_blocks, flat_idx: vec![0; n * ratio], ordinals: vec![0; n], segment_ids: vec![-1; n] };
        let mut filled = vec![0; self.num_rows];
        for (id, s) in self.segments.iter().enumerate() {
            for ordinal in 0..s.len / ratio {
                let at = s.row * num_blocks + filled[s.row];
                filled[s.row] += 1;
                blocks.ordinals[at] = ordinal as i64;
                blocks.segment_ids[at] = id as i32;
                let first = s.row * self.row_len + s.start + ordinal * ratio;
                for j in 0..ratio {
                    blocks.flat_idx[at * ratio + j] = (first + j) as i64;
                }
            }
        }
        blocks
    }

    /// `[B, L, L]`: whether query `t` sees key `j` through the sliding window: same sample and `t - window < j <= t`.
    pub fn window_visibility(&self, window: usize) -> Vec<bool> {
        let l = self.row_len;
        let mut visible = vec![false; self.num_rows * l * l];
        for s in &self.segments {
            for t in 0..s.len {
                let query = (s.row * l + s.start + t) * l + s.start;
                visible[query + (t + 1).saturating_sub(window)..=query + t].fill(true);
            }
        }
        visible
    }

    /// `[B, L, NB]`: whether query `t` may see block `b`: same sample, and `b < (t + 1) / ratio` in-sample (SPEC 4.2).
    pub fn block_visibility(&self, blocks: &Blocks) -> Vec<bool> {
        self.per_block(blocks, |_, t, ordinal| ordinal < (t + 1) / blocks.ratio)
    }

    /// `[B, L, NB]`: whether the recorded indexer selections of CSA layer `layer` (counted among those layers) hold
    /// block `b` and query `t` may see it.
    ///
    /// # Panics
    /// When the microbatch has no recorded selections, or of fewer layers.
    pub fn recorded_visibility(&self, blocks: &Blocks, layer: usize) -> Vec<bool> {
        let choices = self.indexer.as_ref().expect("a sample came without indexer selections to replay");
        assert!(layer < choices.num_layers, "CSA layer {layer} of {} recorded", choices.num_layers);
        let n = self.num_rows * self.row_len;
        let picks = &choices.idx[layer * n * choices.width..(layer + 1) * n * choices.width];
        self.per_block(blocks, |flat, t, ordinal| {
            ordinal < (t + 1) / blocks.ratio
                && picks[flat * choices.width..(flat + 1) * choices.width].contains(&(ordinal as i64))
        })
    }

    /// `[B, L, NB]` of `test(flat position, position in the sample, block's ordinal)`, false across samples.
    fn per_block(&self, blocks: &Blocks, test: impl Fn(usize, usize, usize) -> bool) -> Vec<bool> {
        let (l, nb) = (self.row_len, blocks.num_blocks);
        let mut visible = vec![false; self.num_rows * l * nb];
        let mut first = vec![0; self.num_rows];
        for s in &self.segments {
            let count = s.len / blocks.ratio;
            for t in 0..s.len {
                let flat = s.row * l + s.start + t;
                for ordinal in 0..count {
                    visible[flat * nb + first[s.row] + ordinal] = test(flat, t, ordinal);
                }
            }
            first[s.row] += count;
        }
        visible
    }
}

/// Lays recorded choices, `[len, layers, width]` of each segment, out as `[layers, B, L, width]`.
fn choices(
    segments: &[Segment],
    row_len: usize,
    num_positions: usize,
    recorded: impl Fn(usize) -> Option<(usize, usize, Vec<i64>)>,
) -> Option<Choices> {
    let all: Vec<_> = segments.iter().map(|s| recorded(s.sample_idx)).collect::<Option<_>>()?;
    let &(num_layers, width, _) = all.first()?;
    let mut idx = vec![-1; num_layers * num_positions * width];
    for (s, (layers, w, from)) in segments.iter().zip(&all) {
        assert!(
            *layers == num_layers && *w == width && from.len() >= s.len * num_layers * width,
            "sample {}: {} recorded choices of {layers} layers by {w}, expected {} tokens of {num_layers} by {width}",
            s.sample_idx,
            from.len(),
            s.len,
        );
        for t in 0..s.len {
            for layer in 0..num_layers {
                let to = (layer * num_positions + s.row * row_len + s.start + t) * width;
                let at = (t * num_layers + layer) * width;
                idx[to..to + width].copy_from_slice(&from[at..at + width]);
            }
        }
    }
    Some(Choices { num_layers, width, idx })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datasets::{IndexerChoices, RoutingChoices};
    use proptest::prelude::*;

    use super::*;

    fn sample(id: usize, n: usize) -> Sample {
        Sample {
            group_id: 0,
            rollout_id: id as u64,
            tokens: (0..n).map(|t| (id * 1000 + t) as u32).collect(),
            loss_mask: (1..n).map(|t| !(t + id).is_multiple_of(3)).collect(),
            advantages: vec![id as f32; n - 1],
            rollout_logprobs: (1..n).map(|t| -(t as f32)).collect(),
            routing: Some(Arc::new(RoutingChoices {
                num_layers: 2,
                num_experts_per_token: 1,
                expert_idx: (0..2 * (n - 1)).map(|i| i as u16).collect(),
            })),
            indexer: Some(Arc::new(IndexerChoices {
                num_layers: 1,
                top_k: 2,
                block_idx: (0..n - 1).flat_map(|_| [0, u32::MAX]).collect(),
            })),
        }
    }

    proptest! {
        #[test]
        fn packing_keeps_every_sample_whole(
            lens in prop::collection::vec(2usize..40, 0..40),
            row_tokens in 1usize..64,
            microbatch_tokens in 1usize..256,
            ratio in 1usize..9,
        ) {
            let samples: Vec<_> = lens.iter().enumerate().map(|(i, &n)| sample(i, n)).collect();
            let config = PackConfig { microbatch_tokens, row_tokens };
            let packed = pack(&samples, &config);
            prop_assert_eq!(&packed, &pack(&samples, &config));

            let mut seen = vec![0; samples.len()];
            for mb in &packed {
                prop_assert!(mb.num_rows == 1 || mb.num_rows * mb.row_len <= microbatch_tokens);
                let mut filled = vec![0; mb.num_rows];
                for (id, s) in mb.segments.iter().enumerate() {
                    let from = &samples[s.sample_idx];
                    seen[s.sample_idx] += 1;
                    prop_assert_eq!(filled[s.row], s.start);
                    filled[s.row] += s.len;
                    prop_assert!(filled[s.row] <= row_tokens || s.start == 0);
                    for t in 0..s.len {
                        let at = s.row * mb.row_len + s.start + t;
                        prop_assert_eq!(mb.token_ids[at], i64::from(from.tokens[t]));
                        prop_assert_eq!(mb.targets[at], i64::from(from.tokens[t + 1]));
                        prop_assert_eq!(mb.segment_ids[at], id as i32);
                        prop_assert_eq!(mb.loss_mask[at], from.loss_mask[t]);
                        let routing = mb.routing.as_ref().unwrap();
                        prop_assert_eq!(routing.idx[mb.num_rows * mb.row_len + at], 2 * t as i64 + 1);
                    }
                }
                prop_assert_eq!(filled.iter().copied().max(), Some(mb.row_len));
                let padding = mb.segment_ids.iter().filter(|&&s| s < 0).count();
                prop_assert_eq!(padding + mb.num_tokens(), mb.num_rows * mb.row_len);
                check_visibility(mb, ratio)?;
            }
            prop_assert!(seen.iter().all(|&n| n == 1));
            let before: usize = samples.iter().flat_map(|s| &s.loss_mask).filter(|&&m| m).count();
            prop_assert_eq!(before, packed.iter().map(Microbatch::num_loss_tokens).sum::<usize>());
        }
    }

    /// The masks against their definitions, pair by pair.
    fn check_visibility(mb: &Microbatch, ratio: usize) -> Result<(), TestCaseError> {
        let (l, window) = (mb.row_len, 5);
        let blocks = mb.blocks(ratio);
        let nb = blocks.num_blocks;
        let (by_window, by_block) = (mb.window_visibility(window), mb.block_visibility(&blocks));
        let recorded = mb.recorded_visibility(&blocks, 0);
        for q in 0..mb.num_rows * l {
            let (segment, t) = (mb.segment_ids[q], mb.positions[q]);
            for j in 0..l {
                let k = q / l * l + j;
                let p = mb.positions[k];
                let want = segment >= 0 && segment == mb.segment_ids[k] && t - (window as i64) < p && p <= t;
                prop_assert_eq!(by_window[q * l + j], want);
            }
            for b in 0..nb {
                let k = q / l * nb + b;
                let ordinal = blocks.ordinals[k];
                let want = segment >= 0 && segment == blocks.segment_ids[k] && ordinal < (t + 1) / ratio as i64;
                prop_assert_eq!(by_block[q * nb + b], want);
                prop_assert_eq!(recorded[q * nb + b], want && ordinal == 0);
                if blocks.segment_ids[k] >= 0 {
                    for m in 0..ratio {
                        let at = blocks.flat_idx[k * ratio + m] as usize;
                        prop_assert_eq!(mb.segment_ids[at], blocks.segment_ids[k]);
                        prop_assert_eq!(mb.positions[at], ordinal * ratio as i64 + m as i64);
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn alike_samples_fill_rows_without_padding() {
        let samples: Vec<_> = (0..8).map(|i| sample(i, 17)).collect();
        let packed = pack(&samples, &PackConfig { microbatch_tokens: 64, row_tokens: 1024 });
        let shapes: Vec<_> = packed.iter().map(|mb| (mb.num_rows, mb.row_len)).collect();
        assert_eq!(shapes, [(4, 16), (4, 16)]);
    }
}
