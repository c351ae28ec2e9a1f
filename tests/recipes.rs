//! Every recipe of `recipes/`, run: whole where that takes seconds, else shrunk to a few small steps.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use insta::assert_snapshot;
use tempfile::TempDir;
use trainer::recipe::{Recipe, Task};
use trainer::tracking::Metrics;

use crate::program::{Ending, RunFolder, args, home, names_in, root, task_of, trainer};

/// Several microbatches a step, in seconds instead of minutes.
pub const SHRUNK: &str = "num_steps=2 prompts_per_step=4 group_size=4 pack.microbatch_tokens=256 pack.row_tokens=128 \
                      eval.num_prompts=8 eval.samples_per_prompt=1";

/// Every recipe, with what it is for.
fn recipes() -> Vec<(String, Task)> {
    let names = names_in(&root().join("recipes")).into_iter().filter(|name| name.ends_with(".toml"));
    let recipes: Vec<_> = names
        .map(|name| {
            let path = format!("recipes/{name}");
            let text = std::fs::read_to_string(root().join(&path)).expect("reads");
            (path, task_of(&text))
        })
        .collect();
    assert!(recipes.len() >= 2, "{recipes:?}");
    recipes
}

fn word(task: Task) -> &'static str {
    match task {
        Task::Train => "train",
        Task::Sft => "sft",
        Task::Eval => "eval",
    }
}

#[test]
fn every_recipe_prints_itself_and_reads_it_back() {
    let home = home();
    for (recipe, task) in recipes() {
        let printed = trainer([word(task), &recipe, "--print-config"]).done();
        assert_eq!(printed.stderr, "");
        let copy = home.path().join("copy.toml");
        std::fs::write(&copy, &printed.stdout).expect("writes");
        let load = |path: PathBuf| Recipe::load(&[path], &[], task).expect("a recipe");
        assert_eq!(load(copy.clone()), load(root().join(&recipe)), "{recipe}");
        let again = trainer([word(task).as_ref(), copy.as_os_str(), "--print-config".as_ref()]).done();
        assert_eq!(again.stdout, printed.stdout, "{recipe}");
    }
}

#[test]
fn every_recipe_passes_its_dry_run_and_writes_nothing() {
    for (recipe, task) in recipes() {
        let home = home();
        let mut args = args(word(task), &recipe, home.path(), "");
        args.push("--dry-run".into());
        let outcome = trainer(args).done();
        for part in ["parameters ", "masters ", "optimizer ", "engine ", "activations ", "prompts ", "held out "] {
            assert!(outcome.stdout.contains(&format!("\n{part}")), "{recipe}: no {part} in {}", outcome.stdout);
        }
        assert!(names_in(home.path()).is_empty(), "{recipe}: {:?}", names_in(home.path()));
    }
}

/// Runs a recipe with `sets` over it to its end.
#[track_caller]
pub fn run(task: &str, recipe: &str, home: &Path, sets: &str) -> RunFolder {
    let outcome = trainer(args(task, recipe, home, sets)).done();
    let folder = outcome.stderr.lines().find_map(|line| line.strip_prefix("  run ")).expect("the header names it");
    let run = RunFolder(folder.trim().into());
    run.assert_whole(Ending::Clean);
    run
}

/// The shrunk quick start, in a home of its own.
#[track_caller]
fn quickstart(sets: &str) -> (TempDir, RunFolder) {
    let home = home();
    let run = run("train", "recipes/quickstart.toml", home.path(), &format!("{SHRUNK} {sets}"));
    (home, run)
}

/// The shrunk quick start as it stands, run once for all tests that only look.
fn plain() -> &'static RunFolder {
    static RUN: OnceLock<(TempDir, RunFolder)> = OnceLock::new();
    &RUN.get_or_init(|| quickstart("threads=2")).1
}

fn names(metrics: &Metrics) -> String {
    metrics.keys().map(String::as_str).collect::<Vec<_>>().join("\n")
}

