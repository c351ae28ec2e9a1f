//! Reading and writing `config.json`: the published release's fields, the Hugging Face implementation's renamed ones,
//! and a refusal of every field that means something else than this engine computes.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::config::{self, CSA_RATIO, ConfigError, ModelConfig};

/// Fields that say nothing about the arithmetic; kept, so that a configuration written again is whole.
const WITHOUT_EFFECT: [&str; 24] = [
    "_name_or_path",
    "architectures",
    "auto_map",
    "aux_loss_alpha",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Fields that have one value in every V4 model; a file without them means the same.
fn fixed_values() -> [(&'static str, Value); 16] {
    [
        ("attention_bias", json!(false)),
        ("attention_dropout", json!(0.0)),
        ("ep_size", json!(1)),
        ("first_k_dense_replace", json!(0)),
        ("hidden_act", json!("silu")),
        ("is_encoder_decoder", json!(false)),
        ("mlp_bias", json!(false)),
        ("moe_layer_freq", json!(1)),
        ("n_group", json!(1)),
        ("norm_topk_prob", json!(true)),
        ("num_key_value_heads", json!(1)),
        ("n_shared_experts", json!(1)),
        ("scoring_func", json!("sqrtsoftplus")),
        ("tie_word_embeddings", json!(false)),
        ("topk_group", json!(1)),
        ("topk_method", json!("noaux_tc")),
    ]
}

/// What `quantization_config` may say: how the release stores its matrices.
fn quantization_values() -> [(&'static str, Value); 5] {
    [
        ("activation_scheme", json!("dynamic")),
        ("fmt", json!("e4m3")),
        ("quant_method", json!("fp8")),
        ("scale_fmt", json!("ue8m0")),
        ("weight_block_size", json!([128, 128])),
    ]
}

/// The `quantization_config` of a checkpoint with FP8 matrices.
pub(crate) fn fp8_quantization() -> Value {
    quantization_values().into_iter().collect()
}

const SLIDING: &str = "sliding_attention";
const CSA: &str = "compressed_sparse_attention";
const HCA: &str = "heavily_compressed_attention";
const HASH_MOE: &str = "hash_moe";
const MOE: &str = "moe";

/// Reads the text of a `config.json`; `path` is for the errors.
pub(super) fn parse(text: &str, path: &Path) -> Result<ModelConfig, ConfigError> {
    let mut file = File { path, fields: parse_object(text, path)? };
    let model_type = file.fields.get("model_type").cloned().unwrap_or(Value::Null);
    // Another architecture lacks fields too, but which ones is not what a person needs to hear.
    file.check(model_type == "deepseek_v4", "model_type", shown(&model_type), "`deepseek_v4`")?;
    file.rename()?;
    for (field, expected) in fixed_values() {
        let found = file.fields.get(field).unwrap_or(&Value::Null);
        file.check(found.is_null() || same(found, &expected), field, shown(found), &shown(&expected))?;
    }
    file.check_quantization()?;
    let eos = file.fields.get("eos_token_id").unwrap_or(&Value::Null);
    let ids = eos.as_array().map_or(std::slice::from_ref(eos), Vec::as_slice);
    file.check(ids.iter().all(Value::is_u64), "eos_token_id", shown(eos), "a token id, or a list of them")?;
    let config: ModelConfig = serde_path_to_error::deserialize(Value::Object(file.fields.clone())).map_err(|e| {
        let field = e.path().to_string();
        let message = e.into_inner().to_string();
        let at = if field == "." { String::new() } else { format!("`{field}`: ") };
        ConfigError::Parse { path: path.to_owned(), message: format!("{at}{message}") }
    })?;
    file.refuse_unknown(&config)?;
    config.validate(path)?;
    Ok(config)
}

/// The fields as the Hugging Face implementation writes them, or why it has none for this model.
///
/// # Errors
/// When two heavily compressed layers differ in their ratio: that implementation knows one.
pub(super) fn to_hugging_face(config: &ModelConfig) -> Result<Value, String> {
    let ratios = &config.compress_ratios[..config.num_hidden_layers];
    let heavy: Vec<usize> = ratios.iter().copied().filter(|&r| r != 0 && r != CSA_RATIO).collect();
    if let Some(other) = heavy.iter().find(|&&r| r != heavy[0]) {
        return Err(format!("`compress_ratios` holds {} and {other}", heavy[0]));
    }
    let mut value = to_value(config);
    let fields = value.as_object_mut().expect("a configuration is an object");
    for field in ["compress_ratios", "num_hash_layers", "rope_scaling"] {
        fields.shift_remove(field);
    }
    let kind = |&ratio: &usize| match ratio {
        0 => SLIDING,
        CSA_RATIO => CSA,
        _ => HCA,
    };
    fields.insert("layer_types".into(), ratios.iter().map(kind).collect());
    fields.insert("compress_rates".into(), json!({CSA: CSA_RATIO, HCA: heavy.first().unwrap_or(&128)}));
    let mlp = |layer| if config.is_hash_layer(layer) { HASH_MOE } else { MOE };
    fields.insert("mlp_layer_types".into(), (0..config.num_hidden_layers).map(mlp).collect());
    // That implementation cuts the product off: the factor must not fall short by a rounding.
    let mut factor = config.qk_rope_head_dim as f64 / config.head_dim as f64;
    if (config.head_dim as f64 * factor) as usize != config.qk_rope_head_dim {
        factor = factor.next_up();
    }
    fields.insert("partial_rotary_factor".into(), json!(factor));
    let main = json!({"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": factor});
    let mut compress = main.clone();
    compress["rope_theta"] = json!(config.compress_rope_theta);
    if let Some(yarn) = &config.rope_scaling {
        compress["rope_type"] = json!("yarn");
        compress["factor"] = json!(yarn.factor);
        compress["beta_fast"] = json!(yarn.beta_fast);
        compress["beta_slow"] = json!(yarn.beta_slow);
        compress["original_max_position_embeddings"] = json!(yarn.original_max_position_embeddings);
        compress["attention_factor"] = json!(1.0);
    }
    fields.insert("rope_parameters".into(), json!({"main": main, "compress": compress}));
    Ok(value)
}

/// The fields of the release. By way of text: an f32 keeps its short form then.
pub(super) fn to_value(config: &ModelConfig) -> Value {
    let text = serde_json::to_string(config).expect("a configuration is JSON");
    serde_json::from_str(&text).expect("what was written is JSON")
}

fn parse_object(text: &str, path: &Path) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_str(text).map_err(|e| ConfigError::Parse { path: path.to_owned(), message: e.to_string() })
}

/// Equality that does not tell 10000 from 10000.0.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "missing".into(),
        Value::String(text) => format!("`{text}`"),
        other => other.to_string(),
    }
}

