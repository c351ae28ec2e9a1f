//! The policy: a DeepSeek-V4 model with gradients (SPEC sections 2 to 7), in tch, f32. Shapes: B rows, L positions a
//! row, T = B * L, N residual streams, D model width, V vocabulary, K experts per token, NB compressed blocks a row.

mod parameters;
mod gradients;
mod init;
mod inputs;
mod hyper_connection;
mod rope;
mod compressor;
mod indexer;
mod attention;
mod experts;

use rollout::model::{ModelConfig, Weights};
use tch::{Device, Kind, Tensor};

use self::attention::{Attention, Picks};
use self::experts::Experts;
pub use self::gradients::Gradients;
use self::hyper_connection::{HyperConnection, HyperHead};
pub use self::init::initial_weights;
use self::inputs::Inputs;
use self::parameters::Loader;
pub use self::parameters::{Parameter, PolicyError};
use crate::pack::Microbatch;

/// A model whose parameters are trained.
pub struct Policy {
    config: ModelConfig,
    device: Device,
    parameters: Vec<Parameter>,
    frozen: Weights,
    embed_vd: Tensor,
    layers: Vec<Layer>,
    hc_head: HyperHead,
    norm_d: Tensor,
    head_vd: Tensor,
}

struct Layer {
    hc_attn: HyperConnection,
    attn_norm_d: Tensor,
    attention: Attention,
    hc_ffn: HyperConnection,
    ffn_norm_d: Tensor,
    experts: Experts,
}

/// Which discrete choices are the rollout's instead of the policy's own.
///
/// Close calls fall differently in the engine's arithmetic and in training's; repeating the rollout's choices keeps the
/// two log-probabilities of a token comparable (rollout routing replay; SPEC section 11).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// Experts per token, in every layer.
    pub experts: bool,
    /// Compressed blocks per token, in CSA layers.
    pub indexer: bool,
}

/// What a forward pass went through, for comparison with another implementation.
#[derive(Debug, Default)]
pub struct Trace {
    /// Streams after each layer, `[B, L, N, D]`.
    pub streams: Vec<Tensor>,
    /// Experts used in each layer, `[B, L, K]`, row-major; -1 at padding.
    pub experts: Vec<Vec<i64>>,
    /// Blocks attended to in each CSA layer, `[B, L, NB]` booleans; `None` where no sample has a complete block.
    pub blocks: Vec<Option<Tensor>>,
}

impl Policy {
    /// Takes the weights of `config` (hub names) as f32 masters on `device`. Tensors that `config` does not name are
    /// ignored.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape or type.
    pub fn from_weights(config: &ModelConfig, weights: &Weights, device: Device) -> Result<Self, PolicyError> {
        Self::build(Loader::new(weights, config, device), config, device)
    }

    /// Another handle to the same parameters, for another thread to differentiate with.
    pub fn share(&self) -> Self {
        let loader = Loader::sharing(&self.parameters, &self.frozen, &self.config, self.device);
        Self::build(loader, &self.config, self.device).expect("a policy's own tensors make a policy")
    }

    fn build(mut loader: Loader<'_>, config: &ModelConfig, device: Device) -> Result<Self, PolicyError> {
        let (d, v) = (config.hidden_size, config.vocab_size);
        let embed_vd = loader.trained("embed.weight", &[v, d])?;
        let layers = (0..config.num_hidden_layers)
            .map(|i| {
                Ok(Layer {
                    hc_attn: HyperConnection::load(&mut loader, &format!("layers.{i}.hc_attn"), config)?,
                    attn_norm_d: loader.trained(&format!("layers.{i}.attn_norm.weight"), &[d])?,
                    attention: Attention::load(&mut loader, i, config)?,
                    hc_ffn: HyperConnection::load(&mut loader, &format!("layers.{i}.hc_ffn"), config)?,
                    ffn_norm_d: loader.trained(&format!("layers.{i}.ffn_norm.weight"), &[d])?,
                    experts: Experts::load(&mut loader, i, config)?,
                })
            })
            .collect::<Result<_, _>>()?;
        let hc_head = HyperHead::load(&mut loader, config)?;
        let norm_d = loader.trained("norm.weight", &[d])?;
        let head_vd = loader.trained("head.weight", &[v, d])?;
        let Loader { parameters, frozen, .. } = loader;
        Ok(Self { config: config.clone(), device, parameters, frozen, embed_vd, layers, hc_head, norm_d, head_vd })
    }

    /// The masters and all that training leaves alone, under their hub names.
    pub fn to_weights(&self) -> Weights {
        let mut weights = self.frozen.clone();
        for parameter in &self.parameters {
            parameter.write(&mut weights);
        }
        weights
    }

    /// The architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where the tensors are.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The trained tensors, in a fixed order. Indexers, selection biases and hash tables are not among them.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The trained tensors, to be updated; [`Policy::refresh_quantized`] comes after.
    pub fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    /// Rounds the FP4 experts' masters to their codes again. To be called whenever masters have changed.
    ///
    /// # Panics
    /// When a master is not finite.
    pub fn refresh_quantized(&mut self) {
        self.parameters.iter_mut().for_each(Parameter::refresh);
    }