#[test]
fn quickstart_logs_every_name() {
    let run = plain();
    assert_eq!((run.steps().len(), run.evals().len()), (2, 2));
    assert!(run.steps().windows(2).all(|pair| names(&pair[0]) == names(&pair[1])));
    assert_snapshot!(names(&run.steps()[0]), @"
    perf/actor_train_time
    perf/actor_train_tok_per_s
    perf/reward_time
    perf/rollout_time
    perf/rollout_tok_per_s
    perf/step_time
    perf/update_weights_time
    rollout/raw_reward
    rollout/response_len/max
    rollout/response_len/mean
    rollout/response_len/min
    rollout/reward_part/spell_backward
    rollout/right_ratio
    rollout/rollout_log_probs
    rollout/truncated_ratio
    rollout/unscorable_ratio
    rollout/weight_version/max
    rollout/weight_version/min
    rollout/zero_std/ratio
    train/entropy
    train/grad_norm
    train/log_probs
    train/loss
    train/lr
    train/num_loss_tokens
    train/pg_clipfrac
    train/ppo_kl
    train/ppo_kl_first_update
    train/step
    train/train_rollout_logprob_abs_diff
    train/train_rollout_logprob_abs_diff_max
    ");
    assert_snapshot!(names(&run.evals()[0]), @"
    eval/response_len/max
    eval/response_len/mean
    eval/response_len/min
    eval/reward
    eval/reward_part/spell_backward
    eval/right_ratio
    eval/rollout_log_probs
    eval/truncated_ratio
    eval/unscorable_ratio
    eval/weight_version/max
    eval/weight_version/min
    eval/zero_std/ratio
    perf/eval_time
    ");
    let all = run.metrics();
    assert!(all.iter().all(|(_, metrics)| metrics.values().all(|value| value.is_finite())));
}

#[test]
fn quickstart_starts_on_policy() {
    for (i, metrics) in plain().steps().iter().enumerate() {
        // One update a batch: the ratio is 1 at every step, not only at the first.
        assert!(metrics["train/ppo_kl"].abs() < 1e-9, "step {}: ppo_kl {}", i + 1, metrics["train/ppo_kl"]);
        assert_eq!(metrics["train/pg_clipfrac"], 0.0);
        let diff = metrics["train/train_rollout_logprob_abs_diff"];
        assert!(diff < 2e-5, "step {}: rollout and trainer logprobs differ by {diff}", i + 1);
        assert!((metrics["train/log_probs"] - metrics["rollout/rollout_log_probs"]).abs() < 2e-5);
        // Every step's rollouts come of the weights that the step before published.
        assert_eq!(metrics["rollout/weight_version/min"], i as f64);
        assert_eq!(metrics["rollout/weight_version/max"], i as f64);
        assert_eq!(metrics["train/step"], (i + 1) as f64);
    }
}

#[test]
fn muon_trains_matrices_and_says_so_in_its_state() {
    let (_home, run) = quickstart("optimizer.type=muon optimizer.learning_rate=3e-3");
    let steps = run.steps();
    assert_eq!(steps.len(), 2);
    assert!(steps.iter().all(|metrics| metrics.values().all(|value| value.is_finite())));
    // The first step is AdamW's: the same rollouts, before any update.
    assert_eq!(steps[0]["train/loss"], plain().steps()[0]["train/loss"]);
    assert_ne!(steps[1]["train/log_probs"], plain().steps()[1]["train/log_probs"]);
    let bytes = std::fs::read(run.checkpoint(2).join("optimizer.safetensors")).expect("reads");
    let state = safetensors::SafeTensors::deserialize(&bytes).expect("a file");
    let has = |name: &str| state.names().contains(&name);
    assert!(has("layers.0.ffn.experts.w1.momentum") && has("hc_head_fn.momentum"), "{:?}", state.names());
    assert!(has("embed.weight.mean") && has("norm.weight.square") && has("layers.1.attn.compressor.ape.mean"));
    assert!(!has("embed.weight.momentum") && !has("layers.0.ffn.experts.w1.mean"));
}

#[test]
fn several_updates_a_batch_leave_the_policy_only_after_the_first() {
    let (_home, run) = quickstart("num_steps=1 train.updates_per_step=4 eval.num_prompts=1");
    let metrics = &run.steps()[0];
    assert!(metrics["train/ppo_kl_first_update"].abs() < 1e-9, "{}", metrics["train/ppo_kl_first_update"]);
    assert!(metrics["train/ppo_kl"].abs() > 1e-6, "four updates moved nothing: {}", metrics["train/ppo_kl"]);
    assert_eq!(metrics["train/step"], 4.0);
    assert!(metrics["train/train_rollout_logprob_abs_diff"] < 2e-5);
}

/// Step, name and bits of a number.
pub type Logged = (usize, String, u64);

/// What must not differ between two runs: all metrics but times and speeds, and every byte of the checkpoint.
pub fn result(run: &RunFolder) -> (Vec<Logged>, Vec<Vec<u8>>) {
    let metrics = run.metrics().into_iter().flat_map(|(step, metrics)| {
        let timeless = metrics.into_iter().filter(|(name, _)| !name.starts_with("perf/"));
        timeless.map(move |(name, value)| (step, name, value.to_bits()))
    });
    let step = *run.checkpoints().last().expect("a checkpoint");
    let files = ["model.safetensors", "optimizer.safetensors", "state.json"];
    let bytes = files.map(|name| std::fs::read(run.checkpoint(step).join(name)).expect("reads"));
    (metrics.collect(), bytes.into())
}

#[test]
fn a_run_repeats_bit_for_bit_with_any_number_of_threads() {
    let (want_metrics, want_weights) = result(plain());
    // The same number twice, too.
    for threads in [1, 2, 3] {
        let (_home, run) = quickstart(&format!("threads={threads}"));
        let (metrics, weights) = result(&run);
        assert_eq!(metrics, want_metrics, "{threads} threads");
        assert!(weights == want_weights, "{threads} threads: checkpoints differ");
    }
}

#[test]
fn another_seed_is_another_run() {
    let (_home, other) = quickstart("seed=2");
    let (metrics, weights) = result(&other);
    let (plain_metrics, plain_weights) = result(plain());
    assert_ne!(metrics, plain_metrics);
    assert!(weights != plain_weights);
}

#[test]
fn old_checkpoints_are_removed() {
    let sets = "num_steps=4 prompts_per_step=2 group_size=2 eval.num_prompts=1 checkpoint.every_steps=1 checkpoint.keep_last=2";
    let (_home, run) = quickstart(sets);
    assert_eq!(run.checkpoints(), [3, 4]);
}

/// Two words, asked for again and again, are learned within seconds; the whole task takes minutes.
#[track_caller]
fn check_the_reward_rises(optimizer: &str) {
    let home = home();
    let all = std::fs::read_to_string(root().join("datasets/data/spell_backward.train.jsonl")).expect("reads");
    let prompts = home.path().join("two.jsonl");
    std::fs::write(&prompts, all.lines().take(2).collect::<Vec<_>>().join("\n")).expect("writes");
    let sets = format!(
        "prompts.path={} num_steps=14 prompts_per_step=2 group_size=16 {optimizer} \
         eval.every_steps=0 eval.num_prompts=1 eval.samples_per_prompt=1",
        prompts.display()
    );
    let run = run("train", "recipes/quickstart.toml", home.path(), &sets);
    let rewards: Vec<f64> = run.steps().iter().map(|metrics| metrics["rollout/raw_reward"]).collect();
    let mean = |rewards: &[f64]| rewards.iter().sum::<f64>() / rewards.len() as f64;
    let (first, last) = (mean(&rewards[..4]), mean(&rewards[10..]));
    assert!(last > first + 0.1, "the reward went from {first:.3} to {last:.3}: {rewards:.2?}");
}

/// For seeds 1 to 4 the mean reward rose by 0.16 or more from the first four steps to the last four.
#[test]
fn the_reward_rises() {
    check_the_reward_rises("optimizer.learning_rate=3e-4");
}

/// For seeds 1 to 4, 0.15 or more.
#[test]
fn the_reward_rises_with_muon() {
    check_the_reward_rises(MUON);
}

/// Another `type` starts the table anew: the recipe's warm-up is said again.
const MUON: &str =
    "optimizer.type=muon optimizer.learning_rate=3e-3 optimizer.adamw_learning_rate=3e-4 optimizer.warmup_steps=20";

#[test]
fn a_run_with_muon_repeats_bit_for_bit_with_any_number_of_threads() {
    let (_home, run) = quickstart(&format!("threads=1 {MUON}"));
    let (want_metrics, want_weights) = result(&run);
    assert!(want_weights != result(plain()).1, "AdamW's weights");
    for threads in [2, 3] {
        let (_home, run) = quickstart(&format!("threads={threads} {MUON}"));
        let (metrics, weights) = result(&run);
        assert_eq!(metrics, want_metrics, "{threads} threads");
        assert!(weights == want_weights, "{threads} threads: checkpoints differ");
    }
}

const LEARN: &str = "sft.batch_size=16 eval.num_prompts=16 eval.samples_per_prompt=1";

#[test]
fn answers_are_learned_then_reinforced_then_measured() {
    let home = home();
    let base = "recipes/quickstart_base.toml";
    let sets = format!("{LEARN} sft.num_steps=25 optimizer.warmup_steps=5 sft.stop_at_reward=0.99");
    let learned = run("sft", base, home.path(), &sets);
    let losses: Vec<f64> = learned.steps().iter().map(|metrics| metrics["train/loss"]).collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (mean(&losses[..3]), mean(&losses[22..]));
    // Fresh weights know nothing of 272 tokens: ln 272 = 5.6.
    assert!((4.5..6.5).contains(&first), "the first losses are {first}");
    assert!(last < 0.7 * first, "the loss went from {first} to {last}");
    assert_snapshot!(names(&learned.steps()[0]), @"
    perf/step_time
    perf/train_tokens_per_s
    train/grad_norm
    train/loss
    train/lr
    ");

    // The checkpoint is what was measured: another process gets the same answers from it, to the last bit.
    let checkpoint = learned.checkpoint(25);
    let from = format!("model.path={}", checkpoint.display());
    let measured = run("eval", base, home.path(), &format!("{LEARN} {from} name=measured"));
    let evals = [learned.evals().pop().expect("one at the end"), measured.evals().remove(0)];
    let [at_the_end, later] = evals.map(|mut metrics| {
        metrics.retain(|name, _| !name.starts_with("perf/") && !name.contains("weight_version"));
        metrics
    });
    assert_eq!(later, at_the_end);

    let reinforced =
        run("train", "recipes/quickstart.toml", home.path(), &format!("{SHRUNK} {from} name=then num_steps=1"));
    assert!(reinforced.steps()[0]["train/train_rollout_logprob_abs_diff"] < 2e-5);
}

#[test]
fn fresh_weights_follow_from_the_seed() {
    let weights = |seed: u64| {
        let home = home();
        let sets = format!("{LEARN} sft.num_steps=1 sft.batch_size=2 eval.num_prompts=1 seed={seed}");
        let run = run("sft", "recipes/quickstart_base.toml", home.path(), &sets);
        std::fs::read(run.checkpoint(1).join("model.safetensors")).expect("reads")
    };
    let first = weights(5);
    assert!(first == weights(5) && first != weights(6));
}

#[test]
fn an_evaluation_alone_trains_nothing() {
    let home = home();
    let run = run("eval", "recipes/quickstart.toml", home.path(), SHRUNK);
    assert_eq!((run.steps().len(), run.evals().len(), run.checkpoints()), (0, 1, vec![]));
    // It asks what a training run asks before its first step.
    let mut metrics = [run.evals().remove(0), plain().evals().remove(0)];
    for metrics in &mut metrics {
        metrics.retain(|name, _| !name.starts_with("perf/"));
    }
    assert_eq!(metrics[0], metrics[1]);
}
