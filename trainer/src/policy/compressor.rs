//! Token compression (SPEC 4.2): every complete block of M tokens becomes one entry, a softmax-weighted sum per channel.
//! Shapes: T = B * L positions, D model width, NB blocks a row, M tokens a block, C entry width, S series (2 where
//! blocks overlap, else 1).

use rollout::model::{LayerKind, ModelConfig};
use tch::{Kind, Tensor};

use super::inputs::BlockInputs;
use super::parameters::{Loader, PolicyError};
use super::rope::rotate;

/// The compressor of a CSA or HCA layer, or of an indexer.
pub(super) struct Compressor {
    wkv: Tensor,   // [S C, D]
    wgate: Tensor, // [S C, D]
    ape: Tensor,   // [M, S C]
    norm: Tensor,  // [C]
    ratio: i64,
    width: i64,
    overlap: bool,
    eps: f64,
}

impl Compressor {
    /// `prefix` ends before `.wkv.weight`. Indexers are not `trained`.
    pub fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        width: usize,
        kind: LayerKind,
        trained: bool,
        config: &ModelConfig,
    ) -> Result<Option<Self>, PolicyError> {
        let Some(ratio) = kind.ratio() else { return Ok(None) };
        let overlap = kind == LayerKind::Csa;
        let (out, d) = (if overlap { 2 } else { 1 } * width, config.hidden_size);
        let mut load = |name: &str, shape: &[usize]| {
            let name = format!("{prefix}.{name}");
            if trained { loader.trained(&name, shape) } else { loader.frozen(&name, shape) }
        };
        Ok(Some(Self {
            wkv: load("wkv.weight", &[out, d])?,
            wgate: load("wgate.weight", &[out, d])?,
            ape: load("ape", &[ratio, out])?,
            norm: load("norm.weight", &[width])?,
            ratio: ratio as i64,
            width: width as i64,
            overlap,
            eps: f64::from(config.rms_norm_eps),
        }))
    }

    /// The entries of all blocks, `[B, NB, C]`, from the layer's normalised input `[T, D]`.
    pub fn forward(&self, h_td: &Tensor, blocks: &BlockInputs) -> Tensor {
        let kv = self.gather(&h_td.linear(&self.wkv, None::<&Tensor>), blocks);
        let gate = self.gather(&h_td.linear(&self.wgate, None::<&Tensor>), blocks) + &self.ape;
        let (kv, gate) = if self.overlap {
            (self.with_previous(&kv), self.with_previous(&gate) + &blocks.first_bias)
        } else {
            (kv, gate)
        };
        let entries = (gate.softmax(2, None::<Kind>) * kv).sum_dim_intlist(2, false, None::<Kind>);
        rotate(&super::rms_norm(&entries, &self.norm, self.eps), &blocks.rope)
    }

    /// `[T, S C]` to `[B, NB, M, S C]`.
    fn gather(&self, x: &Tensor, blocks: &BlockInputs) -> Tensor {
        let rows = Tensor::embedding(x, &blocks.flat_idx, -1, false, false);
        rows.view_([blocks.num_rows, blocks.num_blocks, self.ratio, -1])
    }

    /// `[B, NB, M, 2 C]` to `[B, NB, 2 M, C]`: the first series of the block before, then the second of the block
    /// itself. A sample's first block has no block before it; what stands there is masked by the caller.
    fn with_previous(&self, x: &Tensor) -> Tensor {
        let [before, current] =
            x.split_with_sizes([self.width, self.width], 3).try_into().expect("two sizes give two parts");
        let none = before.narrow(1, 0, 1).detach().zeros_like();
        let before = Tensor::cat(&[none, before.narrow(1, 0, before.size()[1] - 1)], 1);
        Tensor::cat(&[before, current], 2)
    }
}
