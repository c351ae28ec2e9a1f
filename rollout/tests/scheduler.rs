//! Whatever happens around a request, it says what it says alone on a cold engine, and no page is lost: random schedules
//! of arrivals, forks, preemptions, aborts, pauses, evictions and weight updates.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use proptest::prelude::*;
use rollout::engine::{Completion, Event, Finish, PauseMode, PromptScores, Request, Scheduler, SchedulerOptions, Sink};
use rollout::model::checkpoint::load_weights;
use rollout::model::{HostTensor, MTP_PREFIX, Model, ModelConfig, TensorData, Weights, to_engine_format};
use rollout::sampler::SamplingParams;
use rollout::score::score;
use rollout::tokenizer::Tokenizer;

type SharedModel = Arc<RwLock<Arc<Model>>>;

fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../recipes/quickstart_base")
}

fn tokenizer() -> &'static Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| Arc::new(Tokenizer::load(&dir(), model(0).config().vocab_size).expect("a tokenizer")))
}

/// The base with a multi-token-prediction block made of its other layers, which lets the streams through nearly as they are:
/// its drafts are sometimes right.
fn base_with_mtp() -> (ModelConfig, Weights) {
    let mut config = ModelConfig::load(&dir().join("config.json")).expect("a configuration");
    let mut weights = load_weights(&dir(), &config).expect("weights");
    let own = |weights: &Weights, from: &str, to: &str| -> Weights {
        let parts = weights.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(from)?, tensor)));
        parts.map(|(name, tensor)| (format!("{MTP_PREFIX}.{to}{name}"), tensor.clone())).collect()
    };
    // A layer without compression has the attention; one without a hash table has the experts.
    let mut block = own(&weights, "layers.0.", "");
    block.retain(|name, _| !name.contains(".ffn."));
    block.extend(own(&weights, "layers.3.ffn.", "ffn."));
    block.extend(
        ["hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight"]
            .map(|n| own(&weights, n, n))
            .into_iter()
            .flatten(),
    );
    let d = config.hidden_size;
    let diagonal = |x: f32| (0..d * d).map(|i| if i / d == i % d { x } else { 0.0 }).collect();
    let tensor = |shape, values| HostTensor { shape, data: TensorData::F32(values) };
    for (name, x) in [("e_proj", 0.1), ("h_proj", 1.0)] {
        block.insert(format!("{MTP_PREFIX}.{name}.weight"), tensor(vec![d, d], diagonal(x)));
    }
    for name in ["enorm", "hnorm"] {
        block.insert(format!("{MTP_PREFIX}.{name}.weight"), tensor(vec![d], vec![1.0; d]));
    }
    weights.extend(block);
    config.num_nextn_predict_layers = 1;
    config.compress_ratios.push(0);
    (config, weights)
}

/// Three versions: the base, and two with other embeddings.
fn model(version: u64) -> &'static Arc<Model> {
    static MODELS: OnceLock<Vec<Arc<Model>>> = OnceLock::new();
    let models = MODELS.get_or_init(|| {
        let (config, base) = base_with_mtp();
        let make = |version: u64| {
            let weights: Weights = base.clone().into_iter().map(|(name, tensor)| (name, tensor.into_f32())).collect();
            let mut weights = weights;
            let embed = weights.get_mut("embed.weight").expect("an embedding");
            let TensorData::F32(values) = &mut embed.data else { panic!("f32") };
            values.iter_mut().for_each(|v| *v *= 1.0 + 0.25 * version as f32);
            Arc::new(Model::new(&config, version, &to_engine_format(&config, weights)))
        };
        (0..3).map(make).collect()
    });
    &models[version as usize]
}

/// What of a completion must not depend on anything around it; floats by their bits.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    base_logprobs: Vec<u32>,
    versions: Vec<u64>,
    expert_idx: Vec<u16>,
    block_idx: Vec<u32>,
    finish: Finish,
}

