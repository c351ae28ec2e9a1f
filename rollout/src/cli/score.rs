//! The commands `score` and `diff`: JSON lines in, log-probabilities or a comparison out.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, bail};
use rollout::convert::Formats;
use rollout::model::{Model, ModelConfig};
use rollout::score::{Divergence, ScoreError, Scores, score};
use rollout::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use super::say;

/// What is scored.
#[derive(clap::Args)]
pub struct Texts {
    /// JSON lines with `text`, or `tokens`, or `prompt` and `completion` each; `-` reads stdin
    #[arg(long, short, default_value = "-")]
    input: PathBuf,
    /// Do not put the model's begin-of-sequence token before texts and prompts
    #[arg(long)]
    no_bos: bool,
}

/// The longest line that is read: far more than the longest context's tokens.
const MAX_LINE_BYTES: u64 = 32 << 20;

/// One line of input.
struct Line {
    number: usize,
    fields: Map<String, Value>,
}

/// The tokens of a line, and how many of them are only context.
struct Sequence {
    tokens: Vec<u32>,
    num_context: usize,
}

/// `rollout score`.
pub fn run_score(dir: &Path, texts: &Texts) -> anyhow::Result<()> {
    let config = ModelConfig::load(&dir.join("config.json"))?;
    let model = Model::load(dir, &config)?;
    let encoder = Encoder::new(dir, &config, texts);
    let (mut num_lines, mut num_tokens, mut sum) = (0, 0, 0.0);
    each_batch(texts, |lines| {
        let results = in_parallel(lines, |line| {
            let sequence = encoder.sequence(line)?;
            let scores = score(&model, &sequence.tokens).map_err(|e| encoder.refusal(line, &e))?;
            Ok((sequence, scores))
        });
        for (line, result) in lines.iter().zip(results) {
            let (sequence, scores) = result?;
            num_lines += 1;
            num_tokens += scores.logprobs.len() + 1 - sequence.num_context.max(1);
            let (text, line_sum) = scored_line(line, &sequence, &scores);
            sum += line_sum;
            say(text)?;
        }
        Ok(())
    })?;
    if num_lines == 0 {
        bail!("{}: no line, expected texts to score", name_of(&texts.input));
    }
    let mean = sum / num_tokens.max(1) as f64;
    let _ = writeln!(
        std::io::stderr(),
        "{num_lines} lines, {num_tokens} tokens scored: mean log-probability {mean:.5}, perplexity {:.5}",
        (-mean).exp()
    );
    Ok(())
}

/// The line with its scores, and the sum of its log-probabilities.
fn scored_line(line: &Line, sequence: &Sequence, scores: &Scores) -> (String, f64) {
    let context = sequence.num_context.max(1);
    let logprobs = &scores.logprobs[context - 1..];
    let sum: f64 = logprobs.iter().map(|p| f64::from(*p)).sum();
    let mut fields = line.fields.clone();
    fields.insert("tokens".into(), json!(sequence.tokens));
    // One entry a token; null where nothing was asked. The text of an f32 keeps it short and exact.
    let shown: Vec<Option<f32>> = vec![None; context].into_iter().chain(logprobs.iter().copied().map(Some)).collect();
    let shown = serde_json::to_string(&shown).expect("numbers are JSON");
    fields.insert("logprobs".into(), serde_json::from_str(&shown).expect("what was written is JSON"));
    fields.insert("sum_logprob".into(), json!(sum));
    fields.insert("perplexity".into(), json!((-sum / logprobs.len() as f64).exp()));
    fields.insert("is_greedy".into(), json!(scores.is_greedy[context - 1..].iter().all(|greedy| *greedy)));
    (Value::Object(fields).to_string(), sum)
}

/// One side of `diff`: a checkpoint, in a format of its own or in another.
pub struct Side<'a> {
    pub dir: &'a Path,
    pub formats: Option<Formats>,
}

