//! What a person sees when something is wrong: one sentence that says where, what was found, what was expected and what
//! to do; an exit status; and a run folder in which everything is whole.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use insta::assert_snapshot;
use rollout::model::checkpoint::{load_weights, save_weights};
use rollout::model::{HostTensor, ModelConfig, TensorData, Weights};

use crate::program::{Ending, Outcome, RunFolder, Running, TRAINER, args, command, home, names_in, root, trainer};

const QUICKSTART: &str = "recipes/quickstart.toml";
/// Seconds instead of minutes.
const SMALL: &str = "num_steps=3 prompts_per_step=2 group_size=2 eval.num_prompts=4 eval.samples_per_prompt=1";

/// What is seen of the quick start with `sets` over it; no run folder may appear.
#[track_caller]
fn refused(home: &Path, sets: &str) -> String {
    let outcome = trainer(args("train", QUICKSTART, home, &format!("{SMALL} {sets}")));
    assert_eq!(outcome.stdout, "");
    assert!(names_in(&home.join("runs")).is_empty(), "a run folder was made");
    outcome.seen(home)
}

/// What is seen of a recipe with this text.
#[track_caller]
fn refused_recipe(text: &str) -> String {
    let home = home();
    let path = home.path().join("mine.toml");
    std::fs::write(&path, text).expect("writes");
    trainer([path]).seen(home.path())
}

