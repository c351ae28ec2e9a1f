//! What a person sees while a run goes on, on stderr: progress bars on a terminal, one line per step elsewhere.
//!
//! Plain lines carry no control codes. They are also what a terminal gets that asks for none (`NO_COLOR`, `TERM=dumb`).
//! Writing never fails: a log that nobody reads must not stop a run.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::console::{Style, Term};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Without a terminal, a step that takes longer than this says how far it is.
const SILENCE: Duration = Duration::from_secs(30);

/// What a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Sampling responses to training prompts.
    Rollout,
    /// Scoring them.
    Reward,
    /// Forward, backward, update.
    Train,
    /// Handing new weights to the engine.
    Sync,
    /// Sampling and scoring held-out prompts.
    Eval,
}

impl Stage {
    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rollout => "rollout",
            Self::Reward => "reward",
            Self::Train => "train",
            Self::Sync => "sync",
            Self::Eval => "eval",
        }
    }
}

/// What is said of a run before it starts.
#[derive(Clone, Debug)]
pub struct Header {
    /// The run's name.
    pub name: String,
    /// Where the model came from.
    pub model: String,
    /// Its parameters: all, and those that one token uses.
    pub num_parameters: (usize, usize),
    /// Where the arithmetic runs.
    pub device: String,
    /// Threads for it.
    pub threads: usize,
    /// The recipe files, as they were given.
    pub recipe: String,
    /// The run's folder.
    pub run_dir: PathBuf,
}

/// What is said of a step when it is over.
#[derive(Clone, Debug, Default)]
pub struct StepLine {
    /// Counted from 1.
    pub step: usize,
    /// Mean reward of the step's rollouts; `None` where there are none (`sft`).
    pub reward: Option<f64>,
    /// Mean length of the responses, in tokens.
    pub response_tokens: Option<f64>,
    /// Mean over the step's updates.
    pub loss: f64,
    /// Before clipping; mean over the step's updates.
    pub grad_norm: f64,
    /// Tokens trained on, per second of the whole step.
    pub tokens_per_s: f64,
    /// The whole step, in seconds. What is left of the run is estimated from it.
    pub step_time_s: f64,
    /// What the time went into, in seconds.
    pub stages_s: Vec<(Stage, f64)>,
}

/// What is said of an evaluation.
#[derive(Clone, Debug, Default)]
pub struct EvalLine {
    /// Steps that the model was trained for.
    pub step: usize,
    /// Mean reward over the held-out prompts.
    pub reward: f64,
    /// Responses it is the mean of.
    pub num_responses: usize,
    /// Responses that could not be judged.
    pub num_unscorable: usize,
    /// Mean length of the responses, in tokens.
    pub response_tokens: f64,
    /// How long it took.
    pub seconds: f64,
}

/// What is said at the end.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Steps that were made.
    pub steps: usize,
    /// How long they took, evaluations and all.
    pub seconds: f64,
    /// Ended by Ctrl-C or a signal.
    pub interrupted: bool,
    /// The last checkpoint, if there is one.
    pub checkpoint: Option<PathBuf>,
    /// The run's folder.
    pub run_dir: PathBuf,
    /// The program, as a shell would call it again.
    pub program: String,
}

/// The run as a person sees it. May be called from any thread.
pub struct Console {
    inner: Mutex<Inner>,
}

struct Inner {
    screen: Screen,
    num_steps: usize,
    step: usize,
    /// Steps over, in this process, with a running mean of their time that follows a change within ten steps or so.
    mean_step_s: Option<f64>,
    rewards: Vec<f64>,
    /// Step and reward.
    first_eval: Option<(usize, f64)>,
    last_eval: Option<(usize, f64)>,
    stage: Option<Stage>,
    stage_since: Instant,
    last_event: Instant,
    last_line: Instant,
}

enum Screen {
    Lines(Box<dyn Write + Send>),
    Bars(Bars),
}

struct Bars {
    multi: MultiProgress,
    step: ProgressBar,
    /// Rollout, reward, eval.
    gather: ProgressBar,
    /// Train, sync.
    update: ProgressBar,
    unicode: bool,
}

impl Console {
    /// The console of a run of `num_steps` steps: bars where stderr is a terminal that takes them, lines elsewhere.
    pub fn new(num_steps: usize) -> Self {
        let term = Term::stderr();
        if term.features().colors_supported() {
            let unicode = term.features().wants_emoji();
            Self::with(Screen::Bars(Bars::new(ProgressDrawTarget::stderr(), num_steps, unicode)), num_steps)
        } else {
            Self::lines(Box::new(std::io::stderr()), num_steps)
        }
    }