fn said(completion: &Completion) -> Said {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
    Said {
        tokens: completion.said.tokens.clone(),
        logprobs: bits(&completion.said.logprobs),
        base_logprobs: bits(&completion.said.base_logprobs),
        versions: completion.said.weight_versions.clone(),
        expert_idx: completion.choices.expert_idx.clone(),
        block_idx: completion.choices.block_idx.clone(),
        finish: completion.finish.clone(),
    }
}

fn scheduler(model: SharedModel, pages: usize, options: SchedulerOptions) -> Scheduler {
    let eos = model.read().expect("whole").config().eos_token_id.ids().to_vec();
    let mut scheduler = Scheduler::new(model.clone(), tokenizer().clone(), eos.clone(), options.clone());
    let page_bytes = scheduler.stats().page_bytes;
    if options.kv_cache_bytes != pages * page_bytes {
        let options = SchedulerOptions { kv_cache_bytes: pages * page_bytes, ..options };
        scheduler = Scheduler::new(model, tokenizer().clone(), eos, options);
    }
    scheduler
}

fn shared(version: u64) -> SharedModel {
    Arc::new(RwLock::new(model(version).clone()))
}

/// Prompts that begin alike in part; some end at a page's or a stride's border.
fn prompt(which: usize) -> Arc<[u32]> {
    let lens = [1, 16, 17, 40, 63, 64, 65, 96, 128, 257];
    let (len, fork) = (lens[which % lens.len()], which / lens.len());
    let same = (len / 2).max(1);
    (0..len).map(|i| (2 + (i * 7 + if i < same { 0 } else { fork }) % 20) as u32).collect()
}

fn request(which: usize, num_samples: usize, id: u64, params: &SamplingParams) -> Request {
    Request {
        prompt_tokens: prompt(which),
        params: Arc::new(params.clone()),
        num_samples,
        first_rollout_id: id,
        resumed: None,
        stream: false,
        prompt_logprobs_from: None,
    }
}

/// What one sample says alone on a cold engine that changes its weights, and makes its state anew, after as many tokens
/// as the given completion did.
fn alone(request: &Request, index: usize, like: &Completion) -> Said {
    let versions = &like.said.weight_versions;
    let first = versions.first().copied().unwrap_or(0);
    let shared = shared(first);
    let options = SchedulerOptions { num_threads: 1, prefix_cache: false, ..SchedulerOptions::default() };
    let mut scheduler = scheduler(shared.clone(), 4000, options);
    let (heard, num_heard) = (Arc::new(Mutex::new(None)), Arc::new(Mutex::new(0)));
    let sink: Sink = {
        let (heard, num_heard) = (heard.clone(), num_heard.clone());
        Box::new(move |event| {
            match event {
                Event::Token { .. } => *num_heard.lock().expect("whole") += 1,
                Event::Finished { completion, .. } => *heard.lock().expect("whole") = Some(completion),
                Event::Taken | Event::PromptScored(_) => {}
                Event::Refused(refusal) => panic!("{refusal}"),
            }
            true
        })
    };
    let request = Request {
        num_samples: 1,
        first_rollout_id: request.first_rollout_id + index as u64,
        stream: true,
        ..request.clone()
    };
    let id = 0;
    scheduler.submit(id, request, sink);
    let mut anew: Vec<usize> = like.recomputed.iter().map(|&(at, _)| at).filter(|&at| at > 0).collect();
    loop {
        let n = *num_heard.lock().expect("whole");
        if let Some(completion) = heard.lock().expect("whole").take() {
            return said(&completion);
        }
        if like.finish == Finish::Aborted && n == versions.len() {
            scheduler.abort(id);
            continue;
        }
        if let Some(&version) = versions.get(n) {
            *shared.write().expect("whole") = model(version).clone();
        }
        if anew.contains(&n) {
            anew.retain(|&at| at != n);
            scheduler.pause(PauseMode::Retract);
            scheduler.resume();
        }
        assert!(scheduler.step(), "nothing to do before the end");
    }
}