#[test]
fn a_recipe_that_is_not_there() {
    let home = home();
    let missing = home.path().join("mine.toml");
    assert_snapshot!(trainer([missing]).seen(home.path()), @"
    error: home/mine.toml: no such recipe; there are no recipes in home; check the path
    exit status 2
    ");
    assert_snapshot!(trainer(["recipes/quickstrat.toml"]).seen(home.path()), @"
    error: recipes/quickstrat.toml: no such recipe; did you mean recipes/quickstart.toml?
    exit status 2
    ");
}

#[test]
fn a_recipe_that_is_wrong() {
    assert_snapshot!(refused_recipe("num_steps = 1\n[model\npath = \"x\"\n"), @"
    error: home/mine.toml:2:7: not TOML: unclosed table, expected `]`; the line reads `[model`
    exit status 2
    ");
    assert_snapshot!(refused_recipe("num_steps = \"many\"\n"), @r#"
    error: home/mine.toml:1: `num_steps` is the string "many", expected a whole number, 0 or more
    exit status 2
    "#);
    assert_snapshot!(refused_recipe("[rollout]\nmax_response_tokens = -1\n"), @"
    error: home/mine.toml:2: `rollout.max_response_tokens` is -1, expected a whole number, 0 or more
    exit status 2
    ");
    assert_snapshot!(refused_recipe("name = \"x\"\n[optimizer]\nlerning_rate = 1e-3\n"), @"
    error: home/mine.toml:3: unknown key `optimizer.lerning_rate`; did you mean `optimizer.learning_rate`?
    exit status 2
    ");
    assert_snapshot!(refused_recipe("name = \"x\"\n"), @r#"
    error: home/mine.toml: `model.path` is not set, expected a checkpoint folder; add `path = "..."` under [model]
    exit status 2
    "#);
    let home = home();
    assert_snapshot!(refused(home.path(), "optimizer.learning_rate=fast"), @r#"
    error: --set optimizer.learning_rate=fast: `optimizer.learning_rate` is the string "fast", expected a number
    exit status 2
    "#);
    assert_snapshot!(refused(home.path(), "rollouts.temperature=1"), @"
    error: --set rollouts.temperature=1: unknown key `rollouts`; did you mean `rollout`?
    exit status 2
    ");
}

/// What is seen when the training prompts are this text.
#[track_caller]
fn refused_prompts(text: &str) -> String {
    let home = home();
    let path = home.path().join("mine.jsonl");
    std::fs::write(&path, text).expect("writes");
    refused(home.path(), &format!("prompts.path={}", path.display()))
}

#[test]
fn prompts_that_are_wrong() {
    const GOOD: &str =
        r#"{"prompt": "pinto", "answer": "otnip", "metadata": {"source_dataset": "spell_backward", "word": "pinto"}}"#;
    let home = home();
    let missing = home.path().join("mine.jsonl");
    assert_snapshot!(refused(home.path(), &format!("prompts.path={}", missing.display())), @"
    error: `prompts.path`: cannot read home/mine.jsonl: No such file or directory (os error 2)
    exit status 2
    ");
    assert_snapshot!(refused(home.path(), &format!("prompts.eval_path={}", missing.display())), @"
    error: `prompts.eval_path`: cannot read home/mine.jsonl: No such file or directory (os error 2)
    exit status 2
    ");
    assert_snapshot!(refused(home.path(), "prompts.path=README.md"), @"
    error: `prompts.path`: README.md: prompts are read from `.jsonl` and `.parquet` files, and this name ends in `.md`; convert the file or rename it
    exit status 2
    ");
    assert_snapshot!(refused_prompts(""), @"
    error: `prompts.path`: home/mine.jsonl: the file has no rows, expected one prompt a row; fill it or name another file
    exit status 2
    ");
    assert_snapshot!(refused_prompts(&format!("{GOOD}\n{}\n", GOOD.replace("answer", "anwser"))), @"
    error: `prompts.path`: home/mine.jsonl: line 2: column `answer` is missing, expected text or a number; fix the row or set `prompts.skip_bad_rows = true`
    exit status 2
    ");
    assert_snapshot!(refused_prompts(&GOOD.replace("answer", "anwser")), @"
    error: `prompts.path`: home/mine.jsonl: no row has a column `answer`; the columns are `prompt`, `anwser`, `metadata`, and the nearest is `anwser`; name the one you mean under `[prompts]`
    exit status 2
    ");
    assert_snapshot!(refused_prompts(&format!("{GOOD}\n{}\n", &GOOD[..40])), @"
    error: `prompts.path`: home/mine.jsonl: line 2: broken JSON at column 40: EOF while parsing a string; fix the row or set `prompts.skip_bad_rows = true`
    exit status 2
    ");
    assert_snapshot!(refused_prompts(&GOOD.replace("spell_backward", "spell_forward")), @r#"
    error: home/mine.jsonl: prompt row 0: `metadata.source_dataset` holds "spell_forward", but the reward `reasoning_gym` expects one of base_conversion, basic_arithmetic, bitwise_arithmetic, calendar_arithmetic, chain_sum, countdown, decimal_arithmetic, decimal_chain_sum, fraction_simplification, gcd, lcm, leg_counting, letter_counting, mini_sudoku, number_filtering, number_sorting, prime_factorization, products, puzzle24, simple_equations, spell_backward, word_sorting; correct the row, or set the recipe's `reward.type` to the rule that fits this data set
    exit status 2
    "#);
    assert_snapshot!(refused_prompts(&GOOD.replace(r#""pinto", "a"#, &format!(r#""{}", "a"#, "p".repeat(5000)))), @"
    error: `prompts.path`: home/mine.jsonl: row 0 has 5003 tokens; with up to 12 more it exceeds the model's context of 4096: shorten the prompt or lower `rollout.max_response_tokens`
    exit status 2
    ");
    // A control token spelled by a data set is read as its twelve letters.
    let roles = GOOD.replace(r#""pinto", "a"#, &format!(r#""{}", "a"#, "<｜User｜>".repeat(400)));
    assert_snapshot!(refused_prompts(&roles), @"
    error: `prompts.path`: home/mine.jsonl: row 0 has 4803 tokens; with up to 12 more it exceeds the model's context of 4096: shorten the prompt or lower `rollout.max_response_tokens`
    exit status 2
    ");
}

/// A copy of the quick start's model in `home/model`.
struct ModelCopy {
    home: tempfile::TempDir,
}

impl ModelCopy {
    fn new() -> Self {
        let copy = Self { home: home() };
        std::fs::create_dir(copy.dir()).expect("a folder can be made");
        for name in ["config.json", "model.safetensors", "tokenizer.json"] {
            std::fs::copy(root().join("recipes/quickstart_base").join(name), copy.dir().join(name)).expect("copies");
        }
        copy
    }

    fn dir(&self) -> PathBuf {
        self.home.path().join("model")
    }

    /// Sets a field of its configuration.
    fn set(self, field: &str, value: impl Into<serde_json::Value>) -> Self {
        let path = self.dir().join("config.json");
        let text = std::fs::read_to_string(&path).expect("reads");
        let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        config[field] = value.into();
        std::fs::write(path, config.to_string()).expect("writes");
        self
    }

    /// Changes its tensors.
    fn edit(self, change: impl FnOnce(&mut Weights)) -> Self {
        let config = ModelConfig::load(&self.dir().join("config.json")).expect("a configuration");
        let mut weights = load_weights(&self.dir(), &config).expect("weights");
        change(&mut weights);
        save_weights(&self.dir().join("model.safetensors"), &weights).expect("writes");
        self
    }

    /// Replaces one of its files.
    fn replace(self, name: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Self {
        let path = self.dir().join(name);
        std::fs::write(&path, change(std::fs::read(&path).expect("reads"))).expect("writes");
        self
    }

    #[track_caller]
    fn refused(&self) -> String {
        refused(self.home.path(), &format!("model.path={}", self.dir().display()))
    }
}

#[test]
fn a_model_that_is_not_there() {
    let home = home();
    assert_snapshot!(refused(home.path(), &format!("model.path={}", home.path().join("model").display())), @"
    error: `model.path`: cannot read home/model/config.json (a model's folder holds config.json, model.safetensors and tokenizer.json): No such file or directory (os error 2)
    exit status 2
    ");
    let model = ModelCopy::new();
    std::fs::remove_file(model.dir().join("model.safetensors")).expect("removes");
    assert_snapshot!(model.refused(), @"
    error: `model.path`: cannot read home/model/model.safetensors (a model's folder holds config.json, model.safetensors or model.safetensors.index.json with its files, and tokenizer.json): No such file or directory (os error 2)
    exit status 2
    ");
    std::fs::remove_file(model.dir().join("tokenizer.json")).expect("removes");
    assert_snapshot!(model.refused(), @"
    error: `model.path`: cannot read the tokenizer home/model/tokenizer.json: No such file or directory (os error 2); copy it from the folder of the model's release
    exit status 2
    ");
}

#[test]
fn a_model_of_another_kind() {
    let llama = br#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}"#;
    assert_snapshot!(ModelCopy::new().replace("config.json", |_| llama.to_vec()).refused(), @"
    error: `model.path`: home/model/config.json: `model_type` is `llama`, expected `deepseek_v4`; correct the file or choose another model
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().replace("config.json", |text| text[..100].to_vec()).refused(), @"
    error: `model.path`: home/model/config.json: not a DeepSeek-V4 configuration: EOF while parsing a string at line 4 column 21; copy it again
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().set("scoring_func", "softmax").refused(), @"
    error: `model.path`: home/model/config.json: `scoring_func` is `softmax`, expected `sqrtsoftplus`; correct the file or choose another model
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().set("eos_token_id", 272).refused(), @"
    error: `model.path`: home/model/config.json: `eos_token_id` is 272, expected below vocab_size (272); correct the file or choose another model
    exit status 2
    ");
    // The tokenizer knows more tokens than the model.
    assert_snapshot!(ModelCopy::new().set("vocab_size", 200).refused(), @"
    error: `model.path`: home/model/tokenizer.json: token 267 lies outside the model's vocabulary of 200; the two do not belong together; take both from one folder
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().replace("tokenizer.json", |text| text[..1000].to_vec()).refused(), @"
    error: `model.path`: cannot read the tokenizer home/model/tokenizer.json: EOF while parsing a string at line 56 column 7; copy it from the folder of the model's release
    exit status 2
    ");
}

#[test]
fn a_checkpoint_that_is_damaged() {
    let tensor = |weights: &mut Weights, change: &dyn Fn(&mut HostTensor)| {
        change(weights.get_mut("layers.1.attn_norm.weight").expect("a tensor of the model"));
    };
    let missing = ModelCopy::new().edit(|weights| drop(weights.remove("layers.2.attn.wkv.weight")));
    assert_snapshot!(missing.refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `layers.2.attn.wkv.weight` is missing; config.json asks for it with shape [64, 128]; copy the file again or correct config.json
    exit status 2
    ");
    let cut = |bytes: Vec<u8>| bytes[..bytes.len() / 2].to_vec();
    assert_snapshot!(ModelCopy::new().replace("model.safetensors", cut).refused(), @"
    error: `model.path`: home/model/model.safetensors: damaged or not a safetensors file (by its header it would be 5591724 bytes long; 2795862 bytes); copy it again
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().replace("model.safetensors", |_| Vec::new()).refused(), @"
    error: `model.path`: home/model/model.safetensors: damaged or not a safetensors file (it ends before its header; 0 bytes); copy it again
    exit status 2
    ");
    let reshaped = ModelCopy::new().edit(|weights| tensor(weights, &|tensor| tensor.shape = vec![2, 64]));
    assert_snapshot!(reshaped.refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `layers.1.attn_norm.weight` has shape [2, 64], config.json says [128]; the two files do not belong together; take both from one folder
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().set("hidden_size", 64).refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `embed.weight` has shape [272, 128], config.json says [272, 64]; the two files do not belong together; take both from one folder
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().set("num_hidden_layers", 3).refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `layers.3.attn.attn_sink` is not part of the model that config.json describes; the two files do not belong together; take both from one folder
    exit status 2
    ");
    let nan = |tensor: &mut HostTensor| tensor.data = TensorData::F32([[1.0; 9].as_slice(), &[f32::NAN; 119]].concat());
    assert_snapshot!(ModelCopy::new().edit(|weights| tensor(weights, &nan)).refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `layers.1.attn_norm.weight` holds NaN at element 9; expected a finite number; take an earlier checkpoint
    exit status 2
    ");
    let integers = |tensor: &mut HostTensor| tensor.data = TensorData::I64(vec![1; 128]);
    assert_snapshot!(ModelCopy::new().edit(|weights| tensor(weights, &integers)).refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `layers.1.attn_norm.weight` is stored as I64; expected F32, BF16, F8_E4M3 or I8 (MXFP4); convert it
    exit status 2
    ");
    let stray = |weights: &mut Weights| {
        let table = weights.get_mut("layers.0.ffn.gate.tid2eid").expect("a hash table");
        let TensorData::I64(experts) = &mut table.data else { panic!("a table holds integers") };
        experts[5] = 8;
    };
    assert_snapshot!(ModelCopy::new().edit(stray).refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `layers.0.ffn.gate.tid2eid` holds 8 at element 5; expected an expert from 0 to 7; take an earlier checkpoint
    exit status 2
    ");
}

#[test]
fn multi_token_prediction_that_is_not_there() {
    assert_snapshot!(refused(home().path(), "train.mtp_loss_weight=0.3"), @"
    error: `train.mtp_loss_weight` is 0.3, but the model has no multi-token-prediction block; set it to 0
    exit status 2
    ");
    assert_snapshot!(refused(home().path(), "train.mtp_loss_weight=-1"), @"
    error: --set train.mtp_loss_weight=-1: `train.mtp_loss_weight` is -1, expected 0 or a number above; 0.1 to 0.3 is usual; 0 leaves it out
    exit status 2
    ");
    // A configuration that promises the block, and a checkpoint without it.
    assert_snapshot!(ModelCopy::new().set("num_nextn_predict_layers", 1).refused(), @"
    error: `model.path`: home/model/model.safetensors: tensor `mtp.0.e_proj.weight` is missing; config.json asks for it with shape [128, 128]; set `num_nextn_predict_layers` to 0 in config.json if the model comes without multi-token prediction
    exit status 2
    ");
    assert_snapshot!(ModelCopy::new().set("num_nextn_predict_layers", 2).refused(), @"
    error: `model.path`: home/model/config.json: `num_nextn_predict_layers` is 2, expected 0 or 1; correct the file or choose another model
    exit status 2
    ");
    let ratios = vec![0, 4, 8, 4, 4];
    let compressed = ModelCopy::new().set("num_nextn_predict_layers", 1).set("compress_ratios", ratios);
    assert_snapshot!(compressed.refused(), @"
    error: `model.path`: home/model/config.json: `compress_ratios` is a list with 4 for the multi-token-prediction block, expected 0 there: it has a sliding window only; correct the file or choose another model
    exit status 2
    ");
}

#[test]
fn an_output_dir_that_cannot_be_used() {
    let home = home();
    std::fs::write(home.path().join("runs"), "").expect("writes");
    assert_snapshot!(refused(home.path(), ""), @"
    error: home/runs is a file, expected a folder; move it away or set `output_dir` to another folder
    exit status 2
    ");
    assert_snapshot!(refused(home.path(), &format!("output_dir={}", home.path().join("runs/deeper").display())), @"
    error: home/runs is a file, expected a folder; move it away or set `output_dir` to another folder
    exit status 2
    ");
    let mut dry = args("train", QUICKSTART, home.path(), SMALL);
    dry.push("--dry-run".into());
    assert_snapshot!(trainer(dry).seen(home.path()), @"
    error: home/runs is a file, expected a folder; move it away or set `output_dir` to another folder
    exit status 2
    ");

    // A folder without write permission; root writes anyway, but not even root makes folders in /proc.
    let locked = home.path().join("locked");
    std::fs::create_dir(&locked).expect("a folder can be made");
    let mut permissions = std::fs::metadata(&locked).expect("there").permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&locked, permissions).expect("its owner may");
    let is_root = std::fs::write(locked.join("probe"), "").is_ok();
    let locked = if is_root { PathBuf::from("/proc/self/fdinfo") } else { locked };
    let seen = refused(home.path(), &format!("output_dir={}", locked.display()));
    let seen = seen.replace(&*locked.to_string_lossy(), "home/locked").replace("/proc/self/fdinfo", "home/locked");
    let (sentence, reason_and_status) = seen.split_once("): ").expect("the system's reason");
    assert_snapshot!(sentence, @"error: cannot make the run folder home/locked/quickstart (set `output_dir` to a folder that can be written to");
    assert!(reason_and_status.ends_with("exit status 2"), "{reason_and_status}");
}

#[test]
fn runs_to_report_that_are_not_there() {
    let home = home();
    let (run, out) = (home.path().join("runs/x"), home.path().join("x.svg"));
    assert_snapshot!(trainer(["report".into(), run, "--out".into(), out]).seen(home.path()), @"
    error: home/runs/x is not a run that can be drawn: cannot open home/runs/x/metrics.jsonl: No such file or directory (os error 2)
    exit status 2
    ");
}

/// Runs on a disk of `size` bytes at `home/disk`: a file system in memory, in a mount namespace of the run's own.
/// `None`, and a sentence, where the system allows neither root nor users to make one.
fn on_a_small_disk(size: &str, home: &Path, task_args: Vec<String>) -> Option<(Outcome, RunFolder)> {
    let disk = home.join("disk");
    std::fs::create_dir(&disk).expect("a folder can be made");
    let run = |user: &[&str], script: &str| {
        let mut words: Vec<String> = user.iter().map(|word| (*word).to_owned()).collect();
        words.extend(["--mount", "sh", "-c", script, size].map(str::to_owned));
        words.push(disk.to_string_lossy().into_owned());
        words.push(TRAINER.to_owned());
        words.extend(task_args.iter().cloned());
        command("unshare", words).output().map(Outcome::from)
    };
    // Seen from outside, the disk is gone with the run: its files are copied to `home/kept`.
    const MOUNT: &str = r#"mount -t tmpfs -o "size=$0" tmpfs "$1""#;
    const RUN: &str = r#"disk=$1; shift; "$@"; status=$?; cp -a "$disk/." "$disk/../kept" && exit $status"#;
    for user in [["--user", "--map-root-user"].as_slice(), &[]] {
        if run(user, MOUNT).is_ok_and(|outcome| outcome.status == Some(0)) {
            let outcome = run(user, &format!("{MOUNT} && {RUN}")).expect("it did run");
            let name = names_in(&home.join("kept")).pop_first().expect("a run folder");
            return Some((outcome, RunFolder(home.join("kept").join(name))));
        }
    }
    eprintln!("skipped: this system lets nobody mount a small disk (`unshare --user --map-root-user --mount`)");
    None
}

/// Runs where no file may grow beyond `blocks` of 512 bytes, and writing more is an error.
fn with_small_files(blocks: u32, home: &Path, task_args: Vec<String>) -> (Outcome, RunFolder) {
    const RUN: &str = r#"trap '' XFSZ; ulimit -f "$0" && exec "$@""#;
    let words = ["-c", RUN, &blocks.to_string(), TRAINER].map(str::to_owned).into_iter().chain(task_args);
    let outcome = command("sh", words).output().expect("sh is there").into();
    let name = names_in(&home.join("runs")).pop_first().expect("a run folder");
    (outcome, RunFolder(home.join("runs").join(name)))
}

/// A learning task that writes nothing but metrics until it ends.
fn metrics_only(home: &Path, output_dir: &str) -> Vec<String> {
    let sets = "sft.batch_size=1 sft.num_steps=200 sft.eval_every_steps=0 eval.num_prompts=4 threads=1";
    let mut args = args("sft", "recipes/quickstart_base.toml", home, sets);
    args.extend(["--set".into(), format!("output_dir={}", home.join(output_dir).display())]);
    args
}

fn quickstart(home: &Path, output_dir: &str, sets: &str) -> Vec<String> {
    args("train", QUICKSTART, home, &format!("{SMALL} {sets} output_dir={}", home.join(output_dir).display()))
}

#[test]
fn no_room_for_metrics() {
    let home = home();
    let (outcome, run) = with_small_files(8, home.path(), metrics_only(home.path(), "runs"));
    assert_snapshot!(outcome.ending(home.path()), @"
    error: cannot write to home/runs/quickstart_base/metrics.jsonl: File too large (os error 27); free some space or set `output_dir` to another disk
    exit status 1
    ");
    run.assert_whole(Ending::Clean);
    assert!(run.steps().len() > 10, "{}", outcome.stderr);

    let Some((outcome, run)) = on_a_small_disk("8k", home.path(), metrics_only(home.path(), "disk")) else { return };
    assert_snapshot!(outcome.ending(home.path()), @"
    error: cannot write to home/disk/quickstart_base/metrics.jsonl: No space left on device (os error 28); free some space or set `output_dir` to another disk
    exit status 1
    ");
    run.assert_whole(Ending::Clean);
    assert!(run.steps().len() > 10, "{}", outcome.stderr);
}

#[test]
fn no_room_for_trajectories() {
    let home = home();
    let sets = "prompts_per_step=8 group_size=4";
    let (outcome, run) = with_small_files(16, home.path(), quickstart(home.path(), "runs", sets));
    assert_snapshot!(outcome.ending(home.path()), @"
    error: cannot write home/runs/quickstart/rollouts/step-000001.parquet: File too large (os error 27); free some space or set `output_dir` to another disk
    exit status 1
    ");
    run.assert_whole(Ending::Clean);
    assert_eq!(names_in(&run.0.join("rollouts")).len(), 0);

    let Some((outcome, run)) = on_a_small_disk("32k", home.path(), quickstart(home.path(), "disk", "")) else { return };
    assert_snapshot!(outcome.ending(home.path()), @"
    error: home/disk/quickstart/rollouts/step-000003.parquet: no room left on the disk for the trajectories of step 3, and nothing half-written was kept; free some space
    exit status 1
    ");
    run.assert_whole(Ending::Clean);
    assert_eq!(run.steps().len(), 2);
    assert_eq!(names_in(&run.0.join("rollouts")).len(), 2, "the steps before are there");
}

#[test]
fn no_room_for_a_checkpoint() {
    let home = home();
    let (outcome, run) = with_small_files(4096, home.path(), quickstart(home.path(), "runs", ""));
    assert_snapshot!(outcome.ending(home.path()), @"
    error: checkpoint of step 3: cannot write home/runs/quickstart/checkpoints/step-000003/model.safetensors; nothing of it was kept: File too large (os error 27); free some space or set `output_dir` to another disk
    exit status 1
    ");
    run.assert_whole(Ending::Clean);
    assert!(run.checkpoints().is_empty());

    // One checkpoint takes 16 MB.
    let args = quickstart(home.path(), "disk", "checkpoint.every_steps=1");
    let Some((outcome, run)) = on_a_small_disk("30m", home.path(), args) else { return };
    assert_snapshot!(outcome.ending(home.path()), @"
    error: checkpoint of step 2: cannot write home/disk/quickstart/checkpoints/step-000002/optimizer.safetensors; nothing of it was kept: No space left on device (os error 28); free some space or set `output_dir` to another disk
    exit status 1
    ");
    run.assert_whole(Ending::Clean);
    assert_eq!(run.checkpoints(), [1], "the checkpoint before is there");
}

#[test]
fn no_room_for_anything() {
    let home = home();
    let Some((outcome, run)) = on_a_small_disk("4k", home.path(), quickstart(home.path(), "disk", "")) else { return };
    assert_snapshot!(outcome.ending(home.path()), @"
    error: cannot write to home/disk/quickstart/metrics.jsonl: No space left on device (os error 28); free some space or set `output_dir` to another disk
    exit status 1
    ");
    run.assert_whole(Ending::Clean);
}

/// Sends a signal, and holds the run to a clean end within seconds: its exit status, its summary, its files.
#[track_caller]
fn assert_stops(running: Running, signal: &str, home: &Path) -> (String, RunFolder) {
    running.signal(signal);
    let sent = Instant::now();
    let (outcome, run) = running.outcome();
    let seconds = sent.elapsed();
    assert_eq!(outcome.status, Some(130), "{}", outcome.stderr);
    assert!(seconds < Duration::from_secs(15), "the run took {seconds:?} to stop");
    run.assert_whole(Ending::Clean);
    let seen = outcome.seen(home);
    let summary = seen.split_once("\nstopped after").unwrap_or_else(|| panic!("no summary in {seen}")).1;
    (format!("stopped after{summary}"), run)
}

/// A summary without its seconds and rewards.
fn without_numbers(summary: &str) -> String {
    summary.lines().map(|line| line.split_once(", ").map_or(line, |(steps, _)| steps)).collect::<Vec<_>>().join("\n")
}

#[test]
fn ctrl_c_while_responses_are_sampled() {
    let stopped_by = |signal| {
        let home = home();
        // So hot that responses go on to their limit: a step would take half a minute.
        let sets = "num_steps=5 prompts_per_step=32 group_size=8 rollout.temperature=1000 \
                    rollout.max_response_tokens=3000 pack.row_tokens=4096 pack.microbatch_tokens=4096 \
                    eval.num_prompts=1 eval.samples_per_prompt=1 threads=2";
        let mut running = Running::start(args("train", QUICKSTART, home.path(), sets), home.path(), "quickstart");
        running.wait_until("it samples", |run| run.num_lines() == 1 && run.has_thread("rollout-1"));
        let (summary, run) = assert_stops(running, signal, home.path());
        assert_eq!(run.steps().len(), 0);
        without_numbers(&summary)
    };
    let summary = stopped_by("INT");
    assert_snapshot!(summary, @"
    stopped after 0 steps of 5
      run         home/runs/quickstart
      curve       trainer report home/runs/quickstart --out curve.svg
    exit status 130
    ");
    assert_eq!(stopped_by("TERM"), summary);
}

#[test]
fn ctrl_c_while_gradients_are_made() {
    let home = home();
    let sets = "num_steps=50 prompts_per_step=16 eval.num_prompts=1 eval.samples_per_prompt=1 \
                pack.microbatch_tokens=256 pack.row_tokens=256";
    let mut running = Running::start(args("train", QUICKSTART, home.path(), sets), home.path(), "quickstart");
    running.wait_until("it trains", |run| run.num_lines() == 2 && run.has_thread("train-0"));
    let (summary, run) = assert_stops(running, "INT", home.path());
    // The evaluation's line, the first step's, and of the step that was under way nothing.
    assert_eq!(run.steps().len(), 1);
    assert_eq!(run.checkpoints(), [1]);
    assert_snapshot!(without_numbers(&summary), @"
    stopped after 1 step of 50
      run         home/runs/quickstart
      checkpoint  home/runs/quickstart/checkpoints/step-000001
      curve       trainer report home/runs/quickstart --out curve.svg
    exit status 130
    ");
}

#[test]
fn ctrl_c_while_answers_are_learned() {
    let home = home();
    let sets = "sft.num_steps=10000 sft.eval_every_steps=0 sft.batch_size=8 eval.num_prompts=4";
    let recipe = "recipes/quickstart_base.toml";
    let mut running = Running::start(args("sft", recipe, home.path(), sets), home.path(), "quickstart_base");
    running.wait_until("it learns", |run| run.num_lines() >= 2);
    let (_, run) = assert_stops(running, "INT", home.path());
    assert_eq!(run.checkpoints(), [run.steps().len()]);
}

#[test]
fn a_kill_at_any_moment_leaves_whole_files() {
    let sets = "num_steps=1000 prompts_per_step=2 group_size=2 eval.num_prompts=1 eval.samples_per_prompt=1 \
                eval.every_steps=1 checkpoint.every_steps=1 checkpoint.keep_last=1 threads=1";
    let start = |home: &Path| {
        let mut running = Running::start(args("train", QUICKSTART, home, sets), home, "quickstart");
        running.wait_until("a first checkpoint", |run| !run.folder.checkpoints().is_empty());
        running
    };
    // Moments that differ from run to run, and are told.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let mut random = now.subsec_nanos();
    for _ in 0..4 {
        random = random.wrapping_mul(1664525).wrapping_add(1013904223);
        let moment = Duration::from_micros(u64::from(random) % 700_000);
        let home = home();
        let mut running = start(home.path());
        std::thread::sleep(moment);
        running.kill();
        println!("killed {moment:?} after the first checkpoint");
        let (outcome, run) = running.outcome();
        assert_eq!(outcome.status, None, "{}", outcome.stderr);
        run.assert_whole(Ending::Killed);
    }
    // And while a checkpoint is half-written.
    let home = home();
    let mut running = start(home.path());
    running.wait_until("a checkpoint is half-written", |run| {
        names_in(&run.folder.0.join("checkpoints")).iter().any(|name| name.ends_with(".partial"))
    });
    running.kill();
    let (_, run) = running.outcome();
    run.assert_whole(Ending::Killed);
    assert!(!run.checkpoints().is_empty(), "the checkpoint before is there");
}
