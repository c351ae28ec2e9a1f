//! Attention of one layer (SPEC section 4): one key-value head over a sliding window and compressed blocks, jointly,
//! with a sink per head. Shapes: B rows, L positions a row, T = B * L, H heads, C head width, S = L + NB + 1 keys: the
//! row's positions, its blocks, and the sink, whose key and value are zero.

use rollout::model::{LayerKind, ModelConfig};
use tch::{Kind, Tensor};

use super::compressor::Compressor;
use super::indexer::Indexer;
use super::inputs::Inputs;
use super::parameters::{Loader, PolicyError};
use super::rope::rotate;
use super::tracer::Tracer;

/// The attention of one layer.
pub(super) struct Attention {
    kind: LayerKind,
    wq_a: Tensor,   // [q_lora, D]
    q_norm: Tensor, // [q_lora]
    wq_b: Tensor,   // [H C, q_lora]
    wkv: Tensor,    // [C, D]
    kv_norm: Tensor,
    sink_h: Tensor,
    wo_a: Tensor, // [G o_lora, H C / G]
    wo_b: Tensor, // [D, G o_lora]
    compressor: Option<Compressor>,
    indexer: Option<Indexer>,
    heads: i64,
    width: i64,
    groups: i64,
    eps: f64,
}

/// Who says which blocks a CSA layer attends to.
pub(super) enum Picks<'a> {
    /// The layer's indexer.
    Indexer,
    /// `[B, L, NB]`, recorded by the rollout.
    Recorded(&'a Tensor),
}

impl Attention {
    /// `block` is `layers.i` or `mtp.0`.
    pub fn load(
        loader: &mut Loader<'_>,
        block: &str,
        kind: LayerKind,
        config: &ModelConfig,
    ) -> Result<Self, PolicyError> {
        let prefix = format!("{block}.attn");
        let (d, c, h, q) = (config.hidden_size, config.head_dim, config.num_attention_heads, config.q_lora_rank);
        let (groups, o) = (config.o_groups, config.o_lora_rank);
        let mut load = |name: &str, shape: &[usize]| loader.trained(&format!("{prefix}.{name}"), shape);
        Ok(Self {
            kind,
            wq_a: load("wq_a.weight", &[q, d])?,
            q_norm: load("q_norm.weight", &[q])?,
            wq_b: load("wq_b.weight", &[h * c, q])?,
            wkv: load("wkv.weight", &[c, d])?,
            kv_norm: load("kv_norm.weight", &[c])?,
            sink_h: load("attn_sink", &[h])?,
            wo_a: load("wo_a.weight", &[groups * o, h * c / groups])?,
            wo_b: load("wo_b.weight", &[d, groups * o])?,
            compressor: Compressor::load(loader, &format!("{prefix}.compressor"), c, kind, true, config)?,
            indexer: match kind {
                LayerKind::Csa => Some(Indexer::load(loader, &format!("{prefix}.indexer"), config)?),
                _ => None,
            },
            heads: h as i64,
            width: c as i64,
            groups: groups as i64,
            eps: f64::from(config.rms_norm_eps),
        })
    }

    /// `[T, D]` to `[T, D]`.
    pub fn forward(&self, h_td: &Tensor, inputs: &Inputs, picks: Picks<'_>, tracer: &mut Tracer<'_>) -> Tensor {
        let (b, l, h, c) = (inputs.num_rows, inputs.row_len, self.heads, self.width);
        let rope = inputs.rope(self.kind);
        let rope_heads = rope.unsqueeze(2);

        let qr_tq = super::rms_norm(&h_td.linear(&self.wq_a, None::<&Tensor>), &self.q_norm, self.eps);
        tracer.rows("q_residual", &qr_tq);
        let q = qr_tq.linear(&self.wq_b, None::<&Tensor>).view_([b, l, h, c]);
        // The softmax's scale rides on the norm's.
        let q = &q * (super::inverse_rms(&q, self.eps) * (1.0 / (c as f64).sqrt()));
        let q = rotate(&q, &rope_heads).view([b, l * h, c]);

        let kv = super::rms_norm(&h_td.linear(&self.wkv, None::<&Tensor>), &self.kv_norm, self.eps);
        let mut keys = vec![rotate(&kv.view([b, l, c]), rope)];
        let mut bias = inputs.window_bias.shallow_clone();
        let blocks = self.kind.ratio().and_then(|m| inputs.blocks.get(&m));
        if self.compressor.is_some() && blocks.is_none() {
            tracer.no_blocks(c, self.indexer.as_ref().map(Indexer::width));
        }
        if let (Some(compressor), Some(blocks)) = (&self.compressor, blocks) {
            let entries = compressor.forward(h_td, blocks);
            tracer.blocks("compressed_kv", &entries);
            keys.push(entries);
            bias = match &self.indexer {
                None => blocks.bias.shallow_clone(),
                Some(indexer) => {
                    let picked = match picks {
                        Picks::Indexer => indexer.pick(h_td, &qr_tq, inputs, blocks, tracer),
                        Picks::Recorded(picked) => {
                            tracer.picks(None, picked, blocks, inputs);
                            picked.shallow_clone()
                        }
                    };
                    inputs.picked_bias(&picked)
                }
            };
        }
        keys.push(Tensor::zeros([b, 1, c], (Kind::Float, h_td.device())));
        let kv_bsc = Tensor::cat(&keys, 1);
        let s = kv_bsc.size()[1];

        let sink_hs =
            Tensor::cat(&[Tensor::zeros([h, s - 1], (Kind::Float, h_td.device())), self.sink_h.view([h, 1])], 1);
        // In place: a matrix product does not need its result for its gradient.
        let mut scores = q.bmm(&kv_bsc.transpose(1, 2)).view([b, l, h, s]);
        let scores = scores.g_add_(&bias.unsqueeze(2)).g_add_(&sink_hs);
        let o = scores.softmax(-1, None::<Kind>).view([b, l * h, s]).bmm(&kv_bsc);
        let o = rotate(&o.view([b, l, h, c]), &rope_heads.conj());

        // Each group of heads has its own rows of wo_a.
        let g = self.groups;
        let o_gtk = o.view([b * l, g, h * c / g]).transpose(0, 1);
        let wo_a = self.wo_a.view([g, -1, h * c / g]).transpose(1, 2);
        let u = o_gtk.bmm(&wo_a).transpose(0, 1).reshape([b * l, -1]);
        let y_td = u.linear(&self.wo_b, None::<&Tensor>);
        tracer.rows("attn_out", &y_td);
        y_td
    }
}
