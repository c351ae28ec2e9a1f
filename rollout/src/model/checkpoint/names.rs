//! Tensor names: the published release's, which the rest of the program uses, and the Hugging Face implementation's
//! (v4/SPEC 9.1). That one stacks the routed experts of a layer into one tensor; a slice of it is what a name means.

/// Endings of a layer's tensors: the release's, then the Hugging Face implementation's.
const LAYER: [(&str, &str); 35] = [
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    ("attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"),
    ("attn.compressor.wgate.weight", "self_attn.compressor.gate_proj.weight"),
    ("attn.compressor.wkv.weight", "self_attn.compressor.kv_proj.weight"),
    ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    ("attn.indexer.compressor.norm.weight", "self_attn.compressor.indexer.kv_norm.weight"),
    ("attn.indexer.compressor.wgate.weight", "self_attn.compressor.indexer.gate_proj.weight"),
    ("attn.indexer.compressor.wkv.weight", "self_attn.compressor.indexer.kv_proj.weight"),
    ("attn.indexer.weights_proj.weight", "self_attn.compressor.indexer.scorer.weights_proj.weight"),
    ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    ("attn.kv_norm.weight", "self_attn.kv_norm.weight"),
    ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    ("attn.wkv.weight", "self_attn.kv_proj.weight"),
    ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    ("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
    ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
    ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn.experts.w1.weight", "mlp.experts.gate_up_proj"),
    ("ffn.experts.w2.weight", "mlp.experts.down_proj"),
    ("ffn.experts.w3.weight", "mlp.experts.gate_up_proj"),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    ("ffn.gate.weight", "mlp.gate.weight"),
    ("ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"),
    ("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
    ("ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("hc_attn_base", "attn_hc.base"),
    ("hc_attn_fn", "attn_hc.fn"),
    ("hc_attn_scale", "attn_hc.scale"),
    ("hc_ffn_base", "ffn_hc.base"),
    ("hc_ffn_fn", "ffn_hc.fn"),
    ("hc_ffn_scale", "ffn_hc.scale"),
];

/// Other endings that transformers' `save_pretrained` writes for the release's: it names every norm of the attention
/// alike, and keeps or reverts the rest.
const SAVED: [(&str, &str); 4] = [
    ("attn.kv_norm.weight", "attn.norm.weight"),
    ("attn.kv_norm.weight", "self_attn.norm.weight"),
    ("attn.compressor.norm.weight", "self_attn.compressor.norm.weight"),
    ("attn.indexer.compressor.norm.weight", "self_attn.compressor.indexer.norm.weight"),
];

/// Tensors outside the layers. Multi-token prediction (`mtp.*`) is unknown there, and keeps the release's names.
const TOP: [(&str, &str); 6] = [
    ("embed.weight", "model.embed_tokens.weight"),
    ("hc_head_base", "model.hc_head.hc_base"),
    ("hc_head_fn", "model.hc_head.hc_fn"),
    ("hc_head_scale", "model.hc_head.hc_scale"),
    ("head.weight", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
];

/// The suffix of the release's scales, beside `.weight`.
pub(super) const SCALE: &str = ".scale";

/// Whose names a checkpoint uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Naming {
    /// The published release's: `layers.0.attn.wq_a.weight`
    Release,
    /// The Hugging Face implementation's: `model.layers.0.self_attn.q_a_proj.weight`, experts stacked
    HuggingFace,
}

/// Where the Hugging Face implementation keeps a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The name of the (possibly stacked) tensor.
    pub name: String,
    /// For a routed expert: which one, and which of the two matrices stacked in `gate_up_proj` (0: gate, 1: up).
    pub slice: Option<(usize, usize)>,
}

/// The scale's name for a weight's, in the release's names.
pub(super) fn scale_of(weight: &str) -> String {
    format!("{}{SCALE}", weight.strip_suffix(".weight").unwrap_or(weight))
}

/// How many matrices of each expert stand below each other in the stack of this name.
pub(super) fn halves_of(stack: &str) -> usize {
    if stack.contains("gate_up_proj") { 2 } else { 1 }
}

/// Where the Hugging Face implementation keeps the tensor that the release calls `name`.
pub(super) fn hugging_face(name: &str) -> Place {
    if let Some(weight) = name.strip_suffix(SCALE) {
        let place = hugging_face(&format!("{weight}.weight"));
        let name = match place.name.strip_suffix(".weight") {
            Some(stem) => format!("{stem}.weight_scale_inv"),
            None => format!("{}_scale_inv", place.name),
        };
        return Place { name, ..place };
    }
    let whole = |name: String| Place { name, slice: None };
    if let Some((_, theirs)) = TOP.iter().find(|(ours, _)| *ours == name) {
        return whole((*theirs).to_owned());
    }
    let Some((layer, ending)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
        return whole(name.to_owned());
    };
    let (ending, slice) = match expert(ending) {
        Some((expert, ending)) => {
            let half = usize::from(ending.ends_with("w3.weight"));
            (ending, Some((expert, half)))
        }
        None => (ending.to_owned(), None),
    };
    match LAYER.iter().find(|(ours, _)| *ours == ending) {
        Some((_, theirs)) => Place { name: format!("model.layers.{layer}.{theirs}"), slice },
        None => whole(name.to_owned()),
    }
}

/// `ffn.experts.3.w1.weight` as `(3, "ffn.experts.w1.weight")`.
fn expert(ending: &str) -> Option<(usize, String)> {
    let (number, matrix) = ending.strip_prefix("ffn.experts.")?.split_once('.')?;
    Some((number.parse().ok()?, format!("ffn.experts.{matrix}")))
}

/// The release's name for one of the Hugging Face implementation's, where it is one tensor and not a stack of experts.
///
/// Its `save_pretrained` also writes mixtures of both namings; those are understood too.
pub(super) fn release(name: &str) -> String {
    if let Some(stem) = name.strip_suffix(".weight_scale_inv") {
        let weight = release(&format!("{stem}.weight"));
        return scale_of(&weight);
    }
    if let Some((ours, _)) = TOP.iter().find(|(_, theirs)| *theirs == name) {
        return (*ours).to_owned();
    }
    let name = name.strip_prefix("model.").unwrap_or(name);
    let Some((layer, ending)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
        return name.to_owned();
    };
    // A stack of experts is many of the release's tensors, and keeps its own name.
    match LAYER.iter().chain(&SAVED).find(|(_, theirs)| *theirs == ending && !ending.contains(".experts.")) {
        Some((ours, _)) => format!("layers.{layer}.{ours}"),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(ours: &str, theirs: &str) {
        assert_eq!(hugging_face(ours), Place { name: theirs.into(), slice: None });
        assert_eq!(release(theirs), ours);
    }

    #[test]
    fn names_go_both_ways() {
        for (ours, theirs) in TOP {
            check(ours, theirs);
        }
        for (ours, theirs) in LAYER.iter().filter(|(ours, _)| !ours.contains(".experts.")) {
            check(&format!("layers.17.{ours}"), &format!("model.layers.17.{theirs}"));
        }
        check("layers.2.attn.wq_a.scale", "model.layers.2.self_attn.q_a_proj.weight_scale_inv");
        check("mtp.0.e_proj.weight", "mtp.0.e_proj.weight");
        // What the Hugging Face implementation writes when it keeps the release's endings.
        assert_eq!(release("model.layers.2.attn.wq_a.weight"), "layers.2.attn.wq_a.weight");
        assert_eq!(release("model.embed.weight"), "embed.weight");
        assert_eq!(release("model.layers.2.attn.norm.weight"), "layers.2.attn.kv_norm.weight");
    }

    #[test]
    fn experts_are_slices_of_a_stack() {
        let place =
            |name: &str, slice| Place { name: format!("model.layers.1.mlp.experts.{name}"), slice: Some(slice) };
        assert_eq!(hugging_face("layers.1.ffn.experts.7.w1.weight"), place("gate_up_proj", (7, 0)));
        assert_eq!(hugging_face("layers.1.ffn.experts.7.w3.weight"), place("gate_up_proj", (7, 1)));
        assert_eq!(hugging_face("layers.1.ffn.experts.7.w2.weight"), place("down_proj", (7, 0)));
        assert_eq!(hugging_face("layers.1.ffn.experts.7.w3.scale"), place("gate_up_proj_scale_inv", (7, 1)));
    }
}