impl Side<'_> {
    fn load(&self) -> anyhow::Result<(ModelConfig, Model)> {
        let config = ModelConfig::load(&self.dir.join("config.json"))?;
        let model = match &self.formats {
            None => Model::load(self.dir, &config)?,
            Some(formats) => {
                formats.check(&config)?;
                Model::load_as(self.dir, &formats.config(&config), |name, t| t.into_format(formats.of(name)))?
            }
        };
        Ok((config, model))
    }

    fn name(&self) -> String {
        match &self.formats {
            None => self.dir.display().to_string(),
            Some(formats) => format!("{} as {}", self.dir.display(), formats.layout),
        }
    }
}

/// `rollout diff`.
pub fn run_diff(a: &Side<'_>, b: &Side<'_>, texts: &Texts) -> anyhow::Result<()> {
    let ((config, model_a), (config_b, model_b)) = (a.load()?, b.load()?);
    if config.vocab_size != config_b.vocab_size {
        bail!(
            "{} has {} tokens in its vocabulary, {} has {}; expected two models with one vocabulary",
            a.dir.display(),
            config.vocab_size,
            b.dir.display(),
            config_b.vocab_size
        );
    }
    let encoder = Encoder::new(a.dir, &config, texts);
    let mut sum = Divergence::default();
    each_batch(texts, |lines| {
        let results = in_parallel(lines, |line| {
            let sequence = encoder.sequence(line)?;
            Divergence::measure(&model_a, &model_b, &sequence.tokens).map_err(|e| encoder.refusal(line, &e))
        });
        for result in results {
            sum.add(&result?);
        }
        Ok(())
    })?;
    if sum.num_tokens == 0 {
        bail!("{}: no line, expected texts to compare on", name_of(&texts.input));
    }
    let n = sum.num_tokens as f64;
    say(format!("A  {}", a.name()))?;
    say(format!("B  {}", b.name()))?;
    say(format!("{:<38}{:>12}{:>12}", format!("over {} predicted tokens", sum.num_tokens), "mean", "max"))?;
    say(format!("{:<38}{:>12.3e}{:>12.3e}", "|logprob A - logprob B|, nats", sum.sum_abs_diff / n, sum.max_abs_diff))?;
    say(format!("{:<38}{:>12.3e}{:>12.3e}", "KL(A || B), nats", sum.sum_kl / n, sum.max_kl))?;
    say(format!("{:<38}{:>12.4}", "same likeliest token", sum.num_same_greedy as f64 / n))?;
    let [perplexity_a, perplexity_b] = sum.sum_logprobs.map(|sum| (-sum / n).exp());
    say(format!("{:<38}{perplexity_a:>12.5}", "perplexity of A"))?;
    say(format!("{:<38}{perplexity_b:>12.5}", "perplexity of B"))
}

/// Turns lines into tokens; the tokenizer is read when a line needs it.
struct Encoder<'a> {
    dir: &'a Path,
    config: &'a ModelConfig,
    source: String,
    bos: bool,
    tokenizer: std::sync::OnceLock<Result<Tokenizer, String>>,
}

impl<'a> Encoder<'a> {
    fn new(dir: &'a Path, config: &'a ModelConfig, texts: &Texts) -> Self {
        let source = name_of(&texts.input);
        Self { dir, config, source, bos: !texts.no_bos, tokenizer: std::sync::OnceLock::new() }
    }

    fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let load = || Tokenizer::load(self.dir, self.config.vocab_size).map_err(|e| e.to_string());
        let tokenizer = self.tokenizer.get_or_init(load).as_ref().map_err(|e| anyhow::anyhow!("{e}"))?;
        Ok(tokenizer.encode(text)?)
    }

    fn at(&self, line: &Line) -> String {
        format!("{}:{}", self.source, line.number)
    }

    fn refusal(&self, line: &Line, error: &ScoreError) -> anyhow::Error {
        anyhow::anyhow!("{}: {error}", self.at(line))
    }

    fn sequence(&self, line: &Line) -> anyhow::Result<Sequence> {
        let text = |field: &str| match line.fields.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str())),
            Some(other) => bail!("{}: `{field}` is {other}, expected a text", self.at(line)),
        };
        let mut tokens = if self.bos { vec![self.config.bos_token_id] } else { Vec::new() };
        match (text("text")?, line.fields.get("tokens"), text("prompt")?, text("completion")?) {
            (Some(text), None, None, None) => {
                tokens.extend(self.encode(text)?);
                Ok(Sequence { tokens, num_context: 0 })
            }
            (None, Some(ids), None, None) => {
                let ids = ids.as_array().and_then(|ids| {
                    ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect::<Option<Vec<u32>>>()
                });
                let Some(tokens) = ids else { bail!("{}: `tokens` is not a list of token ids", self.at(line)) };
                Ok(Sequence { tokens, num_context: 0 })
            }
            (None, None, Some(prompt), Some(completion)) => {
                tokens.extend(self.encode(prompt)?);
                let num_context = tokens.len();
                tokens.extend(self.encode(completion)?);
                if num_context == 0 || tokens.len() == num_context {
                    bail!("{}: `prompt` or `completion` has no token, expected at least one in each", self.at(line));
                }
                Ok(Sequence { tokens, num_context })
            }
            _ => bail!("{}: expected `text`, or `tokens`, or `prompt` and `completion`", self.at(line)),
        }
    }
}

fn name_of(input: &Path) -> String {
    if input == Path::new("-") { "stdin".into() } else { input.display().to_string() }
}

/// Reads the input and hands it on in batches, so that output comes as input does and memory stays bounded.
fn each_batch(texts: &Texts, mut work: impl FnMut(&[Line]) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let source = name_of(&texts.input);
    let mut reader: Box<dyn BufRead> = if texts.input == Path::new("-") {
        Box::new(BufReader::new(std::io::stdin()))
    } else {
        let file = std::fs::File::open(&texts.input).with_context(|| format!("cannot read {source}"))?;
        Box::new(BufReader::new(file))
    };
    let mut batch = Vec::new();
    for number in 1.. {
        let mut line = Vec::new();
        let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line);
        let parsed = match read.with_context(|| format!("cannot read {source}")) {
            Ok(0) => break,
            Ok(_) if line.len() as u64 > MAX_LINE_BYTES => {
                Err(anyhow::anyhow!("{source}:{number}: a line of more than {MAX_LINE_BYTES} bytes; cut the text up"))
            }
            Ok(_) if line.trim_ascii().is_empty() => continue,
            Ok(_) => serde_json::from_slice(&line).map_err(|error| {
                anyhow::anyhow!(
                    "{source}:{number}: not a JSON object ({error}); expected one with `text` or `tokens` on each line"
                )
            }),
            Err(error) => Err(error),
        };
        let fields = match parsed {
            Ok(fields) => fields,
            Err(error) => {
                // What stands before it is not lost.
                work(&batch)?;
                return Err(error);
            }
        };
        batch.push(Line { number, fields });
        if batch.len() == 64 {
            work(&batch)?;
            batch.clear();
        }
    }
    work(&batch)
}

/// `work` on every line, over all cores; results in the order of the lines.
fn in_parallel<T: Send>(lines: &[Line], work: impl Fn(&Line) -> anyhow::Result<T> + Sync) -> Vec<anyhow::Result<T>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(lines.len());
    let next = AtomicUsize::new(0);
    let mut results: Vec<(usize, anyhow::Result<T>)> = std::thread::scope(|scope| {
        let run = || {
            let mut done = Vec::new();
            loop {
                let idx = next.fetch_add(1, Ordering::Relaxed);
                let Some(line) = lines.get(idx) else { break done };
                done.push((idx, work(line)));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a worker does not panic")).collect()
    });
    results.sort_by_key(|(idx, _)| *idx);
    results.into_iter().map(|(_, result)| result).collect()
}
