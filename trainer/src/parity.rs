//! `trainer parity`: the engine's forward pass held against the trainer's on one recipe's model, layer by layer and op
//! by op, on rollouts that the engine has just made.

use std::fmt::Write;

use anyhow::anyhow;
use datasets::Group;
use rollout::engine::{Engine, Progress};
use rollout::kv_cache::KvCache;
use rollout::model::{Extent, ForwardOutput, Logits, Model, Segment, Trace, Workspace, compare, to_engine_format};
use tch::Device;

use crate::advantage;
use crate::cli::{Failure, say};
use crate::generate::{engine_options, params, requests};
use crate::pack::{Microbatch, PackConfig, pack};
use crate::policy::{Policy, Replay, to_vec_f32};
use crate::recipe::Recipe;
use crate::setup::{Inputs, num_threads};

/// Prompts that are answered, once each.
const NUM_PROMPTS: usize = 8;
/// Largest difference of an op, relative to its largest value, that is f32 rounding: sums of thousands of terms in
/// another order, through all layers.
const TOLERANCE: f32 = 1e-4;
/// Largest difference of a token's log-probability, in nats, that is f32 rounding.
const LOGPROB_TOLERANCE: f32 = 1e-3;

/// Columns of the table, and the ops that each sums up.
const COLUMNS: [(&str, &[&str]); 12] = [
    ("hc_attn", &["hc_attn.post", "hc_attn.comb", "hc_attn.collapsed"]),
    ("q_resid", &["q_residual"]),
    ("compr_kv", &["compressed_kv"]),
    ("indexer", &["indexer.keys", "indexer.scores"]),
    ("blocks", &["indexer.topk"]),
    ("attn_out", &["attn_out"]),
    ("hc_ffn", &["hc_ffn.post", "hc_ffn.comb", "hc_ffn.collapsed"]),
    ("router", &["router.logits", "router.weights"]),
    ("experts", &["router.experts"]),
    ("shared", &["shared_out"]),
    ("ffn_out", &["ffn_out"]),
    ("streams", &["streams_out"]),
];

/// The largest difference of one op over all sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cell {
    /// Relative to the op's largest value.
    relative: f32,
    /// Rows that chose differently, of how many.
    different: usize,
    rows: usize,
    is_choice: bool,
}

impl Cell {
    fn take(&mut self, other: &Self) {
        self.relative = self.relative.max(other.relative);
        self.different += other.different;
        self.rows += other.rows;
        self.is_choice |= other.is_choice;
    }

    fn is_rounding(&self) -> bool {
        self.relative <= TOLERANCE && self.different == 0
    }

    fn shown(&self) -> String {
        match (self.is_choice, self.different) {
            (false, _) if self.relative == 0.0 => "0".into(),
            (false, _) => format!("{:.0e}", self.relative),
            (true, 0) => "same".into(),
            (true, n) => format!("{n}/{}", self.rows),
        }
    }
}

/// What a comparison found; [`Report::table`] is for a person.
#[derive(Debug, Default)]
struct Report {
    /// By op, in the order of computation.
    cells: Vec<(String, Cell)>,
    num_sequences: usize,
    num_tokens: usize,
    /// `|rollout - trainer|` of the sampled tokens' log-probabilities.
    logprobs: Spread,
    /// The same with the rollout's choices of experts and blocks replayed, as training does it.
    replayed: Spread,
}

/// Differences of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Spread {
    sum: f64,
    max: f32,
    count: usize,
}

impl Spread {
    fn add(&mut self, differences: &[f32]) {
        self.sum += differences.iter().map(|d| f64::from(*d)).sum::<f64>();
        self.max = differences.iter().fold(self.max, |m, d| m.max(*d));
        self.count += differences.len();
    }

    fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }
}