#[derive(Clone, Debug)]
enum Act {
    Submit { which: usize, num_samples: usize, params: usize, scored_from: Option<usize> },
    Steps(usize),
    Abort(usize),
    Pause(PauseMode),
    Resume,
    Flush,
    Update,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (0usize..30, 1usize..4, 0usize..5, prop::option::weighted(0.3, prop_oneof![Just(0), 0usize..300]))
            .prop_map(|(which, num_samples, params, scored_from)| Act::Submit { which, num_samples, params, scored_from }),
        8 => (1usize..9).prop_map(Act::Steps),
        1 => (0usize..20).prop_map(Act::Abort),
        1 => prop_oneof![Just(PauseMode::Retract), Just(PauseMode::InPlace), Just(PauseMode::Abort)].prop_map(Act::Pause),
        2 => Just(Act::Resume),
        1 => Just(Act::Flush),
        1 => Just(Act::Update),
    ]
}

fn some_params(which: usize) -> SamplingParams {
    let base = SamplingParams { temperature: 2.0, seed: 11, max_tokens: 20, ..SamplingParams::default() };
    match which {
        0 => base,
        1 => SamplingParams { temperature: 0.0, max_tokens: 33, ..base },
        4 => SamplingParams { max_tokens: 0, ..base },
        2 => SamplingParams { top_p: 0.8, top_k: Some(12), frequency_penalty: 0.5, min_tokens: 5, ..base },
        _ => SamplingParams { ignore_eos: true, max_tokens: 40, stop: vec!["ab".into(), "e t".into()], ..base },
    }
}

/// Whether a prompt's scores are those of one version of the weights alone.
fn check_scores(prompt: &[u32], from: Option<usize>, scores: &PromptScores) {
    let first = from.expect("scores that nobody asked for").max(1);
    assert_eq!((scores.first, scores.top_logprobs.len()), (first, scores.logprobs.len()));
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let is_of = |version| {
        let whole = if prompt.len() > 1 { score(model(version), prompt).expect("scores").logprobs } else { Vec::new() };
        bits(whole.get(first - 1..).unwrap_or(&[])) == bits(&scores.logprobs)
    };
    assert!((0..3).any(is_of), "{} tokens from {first}: {scores:?}", prompt.len());
}

