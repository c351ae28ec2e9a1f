//! `config.json` of a DeepSeek-V4 checkpoint, in the field names of the published release.

use std::path::{Path, PathBuf};

use kernels::hyper_connection::MAX_STREAMS;
use serde::{Deserialize, Serialize};

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
        field: &'static str,
        /// Its value.
        found: String,
        /// What would do.
        expected: String,
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

/// The ratio that marks a CSA layer.
pub const CSA_RATIO: usize = 4;

/// YaRN scaling of the rotary frequencies in compressed layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    pub eos_token_id: u32,
    #[serde(default)]
    pub initializer_range: Option<f32>,
    /// `"fp4"`: the routed experts compute on MXFP4 codes. Absent: on the checkpoint's own values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_dtype: Option<String>,
    /// Fields of the file that say nothing about the arithmetic; kept so that a written config is whole.
    #[serde(flatten)]
    pub other: serde_json::Map<String, serde_json::Value>,
}

/// The `model_type` of every model of the family.
const MODEL_TYPE: &str = "deepseek_v4";

/// What is read of a `config.json` first.
#[derive(Deserialize)]
struct Kind {
    model_type: String,
}

fn check(path: &Path, ok: bool, field: &'static str, found: String, expected: &str) -> Result<(), ConfigError> {
    if ok {
        return Ok(());
    }
    Err(ConfigError::Unsupported { path: path.to_owned(), field, found, expected: expected.to_owned() })
}

impl ModelConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// When the file cannot be read, is not V4's, or asks for something this engine does not do.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let parse = |e: serde_json::Error| ConfigError::Parse { path: path.to_owned(), message: e.to_string() };
        // Another architecture lacks fields too, but which ones is not what a person needs to hear.
        let kind: Kind = serde_json::from_str(&text).map_err(parse)?;
        check(path, kind.model_type == MODEL_TYPE, "model_type", format!("`{}`", kind.model_type), "`deepseek_v4`")?;
        let config: Self = serde_json::from_str(&text).map_err(parse)?;
        config.validate(path)?;
        Ok(config)
    }

    fn validate(&self, path: &Path) -> Result<(), ConfigError> {
        let check = |ok, field, found, expected: &str| check(path, ok, field, found, expected);
        let layers = self.num_hidden_layers;
        check(
            self.compress_ratios.len() >= layers,
            "compress_ratios",
            format!("{} entries", self.compress_ratios.len()),
            &format!("one for each of the {layers} layers"),
        )?;
        check(self.num_key_value_heads == 1, "num_key_value_heads", self.num_key_value_heads.to_string(), "1")?;
        check(self.n_shared_experts == 1, "n_shared_experts", self.n_shared_experts.to_string(), "1")?;
        check(!self.tie_word_embeddings, "tie_word_embeddings", "true".into(), "false")?;
        check(
            self.scoring_func == "sqrtsoftplus",
            "scoring_func",
            format!("`{}`", self.scoring_func),
            "`sqrtsoftplus`",
        )?;
        check(
            self.expert_dtype.as_deref().is_none_or(|d| d == "fp4"),
            "expert_dtype",
            format!("`{}`", self.expert_dtype.as_deref().unwrap_or_default()),
            "`fp4`, or no such field",
        )?;
        if let Some(s) = &self.rope_scaling {
            check(s.r#type == "yarn", "rope_scaling.type", format!("`{}`", s.r#type), "`yarn`")?;
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
        // What the arithmetic takes for granted; a file without the field means the same.
        for (field, expected) in [
            ("norm_topk_prob", serde_json::json!(true)),
            ("attention_bias", serde_json::json!(false)),
            ("topk_method", serde_json::json!("noaux_tc")),
            ("hidden_act", serde_json::json!("silu")),
        ] {
            if let Some(found) = self.other.get(field) {
                check(*found == expected, field, found.to_string(), &expected.to_string())?;
            }
        }
        for (field, token) in [("bos_token_id", self.bos_token_id), ("eos_token_id", self.eos_token_id)] {
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

    /// What layer `layer` attends to.
    pub fn layer_kind(&self, layer: usize) -> LayerKind {
        match self.compress_ratios[layer] {
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
        let (d, n, c, e) = (self.hidden_size, self.hc_mult, self.head_dim, self.index_head_dim);
        let (h, q, i) = (self.num_attention_heads, self.q_lora_rank, self.moe_intermediate_size);
        let mixes = (2 + n) * n;
        let mut out: Vec<(String, Vec<usize>)> = vec![("embed.weight".into(), vec![self.vocab_size, d])];
        for layer in 0..self.num_hidden_layers {
            let mut push = |name: &str, shape: &[usize]| out.push((format!("layers.{layer}.{name}"), shape.to_vec()));
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
        out.push(("hc_head_fn".into(), vec![n, n * d]));
        out.push(("hc_head_base".into(), vec![n]));
        out.push(("hc_head_scale".into(), vec![1]));
        out.push(("norm.weight".into(), vec![d]));
        out.push(("head.weight".into(), vec![self.vocab_size, d]));
        out
    }

    /// The hash-routing tables: data of the checkpoint, not parameters. `[vocab_size, K]` each.
    pub fn hash_tables(&self) -> Vec<String> {
        (0..self.num_hash_layers).map(|layer| format!("layers.{layer}.ffn.gate.tid2eid")).collect()
    }

    /// Number of parameters: all, and those that one token uses.
    pub fn num_parameters(&self) -> (usize, usize) {
        let mut total = 0;
        let mut routed = 0;
        for (name, shape) in self.parameters() {
            let n: usize = shape.iter().product();
            total += n;
            if name.contains(".ffn.experts.") {
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
        check_refused("expert_dtype", "fp8".into(), "`expert_dtype` is `fp8`, expected `fp4`, or no such field");
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
        check_refused("hidden_act", "gelu".into(), "`hidden_act` is \"gelu\", expected \"silu\"");
    }
}