/// Compares, prints a table and a verdict.
///
/// # Errors
/// When the recipe's model or prompts cannot be used, or the two passes disagree by more than rounding.
pub fn parity(recipe: &Recipe, inputs: Inputs) -> Result<(), Failure> {
    let threads = num_threads(recipe);
    tch::set_num_threads(threads as i32);
    let Inputs { config, weights, prompts, tokenizer, stop_tokens, .. } = inputs;
    let policy = Policy::from_weights(&config, &weights, Device::Cpu)?;
    let model = Model::new(&config, 0, &to_engine_format(&config, weights));
    let engine = Engine::new(model, tokenizer, stop_tokens, engine_options(recipe, threads));
    let book = prompts.expect("parity reads training prompts");
    let indices: Vec<usize> = (0..book.prompts.len().min(NUM_PROMPTS)).collect();
    let params = params(recipe, recipe.rollout.temperature);
    let groups = engine.generate(&requests(&book, &indices, 1, 0), &params, &Progress::default())?;
    let report = measure(&engine.model(), &policy, &groups, recipe.rollout.temperature);
    say(&report.table(config.num_hidden_layers))?;
    match report.verdict() {
        Ok(sentence) => say(&format!("{sentence}\n")),
        Err(sentence) => Err(Failure::Run(anyhow!("{sentence}"))),
    }
}

fn measure(model: &Model, policy: &Policy, groups: &[Group], temperature: f64) -> Report {
    let _guard = tch::no_grad_guard();
    let advantages: Vec<Vec<f32>> = groups.iter().map(|group| vec![0.0; group.rollouts.len()]).collect();
    let samples = advantage::samples(groups, &advantages);
    let mut report = Report { num_sequences: samples.len(), ..Report::default() };
    for sample in samples {
        // Positions that are read: all tokens but the last.
        let tokens = &sample.tokens[..sample.tokens.len() - 1];
        report.num_tokens += tokens.len();
        let mb = pack(std::slice::from_ref(&sample), &PackConfig::default()).remove(0);
        for difference in compare(&engine_trace(model, tokens), &policy_trace(policy, &mb)) {
            let cell = match difference.extent {
                Extent::Numbers { max_abs: 0.0, .. } => Cell::default(),
                Extent::Numbers { max_abs, .. } if max_abs.is_infinite() => {
                    Cell { relative: f32::INFINITY, ..Cell::default() }
                }
                Extent::Numbers { max_abs, largest, .. } => Cell { relative: max_abs / largest, ..Cell::default() },
                Extent::Choices { num_different, num_rows, .. } => {
                    Cell { different: num_different, rows: num_rows, is_choice: true, ..Cell::default() }
                }
                Extent::Shape { .. } | Extent::Missing => {
                    panic!("the two passes compute different things: {difference}")
                }
            };
            match report.cells.iter_mut().find(|(name, _)| *name == difference.name) {
                Some((_, sum)) => sum.take(&cell),
                None => report.cells.push((difference.name, cell)),
            }
        }
        let replay = Replay { experts: true, indexer: true };
        report.logprobs.add(&logprob_differences(policy, &mb, Replay::default(), temperature));
        report.replayed.add(&logprob_differences(policy, &mb, replay, temperature));
    }
    report
}

fn engine_trace(model: &Model, tokens: &[u32]) -> Trace {
    let mut cache = KvCache::new(model.config());
    let mut trace = Trace::default();
    let segment = Segment { cache: &mut cache, tokens, logits: Logits::All };
    model.forward(&mut [segment], &mut Workspace::default(), &mut ForwardOutput::default(), Some(&mut trace));
    trace
}

fn policy_trace(policy: &Policy, mb: &Microbatch) -> Trace {
    let mut trace = Trace::default();
    let hidden = policy.forward(mb, Replay::default(), Some(&mut trace));
    trace.numbers("logits", &[policy.config().vocab_size], to_vec_f32(&policy.logits(&hidden)));
    trace
}

/// `|rollout_logprob - trainer_logprob|` of the trained tokens.
fn logprob_differences(policy: &Policy, mb: &Microbatch, replay: Replay, temperature: f64) -> Vec<f32> {
    let (logprobs, _) = policy.token_logprobs(mb, replay, temperature);
    let logprobs = to_vec_f32(&logprobs);
    let trained = (0..logprobs.len()).filter(|&at| mb.loss_mask[at]);
    trained.map(|at| (logprobs[at] - mb.rollout_logprobs[at]).abs()).collect()
}

