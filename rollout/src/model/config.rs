//! `config.json` of a DeepSeek-V4 checkpoint, in the field names of the published release.

use std::path::{Path, PathBuf};

use kernels::hyper_connection::MAX_STREAMS;
use serde::{Deserialize, Serialize};

use super::checkpoint::is_routed_expert;
use super::config_file;

/// Why a `config.json` was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {} (a model's folder holds config.json, model.safetensors and tokenizer.json)", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Not the JSON of a V4 configuration.
    #[error("{}: not a DeepSeek-V4 configuration: {message}; copy it again", path.display())]
    Parse {
        /// Which file.
        path: PathBuf,
        /// What the JSON reader said.
        message: String,
    },
    /// A field holds what this engine cannot run.
    #[error("{}: `{field}` is {found}, expected {expected}; correct the file or choose another model", path.display())]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A field that nothing here knows: the model may compute something else than this engine does.
    #[error("{}: `{field}` ({found}) is no field of a DeepSeek-V4 configuration; {hint}", path.display())]
    Unknown {
        /// Which file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// What to do.
        hint: String,
    },
}

/// What a layer attends to beside its sliding window (SPEC: `compress_ratios`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Sliding window only.
    Window,
    /// Compressed sparse attention: overlapping blocks of 4 tokens, chosen by the lightning indexer.
    Csa,
    /// Heavily compressed attention: every block of `ratio` tokens.
    Hca {
        /// Tokens per block.
        ratio: usize,
    },
}

impl LayerKind {
    /// Tokens per compressed block; `None` for a layer without compression.
    pub fn ratio(self) -> Option<usize> {
        match self {
            Self::Window => None,
            Self::Csa => Some(CSA_RATIO),
            Self::Hca { ratio } => Some(ratio),
        }
    }
}

/// What the names of the multi-token-prediction block begin with.
pub const MTP_PREFIX: &str = "mtp.0";

/// The ratio that marks a CSA layer.
pub const CSA_RATIO: usize = 4;

/// YaRN scaling of the rotary frequencies in compressed layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// Always `yarn`.
    #[serde(alias = "rope_type")]
    pub r#type: String,
    /// Context extension factor.
    pub factor: f64,
    /// Rotations over the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Context length before the extension.
    pub original_max_position_embeddings: f64,
    /// A factor on cosine and sine: V4 has none (v4/SPEC section 4), so only 1 is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
}

/// The tokens that end a response: one number in a file, or a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum EosTokens {
    /// The one of the published models.
    One(u32),
    /// Any of these.
    Any(Vec<u32>),
}

impl EosTokens {
    /// All of them, the first being the one that training appends.
    pub fn ids(&self) -> &[u32] {
        match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Any(ids) => ids,
        }
    }

    /// The one that training appends to a response.
    pub fn first(&self) -> u32 {
        self.ids()[0]
    }
}

fn one() -> usize {
    1
}
fn sqrtsoftplus() -> String {
    "sqrtsoftplus".into()
}

/// The architecture of a model. Field names are those of the published `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are the release's; v4/SPEC section 1 is their manual")]
pub struct ModelConfig {
    pub model_type: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    #[serde(default = "one")]
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub o_groups: usize,
    pub o_lora_rank: usize,
    pub sliding_window: usize,
    /// One entry per layer (0 window, 4 CSA, else HCA), then one per multi-token-prediction layer.
    pub compress_ratios: Vec<usize>,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    #[serde(default)]
    pub rope_scaling: Option<RopeScaling>,
    pub max_position_embeddings: usize,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    pub n_routed_experts: usize,
    #[serde(default = "one")]
    pub n_shared_experts: usize,
    pub num_experts_per_tok: usize,
    pub moe_intermediate_size: usize,
    pub num_hash_layers: usize,
    #[serde(default = "sqrtsoftplus")]
    pub scoring_func: String,
    pub routed_scaling_factor: f32,
    pub swiglu_limit: f32,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub hc_eps: f32,
    pub rms_norm_eps: f32,
    #[serde(default)]
    pub num_nextn_predict_layers: usize,
    #[serde(default)]
    pub tie_word_embeddings: bool,
    pub bos_token_id: u32,
    pub eos_token_id: EosTokens,
    #[serde(default)]
    pub initializer_range: Option<f32>,
    /// `"fp4"`: the routed experts compute on MXFP4 codes. Absent, or another type: on the checkpoint's own values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_dtype: Option<String>,
    /// Fields of the file that say nothing about the arithmetic; kept so that a written config is whole.
    #[serde(flatten)]
    pub other: serde_json::Map<String, serde_json::Value>,
}