    /// Plain lines, wherever `out` leads.
    pub fn lines(out: Box<dyn Write + Send>, num_steps: usize) -> Self {
        Self::with(Screen::Lines(out), num_steps)
    }

    fn with(screen: Screen, num_steps: usize) -> Self {
        let now = Instant::now();
        let inner = Inner {
            screen,
            num_steps,
            step: 0,
            mean_step_s: None,
            rewards: Vec::new(),
            first_eval: None,
            last_eval: None,
            stage: None,
            stage_since: now,
            last_event: now,
            last_line: now,
        };
        Self { inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A thread that panicked while it printed has broken no invariant.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which model, where, from which recipe, into which folder.
    pub fn header(&self, header: &Header) {
        let mut inner = self.lock();
        let (total, active) = header.num_parameters;
        let title = inner.paint(&Style::new().bold(), &format!("furlong {}", header.name));
        inner.print(&title);
        for (label, text) in [
            ("model", format!("{}, {} parameters, {} active", header.model, count(total as f64), count(active as f64))),
            ("device", format!("{}, {}", header.device, plural(header.threads, "thread"))),
            ("recipe", header.recipe.clone()),
            ("run", header.run_dir.display().to_string()),
        ] {
            inner.print_field(label, &text);
        }
        inner.print("");
    }

    /// Step `step` (counted from 1) begins.
    pub fn step_started(&self, step: usize) {
        let mut inner = self.lock();
        inner.step = step;
        inner.stage = None;
        inner.last_event = Instant::now();
        if let Screen::Bars(bars) = &inner.screen {
            bars.step.set_position(step.saturating_sub(1) as u64);
            for (bar, stage) in [(&bars.gather, Stage::Rollout), (&bars.update, Stage::Train)] {
                // The length stays: the next batch is most often as long.
                bar.set_message("");
                bar.set_prefix(stage.name());
                bar.set_position(0);
            }
        }
    }

    /// A stage has done `done` of `total` pieces, with `tokens` tokens so far. Cheap; call it as often as you like.
    pub fn stage(&self, stage: Stage, done: usize, total: usize, tokens: usize) {
        let mut inner = self.lock();
        let now = Instant::now();
        if inner.stage != Some(stage) {
            inner.stage = Some(stage);
            inner.stage_since = inner.last_event;
        }
        inner.last_event = now;
        let seconds = now.duration_since(inner.stage_since).as_secs_f64();
        let speed = if tokens > 0 && seconds > 0.0 { rate(tokens as f64 / seconds) } else { String::new() };
        match &inner.screen {
            Screen::Bars(bars) => {
                let bar = match stage {
                    Stage::Rollout | Stage::Reward | Stage::Eval => &bars.gather,
                    Stage::Train | Stage::Sync => &bars.update,
                };
                bar.set_prefix(stage.name());
                bar.set_length(total as u64);
                bar.set_position(done as u64);
                // Scoring and handing over have no tokens: the speed of the stage before stays in sight.
                if !matches!(stage, Stage::Reward | Stage::Sync) {
                    bar.set_message(speed);
                }
            }
            Screen::Lines(_) => {
                if now.duration_since(inner.last_line) >= SILENCE {
                    let at = format!("step {}/{}  {} {done}/{total}", inner.step, inner.num_steps, stage.name());
                    inner.print(&if speed.is_empty() { at } else { format!("{at}  {speed}") });
                }
            }
        }
    }

    /// A step is over.
    pub fn step_finished(&self, line: &StepLine) {
        let mut inner = self.lock();
        let mean = inner.mean_step_s.map_or(line.step_time_s, |mean| mean + 0.1 * (line.step_time_s - mean));
        inner.mean_step_s = Some(mean);
        inner.rewards.extend(line.reward);
        let left = duration(mean * inner.num_steps.saturating_sub(line.step) as f64);
        let mut parts = Vec::new();
        if let Some(reward) = line.reward {
            parts.push(format!("reward {reward:.3}"));
        }
        match &inner.screen {
            Screen::Bars(bars) => {
                // The most telling first: a narrow terminal cuts the rest.
                if bars.unicode && inner.rewards.len() > 1 {
                    parts.push(sparkline(&inner.rewards, 12));
                }
                if line.reward.is_none() {
                    parts.push(format!("loss {}", number(line.loss)));
                }
                parts.push(format!("{left} left"));
                parts.push(format!("{} a step", duration(line.step_time_s)));
                parts.extend(line.response_tokens.map(|tokens| format!("length {tokens:.1}")));
                bars.step.set_position(line.step as u64);
                bars.step.set_message(parts.join("  "));
            }
            Screen::Lines(_) => {
                let width = inner.num_steps.to_string().len();
                let stages: Vec<String> =
                    line.stages_s.iter().map(|(stage, seconds)| format!("{} {seconds:.1}", stage.name())).collect();
                let split = if stages.is_empty() { String::new() } else { format!(" ({})", stages.join(", ")) };
                parts.insert(0, format!("step {:>width$}/{}", line.step, inner.num_steps));
                parts.extend(line.response_tokens.map(|tokens| format!("length {tokens:.1}")));
                parts.push(format!("loss {}", number(line.loss)));
                parts.push(format!("grad {}", number(line.grad_norm)));
                parts.push(rate(line.tokens_per_s));
                parts.push(format!("{:.1} s{split}", line.step_time_s));
                parts.push(format!("{left} left"));
                inner.print(&parts.join("  "));
            }
        }
    }

    /// An evaluation is over.
    pub fn eval(&self, line: &EvalLine) {
        let mut inner = self.lock();
        let since = match inner.first_eval {
            Some((step, reward)) => format!(" ({:+.3} since step {step})", line.reward - reward),
            None => String::new(),
        };
        inner.first_eval.get_or_insert((line.step, line.reward));
        inner.last_eval = Some((line.step, line.reward));
        let unscorable = match line.num_unscorable {
            0 => String::new(),
            n => format!(", {n} of them unscorable"),
        };
        let reward = inner.paint(&Style::new().green().bold(), &format!("{:.3}", line.reward));
        inner.print(&format!(
            "eval at step {}: held-out reward {reward}{since}, {} of {:.1} tokens{unscorable}, {}",
            line.step,
            plural(line.num_responses, "response"),
            line.response_tokens,
            duration(line.seconds),
        ));
        if let Screen::Bars(bars) = &inner.screen {
            bars.gather.set_position(0);
            bars.gather.set_message("");
        }
    }

    /// Something that a person should know: one sentence, with the key to change.
    pub fn warning(&self, sentence: &str) {
        let mut inner = self.lock();
        let label = inner.paint(&Style::new().yellow().bold(), "warning:");
        inner.print(&format!("{label} {sentence}"));
    }

    /// The run is over. Nothing is drawn after it.
    pub fn summary(&self, summary: &Summary) {
        let mut inner = self.lock();
        inner.clear();
        let steps = plural(summary.steps, "step");
        let steps = match summary.interrupted {
            true => format!("stopped after {steps} of {}, {}", inner.num_steps, duration(summary.seconds)),
            false => format!("done: {steps} in {}", duration(summary.seconds)),
        };
        let reward = match (inner.first_eval, inner.last_eval) {
            (Some((from, before)), Some((to, after))) if from != to => {
                format!("; held-out reward {before:.3} -> {after:.3}")
            }
            (_, Some((_, reward))) => format!("; held-out reward {reward:.3}"),
            _ => String::new(),
        };
        inner.print("");
        let outcome = inner.paint(&Style::new().bold(), &format!("{steps}{reward}"));
        inner.print(&outcome);
        let run = summary.run_dir.display();
        inner.print_field("run", &run.to_string());
        if let Some(checkpoint) = &summary.checkpoint {
            inner.print_field("checkpoint", &checkpoint.display().to_string());
        }
        inner.print_field("curve", &format!("{} report {run} --out curve.svg", summary.program));
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.lock().clear();
    }
}

impl Inner {
    fn print(&mut self, line: &str) {
        self.last_line = Instant::now();
        // Nobody may be listening (see the module's comment).
        match &mut self.screen {
            Screen::Lines(out) => {
                let _ = out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush());
            }
            Screen::Bars(bars) => {
                let _ = bars.multi.println(line);
            }
        }
    }

    fn print_field(&mut self, label: &str, text: &str) {
        let label = self.paint(&Style::new().dim(), &format!("{label:<10}"));
        self.print(&format!("  {label}  {text}"));
    }

    fn paint(&self, style: &Style, text: &str) -> String {
        match self.screen {
            Screen::Bars(_) => style.clone().force_styling(true).apply_to(text).to_string(),
            Screen::Lines(_) => text.to_owned(),
        }
    }

    fn clear(&self) {
        if let Screen::Bars(bars) = &self.screen {
            for bar in [&bars.step, &bars.gather, &bars.update] {
                bar.finish_and_clear();
            }
        }
    }
}

impl Bars {
    fn new(target: ProgressDrawTarget, num_steps: usize, unicode: bool) -> Self {
        let multi = MultiProgress::with_draw_target(target);
        let add = |len: Option<usize>, name: &'static str, color: &str| {
            let template = format!("{{prefix:<8}}{{bar:20.{color}/240}} {{pos:>5}}/{{len:<5}}  {{wide_msg}}");
            let style = ProgressStyle::with_template(&template).expect("the template is ours");
            let style = style.progress_chars(if unicode { "━╸━" } else { "=>-" });
            let bar = multi.add(len.map_or_else(ProgressBar::no_length, |len| ProgressBar::new(len as u64)));
            bar.set_style(style);
            bar.set_prefix(name);
            bar
        };
        let step = add(Some(num_steps), "step", "green");
        let gather = add(None, Stage::Rollout.name(), "cyan");
        let update = add(None, Stage::Train.name(), "magenta");
        Self { multi, step, gather, update, unicode }
    }
}