impl Report {
    fn cell(&self, prefix: &str, ops: &[&str]) -> Option<Cell> {
        let wanted = |name: &str| name.strip_prefix(prefix).is_some_and(|op| ops.contains(&op));
        let mut found = self.cells.iter().filter(|(name, _)| wanted(name)).map(|(_, cell)| *cell);
        let mut sum = found.next()?;
        found.for_each(|cell| sum.take(&cell));
        Some(sum)
    }

    /// A row a layer, a column an op: the largest difference relative to the op's largest value, or the rows that chose
    /// differently.
    fn table(&self, num_layers: usize) -> String {
        let mut out = format!(
            "engine against trainer on {} rollouts of {} tokens: largest difference relative to an op's largest value\n\n",
            self.num_sequences, self.num_tokens
        );
        let _ = write!(out, "{:<6}", "layer");
        for (column, _) in COLUMNS {
            let _ = write!(out, "{column:>9}");
        }
        out.push('\n');
        for layer in 0..num_layers {
            let _ = write!(out, "{layer:<6}");
            for (_, ops) in COLUMNS {
                let cell = self.cell(&format!("layers.{layer}."), ops);
                let _ = write!(out, "{:>9}", cell.map_or(String::new(), |cell| cell.shown()));
            }
            out.push('\n');
        }
        out.push('\n');
        for op in ["head_collapsed", "final_norm", "logits"] {
            let cell = self.cell("", &[op]).unwrap_or_default();
            let _ = writeln!(out, "{op:<24}{:>9}", cell.shown());
        }
        let _ = writeln!(out, "\n{:<24}{:>12}{:>12}", "|logprob difference|", "mean", "max");
        for (name, spread) in [("own choices", self.logprobs), ("rollout's replayed", self.replayed)] {
            let _ = writeln!(out, "{name:<24}{:>12.1e}{:>12.1e}", spread.mean(), spread.max);
        }
        out.push('\n');
        out
    }

    /// Whether the two passes agree, in one sentence.
    fn verdict(&self) -> Result<String, String> {
        if let Some((name, cell)) = self.cells.iter().find(|(_, cell)| !cell.is_rounding()) {
            return Err(format!(
                "engine and trainer disagree first in {name} ({}), by more than rounding ({TOLERANCE:.0e})",
                cell.shown()
            ));
        }
        let max = self.logprobs.max;
        if max > LOGPROB_TOLERANCE || max.is_nan() {
            return Err(format!("log-probabilities differ by {max:.1e}, more than rounding ({LOGPROB_TOLERANCE:.0e})"));
        }
        let largest = self.cells.iter().max_by(|a, b| a.1.relative.total_cmp(&b.1.relative));
        let (name, cell) = largest.map_or(("", Cell::default()), |(name, cell)| (name.as_str(), *cell));
        Ok(format!(
            "engine and trainer agree: every choice is the same, no op differs by more than {:.1e} of its largest value \
             ({name})",
            cell.relative
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cells: &[(&str, Cell)]) -> Report {
        Report { cells: cells.iter().map(|(name, cell)| ((*name).to_owned(), *cell)).collect(), ..Report::default() }
    }

    #[test]
    fn the_first_op_that_differs_is_named() {
        let fine = Cell { relative: 3e-7, ..Cell::default() };
        let same = Cell { rows: 40, is_choice: true, ..Cell::default() };
        let agreed = report(&[("layers.0.attn_out", fine), ("layers.0.router.experts", same)]);
        assert!(agreed.verdict().expect("agrees").ends_with("3.0e-7 of its largest value (layers.0.attn_out)"));
        let off = Cell { relative: 2e-3, ..Cell::default() };
        let flipped = Cell { different: 2, ..same };
        let apart = report(&[("layers.0.attn_out", fine), ("layers.1.router.experts", flipped), ("logits", off)]);
        assert_eq!(
            apart.verdict().expect_err("differs"),
            "engine and trainer disagree first in layers.1.router.experts (2/40), by more than rounding (1e-4)"
        );
        let broken = Cell { relative: f32::INFINITY, ..Cell::default() };
        assert!(report(&[("logits", broken)]).verdict().is_err());
    }
}
