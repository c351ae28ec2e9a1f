//! Multi-token prediction end to end: trained where the recipe gives its loss a weight, else carried along untouched.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rollout::model::checkpoint::{load_weights, save_weights};
use rollout::model::{MTP_PREFIX, Model, ModelConfig, Trace, Weights, compare, first_beyond};
use tch::Device;
use trainer::policy::{Policy, initial_weights};

use crate::golden::TOLERANCE;
use crate::program::{RunFolder, args, home, root, trainer};
use crate::recipes::{SHRUNK, result, run};
use crate::{engine_golden, policy_golden};

const QUICKSTART: &str = "recipes/quickstart.toml";

/// The quick start's base with a fresh block for multi-token prediction beside it.
pub fn base_with_mtp(home: &Path) -> PathBuf {
    let (plain, dir) = (root().join("recipes/quickstart_base"), home.join("base"));
    std::fs::create_dir(&dir).expect("makes a folder");
    let text = std::fs::read_to_string(plain.join("config.json")).expect("reads");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    json["num_nextn_predict_layers"] = 1.into();
    json["compress_ratios"].as_array_mut().expect("a list").push(0.into());
    std::fs::write(dir.join("config.json"), json.to_string()).expect("writes");
    std::fs::copy(plain.join("tokenizer.json"), dir.join("tokenizer.json")).expect("copies");
    let load = |dir: &Path| ModelConfig::load(&dir.join("config.json")).expect("a configuration");
    let mut weights = load_weights(&plain, &load(&plain)).expect("weights");
    weights.extend(mtp_of(initial_weights(&load(&dir), 7)));
    save_weights(&dir.join("model.safetensors"), &weights).expect("writes");
    dir
}

/// The tensors of the block.
fn mtp_of(weights: Weights) -> Weights {
    weights.into_iter().filter(|(name, _)| name.starts_with(MTP_PREFIX)).collect()
}

/// The weights in a folder, those of multi-token prediction and the others.
fn weights_in(dir: &Path) -> (Weights, Weights) {
    let config = ModelConfig::load(&dir.join("config.json")).expect("a configuration");
    let weights = load_weights(dir, &config).expect("weights");
    weights.into_iter().partition(|(name, _)| name.starts_with(MTP_PREFIX))
}

fn mtp_losses(run: &RunFolder) -> Vec<f64> {
    run.steps().iter().filter_map(|metrics| metrics.get("train/mtp_loss")).copied().collect()
}

#[test]
fn engine_and_policy_compute_the_same_op_by_op() {
    let home = home();
    let base = base_with_mtp(home.path());
    let config = ModelConfig::load(&base.join("config.json")).expect("a configuration");
    let weights = load_weights(&base, &config).expect("weights");
    let policy = Policy::from_weights(&config, &weights, Device::Cpu).expect("a policy");
    let model = Model::load(&base, &config).expect("a model");
    let tokens = |n: u32, step: u32| (0..n).map(|t| (t * t * step + 7 * t) % 272).collect::<Vec<u32>>();
    // Whole blocks of every layer, and sequences that are shorter than any.
    for sequences in [vec![tokens(64, 5), tokens(64, 11)], vec![tokens(3, 3)]] {
        let (engine, policy) = (engine_golden::run(&model, &sequences), policy_golden::run(&policy, &sequences));
        let differences = compare(&engine, &policy);
        if let Some(first) = first_beyond(&differences, TOLERANCE) {
            panic!("{} tokens: {first}", sequences[0].len());
        }
        let names = |trace: &Trace| trace.ops().iter().map(|(name, _)| name.clone()).collect::<BTreeSet<String>>();
        assert_eq!(names(&engine), names(&policy));
        assert_eq!(names(&engine).iter().filter(|name| name.starts_with("mtp.")).count(), 17);
    }
}

