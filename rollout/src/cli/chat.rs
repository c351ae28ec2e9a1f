//! `rollout chat`: talk with a model in a terminal.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use rollout::chat::{ChatOptions, Message, ThinkingMode, Transcript};
use rollout::engine::{Completion, Engine, Event, Finish, Request, Sink};
use rollout::sampler::SamplingParams;

use super::engine::{EngineArgs, load_engine};
use super::{say, without_control};

#[derive(Args, Clone, Debug)]
pub struct ChatArgs {
    /// A checkpoint folder
    model: PathBuf,
    /// What the model is told before anybody speaks
    #[arg(long)]
    system: Option<String>,
    /// For a model that does not know V4's chat: what it reads of a line, each on its own
    #[arg(long, value_parser = super::template, conflicts_with_all = ["system", "thinking"])]
    template: Option<String>,
    /// Let the model reason before it answers
    #[arg(long)]
    thinking: bool,
    /// Divides the logits, 0.001 to 1000; 0 takes the likeliest token
    #[arg(long, default_value_t = 1.0, value_parser = super::temperature)]
    temperature: f32,
    /// Where an answer is cut, in tokens
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Keys the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// What Ctrl-C does: leave, or end the answer.
static STATE: AtomicU8 = AtomicU8::new(LISTENING);
const LISTENING: u8 = 0;
const ANSWERING: u8 = 1;
const STOPPING: u8 = 2;

const HELP: &str = "/new begins anew, /think lets the model reason or not, /quit leaves; Ctrl-C ends an answer";

pub fn run_chat(args: ChatArgs) -> anyhow::Result<()> {
    let engine = load_engine(&args.model, args.engine.options())?;
    ctrlc::set_handler(|| {
        if STATE.compare_exchange(ANSWERING, STOPPING, Ordering::Relaxed, Ordering::Relaxed) == Err(LISTENING) {
            std::process::exit(130);
        }
    })
    .context("cannot listen for Ctrl-C")?;
    let is_terminal = std::io::stdin().is_terminal();
    let mut mode = if args.thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat };
    let begin = || args.system.as_deref().map(Message::system).into_iter().collect::<Vec<_>>();
    let mut messages = begin();
    let mut transcript: Option<Transcript<'_>> = None;
    let mut turn = 0;
    if is_terminal {
        say(HELP.into())?;
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if is_terminal {
            write!(std::io::stdout(), "> ")
                .and_then(|()| std::io::stdout().flush())
                .context("cannot write to stdout")?;
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.context("cannot read stdin; it is to be UTF-8 text")?;
        match line.trim() {
            "" => continue,
            "/quit" | "/exit" => return Ok(()),
            "/help" => {
                say(HELP.into())?;
                continue;
            }
            "/new" => {
                (messages, transcript) = (begin(), None);
                continue;
            }
            "/think" => {
                let (other, word) = match mode {
                    ThinkingMode::Thinking => (ThinkingMode::Chat, "no longer reasons"),
                    ThinkingMode::Chat => (ThinkingMode::Thinking, "reasons first"),
                };
                (mode, messages, transcript) = (other, begin(), None);
                say(format!("the model {word}; the conversation begins anew"))?;
                continue;
            }
            _ => {}
        }
        let params = SamplingParams {
            temperature: args.temperature,
            seed: args.seed,
            max_tokens: args.max_tokens as usize,
            ..SamplingParams::default()
        };
        turn += 1;
        if let Some(template) = &args.template {
            let tokens = engine.tokenizer().encode_marked(&engine.tokenizer().fill_template(template, &line))?;
            answer(&engine, tokens.into(), params, turn, is_terminal)?;
            continue;
        }
        let said = Message::user(line);
        match &mut transcript {
            Some(transcript) => {
                transcript.push_messages(vec![said])?;
            }
            None => {
                messages.push(said);
                // Reasoning stays, so that what was generated stays a prefix and its state is used again.
                let options = ChatOptions { thinking_mode: mode, drop_thinking: false, ..ChatOptions::default() };
                let begun = Transcript::new(engine.tokenizer(), options, std::mem::take(&mut messages));
                transcript = Some(begun.context("this model does not know V4's chat; give --template what it knows")?);
            }
        }
        let Some(open) = &mut transcript else { unreachable!("it was begun just now") };
        match answer(&engine, open.tokens().into(), params, turn, is_terminal)? {
            Some(completion) => drop(open.push_completion(&completion.said.tokens)?),
            None => (messages, transcript) = (begin(), None),
        }
    }
}

/// Prints an answer as it comes; `None` where the conversation has become too long.
fn answer(
    engine: &Engine,
    prompt_tokens: Arc<[u32]>,
    mut params: SamplingParams,
    turn: u64,
    is_terminal: bool,
) -> anyhow::Result<Option<Completion>> {
    let room = engine.max_sequence_len().saturating_sub(prompt_tokens.len());
    if room == 0 {
        say(format!("the conversation has {} tokens, which is as many as fit: it begins anew", prompt_tokens.len()))?;
        return Ok(None);
    }
    params.max_tokens = params.max_tokens.min(room);
    let prompt_len = prompt_tokens.len();
    let (sender, events) = channel();
    let sink: Sink = Box::new(move |event| sender.send(event).is_ok());
    let request = Request {
        prompt_tokens,
        params: Arc::new(params),
        num_samples: 1,
        first_rollout_id: turn,
        resumed: None,
        stream: true,
        prompt_logprobs_from: None,
    };
    STATE.store(ANSWERING, Ordering::Relaxed);
    let (start, mut first) = (Instant::now(), None);
    let id = engine.submit(vec![(request, sink)]).start;
    let show = |text: &str| -> anyhow::Result<()> {
        let text = if is_terminal { without_control(text) } else { text.to_owned() };
        write!(std::io::stdout(), "{text}").and_then(|()| std::io::stdout().flush()).context("cannot write to stdout")
    };
    let completion = loop {
        match events.recv_timeout(Duration::from_millis(50)) {
            Ok(Event::Token { text, .. }) => {
                first.get_or_insert_with(Instant::now);
                show(&text)?;
            }
            Ok(Event::Finished { text, completion }) => {
                show(&text)?;
                break completion;
            }
            Ok(Event::Taken | Event::PromptScored(_)) => {}
            Ok(Event::Refused(refusal)) => return Err(refusal.into()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the engine has stopped"),
        }
        if STATE.load(Ordering::Relaxed) == STOPPING {
            engine.abort(id);
        }
    };
    STATE.store(LISTENING, Ordering::Relaxed);
    if let Finish::NotFinite(_) = completion.finish {
        anyhow::bail!("the model's logits are not finite: its weights are broken");
    }
    let cut = match completion.finish {
        Finish::Length => " ... (cut at the token limit)",
        Finish::Aborted => " ... (stopped)",
        _ => "",
    };
    say(cut.to_owned())?;
    if is_terminal {
        let (n, first) = (completion.said.tokens.len(), first.unwrap_or_else(Instant::now));
        let rate = n.saturating_sub(1) as f64 / first.elapsed().as_secs_f64().max(1e-9);
        say(format!(
            "({n} tokens at {rate:.0} a second, the first after {:.0} ms; {} of the {prompt_len} before were there)",
            1e3 * (first - start).as_secs_f64(),
            completion.num_cached_tokens
        ))?;
    }
    Ok(Some(*completion))
}
