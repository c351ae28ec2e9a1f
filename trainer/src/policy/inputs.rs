//! What the layers need of a microbatch, once per forward pass: positions as rotations, blocks, and who sees whom.
//! Shapes: B rows, L positions a row, NB blocks a row, R rotary channels.

use std::collections::BTreeMap;

use rollout::model::{LayerKind, ModelConfig};
use tch::{Device, Kind, Tensor};

use super::rope::rope_table;
use crate::pack::{Blocks, Microbatch};

/// The blocks of one compression ratio.
pub(super) struct BlockInputs {
    /// As the host has them.
    pub host: Blocks,
    pub num_rows: i64,
    pub num_blocks: i64,
    /// Most blocks of any one sample.
    pub longest: usize,
    /// `[B * NB * M]`
    pub flat_idx: Tensor,
    /// `[B, NB, 2 M, 1]`: minus infinity on the overlap half of a sample's first block, else 0.
    pub first_bias: Tensor,
    /// `[B, NB, R/2]`: rotation by the block's first position.
    pub rope: Tensor,
    /// `[B, L, NB]`: which blocks are complete for which query.
    pub visible: Tensor,
    /// `[B, L, L + NB + 1]`, see [`Inputs::window_bias`].
    pub bias: Tensor,
}

/// A microbatch on the policy's device.
pub(super) struct Inputs {
    pub num_rows: i64,
    pub row_len: i64,
    /// `[B * L]`
    pub token_ids: Tensor,
    /// `[B, L, R/2]`, for window-only and for compressed layers.
    rope_window: Tensor,
    rope_compressed: Tensor,
    /// `[B, L, L + 1]`: 0 where a key is seen, minus infinity elsewhere; the last column is the sink's, always seen.
    pub window_bias: Tensor,
    /// By ratio; a ratio that no sample is long enough for is left out.
    pub blocks: BTreeMap<usize, BlockInputs>,
}

impl Inputs {
    pub fn new(config: &ModelConfig, mb: &Microbatch, device: Device) -> Self {
        let (b, l) = (mb.num_rows as i64, mb.row_len as i64);
        let rope = |positions: &[i64], shape: &[i64], kind: LayerKind| {
            rope_table(positions, shape, &config.rope_frequencies(kind), device)
        };
        let window = Tensor::from_slice(&mb.window_visibility(config.sliding_window)).view_([b, l, l]);
        let window = window.to_device(device);
        let mut blocks = BTreeMap::new();
        for layer in 0..config.num_hidden_layers {
            let kind = config.layer_kind(layer);
            let Some(ratio) = kind.ratio() else { continue };
            if blocks.contains_key(&ratio) {
                continue;
            }
            let host = mb.blocks(ratio);
            if host.num_blocks == 0 {
                continue;
            }
            let nb = host.num_blocks as i64;
            let visible = Tensor::from_slice(&mb.block_visibility(&host)).view_([b, l, nb]).to_device(device);
            let first: Vec<f32> = host
                .ordinals
                .iter()
                .flat_map(|&ordinal| {
                    let overlap = if ordinal == 0 { f32::NEG_INFINITY } else { 0.0 };
                    std::iter::repeat_n(overlap, ratio).chain(std::iter::repeat_n(0.0, ratio))
                })
                .collect();
            let positions: Vec<i64> = host.ordinals.iter().map(|o| o * ratio as i64).collect();
            let inputs = BlockInputs {
                num_rows: b,
                num_blocks: nb,
                longest: mb.segments.iter().map(|s| s.len / ratio).max().unwrap_or(0),
                flat_idx: Tensor::from_slice(&host.flat_idx).to_device(device),
                first_bias: Tensor::from_slice(&first).view_([b, nb, 2 * ratio as i64, 1]).to_device(device),
                rope: rope(&positions, &[b, nb], kind),
                bias: bias(&[&window, &visible]),
                visible,
                host,
            };
            blocks.insert(ratio, inputs);
        }
        Self {
            num_rows: b,
            row_len: l,
            token_ids: Tensor::from_slice(&mb.token_ids).to_device(device),
            rope_window: rope(&mb.positions, &[b, l], LayerKind::Window),
            rope_compressed: rope(&mb.positions, &[b, l], LayerKind::Csa),
            window_bias: bias(&[&window]),
            blocks,
        }
    }

    /// `[B, L, R/2]` of a layer.
    pub fn rope(&self, kind: LayerKind) -> &Tensor {
        if kind == LayerKind::Window { &self.rope_window } else { &self.rope_compressed }
    }

    /// The bias of a CSA layer whose indexer picked `picked` `[B, L, NB]` of the blocks.
    pub fn picked_bias(&self, picked: &Tensor) -> Tensor {
        let window = self.window_bias.narrow(2, 0, self.row_len);
        let sink = self.window_bias.narrow(2, self.row_len, 1);
        Tensor::cat(&[window, to_bias(picked), sink], 2)
    }

    /// The blocks of CSA layers.
    pub fn csa(&self) -> Option<&BlockInputs> {
        LayerKind::Csa.ratio().and_then(|ratio| self.blocks.get(&ratio))
    }
}

fn to_bias(visible: &Tensor) -> Tensor {
    visible.zeros_like().to_kind(Kind::Float).masked_fill(&visible.logical_not(), f64::NEG_INFINITY)
}

fn bias(visible: &[&Tensor]) -> Tensor {
    let mut parts: Vec<Tensor> = visible.iter().map(|v| to_bias(v)).collect();
    let (b, l) = (parts[0].size()[0], parts[0].size()[1]);
    parts.push(Tensor::zeros([b, l, 1], (Kind::Float, parts[0].device())));
    Tensor::cat(&parts, 2)
}
