//! The program as a person runs it, and what it must leave behind.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use datasets::read_trajectories;
use rollout::model::checkpoint::load_weights;
use rollout::model::{HostTensor, ModelConfig, Weights};
use rollout::tokenizer::Tokenizer;
use safetensors::SafeTensors;
use tempfile::TempDir;
use trainer::optimizer::Optimizer;
use trainer::policy::{Frozen, Policy};
use trainer::recipe::{Recipe, Task};
use trainer::tracking::{Metrics, read_metrics};

/// The binary.
pub const TRAINER: &str = env!("CARGO_BIN_EXE_trainer-under-test");

/// The folder of the workspace: recipes name their files from there.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace")
}

/// A folder of the test's own, gone when dropped.
pub fn home() -> TempDir {
    tempfile::Builder::new().prefix("furlong-").tempdir().expect("a folder can be made")
}

/// How a run ended and what it said.
pub struct Outcome {
    /// `None` if a signal ended it.
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

impl Outcome {
    /// What a person reads, with `home` for the test's folder and `trainer` for the program, and the exit status.
    pub fn seen(&self, home: &Path) -> String {
        let status = self.status.map_or("a signal".into(), |status| status.to_string());
        let text = format!("{}exit status {status}", self.stderr);
        text.replace(&*home.to_string_lossy(), "home").replace(TRAINER, "trainer")
    }

    /// The last line of what a person reads, which is the error, and the exit status.
    pub fn ending(&self, home: &Path) -> String {
        let seen = self.seen(home);
        let lines: Vec<&str> = seen.lines().collect();
        lines[lines.len().saturating_sub(2)..].join("\n")
    }

    /// Itself, if the run did what was asked.
    #[track_caller]
    pub fn done(self) -> Self {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        self
    }
}

/// A command of the program: arguments as words, run in the workspace.
pub fn command<S: AsRef<std::ffi::OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(root()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("NO_COLOR", "1").env_remove("RUST_BACKTRACE");
    command
}

/// Runs the program to its end.
pub fn trainer<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Outcome {
    command(TRAINER, args).output().expect("the program starts").into()
}

/// The arguments of a recipe laid over with `key=value` words, its run folder in `home/runs` unless they say otherwise.
pub fn args(task: &str, recipe: &str, home: &Path, sets: &str) -> Vec<String> {
    let mut args = vec![task.to_owned(), recipe.to_owned()];
    let output_dir = format!("output_dir={}", home.join("runs").display());
    for set in [output_dir.as_str()].into_iter().chain(sets.split_whitespace()) {
        args.extend(["--set".to_owned(), set.to_owned()]);
    }
    args
}

/// A run's folder.
pub struct RunFolder(pub PathBuf);

/// What may lie in a run's folder beside whole files.
#[derive(Clone, Copy, PartialEq)]
pub enum Ending {
    /// By itself, by an error or by Ctrl-C: nothing.
    Clean,
    /// By a kill: a torn last line of metrics, and hidden parts of files.
    Killed,
}

impl RunFolder {
    /// The lines of `metrics.jsonl`.
    pub fn metrics(&self) -> Vec<(usize, Metrics)> {
        read_metrics(&self.0.join("metrics.jsonl")).expect("every line is whole")
    }

    /// The metrics of the training steps, in order: lines that hold a loss.
    pub fn steps(&self) -> Vec<Metrics> {
        let lines = self.metrics().into_iter().filter(|(_, metrics)| metrics.contains_key("train/loss"));
        let (numbers, metrics): (Vec<_>, Vec<_>) = lines.unzip();
        assert_eq!(numbers, (1..=metrics.len()).collect::<Vec<_>>(), "steps are logged once, in order");
        metrics
    }

    /// The metrics of the evaluations, in order.
    pub fn evals(&self) -> Vec<Metrics> {
        let lines = self.metrics().into_iter().filter(|(_, metrics)| metrics.contains_key("eval/reward"));
        lines.map(|(_, metrics)| metrics).collect()
    }

    /// The steps of the checkpoints that are there.
    pub fn checkpoints(&self) -> Vec<usize> {
        let names = names_in(&self.0.join("checkpoints"));
        let steps = names.iter().filter_map(|name| name.strip_prefix("step-"));
        steps.map(|step| step.parse().expect("a checkpoint is named by its step")).collect()
    }

    /// The folder of a checkpoint.
    pub fn checkpoint(&self, step: usize) -> PathBuf {
        self.0.join(format!("checkpoints/step-{step:06}"))
    }

    /// Every file is one that a run makes, and whole.
    #[track_caller]
    pub fn assert_whole(&self, ending: Ending) {
        let at = |name: &str| self.0.join(name);
        for name in self.visible(".", ending) {
            match name.as_str() {
                "recipe.toml" => {
                    let text = std::fs::read_to_string(at(&name)).expect("reads");
                    let recipe = Recipe::load(&[at(&name)], &[], task_of(&text)).expect("a recipe");
                    assert_eq!(recipe.to_toml(), text);
                }
                "metrics.jsonl" => {
                    let bytes = std::fs::read(at(&name)).expect("reads");
                    let is_torn = bytes.last().is_some_and(|&byte| byte != b'\n');
                    assert!(!is_torn || ending == Ending::Killed, "the last line is torn");
                    self.metrics();
                }
                "rollouts" => {
                    for name in self.visible("rollouts", ending) {
                        let rows = read_trajectories(&at("rollouts").join(&name)).expect("whole");
                        let step = rows.first().expect("a step has rollouts").step;
                        assert_eq!(name, format!("step-{step:06}.parquet"));
                    }
                }
                "checkpoints" => {
                    for name in self.visible("checkpoints", ending) {
                        assert_checkpoint(&at("checkpoints").join(name));
                    }
                }
                other => panic!("{other} in the run's folder"),
            }
        }
    }

