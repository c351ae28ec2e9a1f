//! The lightning indexer of CSA layers (SPEC section 5): which compressed blocks a query attends to. No gradient passes
//! a choice, so all of it runs outside the graph. Shapes: T = B * L positions, NB blocks a row, NI heads, E head width.

use rollout::model::{LayerKind, ModelConfig};
use tch::{Kind, Tensor};

use super::compressor::Compressor;
use super::inputs::{BlockInputs, Inputs};
use super::parameters::{Loader, PolicyError};
use super::rope::rotate;
use super::tracer::Tracer;

/// One layer's indexer.
pub(super) struct Indexer {
    wq_b: Tensor,         // [NI E, q_lora]
    weights_proj: Tensor, // [NI, D]
    compressor: Compressor,
    heads: i64,
    width: i64,
    top_k: usize,
}

impl Indexer {
    /// `prefix` is `layers.i.attn.indexer`.
    pub fn load(loader: &mut Loader<'_>, prefix: &str, config: &ModelConfig) -> Result<Self, PolicyError> {
        let (heads, e) = (config.index_n_heads, config.index_head_dim);
        let compressor = Compressor::load(loader, &format!("{prefix}.compressor"), e, LayerKind::Csa, false, config)?;
        Ok(Self {
            wq_b: loader.frozen(&format!("{prefix}.wq_b.weight"), &[heads * e, config.q_lora_rank])?,
            weights_proj: loader.frozen(&format!("{prefix}.weights_proj.weight"), &[heads, config.hidden_size])?,
            compressor: compressor.expect("CSA layers compress"),
            heads: heads as i64,
            width: e as i64,
            top_k: config.index_topk,
        })
    }

    /// Width of a key.
    pub fn width(&self) -> i64 {
        self.width
    }

    /// `[B, L, NB]`: the visible blocks with the `index_topk` highest scores; of equal scores the lower block wins.
    /// `h_td` is the layer's normalised input, `qr_tq` the low-rank query it shares with the attention.
    pub fn pick(
        &self,
        h_td: &Tensor,
        qr_tq: &Tensor,
        inputs: &Inputs,
        blocks: &BlockInputs,
        tracer: &mut Tracer<'_>,
    ) -> Tensor {
        if blocks.longest <= self.top_k && !tracer.is_on() {
            return blocks.visible.shallow_clone(); // fewer than asked for: the scores change nothing
        }
        tch::no_grad(|| {
            let (b, l, nb) = (inputs.num_rows, inputs.row_len, blocks.num_blocks);
            let q = qr_tq.linear(&self.wq_b, None::<&Tensor>).view_([b, l, self.heads, self.width]);
            let q = rotate(&q, &inputs.rope(LayerKind::Csa).unsqueeze(2)).view([b, l * self.heads, self.width]);
            let keys = self.compressor.forward(h_td, blocks);
            tracer.blocks("indexer.keys", &keys);
            let per_head = q.bmm(&keys.transpose(1, 2)).relu_().view([b * l, self.heads, nb]);
            let scale = 1.0 / ((self.width * self.heads) as f64).sqrt();
            let weight = h_td.linear(&self.weights_proj, None::<&Tensor>) * scale;
            let score = weight.unsqueeze(1).bmm(&per_head).view([b, l, nb]);
            let score = score.masked_fill(&blocks.visible.logical_not(), f64::NEG_INFINITY);
            let (_, order) = score.sort_stable(true, -1, true);
            let top = order.narrow(-1, 0, nb.min(self.top_k as i64));
            let picked = Tensor::zeros([b, l, nb], (Kind::Bool, score.device()));
            let picked = picked.scatter_value(-1, &top, 1).logical_and(&blocks.visible);
            tracer.picks(Some(&score), &picked, blocks, inputs);
            picked
        })
    }
}