/// The history in `width` characters or less, each the mean of its share, from the lowest to the highest.
fn sparkline(values: &[f64], width: usize) -> String {
    let num_buckets = width.min(values.len());
    let means: Vec<f64> = (0..num_buckets)
        .map(|i| {
            let bucket = &values[i * values.len() / num_buckets..(i + 1) * values.len() / num_buckets];
            bucket.iter().sum::<f64>() / bucket.len() as f64
        })
        .collect();
    let low = means.iter().copied().fold(f64::INFINITY, f64::min);
    let high = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let levels = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    // A flat history is a flat line; NaN casts to 0.
    let scale = if high > low { (levels.len() - 1) as f64 / (high - low) } else { 0.0 };
    means.iter().map(|mean| levels[((mean - low) * scale).round() as usize % levels.len()]).collect()
}

/// `842`, `3.1k`, `2.2M`, `284B`.
fn count(x: f64) -> String {
    for (unit, name) in [(1e9, "B"), (1e6, "M"), (1e3, "k")] {
        // A number that would round up to the next unit's first belongs to it.
        if x >= unit * 0.9995 {
            let x = x / unit;
            return if x >= 99.95 { format!("{x:.0}{name}") } else { format!("{x:.1}{name}") };
        }
    }
    format!("{x:.0}")
}

