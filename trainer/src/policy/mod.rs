//! The policy: a DeepSeek-V4 model with gradients (SPEC sections 2 to 7), in tch, f32. Shapes: B rows, L positions a
//! row, T = B * L, N residual streams, D model width, V vocabulary, K experts per token, NB compressed blocks a row.

mod parameters;
mod frozen;
mod gradients;
mod init;
mod inputs;
mod hyper_connection;
mod rope;
mod compressor;
mod indexer;
mod attention;
mod experts;
mod tracer;

use rollout::model::{LayerKind, MTP_PREFIX, ModelConfig, Trace, Weights};
use tch::{Device, Kind, Tensor};

use self::attention::{Attention, Picks};
use self::experts::Experts;
pub use self::frozen::{Frozen, FrozenError};
pub use self::gradients::Gradients;
use self::hyper_connection::{HyperConnection, HyperHead};
pub use self::init::initial_weights;
use self::inputs::Inputs;
use self::parameters::Loader;
pub use self::parameters::{Parameter, PolicyError};
use self::tracer::Tracer;
use crate::pack::Microbatch;

/// A model whose parameters are trained.
pub struct Policy {
    config: ModelConfig,
    device: Device,
    parameters: Vec<Parameter>,
    frozen: Vec<Parameter>,
    tables: Weights,
    embed_vd: Tensor,
    blocks: Vec<Block>,
    head: Head,
    head_vd: Tensor,
    mtp: Option<Mtp>,
}

/// A layer, or the block of multi-token prediction.
struct Block {
    hc_attn: HyperConnection,
    attn_norm_d: Tensor,
    attention: Attention,
    hc_ffn: HyperConnection,
    ffn_norm_d: Tensor,
    experts: Experts,
    eps: f64,
}

/// From streams to the hidden state that scores are made of.
struct Head {
    hc_head: HyperHead,
    norm_d: Tensor,
    eps: f64,
}

/// Multi-token prediction (SPEC section 8); embedding and output head are the model's.
struct Mtp {
    e_proj: Tensor, // [D, D]
    h_proj: Tensor, // [D, D]
    enorm_d: Tensor,
    hnorm_d: Tensor,
    block: Block,
    head: Head,
    eps: f64,
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

/// What a policy says of the trained positions of a microbatch, `[B, L]` each; other positions hold 0.
#[derive(Debug)]
pub struct TokenScores {
    /// Log-probability of the target, in nats.
    pub logprobs: Tensor,
    /// Entropy of the distribution it is drawn from, in nats, without gradient.
    pub entropy: Tensor,
    /// Log-probability of the token after the target by multi-token prediction, where that token is trained on.
    pub mtp_logprobs: Option<Tensor>,
}

impl Policy {
    /// Takes the weights of `config` (hub names) as f32 masters on `device`; all that gradients reach is trained. Tensors
    /// that `config` does not name are ignored.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape or type.
    pub fn from_weights(config: &ModelConfig, weights: &Weights, device: Device) -> Result<Self, PolicyError> {
        Self::with_frozen(config, weights, device, &|_| false)
    }

    /// [`Policy::from_weights`] where parameters of certain hub names stay what they are.
    ///
    /// # Errors
    /// As [`Policy::from_weights`].
    ///
    /// # Panics
    /// When some of a layer's experts are frozen and others are not.
    pub fn with_frozen(
        config: &ModelConfig,
        weights: &Weights,
        device: Device,
        is_frozen: &dyn Fn(&str) -> bool,
    ) -> Result<Self, PolicyError> {
        Self::build(Loader::new(weights, config, device, is_frozen), config, device)
    }

    /// Another handle to the same parameters, for another thread to differentiate with.
    pub fn share(&self) -> Self {
        let loader = Loader::sharing(&self.parameters, &self.frozen, &self.tables, &self.config, self.device);
        Self::build(loader, &self.config, self.device).expect("a policy's own tensors make a policy")
    }