    /// The names in a folder of the run, hidden ones left out after a kill.
    fn visible(&self, folder: &str, ending: Ending) -> Vec<String> {
        let mut names: Vec<String> = names_in(&self.0.join(folder)).into_iter().collect();
        if ending == Ending::Killed {
            names.retain(|name| !name.starts_with('.'));
        }
        names
    }
}

/// A recipe that trains fresh weights names them under `[sft]`.
pub fn task_of(recipe: &str) -> Task {
    let is_model = |line: &str| line.starts_with("model = ");
    if recipe.lines().any(is_model) { Task::Sft } else { Task::Train }
}

/// What is in a folder; nothing if it is not there.
pub fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.expect("lists").file_name().to_string_lossy().into_owned()).collect()
}

#[track_caller]
fn assert_checkpoint(dir: &Path) {
    let names = ["config.json", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"];
    assert_eq!(names_in(dir).into_iter().collect::<Vec<_>>(), names, "{}", dir.display());
    let config = ModelConfig::load(&dir.join("config.json")).expect("a configuration");
    Tokenizer::load(dir, config.vocab_size).expect("a tokenizer");
    let weights = load_weights(dir, &config).expect("all tensors");
    let state = std::fs::read_to_string(dir.join("state.json")).expect("reads");
    let state: serde_json::Value = serde_json::from_str(&state).expect("JSON");
    // The recipe's optimizer takes up its saved state, and nothing of it is left over.
    let recipe = dir.ancestors().nth(2).expect("a run's folder").join("recipe.toml");
    let task = task_of(&std::fs::read_to_string(&recipe).expect("reads"));
    let recipe = Recipe::load(&[recipe], &[], task).expect("a recipe");
    let frozen = Frozen::new(&recipe.train, &config).expect("makes sense");
    let policy = Policy::with_frozen(&config, &weights, tch::Device::Cpu, &|name| frozen.contains(name));
    let mut optimizer = Optimizer::new(&recipe.optimizer, &policy.expect("a policy"));
    let bytes = std::fs::read(dir.join("optimizer.safetensors")).expect("reads");
    let saved = SafeTensors::deserialize(&bytes).expect("tensors");
    let floats = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let saved: Weights =
        saved.iter().map(|(name, t)| (name.to_owned(), HostTensor::f32(t.shape(), floats(t.data())))).collect();
    optimizer.restore(&saved, state["optimizer_steps"].as_u64().expect("steps")).expect("the recipe's optimizer");
    assert!(optimizer.state() == saved, "{}: more state than the optimizer keeps", dir.display());
    let step = state["step"].as_u64().expect("the step");
    assert!(dir.ends_with(format!("step-{step:06}")), "{} is of step {step}", dir.display());
}

/// A run under way.
pub struct Running {
    child: Child,
    pub folder: RunFolder,
}

impl Running {
    /// Starts a recipe; its run folder is `name`.
    pub fn start(args: Vec<String>, home: &Path, name: &str) -> Self {
        let child = command(TRAINER, args).spawn().expect("the program starts");
        Self { child, folder: RunFolder(home.join("runs").join(name)) }
    }

    /// Waits until something is so.
    #[track_caller]
    pub fn wait_until(&mut self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        let started = Instant::now();
        while !is_so(self) {
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                panic!("the run ended ({status}) before {what}");
            }
            assert!(started.elapsed() < Duration::from_secs(100), "waited in vain for {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lines in `metrics.jsonl` by now.
    pub fn num_lines(&self) -> usize {
        let bytes = std::fs::read(self.folder.0.join("metrics.jsonl")).unwrap_or_default();
        bytes.iter().filter(|&&byte| byte == b'\n').count()
    }

    /// Whether a thread of that name lives: `rollout-0` while responses are sampled, `train-0` while gradients are made.
    pub fn has_thread(&self, name: &str) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).into_iter().flatten().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.into_iter().any(|comm| comm.trim_end() == name)
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(status.expect("kill is there").success());
    }

    /// Ends it as a power cut would.
    pub fn kill(&mut self) {
        self.child.kill().expect("a child can be killed");
    }

    /// Waits for its end, at most a minute.
    #[track_caller]
    pub fn outcome(mut self) -> (Outcome, RunFolder) {
        let started = Instant::now();
        while self.child.try_wait().expect("a child can be waited for").is_none() {
            if started.elapsed() > Duration::from_secs(60) {
                self.kill();
                panic!("the run did not end");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        (self.child.wait_with_output().expect("its output").into(), self.folder)
    }
}