fn rate(tokens_per_s: f64) -> String {
    format!("{} tok/s", count(tokens_per_s))
}

/// `1.2 s`, `5m 30s`, `2h 05m`, `3d 04h`.
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        0..60 => format!("{whole} s"),
        60..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        3600..86400 => format!("{}h {:02}m", whole / 3600, whole / 60 % 60),
        _ => format!("{}d {:02}h", whole / 86400, whole / 3600 % 24),
    }
}

/// Losses and norms span many sizes: four decimals while they show something, else powers of ten.
fn number(x: f64) -> String {
    match x.abs() {
        0.001..10000.0 => format!("{x:.4}"),
        _ if x == 0.0 || !x.is_finite() => format!("{x}"),
        _ => format!("{x:.2e}"),
    }
}

fn plural(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use insta::assert_snapshot;

    use super::*;

    /// A place to write to that a test can read.
    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn written(num_steps: usize, show: impl Fn(&Console)) -> String {
        let page = Page::default();
        let console = Console::lines(Box::new(page.clone()), num_steps);
        show(&console);
        drop(console);
        let text = String::from_utf8(page.0.lock().expect("no panic").clone()).expect("UTF-8");
        assert!(!text.contains('\x1b'), "control codes in {text:?}");
        text
    }

    #[test]
    fn a_run_without_a_terminal() {
        assert_snapshot!(written(150, |console| {
            console.header(&Header {
                name: "quickstart".into(),
                model: "recipes/quickstart_base".into(),
                num_parameters: (2_214_912, 913_408),
                device: "CPU (AVX-512)".into(),
                threads: 2,
                recipe: "recipes/quickstart.toml".into(),
                run_dir: "runs/quickstart".into(),
            });
            console.eval(&EvalLine { step: 0, reward: 0.104, num_responses: 200, response_tokens: 20.5, seconds: 1.24, ..EvalLine::default() });
            for (step, reward) in [(1, 0.112), (2, 0.125)] {
                console.step_started(step);
                console.stage(Stage::Rollout, 0, 256, 0);
                console.stage(Stage::Rollout, 256, 256, 6000);
                console.step_finished(&StepLine {
                    step,
                    reward: Some(reward),
                    response_tokens: Some(23.44),
                    loss: -0.01234,
                    grad_norm: 0.8125,
                    tokens_per_s: 3120.0,
                    step_time_s: 2.4,
                    stages_s: vec![(Stage::Rollout, 1.2), (Stage::Reward, 0.01), (Stage::Train, 1.1), (Stage::Sync, 0.09)],
                });
            }
            console.warning("step 2: 28 of 32 groups have equal rewards and teach nothing; raise `rollout.temperature` or `group_size`");
            console.eval(&EvalLine { step: 150, reward: 0.712, num_responses: 1, num_unscorable: 1, response_tokens: 21.0, seconds: 70.0 });
            console.summary(&Summary {
                steps: 150,
                seconds: 330.0,
                interrupted: false,
                checkpoint: Some("runs/quickstart/checkpoints/step-000150".into()),
                run_dir: "runs/quickstart".into(),
                program: "trainer".into(),
            });
        }), @r#"
    furlong quickstart
      model       recipes/quickstart_base, 2.2M parameters, 913k active
      device      CPU (AVX-512), 2 threads
      recipe      recipes/quickstart.toml
      run         runs/quickstart

    eval at step 0: held-out reward 0.104, 200 responses of 20.5 tokens, 1.2 s
    step   1/150  reward 0.112  length 23.4  loss -0.0123  grad 0.8125  3.1k tok/s  2.4 s (rollout 1.2, reward 0.0, train 1.1, sync 0.1)  5m 58s left
    step   2/150  reward 0.125  length 23.4  loss -0.0123  grad 0.8125  3.1k tok/s  2.4 s (rollout 1.2, reward 0.0, train 1.1, sync 0.1)  5m 55s left
    warning: step 2: 28 of 32 groups have equal rewards and teach nothing; raise `rollout.temperature` or `group_size`
    eval at step 150: held-out reward 0.712 (+0.608 since step 0), 1 response of 21.0 tokens, 1 of them unscorable, 1m 10s

    done: 150 steps in 5m 30s; held-out reward 0.104 -> 0.712
      run         runs/quickstart
      checkpoint  runs/quickstart/checkpoints/step-000150
      curve       trainer report runs/quickstart --out curve.svg
    "#);
    }

    #[test]
    fn fine_tuning_has_no_rewards() {
        assert_snapshot!(written(1000, |console| {
            console.step_finished(&StepLine { step: 7, loss: 3.25, grad_norm: 1e-5, tokens_per_s: 812.0, step_time_s: 0.5, ..StepLine::default() });
            console.step_finished(&StepLine { step: 8, loss: f64::NAN, grad_norm: f64::INFINITY, step_time_s: 1.0, ..StepLine::default() });
            console.summary(&Summary { steps: 1, seconds: 1.0, interrupted: true, checkpoint: None, run_dir: "runs/x".into(), program: "trainer".into() });
        }), @r#"
    step    7/1000  loss 3.2500  grad 1.00e-5  812 tok/s  0.5 s  8m 17s left
    step    8/1000  loss NaN  grad inf  0 tok/s  1.0 s  9m 06s left

    stopped after 1 step of 1000, 1.0 s
      run         runs/x
      curve       trainer report runs/x --out curve.svg
    "#);
    }

    #[test]
    fn a_closed_pipe_stops_nothing() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        }
        Console::lines(Box::new(Closed), 1).warning("nobody reads this");
    }

    #[test]
    fn sizes_and_times() {
        let counts = [0.0, 842.0, 999.6, 3120.0, 99_960.0, 123_456.0, 2_214_912.0, 284e9].map(count);
        assert_eq!(counts, ["0", "842", "1.0k", "3.1k", "100k", "123k", "2.2M", "284B"]);
        let times = [0.04, 9.94, 9.96, 59.7, 330.0, 3600.0, 7500.0, 100_000.0].map(duration);
        assert_eq!(times, ["0.0 s", "9.9 s", "10 s", "1m 00s", "5m 30s", "1h 00m", "2h 05m", "1d 03h"]);
        let numbers = [0.0, -0.01234, 1e-5, 12345.0, f64::NAN, f64::INFINITY].map(number);
        assert_eq!(numbers, ["0", "-0.0123", "1.00e-5", "1.23e4", "NaN", "inf"]);
    }

    #[test]
    fn history_as_a_line() {
        assert_eq!(sparkline(&[0.0, 0.5, 1.0], 16), "▁▅█");
        assert_eq!(sparkline(&[0.3, 0.3], 16), "▁▁");
        assert_eq!(sparkline(&(0..160).map(f64::from).collect::<Vec<_>>(), 8), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[0.0, f64::NAN, 1.0], 16), "▁▁█");
    }
}