/// The fields of one file on their way to the release's names.
struct File<'a> {
    path: &'a Path,
    fields: Map<String, Value>,
}

impl File<'_> {
    fn check(&self, ok: bool, field: &str, found: String, expected: &str) -> Result<(), ConfigError> {
        config::check(self.path, ok, field, found, expected)
    }

    fn unsupported<T>(&self, field: &str, found: &Value, expected: &str) -> Result<T, ConfigError> {
        Err(config::unsupported(self.path, field, shown(found), expected))
    }

    fn take(&mut self, field: &str) -> Option<Value> {
        self.fields.shift_remove(field).filter(|value| !value.is_null())
    }

    /// Sets what another field says too; both may stand in a file if they agree.
    fn put(&mut self, field: &str, value: Value, from: &str) -> Result<(), ConfigError> {
        match self.fields.get(field) {
            Some(found) if !found.is_null() && !same(found, &value) => {
                self.unsupported(from, &value, &format!("what `{field}` says ({})", shown(found)))
            }
            _ => {
                self.fields.insert(field.to_owned(), value);
                Ok(())
            }
        }
    }

    fn number(&self, field: &str) -> Option<usize> {
        self.fields.get(field)?.as_u64().and_then(|n| usize::try_from(n).ok())
    }

    /// Renames what the Hugging Face implementation renamed (v4/SPEC section 1).
    fn rename(&mut self) -> Result<(), ConfigError> {
        for (theirs, ours) in
            [("num_local_experts", "n_routed_experts"), ("intermediate_size", "moe_intermediate_size")]
        {
            if let Some(value) = self.take(theirs) {
                self.put(ours, value, theirs)?;
            }
        }
        self.rotary()?;
        self.layer_types()?;
        self.mlp_layer_types()
    }

    fn rotary(&mut self) -> Result<(), ConfigError> {
        if let Some(factor) = self.take("partial_rotary_factor") {
            let dims = factor
                .as_f64()
                .zip(self.number("head_dim"))
                .map(|(factor, dims)| (factor * dims as f64).round() as usize);
            let Some(dims) = dims else { return self.unsupported("partial_rotary_factor", &factor, "a number") };
            self.put("qk_rope_head_dim", dims.into(), "partial_rotary_factor")?;
        }
        let Some(parameters) = self.take("rope_parameters") else { return Ok(()) };
        let Value::Object(mut parameters) = parameters else {
            return self.unsupported("rope_parameters", &parameters, "an object");
        };
        let mut yarn = match parameters.shift_remove("compress") {
            Some(Value::Object(mut compress)) => {
                let main = parameters.shift_remove("main").unwrap_or(json!({}));
                if let Some((field, value)) = parameters.iter().next() {
                    let expected = "`main` and `compress` alone";
                    return self.unsupported(&format!("rope_parameters.{field}"), value, expected);
                }
                self.plain_rotary(&main)?;
                if let Some(theta) = compress.shift_remove("rope_theta") {
                    self.put("compress_rope_theta", theta, "rope_parameters.compress.rope_theta")?;
                }
                compress
            }
            Some(other) => return self.unsupported("rope_parameters.compress", &other, "an object"),
            // Not told apart: the base is then the one of layers without compression.
            None => {
                if let Some(theta) = parameters.shift_remove("rope_theta") {
                    self.put("rope_theta", theta, "rope_parameters.rope_theta")?;
                }
                parameters
            }
        };
        yarn.shift_remove("partial_rotary_factor");
        if yarn.get("attention_factor").is_some_and(|factor| same(factor, &json!(1))) {
            yarn.shift_remove("attention_factor"); // what V4 means without it
        }
        let kind = yarn.shift_remove("rope_type").or_else(|| yarn.get("type").cloned());
        yarn.shift_remove("type");
        let Some(kind) = kind.filter(|kind| kind != "default") else {
            return match yarn.iter().next() {
                Some((field, value)) => self.unsupported(
                    &format!("rope_parameters.{field}"),
                    value,
                    "no such field with `rope_type` default",
                ),
                None => Ok(()),
            };
        };
        yarn.insert("type".into(), kind);
        match self.fields.get("rope_scaling") {
            Some(Value::Object(scaling)) => {
                let differs =
                    |(field, value): &(&String, &Value)| scaling.get(*field).is_some_and(|own| !same(own, value));
                match yarn.iter().find(differs) {
                    Some((field, value)) => self.unsupported(
                        &format!("rope_parameters.compress.{field}"),
                        value,
                        &format!("what `rope_scaling` says ({})", shown(&scaling[field])),
                    ),
                    None => {
                        let mut scaling = scaling.clone();
                        let has_kind = scaling.contains_key("rope_type");
                        yarn.retain(|field, _| !(scaling.contains_key(field) || has_kind && field == "type"));
                        scaling.extend(yarn);
                        self.fields.insert("rope_scaling".into(), Value::Object(scaling));
                        Ok(())
                    }
                }
            }
            _ => {
                self.fields.insert("rope_scaling".into(), Value::Object(yarn));
                Ok(())
            }
        }
    }

    /// The rotary embedding of layers without compression is the plain one.
    fn plain_rotary(&mut self, main: &Value) -> Result<(), ConfigError> {
        let Some(main) = main.as_object() else {
            return self.unsupported("rope_parameters.main", main, "an object");
        };
        for (field, value) in main {
            let name = format!("rope_parameters.main.{field}");
            match field.as_str() {
                "rope_theta" => self.put("rope_theta", value.clone(), &name)?,
                "rope_type" => self.check(value == "default", &name, shown(value), "`default`")?,
                "partial_rotary_factor" => {}
                _ => return self.unsupported(&name, value, "no such field"),
            }
        }
        Ok(())
    }

    fn layer_types(&mut self) -> Result<(), ConfigError> {
        let mut rates = match self.take("compress_rates") {
            None => Map::new(),
            Some(Value::Object(rates)) => rates,
            Some(other) => return self.unsupported("compress_rates", &other, "an object"),
        };
        for (field, kind) in [("compress_rate_csa", CSA), ("compress_rate_hca", HCA)] {
            if let Some(rate) = self.take(field) {
                rates.insert(kind.to_owned(), rate);
            }
        }
        if let Some((kind, rate)) = rates.iter().find(|(kind, _)| ![SLIDING, CSA, HCA].contains(&kind.as_str())) {
            return self.unsupported(&format!("compress_rates.{kind}"), rate, "no such kind of layer");
        }
        let csa = rates.get(CSA).cloned().unwrap_or(json!(CSA_RATIO));
        self.check(csa == CSA_RATIO, &format!("compress_rates.{CSA}"), shown(&csa), "4")?;
        let hca = rates.get(HCA).cloned().unwrap_or(json!(128));
        let is_heavy = hca.as_u64().is_some_and(|rate| rate != 0 && rate != CSA_RATIO as u64);
        self.check(is_heavy, &format!("compress_rates.{HCA}"), shown(&hca), "a number other than 0 and 4")?;
        let heavy = |ratio: &&Value| ratio.as_u64().is_some_and(|r| r != 0 && r != CSA_RATIO as u64) && **ratio != hca;
        let ratios = self.fields.get("compress_ratios").and_then(Value::as_array);
        if let Some(other) = ratios.into_iter().flatten().find(heavy).filter(|_| rates.contains_key(HCA)) {
            let expected = format!("what `compress_ratios` says ({other})");
            return self.unsupported(&format!("compress_rates.{HCA}"), &hca, &expected);
        }
        let Some(types) = self.take("layer_types") else { return Ok(()) };
        if types.as_array().map(Vec::len) != self.number("num_hidden_layers") {
            return self.unsupported("layer_types", &types, "a list with one entry for each of `num_hidden_layers`");
        }
        let mut ratios = Vec::new();
        for kind in types.as_array().into_iter().flatten() {
            ratios.push(match kind.as_str() {
                Some(SLIDING) => json!(0),
                Some(CSA) => json!(CSA_RATIO),
                Some(HCA) => hca.clone(),
                _ => return self.unsupported("layer_types", kind, &format!("`{SLIDING}`, `{CSA}` or `{HCA}`")),
            });
        }
        match self.fields.get("compress_ratios").and_then(Value::as_array) {
            Some(found) if found.get(..ratios.len()) != Some(&ratios) => {
                self.unsupported("layer_types", &types, "what `compress_ratios` says")
            }
            Some(_) => Ok(()),
            None => {
                // One more for each multi-token-prediction block, which has a window only.
                ratios.extend(vec![json!(0); self.number("num_nextn_predict_layers").unwrap_or(0).min(1)]);
                self.put("compress_ratios", ratios.into(), "layer_types")
            }
        }
    }

    fn mlp_layer_types(&mut self) -> Result<(), ConfigError> {
        let Some(types) = self.take("mlp_layer_types") else { return Ok(()) };
        let kinds = types.as_array().into_iter().flatten().map(|kind| kind.as_str().unwrap_or_default());
        let kinds: Vec<&str> = kinds.collect();
        let num_hash_layers = kinds.iter().take_while(|kind| **kind == HASH_MOE).count();
        if Some(kinds.len()) != self.number("num_hidden_layers") || kinds[num_hash_layers..].iter().any(|k| *k != MOE) {
            let expected = format!("one entry a layer, first `{HASH_MOE}`, then `{MOE}`");
            return self.unsupported("mlp_layer_types", &types, &expected);
        }
        self.put("num_hash_layers", num_hash_layers.into(), "mlp_layer_types")
    }

    fn check_quantization(&mut self) -> Result<(), ConfigError> {
        let Some(mut quantization) = self.fields.get("quantization_config").cloned().filter(|q| !q.is_null()) else {
            return Ok(());
        };
        let Some(fields) = quantization.as_object_mut() else {
            return self.unsupported("quantization_config", &quantization, "an object");
        };
        // Which modules were left in 16 bits shows in the tensors' own types.
        fields.shift_remove("modules_to_not_convert");
        if let Some(dtype) = fields.shift_remove("expert_dtype") {
            self.put("expert_dtype", dtype, "quantization_config.expert_dtype")?;
        }
        for (field, value) in fields {
            let name = format!("quantization_config.{field}");
            match quantization_values().into_iter().find(|(known, _)| known == field) {
                Some((_, expected)) => self.check(*value == expected, &name, shown(value), &shown(&expected))?,
                None => return self.unsupported(&name, value, "no such field"),
            }
        }
        Ok(())
    }

    /// A field that nobody here knows may change what the model computes.
    fn refuse_unknown(&self, config: &ModelConfig) -> Result<(), ConfigError> {
        let fixed = fixed_values().map(|(field, _)| field);
        let known =
            |field: &str| fixed.contains(&field) || WITHOUT_EFFECT.contains(&field) || field == "quantization_config";
        let Some((field, value)) = config.other.iter().find(|(field, _)| !known(field)) else { return Ok(()) };
        let own = to_value(config);
        let near = own
            .as_object()
            .into_iter()
            .flat_map(|fields| fields.keys().map(String::as_str))
            .chain(fixed)
            .filter(|candidate| candidate != field)
            .map(|candidate| (strsim::jaro_winkler(field, candidate), candidate))
            .filter(|(likeness, _)| *likeness > 0.9)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, candidate)| candidate.to_owned());
        Err(ConfigError::Unknown {
            path: self.path.to_owned(),
            field: field.clone(),
            found: shown(value),
            hint: near.map_or("remove it if the model does not depend on it".into(), |near| {
                format!("did you mean `{near}`?")
            }),
        })
    }
}