    fn build(mut loader: Loader<'_>, config: &ModelConfig, device: Device) -> Result<Self, PolicyError> {
        let (d, v) = (config.hidden_size, config.vocab_size);
        let embed_vd = loader.trained("embed.weight", &[v, d])?;
        let blocks = (0..config.num_hidden_layers)
            .map(|i| Block::load(&mut loader, &format!("layers.{i}"), i, config))
            .collect::<Result<_, _>>()?;
        let head = Head::load(&mut loader, "", config)?;
        let head_vd = loader.trained("head.weight", &[v, d])?;
        let mtp = if config.has_mtp() { Some(Mtp::load(&mut loader, config)?) } else { None };
        let Loader { parameters, frozen, tables, .. } = loader;
        Ok(Self { config: config.clone(), device, parameters, frozen, tables, embed_vd, blocks, head, head_vd, mtp })
    }

    /// The masters and all that training leaves alone, under their hub names.
    pub fn to_weights(&self) -> Weights {
        let mut weights = self.tables.clone();
        for parameter in self.parameters.iter().chain(&self.frozen) {
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

    /// The trained tensors, in a fixed order. Indexers and selection biases, which no gradient reaches, and what was
    /// frozen are not among them.
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

    /// Moves the selection bias of every score-routed layer: an expert that had less than the mean load becomes
    /// likelier by `speed`, one that had more, unlikelier (arXiv:2412.19437, sec. 2.1.2; v4/SPEC section 11). `loads` are
    /// tokens per expert, layer after layer, `[layers, E]`. All handles to the policy see the change.
    ///
    /// # Panics
    /// When `loads` are not this model's.
    pub fn update_router_bias(&mut self, loads: &[u64], speed: f64) {
        let num_experts = self.config.n_routed_experts;
        assert_eq!(loads.len(), self.blocks.len() * num_experts, "loads of all experts of all layers");
        for (layer, loads) in loads.chunks_exact(num_experts).enumerate() {
            let name = format!("layers.{layer}.ffn.gate.bias");
            let Some(bias) = self.frozen.iter_mut().find(|p| p.name == name) else { continue }; // hash-routed
            let mean = loads.iter().sum::<u64>() as f64 / num_experts as f64;
            let steps: Vec<f32> = loads
                .iter()
                .map(|&load| match load as f64 {
                    load if load < mean => speed as f32,
                    load if load > mean => -speed as f32,
                    _ => 0.0,
                })
                .collect();
            tch::no_grad(|| {
                let _ = bias.master.g_add_(&Tensor::from_slice(&steps).to_device(self.device));
            });
        }
    }

    /// Parameters that are trained, and those that are frozen (hash tables are none).
    pub fn num_trained_and_frozen(&self) -> (usize, usize) {
        let count = |parameters: &[Parameter]| parameters.iter().map(|p| p.master.numel()).sum();
        (count(&self.parameters), count(&self.frozen))
    }

    /// The final normalised hidden state of every position, `[B, L, D]`. What padding holds is finite and meaningless.
    ///
    /// # Panics
    /// When `replay` asks for choices that the microbatch does not have or that do not fit the model.
    pub fn forward(&self, mb: &Microbatch, replay: Replay, mut trace: Option<&mut Trace>) -> Tensor {
        let inputs = Inputs::new(&self.config, mb, self.device);
        let streams_tnd = self.streams(mb, &inputs, replay, trace.as_deref_mut());
        let hidden_td = self.head.forward(&streams_tnd, &mut Tracer::new(trace, "", &mb.segment_ids));
        hidden_td.view([inputs.num_rows, inputs.row_len, -1])
    }

    /// As [`Policy::forward`], and behind it the hidden state of multi-token prediction, whose position t has read the
    /// target of position t and predicts the one after.
    ///
    /// # Panics
    /// As [`Policy::forward`], and when the model has no such block.
    pub fn forward_with_mtp(&self, mb: &Microbatch, replay: Replay, mut trace: Option<&mut Trace>) -> (Tensor, Tensor) {
        let mtp = self.mtp.as_ref().expect("a model with a multi-token-prediction block");
        let inputs = Inputs::new(&self.config, mb, self.device);
        let streams_tnd = self.streams(mb, &inputs, replay, trace.as_deref_mut());
        let tracer = &mut Tracer::new(trace.as_deref_mut(), "", &mb.segment_ids);
        let hidden_td = self.head.forward(&streams_tnd, tracer);
        let next_t = Tensor::from_slice(&mb.targets).to_device(self.device);
        let next_td = Tensor::embedding(&self.embed_vd, &next_t, -1, false, false);
        let mtp_td = mtp.forward(&streams_tnd, &next_td, mb, &inputs, trace);
        let shape = [inputs.num_rows, inputs.row_len, -1];
        (hidden_td.view(shape), mtp_td.view(shape))
    }

    /// The streams after the last layer, `[T, N, D]`.
    fn streams(&self, mb: &Microbatch, inputs: &Inputs, replay: Replay, mut trace: Option<&mut Trace>) -> Tensor {
        let config = &self.config;
        let (t, d, n) = (inputs.num_rows * inputs.row_len, config.hidden_size as i64, config.hc_mult as i64);
        let routing = replay.experts.then(|| {
            let choices = mb.routing.as_ref().expect("a sample came without expert choices to replay");
            assert_eq!(
                (choices.num_layers, choices.width),
                (self.blocks.len(), config.num_experts_per_tok),
                "recorded expert choices (layers, experts per token) are not this model's"
            );
            choices.idx.chunks_exact(choices.width * t as usize)
        });
        let mut routing = routing.into_iter().flatten();
        let mut csa_idx = 0;
        let embedded_td = Tensor::embedding(&self.embed_vd, &inputs.token_ids, -1, false, false);
        let mut streams_tnd = embedded_td.unsqueeze(1).expand([t, n, d], false).contiguous();
        for (i, block) in self.blocks.iter().enumerate() {
            let is_csa = config.layer_kind(i) == LayerKind::Csa;
            let recorded = inputs.csa().filter(|_| is_csa && replay.indexer).map(|blocks| {
                let visible = mb.recorded_visibility(&blocks.host, csa_idx);
                Tensor::from_slice(&visible).view_(blocks.visible.size()).to_device(self.device)
            });
            let picks = recorded.as_ref().map_or(Picks::Indexer, Picks::Recorded);
            let prefix = format!("layers.{i}.");
            let tracer = &mut Tracer::new(trace.as_deref_mut(), &prefix, &mb.segment_ids);
            streams_tnd = block.forward(&streams_tnd, inputs, mb, picks, routing.next(), tracer);
            csa_idx += usize::from(is_csa);
        }
        streams_tnd
    }

    /// Scores of every token of the vocabulary, `[.., V]`, from hidden states `[.., D]`.
    pub fn logits(&self, hidden: &Tensor) -> Tensor {
        hidden.linear(&self.head_vd, None::<&Tensor>)
    }

    /// Log-probabilities of the trained positions' targets at `temperature`, with those of multi-token prediction (at
    /// temperature 1) if `with_mtp`.
    ///
    /// # Panics
    /// As [`Policy::forward`], when `temperature` is not positive, and when `with_mtp` is asked of a model without it.
    pub fn score(&self, mb: &Microbatch, replay: Replay, temperature: f64, with_mtp: bool) -> TokenScores {
        assert!(temperature > 0.0, "temperature is {temperature}; a distribution needs one above 0");
        let (hidden, mtp_hidden) = if with_mtp {
            let (hidden, mtp_hidden) = self.forward_with_mtp(mb, replay, None);
            (hidden, Some(mtp_hidden))
        } else {
            (self.forward(mb, replay, None), None)
        };
        // The vocabulary is wide: only the positions that count are scored. P of them.
        let positions = |mask: &[bool]| -> Vec<i64> {
            (0..).zip(mask).filter(|(_, is_wanted)| **is_wanted).map(|(at, _)| at).collect()
        };
        let log_softmax = |hidden: &Tensor, positions: &[i64], temperature: f64| {
            let positions_p = Tensor::from_slice(positions).to_device(self.device);
            let hidden_td = hidden.view([-1, self.config.hidden_size as i64]);
            let logits_pv = self.logits(&hidden_td.index_select(0, &positions_p));
            let logits_pv = if temperature == 1.0 { logits_pv } else { logits_pv / temperature };
            (logits_pv.log_softmax(-1, None::<Kind>), positions_p)
        };
        let gather = |all_pv: &Tensor, targets: Vec<i64>| {
            let targets_p = Tensor::from_slice(&targets).to_device(self.device);
            all_pv.gather(-1, &targets_p.unsqueeze(-1), false).squeeze_dim(-1)
        };
        let on_rows = |values_p: &Tensor, positions_p: &Tensor| {
            let zeros = Tensor::zeros([mb.loss_mask.len() as i64], (Kind::Float, self.device));
            zeros.scatter(0, positions_p, values_p).view([mb.num_rows as i64, mb.row_len as i64])
        };
        let trained = positions(&mb.loss_mask);
        let (all_pv, trained_p) = log_softmax(&hidden, &trained, temperature);
        let entropy_p = tch::no_grad(|| {
            let logprobs = all_pv.detach();
            -(logprobs.exp() * logprobs).sum_dim_intlist(-1, false, None::<Kind>)
        });
        let logprobs_p = gather(&all_pv, trained.iter().map(|&at| mb.targets[at as usize]).collect());
        let mtp_logprobs = mtp_hidden.map(|hidden| {
            let positions = positions(&mb.mtp_mask());
            let (all_pv, positions_p) = log_softmax(&hidden, &positions, 1.0);
            let targets = positions.iter().map(|&at| mb.targets[at as usize + 1]).collect();
            on_rows(&gather(&all_pv, targets), &positions_p)
        });
        TokenScores {
            logprobs: on_rows(&logprobs_p, &trained_p),
            entropy: on_rows(&entropy_p, &trained_p),
            mtp_logprobs,
        }
    }

    /// Log-probability of every trained position's target at `temperature`, `[B, L]`, and the entropy of its distribution
    /// in nats, `[B, L]`, without gradient. Positions that are not trained on hold 0.
    ///
    /// # Panics
    /// As [`Policy::forward`], and when `temperature` is not positive.
    pub fn token_logprobs(&self, mb: &Microbatch, replay: Replay, temperature: f64) -> (Tensor, Tensor) {
        let TokenScores { logprobs, entropy, .. } = self.score(mb, replay, temperature, false);
        (logprobs, entropy)
    }
}

impl Block {
    /// `layer` is its number; that of multi-token prediction follows the last layer's.
    fn load(loader: &mut Loader<'_>, name: &str, layer: usize, config: &ModelConfig) -> Result<Self, PolicyError> {
        let d = config.hidden_size;
        Ok(Self {
            hc_attn: HyperConnection::load(loader, &format!("{name}.hc_attn"), config)?,
            attn_norm_d: loader.trained(&format!("{name}.attn_norm.weight"), &[d])?,
            attention: Attention::load(loader, name, config.layer_kind(layer), config)?,
            hc_ffn: HyperConnection::load(loader, &format!("{name}.hc_ffn"), config)?,
            ffn_norm_d: loader.trained(&format!("{name}.ffn_norm.weight"), &[d])?,
            experts: Experts::load(loader, name, config.is_hash_layer(layer), config)?,
            eps: f64::from(config.rms_norm_eps),
        })
    }

    /// Streams `[T, N, D]` to streams; `recorded` are the rollout's experts, if they are replayed.
    fn forward(
        &self,
        streams_tnd: &Tensor,
        inputs: &Inputs,
        mb: &Microbatch,
        picks: Picks<'_>,
        recorded: Option<&[i64]>,
        tracer: &mut Tracer<'_>,
    ) -> Tensor {
        let mixed = self.hc_attn.pre(streams_tnd);
        tracer.rows("hc_attn.post", &mixed.post_tn);
        tracer.rows("hc_attn.comb", &mixed.comb_tnn);
        tracer.rows("hc_attn.collapsed", &mixed.x_td);
        let h_td = rms_norm(&mixed.x_td, &self.attn_norm_d, self.eps);
        let y_td = self.attention.forward(&h_td, inputs, picks, tracer);
        let streams_tnd = self.hc_attn.post(&y_td, streams_tnd, &mixed);

        let mixed = self.hc_ffn.pre(&streams_tnd);
        tracer.rows("hc_ffn.post", &mixed.post_tn);
        tracer.rows("hc_ffn.comb", &mixed.comb_tnn);
        tracer.rows("hc_ffn.collapsed", &mixed.x_td);
        let h_td = rms_norm(&mixed.x_td, &self.ffn_norm_d, self.eps);
        let y_td = self.experts.forward(&h_td, &mb.token_ids, &mb.segment_ids, recorded, tracer);
        let streams_tnd = self.hc_ffn.post(&y_td, &streams_tnd, &mixed);
        tracer.rows("streams_out", &streams_tnd);
        streams_tnd
    }
}

impl Head {
    /// `prefix` is empty, or `mtp.0.`.
    fn load(loader: &mut Loader<'_>, prefix: &str, config: &ModelConfig) -> Result<Self, PolicyError> {
        Ok(Self {
            hc_head: HyperHead::load(loader, prefix, config)?,
            norm_d: loader.trained(&format!("{prefix}norm.weight"), &[config.hidden_size])?,
            eps: f64::from(config.rms_norm_eps),
        })
    }

    /// `[T, N, D]` to `[T, D]`.
    fn forward(&self, streams_tnd: &Tensor, tracer: &mut Tracer<'_>) -> Tensor {
        let collapsed_td = self.hc_head.forward(streams_tnd);
        tracer.rows("head_collapsed", &collapsed_td);
        let hidden_td = rms_norm(&collapsed_td, &self.norm_d, self.eps);
        tracer.rows("final_norm", &hidden_td);
        hidden_td
    }
}

impl Mtp {
    fn load(loader: &mut Loader<'_>, config: &ModelConfig) -> Result<Self, PolicyError> {
        let d = config.hidden_size;
        let mut load = |name: &str, shape: &[usize]| loader.trained(&format!("{MTP_PREFIX}.{name}.weight"), shape);
        Ok(Self {
            e_proj: load("e_proj", &[d, d])?,
            h_proj: load("h_proj", &[d, d])?,
            enorm_d: load("enorm", &[d])?,
            hnorm_d: load("hnorm", &[d])?,
            block: Block::load(loader, MTP_PREFIX, config.num_hidden_layers, config)?,
            head: Head::load(loader, &format!("{MTP_PREFIX}."), config)?,
            eps: f64::from(config.rms_norm_eps),
        })
    }

    /// From the model's streams `[T, N, D]` and the embeddings of the next tokens `[T, D]` to hidden states `[T, D]`.
    fn forward(
        &self,
        streams_tnd: &Tensor,
        next_td: &Tensor,
        mb: &Microbatch,
        inputs: &Inputs,
        trace: Option<&mut Trace>,
    ) -> Tensor {
        let none = None::<&Tensor>;
        let e_td = rms_norm(next_td, &self.enorm_d, self.eps).linear(&self.e_proj, none);
        let h_tnd = rms_norm(streams_tnd, &self.hnorm_d, self.eps).linear(&self.h_proj, none);
        let tracer = &mut Tracer::new(trace, "mtp.", &mb.segment_ids);
        let streams_tnd = (h_tnd + e_td.unsqueeze(1)).contiguous();
        let streams_tnd = self.block.forward(&streams_tnd, inputs, mb, Picks::Indexer, None, tracer);
        self.head.forward(&streams_tnd, tracer)
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