/// Runs the acts, then everything to its end; all completions with their requests.
fn run(acts: &[Act], pages: usize, options: SchedulerOptions) -> Vec<(Request, Completion)> {
    let shared = shared(0);
    let mut scheduler = scheduler(shared.clone(), pages, options);
    let heard: Arc<Mutex<Vec<(u64, Completion)>>> = Arc::default();
    let mut asked: HashMap<u64, Request> = HashMap::new();
    let (mut ids, mut version, mut expected) = (Vec::new(), 0, 0);
    for act in acts {
        match act {
            Act::Submit { which, num_samples, params, scored_from } => {
                let first = 1000 * asked.len() as u64;
                let prompt_logprobs_from = *scored_from;
                let request =
                    Request { prompt_logprobs_from, ..request(*which, *num_samples, first, &some_params(*params)) };
                let sink: Sink = {
                    let (heard, prompt_tokens) = (heard.clone(), request.prompt_tokens.clone());
                    let (mut has_ended, mut is_scored) = (false, scored_from.is_none());
                    Box::new(move |event| {
                        match event {
                            Event::PromptScored(scores) => {
                                assert!(!is_scored && !has_ended, "scores come once, and first");
                                is_scored = true;
                                check_scores(&prompt_tokens, prompt_logprobs_from, &scores);
                            }
                            Event::Finished { completion, .. } => {
                                has_ended = true;
                                assert!(is_scored || completion.said.tokens.is_empty(), "no scores before a token");
                                assert!(is_scored || completion.finish == Finish::Aborted, "no scores");
                                heard.lock().expect("whole").push((first, *completion));
                            }
                            _ => {}
                        }
                        true
                    })
                };
                ids.push(first);
                scheduler.submit(first, request.clone(), sink);
                asked.insert(first, request);
                expected += num_samples;
            }
            Act::Steps(n) => {
                for _ in 0..*n {
                    scheduler.step();
                }
            }
            Act::Abort(which) if !ids.is_empty() => {
                scheduler.abort(ids[which % ids.len()]);
            }
            Act::Pause(mode) => scheduler.pause(*mode),
            Act::Resume => scheduler.resume(),
            Act::Flush => {
                scheduler.flush();
            }
            Act::Update if version < 2 => {
                version += 1;
                *shared.write().expect("whole") = model(version).clone();
            }
            _ => {}
        }
        let stats = scheduler.stats();
        assert!(stats.pages_in_use <= stats.pages);
    }
    scheduler.resume();
    let mut steps = 0;
    while scheduler.step() {
        steps += 1;
        assert!(steps < 100_000, "no end: {scheduler:?}");
    }
    assert!(scheduler.flush(), "nobody holds a state any more");
    let stats = scheduler.stats();
    assert_eq!((stats.pages_in_use, stats.num_prefixes, stats.num_running, stats.num_waiting), (0, 0, 0, 0));
    let heard = std::mem::take(&mut *heard.lock().expect("whole"));
    assert_eq!(heard.len(), expected, "every sample ends once");
    assert_eq!(stats.finished as usize, expected);
    heard.into_iter().map(|(first, completion)| (asked[&first].clone(), completion)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_schedules_say_what_each_request_says_alone(
        acts in prop::collection::vec(act(), 1..40),
        pages in prop_oneof![Just(0usize), 0usize..200, Just(3000)],
        max_batch in 1usize..9,
        max_step_tokens in prop_oneof![1usize..40, Just(300)],
        speculative: bool,
    ) {
        // Enough for the longest request alone, and some more or much more.
        let longest = rollout::kv_cache::KvCache::num_pages_at(model(0).config(), 257 + 40);
        let options =
            SchedulerOptions { num_threads: 1, max_batch, max_step_tokens, speculative, ..SchedulerOptions::default() };
        for (request, completion) in run(&acts, longest + pages, options) {
            if completion.said.tokens.is_empty() {
                continue;
            }
            let want = alone(&request, completion.index, &completion);
            let mut got = said(&completion);
            if completion.finish == Finish::Aborted {
                // Whether the last token had gone through when it came is the schedule's.
                let n = got.expert_idx.len().min(want.expert_idx.len());
                prop_assert_eq!(&got.expert_idx[..n], &want.expert_idx[..n]);
                got.expert_idx = want.expert_idx.clone();
                got.block_idx = want.block_idx.clone();
            }
            prop_assert!(got == want, "got {:.400?}, wanted {:.400?}, recomputed {:?}", got, want, completion.recomputed);
        }
    }
}

#[test]
fn a_group_reads_its_prompt_once_and_others_go_on_from_it() {
    let options = SchedulerOptions { num_threads: 1, ..SchedulerOptions::default() };
    let mut scheduler = scheduler(shared(0), 4000, options);
    let heard: Arc<Mutex<Vec<Completion>>> = Arc::default();
    let ask = |scheduler: &mut Scheduler, prompt_tokens: Arc<[u32]>, num_samples| {
        let heard = heard.clone();
        let sink: Sink = Box::new(move |event| {
            if let Event::Finished { completion, .. } = event {
                heard.lock().expect("whole").push(*completion);
            }
            true
        });
        let params = SamplingParams { ignore_eos: true, ..some_params(0) };
        let request = Request { prompt_tokens, ..request(0, num_samples, 0, &params) };
        scheduler.submit(0, request, sink);
        while scheduler.step() {}
    };
    let first = prompt(9);
    ask(&mut scheduler, first.clone(), 8);
    assert_eq!(scheduler.stats().prefill_tokens, 257, "eight samples, one prompt");
    // The same again: all but its last token is there.
    ask(&mut scheduler, first.clone(), 1);
    assert_eq!((scheduler.stats().prefill_tokens, scheduler.stats().cached_tokens), (258, 256));
    // A second turn: the prompt, what was said, and something new.
    let said = heard.lock().expect("whole")[0].said.tokens.clone();
    let turn: Arc<[u32]> = first.iter().chain(&said).chain(&[5, 6, 7]).copied().collect();
    ask(&mut scheduler, turn.clone(), 1);
    let cached = heard.lock().expect("whole").last().expect("ended").num_cached_tokens;
    assert_eq!(cached, 257 + said.len() - 1, "all that went through the model");
    // A prompt that parts from it on the way goes on from the stride before.
    let other: Arc<[u32]> = first[..256].iter().chain(&[9, 9, 9]).copied().collect();
    ask(&mut scheduler, other, 1);
    assert_eq!(heard.lock().expect("whole").last().expect("ended").num_cached_tokens, 256);
}

#[test]
fn an_interrupted_sample_is_resumed_as_if_nothing_had_been() {
    let params = SamplingParams { ignore_eos: true, ..some_params(0) };
    let whole = request(4, 1, 7, &params);
    let like = Completion {
        index: 0,
        rollout_id: 7,
        said: rollout::engine::Partial { weight_versions: vec![0; 20], ..Default::default() },
        text: None,
        finish: Finish::Length,
        choices: Default::default(),
        num_cached_tokens: 0,
        recomputed: Vec::new(),
    };
    let want = alone(&whole, 0, &like);
    let mut scheduler = scheduler(shared(0), 4000, SchedulerOptions { num_threads: 1, ..SchedulerOptions::default() });
    let heard: Arc<Mutex<Vec<Completion>>> = Arc::default();
    let sink = || -> Sink {
        let heard = heard.clone();
        Box::new(move |event| {
            if let Event::Finished { completion, .. } = event {
                heard.lock().expect("whole").push(*completion);
            }
            true
        })
    };
    let id = 0;
    scheduler.submit(id, whole.clone(), sink());
    for _ in 0..9 {
        scheduler.step();
    }
    scheduler.abort(id);
    let part = heard.lock().expect("whole").pop().expect("it was told");
    assert!(part.finish == Finish::Aborted && (1..20).contains(&part.said.tokens.len()), "{part:?}");
    scheduler.flush();
    scheduler.submit(1, Request { resumed: Some(part.said), ..whole }, sink());
    while scheduler.step() {}
    let completion = heard.lock().expect("whole").pop().expect("it was told");
    assert_eq!(said(&completion), want);
}

#[test]
fn drafts_change_how_many_passes_it_takes_and_nothing_else() {
    let ask = |speculative: bool, which: usize| {
        let options = SchedulerOptions { num_threads: 1, speculative, ..SchedulerOptions::default() };
        let mut scheduler = scheduler(shared(0), 4000, options);
        let heard: Arc<Mutex<Vec<Completion>>> = Arc::default();
        let sink: Sink = {
            let heard = heard.clone();
            Box::new(move |event| {
                if let Event::Finished { completion, .. } = event {
                    heard.lock().expect("whole").push(*completion);
                }
                true
            })
        };
        let params = SamplingParams { ignore_eos: true, max_tokens: 100, ..some_params(which) };
        scheduler.submit(0, request(9, 2, 0, &params), sink);
        while scheduler.step() {}
        let mut heard = std::mem::take(&mut *heard.lock().expect("whole"));
        heard.sort_by_key(|completion| completion.index);
        (heard.iter().map(said).collect::<Vec<_>>(), scheduler.stats())
    };
    for which in 0..2 {
        let ((without, plain), (with, drafted)) = (ask(false, which), ask(true, which));
        assert_eq!(with, without);
        let (rate, length) = (drafted.spec_accept_rate(), drafted.spec_accept_length());
        println!("{} passes instead of {}, {rate:?} accepted, {length:?} tokens a pass", drafted.steps, plain.steps);
        assert!(plain.drafted_tokens == 0 && drafted.accepted_tokens > 0 && drafted.steps < plain.steps, "{drafted:?}");
    }
}
