//! `rollout bench`: how fast a model answers prompts on this machine, without a server between.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use rollout::engine::{Engine, Event, Finish, Request, Sink, Stats};
use rollout::sampler::SamplingParams;
use serde_json::{Value, json};

use super::engine::{EngineArgs, load_engine};
use super::say;

#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// A checkpoint folder
    model: PathBuf,
    /// A file of prompts, one a line: JSON with `prompt`, `text`, `question` or `input_ids`, or plain text
    #[arg(long, conflicts_with = "input_len")]
    prompts: Option<PathBuf>,
    /// Without a file: tokens of each prompt, drawn at random
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    input_len: u32,
    /// How many prompts; those of a file are repeated or left out
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    num_prompts: Option<u32>,
    /// Answers to each prompt
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    samples: u32,
    /// Tokens of each answer; it does not end before
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    max_tokens: u32,
    /// Let answers end where the model ends them
    #[arg(long)]
    with_eos: bool,
    /// Requests in flight; all of them unless said
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,
    /// Divides the logits, 0.001 to 1000; 0 takes the likeliest token
    #[arg(long, default_value_t = 1.0, value_parser = super::temperature)]
    temperature: f32,
    /// Keys the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object and no table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run_bench(args: BenchArgs) -> anyhow::Result<()> {
    let engine = load_engine(&args.model, args.engine.options())?;
    let found = match &args.prompts {
        Some(path) => read_prompts(&engine, path)?,
        None => random_prompts(&engine, args.input_len as usize, args.num_prompts.unwrap_or(64) as usize, args.seed),
    };
    let n = args.num_prompts.map_or(found.len(), |n| n as usize);
    let prompts: Vec<Arc<[u32]>> = found.iter().cycle().take(n).cloned().collect();
    let figures = measure(&engine, &prompts, &args)?;
    if args.json { say(figures.to_string()) } else { table(&figures) }
}

/// The prompts of a file.
fn read_prompts(engine: &Engine, path: &Path) -> anyhow::Result<Vec<Arc<[u32]>>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut prompts = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("{} line {}", path.display(), i + 1);
        let tokens = if line.trim_start().starts_with('{') {
            let value: Value = serde_json::from_str(line).with_context(|| format!("{} is no JSON", place()))?;
            let text = ["prompt", "text", "question"].iter().find_map(|key| value[key].as_str());
            let ids = || serde_json::from_value::<Vec<u32>>(value["input_ids"].clone());
            match (text, ids()) {
                (Some(text), _) => engine.tokenizer().encode(text)?,
                (None, Ok(ids)) => ids,
                (None, Err(_)) => {
                    bail!("{} has none of `prompt`, `text`, `question` and `input_ids`, expected one", place())
                }
            }
        } else {
            engine.tokenizer().encode(line)?
        };
        prompts.push(tokens.into());
    }
    if prompts.is_empty() {
        bail!("{} holds no prompt, expected one a line", path.display());
    }
    Ok(prompts)
}

/// Prompts that share nothing.
fn random_prompts(engine: &Engine, len: usize, n: usize, seed: u64) -> Vec<Arc<[u32]>> {
    let (vocab_size, mut state) = (engine.config().vocab_size as u64, seed);
    let mut token = || {
        // Knuth's MMIX generator: which tokens they are does not matter.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % vocab_size) as u32
    };
    (0..n).map(|_| (0..len).map(|_| token()).collect()).collect()
}