    /// The final normalised hidden state of every position, `[B, L, D]`. What padding holds is finite and meaningless.
    ///
    /// # Panics
    /// When `replay` asks for choices that the microbatch does not have or that do not fit the model.
    pub fn forward(&self, mb: &Microbatch, replay: Replay, mut trace: Option<&mut Trace>) -> Tensor {
        let config = &self.config;
        let inputs = Inputs::new(config, mb, self.device);
        let (t, d, n) = (inputs.num_rows * inputs.row_len, config.hidden_size as i64, config.hc_mult as i64);
        let routing = replay.experts.then(|| {
            let choices = mb.routing.as_ref().expect("a sample came without expert choices to replay");
            assert_eq!(
                (choices.num_layers, choices.width),
                (self.layers.len(), config.num_experts_per_tok),
                "recorded expert choices (layers, experts per token) are not this model's"
            );
            choices.idx.chunks_exact(choices.width * t as usize)
        });
        let mut routing = routing.into_iter().flatten();
        let mut csa_idx = 0;

        let embedded_td = Tensor::embedding(&self.embed_vd, &inputs.token_ids, -1, false, false);
        let mut streams_tnd = embedded_td.unsqueeze(1).expand([t, n, d], false).contiguous();
        for (i, layer) in self.layers.iter().enumerate() {
            let is_csa = config.layer_kind(i) == rollout::model::LayerKind::Csa;
            let recorded = inputs.csa().filter(|_| is_csa && replay.indexer).map(|blocks| {
                let visible = mb.recorded_visibility(&blocks.host, csa_idx);
                Tensor::from_slice(&visible).view_(blocks.visible.size()).to_device(self.device)
            });
            let picks = recorded.as_ref().map_or(Picks::Indexer, Picks::Recorded);

            let mixed = layer.hc_attn.pre(&streams_tnd);
            let h_td = self.norm(&mixed.x_td, &layer.attn_norm_d);
            let (y_td, attended) = layer.attention.forward(&h_td, &inputs, picks);
            streams_tnd = layer.hc_attn.post(&y_td, &streams_tnd, &mixed);

            let mixed = layer.hc_ffn.pre(&streams_tnd);
            let h_td = self.norm(&mixed.x_td, &layer.ffn_norm_d);
            let (y_td, chosen) = layer.experts.forward(&h_td, &mb.token_ids, &mb.segment_ids, routing.next());
            streams_tnd = layer.hc_ffn.post(&y_td, &streams_tnd, &mixed);

            if let Some(trace) = trace.as_deref_mut() {
                trace.streams.push(streams_tnd.detach().view([inputs.num_rows, inputs.row_len, n, d]));
                trace.experts.push(chosen);
                if is_csa {
                    trace.blocks.push(attended);
                }
            }
            csa_idx += usize::from(is_csa);
        }
        self.norm(&self.hc_head.forward(&streams_tnd), &self.norm_d).view([inputs.num_rows, inputs.row_len, d])
    }

    /// Scores of every token of the vocabulary, `[.., V]`, from hidden states `[.., D]`.
    pub fn logits(&self, hidden: &Tensor) -> Tensor {
        hidden.linear(&self.head_vd, None::<&Tensor>)
    }

    /// Log-probability of every trained position's target at `temperature`, `[B, L]`, and the entropy of its distribution
    /// in nats, `[B, L]`, without gradient. Positions that are not trained on hold 0.
    ///
    /// # Panics
    /// As [`Policy::forward`], and when `temperature` is not positive.
    pub fn token_logprobs(&self, mb: &Microbatch, replay: Replay, temperature: f64) -> (Tensor, Tensor) {
        assert!(temperature > 0.0, "temperature is {temperature}; a distribution needs one above 0");
        let hidden_td = self.forward(mb, replay, None).view([-1, self.config.hidden_size as i64]);
        // The vocabulary is wide: only the positions that count are scored. P of them.
        let trained: Vec<i64> = (0..).zip(&mb.loss_mask).filter(|(_, trained)| **trained).map(|(at, _)| at).collect();
        let targets: Vec<i64> = trained.iter().map(|&at| mb.targets[at as usize]).collect();
        let trained_p = Tensor::from_slice(&trained).to_device(self.device);
        let targets_p = Tensor::from_slice(&targets).to_device(self.device);
        let logits_pv = self.logits(&hidden_td.index_select(0, &trained_p));
        let logits_pv = if temperature == 1.0 { logits_pv } else { logits_pv / temperature };
        let all_pv = logits_pv.log_softmax(-1, None::<Kind>);
        let entropy_p = tch::no_grad(|| {
            let logprobs = all_pv.detach();
            -(logprobs.exp() * logprobs).sum_dim_intlist(-1, false, None::<Kind>)
        });
        let logprobs_p = all_pv.gather(-1, &targets_p.unsqueeze(-1), false).squeeze_dim(-1);
        let on_rows = |values_p: &Tensor| {
            let zeros = Tensor::zeros([mb.loss_mask.len() as i64], (Kind::Float, self.device));
            zeros.scatter(0, &trained_p, values_p).view([mb.num_rows as i64, mb.row_len as i64])
        };
        (on_rows(&logprobs_p), on_rows(&entropy_p))
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        rms_norm(x, weight, f64::from(self.config.rms_norm_eps))
    }
}

/// `1 / sqrt(mean(x^2) + eps)` over the last axis, which is kept.
fn inverse_rms(x: &Tensor, eps: f64) -> Tensor {
    (x.square().mean_dim(-1, true, None::<Kind>) + eps).rsqrt()
}

/// `weight * x / sqrt(mean(x^2) + eps)`.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    x * inverse_rms(x, eps) * weight
}

/// The elements in host memory, row-major.
pub(crate) fn to_vec_f32(x: &Tensor) -> Vec<f32> {
    let mut out = vec![0f32; x.numel()];
    x.detach().to_device(Device::Cpu).contiguous().copy_data(&mut out, x.numel());
    out
}

#[cfg(test)]
mod tests;