#[test]
fn without_a_weight_it_changes_nothing_and_nothing_changes_it() {
    let home = home();
    let base = base_with_mtp(home.path());
    let plain = run("train", QUICKSTART, home.path(), &format!("{SHRUNK} name=plain"));
    let with = run("train", QUICKSTART, home.path(), &format!("{SHRUNK} model.path={}", base.display()));
    assert_eq!(result(&with).0, result(&plain).0, "metrics of a model with the block and without");
    let ((mtp, others), (none, plain)) = (weights_in(&with.checkpoint(2)), weights_in(&plain.checkpoint(2)));
    assert!(none.is_empty() && others == plain);
    assert!(mtp == weights_in(&base).0);
}

#[test]
fn with_a_weight_it_is_trained_beside_the_policy() {
    let home = home();
    let base = base_with_mtp(home.path());
    let sets = format!("{SHRUNK} model.path={} train.mtp_loss_weight=0.3", base.display());
    let one = run("train", QUICKSTART, home.path(), &format!("{sets} threads=1 name=one"));
    let losses = mtp_losses(&one);
    assert_eq!(losses.len(), 2);
    // A fresh head over 272 tokens: near ln 272 = 5.6 nats, and not yet good.
    assert!(losses.iter().all(|loss| (1.0..20.0).contains(loss)), "{losses:?}");
    // The engine serves what was published, block and all, and both sides still see one model.
    for metrics in one.steps() {
        assert!(metrics["train/train_rollout_logprob_abs_diff"] < 2e-5, "{metrics:?}");
    }
    let ((mtp, others), (mtp_before, others_before)) = (weights_in(&one.checkpoint(2)), weights_in(&base));
    assert!(others != others_before);
    for (name, before) in &mtp_before {
        // Selection biases are not trained by gradients.
        assert_eq!(mtp[name] == *before, name.ends_with(".gate.bias"), "{name}");
    }
    let two = run("train", QUICKSTART, home.path(), &format!("{sets} threads=2 name=two"));
    assert!(result(&one) == result(&two), "one thread and two");
}

#[test]
fn drafts_change_nothing_but_how_long_it_takes() {
    let home = home();
    let base = base_with_mtp(home.path());
    let sets = format!("{SHRUNK} model.path={} rollout.max_batch_rollouts=2", base.display());
    let plain = run("train", QUICKSTART, home.path(), &format!("{sets} name=plain"));
    let with = run("train", QUICKSTART, home.path(), &format!("{sets} rollout.speculative=true name=with"));
    let rates: Vec<f64> =
        with.steps().iter().filter_map(|step| step.get("rollout/spec_accept_rate")).copied().collect();
    assert!(!rates.is_empty() && rates.iter().all(|rate| (0.0..=1.0).contains(rate)), "{rates:?}");
    let (mut metrics, weights) = result(&with);
    metrics.retain(|(_, name, _)| !name.starts_with("rollout/spec_accept_"));
    assert!((metrics, weights) == result(&plain));
    let outcome = trainer(args("train", QUICKSTART, home.path(), &format!("{SHRUNK} rollout.speculative=true")));
    let error = outcome.seen(home.path());
    assert!(
        error.contains("`rollout.speculative` is true, but the model has no multi-token-prediction block"),
        "{error}"
    );
}

#[test]
fn fine_tuning_teaches_it_too() {
    let home = home();
    let sets = format!(
        "sft.model={} train.mtp_loss_weight=0.3 sft.num_steps=25 sft.batch_size=16 optimizer.warmup_steps=5 \
         eval.num_prompts=1 eval.samples_per_prompt=1",
        base_with_mtp(home.path()).display()
    );
    let losses = mtp_losses(&run("sft", "recipes/quickstart_base.toml", home.path(), &sets));
    assert_eq!(losses.len(), 25);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (mean(&losses[..3]), mean(&losses[22..]));
    assert!((4.5..6.5).contains(&first), "the first losses are {first}, fresh weights know nothing: ln 272 = 5.6");
    assert!(last < 0.8 * first, "the loss went from {first} to {last}");
}