/// Answers all prompts and says how it went.
fn measure(engine: &Engine, prompts: &[Arc<[u32]>], args: &BenchArgs) -> anyhow::Result<Value> {
    let params = Arc::new(SamplingParams {
        temperature: args.temperature,
        seed: args.seed,
        max_tokens: args.max_tokens as usize,
        ignore_eos: !args.with_eos,
        ..SamplingParams::default()
    });
    let num_samples = args.samples as usize;
    let (sender, events) = channel();
    let submit = |which: &mut VecDeque<usize>, n: usize| {
        let requests = which.drain(..n.min(which.len())).map(|at| {
            let (sender, begun) = (sender.clone(), Instant::now());
            let sink: Sink = Box::new(move |event| sender.send((at, begun, Instant::now(), event)).is_ok());
            let request = Request {
                prompt_tokens: prompts[at].clone(),
                params: params.clone(),
                num_samples,
                first_rollout_id: (at * num_samples) as u64,
                resumed: None,
                stream: engine.tokenizer().writes_bytes(),
                prompt_logprobs_from: None,
            };
            (request, sink)
        });
        engine.submit(requests.collect());
    };
    let mut to_ask: VecDeque<usize> = (0..prompts.len()).collect();
    let mut num_open = prompts.len() * num_samples;
    let mut open_of = vec![num_samples; prompts.len()];
    let mut last: Vec<Option<Instant>> = vec![None; num_open];
    let (mut first_token, mut between, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    let (mut num_said, mut peak_pages) = (0, 0);
    let start = Instant::now();
    submit(&mut to_ask, args.concurrency.map_or(usize::MAX, |n| n as usize));
    while num_open > 0 {
        let (at, begun, now, event) = events.recv().context("the engine has stopped")?;
        match event {
            Event::Taken | Event::PromptScored(_) => {}
            Event::Refused(refusal) => bail!("prompt {at}: {refusal}"),
            Event::Token { index, .. } => match last[at * num_samples + index].replace(now) {
                None => first_token.push((now - begun).as_secs_f64()),
                Some(before) => between.push((now - before).as_secs_f64()),
            },
            Event::Finished { completion, .. } => {
                if let Finish::NotFinite(_) = completion.finish {
                    bail!("the model's logits are not finite: its weights are broken");
                }
                whole.push((now - begun).as_secs_f64());
                num_said += completion.said.tokens.len();
                num_open -= 1;
                open_of[at] -= 1;
                peak_pages = peak_pages.max(engine.stats().pages_in_use);
                if open_of[at] == 0 && args.concurrency.is_some() {
                    submit(&mut to_ask, 1);
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let stats: Stats = engine.stats();
    Ok(json!({
        "model": args.model,
        "kernels": format!("{:?}", kernels::backend()).to_lowercase(),
        "threads": engine.options().num_threads,
        "prompts": prompts.len(),
        "samples": prompts.len() * num_samples,
        "concurrency": args.concurrency,
        "seconds": seconds,
        "prompt_tokens": prompts.iter().map(|prompt| prompt.len()).sum::<usize>(),
        "prefill_tokens": stats.prefill_tokens,
        "cached_tokens": stats.cached_tokens,
        "decode_tokens": num_said,
        "prefill_tokens_per_s": stats.prefill_tokens as f64 / seconds,
        "decode_tokens_per_s": num_said as f64 / seconds,
        "cache_hit_rate": stats.cache_hit_rate(),
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "spec_accept_rate": stats.spec_accept_rate(),
        "spec_accept_length": stats.spec_accept_length(),
        "peak_pages": peak_pages,
        "pages": stats.pages,
        "page_bytes": stats.page_bytes,
        "time_to_first_token_s": percentiles(&mut first_token),
        "time_between_tokens_s": percentiles(&mut between),
        "latency_s": percentiles(&mut whole),
    }))
}

fn percentiles(times: &mut [f64]) -> Value {
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times.get(((times.len() as f64 * part).ceil() as usize).saturating_sub(1)).copied();
    json!({"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)})
}

fn table(figures: &Value) -> anyhow::Result<()> {
    let number = |key: &str| figures[key].as_f64().unwrap_or(0.0);
    let row = |name: &str, value: String| say(format!("{name:<24}{value}"));
    row("samples", format!("{} of {} prompts", figures["samples"], figures["prompts"]))?;
    row(
        "time",
        format!(
            "{:.2} s on {} threads, {} kernels",
            number("seconds"),
            figures["threads"],
            figures["kernels"].as_str().unwrap_or("")
        ),
    )?;
    row("prefill", format!("{:.0} tokens/s ({} tokens)", number("prefill_tokens_per_s"), figures["prefill_tokens"]))?;
    row("decode", format!("{:.0} tokens/s ({} tokens)", number("decode_tokens_per_s"), figures["decode_tokens"]))?;
    let hits = 100.0 * number("cache_hit_rate");
    row("prefix cache", format!("{hits:.1} % of prompt tokens ({})", figures["cached_tokens"]))?;
    let mib = number("peak_pages") * number("page_bytes") / f64::from(1 << 20);
    row("pages in use, at most", format!("{} of {} ({mib:.1} MiB)", figures["peak_pages"], figures["pages"]))?;
    row("preemptions", figures["preemptions"].to_string())?;
    if let Some(rate) = figures["spec_accept_rate"].as_f64() {
        row("drafts accepted", format!("{:.1} %, {:.2} tokens a pass", 100.0 * rate, number("spec_accept_length")))?;
    }
    say(format!("{:<24}{:>10}{:>10}{:>10}{:>10}", "milliseconds", "p50", "p90", "p99", "max"))?;
    for (name, key) in [
        ("to the first token", "time_to_first_token_s"),
        ("between tokens", "time_between_tokens_s"),
        ("whole answer", "latency_s"),
    ] {
        let cells = ["p50", "p90", "p99", "max"].map(|part| match figures[key][part].as_f64() {
            Some(seconds) => format!("{:>10.2}", 1e3 * seconds),
            None => format!("{:>10}", "-"),
        });
        say(format!("{name:<24}{}", cells.concat()))?;
    }
    Ok(())
}