pub(super) fn unsupported(path: &Path, field: &str, found: String, expected: &str) -> ConfigError {
    let (path, field, expected) = (path.to_owned(), field.to_owned(), expected.to_owned());
    ConfigError::Unsupported { path, field, found, expected }
}

pub(super) fn check(path: &Path, ok: bool, field: &str, found: String, expected: &str) -> Result<(), ConfigError> {
    if ok { Ok(()) } else { Err(unsupported(path, field, found, expected)) }
}

/// Published models whose configuration is built in, for sizes without a checkpoint.
pub const PRESETS: [(&str, &str); 2] =
    [("v4-flash", include_str!("presets/v4-flash.json")), ("v4-pro", include_str!("presets/v4-pro.json"))];

impl ModelConfig {
    /// Reads and checks `config.json`, in the field names of the release or of the Hugging Face implementation.
    ///
    /// # Errors
    /// When the file cannot be read, is not V4's, or asks for something this engine does not do.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        config_file::parse(&text, path)
    }

    /// The configuration of a published model (one of [`PRESETS`]), if `name` is one.
    pub fn preset(name: &str) -> Option<Self> {
        let (name, text) = PRESETS.iter().find(|(preset, _)| *preset == name)?;
        Some(config_file::parse(text, Path::new(name)).unwrap_or_else(|e| panic!("{e}")))
    }

    /// The fields as the Hugging Face implementation names them.
    ///
    /// # Errors
    /// What that implementation cannot say, as the field and its values.
    pub fn to_hugging_face(&self) -> Result<serde_json::Value, String> {
        config_file::to_hugging_face(self)
    }

    pub(super) fn validate(&self, path: &Path) -> Result<(), ConfigError> {
        let check = |ok, field, found, expected: &str| check(path, ok, field, found, expected);
        let layers = self.num_hidden_layers;
        check(
            self.expert_dtype.as_deref().is_none_or(|d| ["fp4", "fp8", "bf16", "f32"].contains(&d)),
            "expert_dtype",
            format!("`{}`", self.expert_dtype.as_deref().unwrap_or_default()),
            "`fp4`, `fp8`, `bf16`, `f32`, or no such field",
        )?;
        if let Some(s) = &self.rope_scaling {
            check(s.r#type == "yarn", "rope_scaling.type", format!("`{}`", s.r#type), "`yarn`")?;
            let factor = s.attention_factor.unwrap_or(1.0);
            check(factor == 1.0, "rope_scaling.attention_factor", factor.to_string(), "1")?;
        }
        // Ten times what has been published and more, and yet no product of sizes overflows.
        for (field, n, most) in [
            ("num_hidden_layers", layers, 1 << 10),
            ("vocab_size", self.vocab_size, 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 16),
            ("head_dim", self.head_dim, 1 << 12),
            ("num_attention_heads", self.num_attention_heads, 1 << 10),
            ("q_lora_rank", self.q_lora_rank, 1 << 16),
            ("o_groups", self.o_groups, 1 << 10),
            ("o_lora_rank", self.o_lora_rank, 1 << 14),
            ("sliding_window", self.sliding_window, 1 << 30),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 30),
            ("n_routed_experts", self.n_routed_experts, 1 << 12),
            ("num_experts_per_tok", self.num_experts_per_tok, 1 << 12),
            ("moe_intermediate_size", self.moe_intermediate_size, 1 << 16),
            ("hc_mult", self.hc_mult, MAX_STREAMS),
            ("hc_sinkhorn_iters", self.hc_sinkhorn_iters, 1000),
            ("index_topk", self.index_topk, 1 << 16),
            ("index_n_heads", self.index_n_heads, 1 << 10),
            ("index_head_dim", self.index_head_dim, 1 << 12),
        ] {
            check((1..=most).contains(&n), field, n.to_string(), &format!("1 to {most}"))?;
        }
        check(
            (layers..=layers + 1).contains(&self.compress_ratios.len()),
            "compress_ratios",
            format!("a list of {} entries", self.compress_ratios.len()),
            &format!("one for each of the {layers} layers, and at most one more for multi-token prediction"),
        )?;
        let mtp = self.num_nextn_predict_layers;
        check(mtp <= 1, "num_nextn_predict_layers", mtp.to_string(), "0 or 1")?;
        if self.has_mtp() {
            let ratio = self.compress_ratios.get(layers).copied().unwrap_or(0);
            let found = format!("a list with {ratio} for the multi-token-prediction block");
            check(ratio == 0, "compress_ratios", found, "0 there: it has a sliding window only")?;
        }
        for &ratio in &self.compress_ratios[..layers] {
            check(ratio <= 1 << 16, "compress_ratios", format!("a list with {ratio}"), "ratios of at most 65536")?;
        }
        let above = |field, x: f64, floor: f64| {
            check(x > floor && (x as f32).is_finite(), field, format!("{x:?}"), &format!("a number above {floor}"))
        };
        above("rope_theta", self.rope_theta, 1.0)?;
        above("compress_rope_theta", self.compress_rope_theta, 1.0)?;
        above("routed_scaling_factor", self.routed_scaling_factor.into(), 0.0)?;
        above("swiglu_limit", self.swiglu_limit.into(), 0.0)?;
        above("rms_norm_eps", self.rms_norm_eps.into(), 0.0)?;
        check(
            self.hc_eps >= 0.0 && self.hc_eps.is_finite(),
            "hc_eps",
            format!("{:?}", self.hc_eps),
            "0 or a number above",
        )?;
        if let Some(range) = self.initializer_range {
            check(range > 0.0 && range <= 10.0, "initializer_range", format!("{range:?}"), "above 0, at most 10")?;
        }
        if let Some(s) = &self.rope_scaling {
            above("rope_scaling.factor", s.factor, 0.0)?;
            above("rope_scaling.beta_slow", s.beta_slow, 0.0)?;
            above("rope_scaling.beta_fast", s.beta_fast, 0.0)?;
            above("rope_scaling.original_max_position_embeddings", s.original_max_position_embeddings, 0.0)?;
        }
        let eos = self.eos_token_id.ids();
        check(!eos.is_empty(), "eos_token_id", "an empty list".into(), "a token id, or a list of them")?;
        let tokens = eos.iter().map(|&id| ("eos_token_id", id)).chain([("bos_token_id", self.bos_token_id)]);
        for (field, token) in tokens {
            let vocab_size = self.vocab_size;
            check(
                (token as usize) < vocab_size,
                field,
                token.to_string(),
                &format!("below vocab_size ({vocab_size})"),
            )?;
        }
        check(
            self.num_attention_heads.is_multiple_of(self.o_groups),
            "o_groups",
            self.o_groups.to_string(),
            &format!("a divisor of num_attention_heads ({})", self.num_attention_heads),
        )?;
        check(
            self.qk_rope_head_dim > 0
                && self.qk_rope_head_dim.is_multiple_of(2)
                && self.qk_rope_head_dim <= self.head_dim.min(self.index_head_dim),
            "qk_rope_head_dim",
            self.qk_rope_head_dim.to_string(),
            "an even number, at least 2 and no larger than head_dim and index_head_dim",
        )?;
        for (field, n) in [("head_dim", self.head_dim), ("index_head_dim", self.index_head_dim)] {
            check(n.is_multiple_of(2), field, n.to_string(), "an even number: rotary channels come in pairs")?;
        }
        check(
            self.num_experts_per_tok <= self.n_routed_experts,
            "num_experts_per_tok",
            self.num_experts_per_tok.to_string(),
            &format!("at most n_routed_experts ({})", self.n_routed_experts),
        )?;
        check(
            self.num_hash_layers <= layers,
            "num_hash_layers",
            self.num_hash_layers.to_string(),
            "at most num_hidden_layers",
        )?;
        if self.experts_are_fp4() {
            check(
                self.hidden_size.is_multiple_of(32) && self.moe_intermediate_size.is_multiple_of(32),
                "moe_intermediate_size",
                format!("{} (hidden_size {})", self.moe_intermediate_size, self.hidden_size),
                "multiples of 32, the block of MXFP4",
            )?;
        }
        Ok(())
    }

    /// Whether the model has a block for multi-token prediction (v4/SPEC section 8).
    pub fn has_mtp(&self) -> bool {
        self.num_nextn_predict_layers > 0
    }

    /// What layer `layer` attends to; the one after the last is the multi-token-prediction block.
    pub fn layer_kind(&self, layer: usize) -> LayerKind {
        match self.compress_ratios.get(layer).copied().unwrap_or(0) {
            0 => LayerKind::Window,
            CSA_RATIO => LayerKind::Csa,
            ratio => LayerKind::Hca { ratio },
        }
    }

    /// Whether layer `layer` takes its experts from the hash table instead of the router's scores.
    pub fn is_hash_layer(&self, layer: usize) -> bool {
        layer < self.num_hash_layers
    }

    /// Whether the routed experts compute on MXFP4 codes.
    pub fn experts_are_fp4(&self) -> bool {
        self.expert_dtype.as_deref() == Some("fp4")
    }

    /// The layers with a lightning indexer, in order.
    pub fn csa_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_hidden_layers).filter(|&l| self.layer_kind(l) == LayerKind::Csa)
    }

    /// Rotary frequencies of a layer, `[qk_rope_head_dim / 2]`, in radians per position (SPEC 4.1).
    ///
    /// Window-only layers use `rope_theta`; compressed layers use `compress_rope_theta` with YaRN, for everything in
    /// the layer.
    pub fn rope_frequencies(&self, kind: LayerKind) -> Vec<f32> {
        let r = self.qk_rope_head_dim;
        let base = if kind == LayerKind::Window { self.rope_theta } else { self.compress_rope_theta };
        let plain = |p: usize| (1.0 / base.powf((2 * p) as f64 / r as f64)) as f32;
        let Some(yarn) = self.rope_scaling.as_ref().filter(|_| kind != LayerKind::Window) else {
            return (0..r / 2).map(plain).collect();
        };
        let dim = |rotations: f64| {
            r as f64 * (yarn.original_max_position_embeddings / (rotations * std::f64::consts::TAU)).ln()
                / (2.0 * base.ln())
        };
        let low = dim(yarn.beta_fast).floor().max(0.0);
        let mut high = dim(yarn.beta_slow).ceil().min((r - 1) as f64);
        if low == high {
            high += 0.001;
        }
        (0..r / 2)
            .map(|p| {
                let ramp = (((p as f64 - low) / (high - low)) as f32).clamp(0.0, 1.0);
                let f = plain(p);
                f / yarn.factor as f32 * ramp + f * (1.0 - ramp)
            })
            .collect()
    }

    /// Every parameter tensor of the model with its shape, in the release's names; the order is fixed.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let (d, n) = (self.hidden_size, self.hc_mult);
        let mut out: Vec<(String, Vec<usize>)> = vec![("embed.weight".into(), vec![self.vocab_size, d])];
        for layer in 0..self.num_hidden_layers {
            self.push_block(&format!("layers.{layer}"), layer, &mut out);
        }
        let head = |prefix: &str| {
            [
                (format!("{prefix}hc_head_fn"), vec![n, n * d]),
                (format!("{prefix}hc_head_base"), vec![n]),
                (format!("{prefix}hc_head_scale"), vec![1]),
                (format!("{prefix}norm.weight"), vec![d]),
            ]
        };
        out.extend(head(""));
        out.push(("head.weight".into(), vec![self.vocab_size, d]));
        if self.has_mtp() {
            let prefix = MTP_PREFIX;
            for (name, shape) in
                [("e_proj", vec![d, d]), ("h_proj", vec![d, d]), ("enorm", vec![d]), ("hnorm", vec![d])]
            {
                out.push((format!("{prefix}.{name}.weight"), shape));
            }
            self.push_block(prefix, self.num_hidden_layers, &mut out);
            out.extend(head(&format!("{prefix}.")));
        }
        out
    }

    /// The parameters of one block: hyper-connections, norms, attention and experts.
    fn push_block(&self, prefix: &str, layer: usize, out: &mut Vec<(String, Vec<usize>)>) {
        let (d, n, c, e) = (self.hidden_size, self.hc_mult, self.head_dim, self.index_head_dim);
        let (h, q, i) = (self.num_attention_heads, self.q_lora_rank, self.moe_intermediate_size);
        let mixes = (2 + n) * n;
        let mut push = |name: &str, shape: &[usize]| out.push((format!("{prefix}.{name}"), shape.to_vec()));
        for part in ["attn", "ffn"] {
            push(&format!("hc_{part}_fn"), &[mixes, n * d]);
            push(&format!("hc_{part}_base"), &[mixes]);
            push(&format!("hc_{part}_scale"), &[3]);
            push(&format!("{part}_norm.weight"), &[d]);
        }
        push("attn.wq_a.weight", &[q, d]);
        push("attn.q_norm.weight", &[q]);
        push("attn.wq_b.weight", &[h * c, q]);
        push("attn.wkv.weight", &[c, d]);
        push("attn.kv_norm.weight", &[c]);
        push("attn.attn_sink", &[h]);
        push("attn.wo_a.weight", &[self.o_groups * self.o_lora_rank, h * c / self.o_groups]);
        push("attn.wo_b.weight", &[d, self.o_groups * self.o_lora_rank]);
        let kind = self.layer_kind(layer);
        if let Some(m) = kind.ratio() {
            let series = if kind == LayerKind::Csa { 2 } else { 1 };
            let mut compressor = |prefix: &str, width: usize| {
                push(&format!("{prefix}compressor.wkv.weight"), &[series * width, d]);
                push(&format!("{prefix}compressor.wgate.weight"), &[series * width, d]);
                push(&format!("{prefix}compressor.ape"), &[m, series * width]);
                push(&format!("{prefix}compressor.norm.weight"), &[width]);
            };
            compressor("attn.", c);
            if kind == LayerKind::Csa {
                compressor("attn.indexer.", e);
                push("attn.indexer.wq_b.weight", &[self.index_n_heads * e, q]);
                push("attn.indexer.weights_proj.weight", &[self.index_n_heads, d]);
            }
        }
        push("ffn.gate.weight", &[self.n_routed_experts, d]);
        if !self.is_hash_layer(layer) {
            push("ffn.gate.bias", &[self.n_routed_experts]);
        }
        for expert in 0..self.n_routed_experts {
            for (w, shape) in [("w1", [i, d]), ("w2", [d, i]), ("w3", [i, d])] {
                push(&format!("ffn.experts.{expert}.{w}.weight"), &shape);
            }
        }
        for (w, shape) in [("w1", [i, d]), ("w2", [d, i]), ("w3", [i, d])] {
            push(&format!("ffn.shared_experts.{w}.weight"), &shape);
        }
    }

    /// The hash-routing tables: data of the checkpoint, not parameters. `[vocab_size, K]` each.
    pub fn hash_tables(&self) -> Vec<String> {
        (0..self.num_hash_layers).map(|layer| format!("layers.{layer}.ffn.gate.tid2eid")).collect()
    }

    /// The shape of a hash-routing table.
    pub fn hash_table_shape(&self) -> [usize; 2] {
        [self.vocab_size, self.num_experts_per_tok]
    }

    /// Number of parameters: all, and those that one token uses.
    pub fn num_parameters(&self) -> (usize, usize) {
        let mut total = 0;
        let mut routed = 0;
        for (name, shape) in self.parameters() {
            let n: usize = shape.iter().product();
            total += n;
            if is_routed_expert(&name) {
                routed += n;
            }
        }
        (total, total - routed + routed / self.n_routed_experts * self.num_experts_per_tok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of a configuration with one field changed; `None` if nothing.
    fn refusal(field: &str, value: serde_json::Value) -> Option<String> {
        let mut config = serde_json::json!({
            "model_type": "deepseek_v4", "vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "head_dim": 16, "qk_rope_head_dim": 4, "q_lora_rank": 8, "o_groups": 2,
            "o_lora_rank": 4, "sliding_window": 4, "compress_ratios": [0, 4], "rope_theta": 1e4,
            "compress_rope_theta": 16e4, "max_position_embeddings": 64, "index_n_heads": 2, "index_head_dim": 8,
            "index_topk": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "num_hash_layers": 1, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
            "expert_dtype": "fp4",
        });
        config[field] = value;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string()).expect("writes");
        let error = ModelConfig::load(&path).err()?.to_string();
        Some(error.replace(&*path.to_string_lossy(), "config.json"))
    }

    #[track_caller]
    fn check_refused(field: &str, value: serde_json::Value, sentence: &str) {
        let said = refusal(field, value).expect("is refused");
        assert!(said.starts_with(&format!("config.json: {sentence}; ")), "{said}");
    }

    #[test]
    fn shapes_that_no_kernel_runs_are_refused() {
        assert_eq!(refusal("hc_mult", 8.into()), None);
        check_refused("hc_mult", 9.into(), "`hc_mult` is 9, expected 1 to 8");
        check_refused("num_hidden_layers", 0.into(), "`num_hidden_layers` is 0, expected 1 to 1024");
        check_refused("hidden_size", (1_u64 << 40).into(), "`hidden_size` is 1099511627776, expected 1 to 65536");
        check_refused("index_topk", (1_u64 << 63).into(), "`index_topk` is 9223372036854775808, expected 1 to 65536");
        check_refused("hc_sinkhorn_iters", 1_000_000.into(), "`hc_sinkhorn_iters` is 1000000, expected 1 to 1000");
        check_refused(
            "compress_ratios",
            serde_json::json!([0, 1_u64 << 31]),
            "`compress_ratios` is a list with 2147483648, expected ratios of at most 65536",
        );
        check_refused(
            "qk_rope_head_dim",
            0.into(),
            "`qk_rope_head_dim` is 0, expected an even number, at least 2 and no larger than head_dim and index_head_dim",
        );
        check_refused(
            "head_dim",
            15.into(),
            "`head_dim` is 15, expected an even number: rotary channels come in pairs",
        );
        check_refused(
            "expert_dtype",
            "int4".into(),
            "`expert_dtype` is `int4`, expected `fp4`, `fp8`, `bf16`, `f32`, or no such field",
        );
    }

    #[test]
    fn numbers_that_the_two_forward_passes_would_read_differently_are_refused() {
        check_refused("swiglu_limit", (-1).into(), "`swiglu_limit` is -1.0, expected a number above 0");
        check_refused("rope_theta", 1.into(), "`rope_theta` is 1.0, expected a number above 1");
        check_refused("rms_norm_eps", (-1).into(), "`rms_norm_eps` is -1.0, expected a number above 0");
        check_refused("swiglu_limit", 1e39.into(), "`swiglu_limit` is inf, expected a number above 0");
    }

    #[test]
    fn what_the_arithmetic_takes_for_granted_must_hold() {
        assert_eq!(refusal("norm_topk_prob", true.into()), None);
        check_refused("norm_topk_prob", false.into(), "`norm_topk_prob` is false, expected true");
        check_refused("attention_bias", true.into(), "`attention_bias` is true, expected false");
        check_refused("n_shared_experts", 2.into(), "`n_shared_experts` is 2, expected 1");
        check_refused(
            "num_local_experts",
            8.into(),
            "`num_local_experts` is 8, expected what `n_routed_experts` says (4)",
        );
        check_refused("hidden_act", "gelu".into(), "`hidden_act` is `gelu`, expected `silu`");
    }

    #[test]
    fn a_field_that_may_change_the_arithmetic_is_refused_by_name() {
        assert_eq!(refusal("transformers_version", "5.24.0".into()), None);
        let said = refusal("index_top_k", 2.into()).expect("is refused");
        assert_eq!(
            said,
            "config.json: `index_top_k` (2) is no field of a DeepSeek-V4 configuration; did you mean `index_topk`?"
        );
        let said = refusal("dspark_block_size", 5.into()).expect("is refused");
        assert_eq!(
            said,
            "config.json: `dspark_block_size` (5) is no field of a DeepSeek-V4 configuration; remove it if the model does \
             not depend on it"
        );
        let yarn = serde_json::json!({"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 64, "mscale": 0.7});
        let said = refusal("rope_scaling", yarn).expect("is refused");
        assert!(said.contains("`rope_scaling.mscale`: unknown field `mscale`"), "{said}");
        let said = refusal("hidden_size", "32".into()).expect("is refused");
        assert!(said.contains("`hidden_size`: invalid type: string \"32\", expected usize"), "{said}");
        check_refused(
            "quantization_config",
            serde_json::json!({"quant_method": "fp8", "weight_block_size": [32, 32]}),
            "`quantization_config.weight_block_size` is [32,32], expected [128,128]",
        );
        check_refused(
            "eos_token_id",
            serde_json::Value::Null,
            "`eos_token_id` is missing, expected a token id, or a list of them",
        );
        assert_eq!(refusal("eos_token_id", serde_json::json!([1, 2])), None);
    }

    #[test]
    fn the_published_sizes() {
        use crate::model::Sizes;
        use crate::model::checkpoint::{Format, Layout};

        let check = |name, [total, main, active]: [usize; 3], num_tensors, stored: Option<usize>| {
            let config = ModelConfig::preset(name).expect("a preset");
            let sizes = Sizes::new(&config);
            let mtp: usize = sizes.kinds.iter().filter(|k| k.kind == "multi-token prediction").map(|k| k.total).sum();
            let hundred_millions = [sizes.total().0, sizes.total().0 - mtp, sizes.total().1].map(|n| n / 100_000_000);
            assert_eq!(hundred_millions, [total, main, active], "{name}");
            // The published files: tensors and their elements, scales and hash tables among them, two FP4 in one.
            let (mut tensors, mut elements) = (0, 0);
            for (name, shape) in config.parameters() {
                let (n, format) = (shape.iter().product::<usize>(), Layout::Mxfp4.format(&name));
                let scales = match format {
                    Format::Fp8 => kernels::quant::num_tiles(shape[0], shape[1]),
                    Format::Mxfp4 => n / 32,
                    _ => 0,
                };
                tensors += 1 + usize::from(scales > 0);
                elements += scales + if format == Format::Mxfp4 { n / 2 } else { n };
            }
            tensors += config.num_hash_layers;
            elements += config.num_hash_layers * config.hash_table_shape().iter().product::<usize>();
            assert_eq!(tensors, num_tensors, "{name}");
            if let Some(stored) = stored {
                assert_eq!(elements / 100_000_000, stored, "{name}");
            }
        };
        // Published: 284B in all and 13B active, which the embedding is not part of; 1.6T and 49B.
        check("v4-flash", [2909, 2843, 137], 69_187, None);
        check("v4-pro", [15988, 15729, 497], 145_116, Some(8616));
        assert_eq!(ModelConfig::preset("v5"), None);
    }

    #[test]
    fn both_spellings_of_a_configuration_mean_the_same() {
        for (name, _) in PRESETS {
            let config = ModelConfig::preset(name).expect("a preset");
            let text = config.to_hugging_face().expect("one ratio").to_string();
            assert!(text.contains("partial_rotary_factor") && !text.contains("compress_ratios"), "{text}");
            assert_eq!(config_file::parse(&text, Path::new("config.json")).expect("is read"), config);
        }
    }
}
