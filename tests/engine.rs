//! The engine across its parts: what it says does not depend on how it is asked, and weights arrive whole or not at all.

use kernels::logits::CHUNK;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use datasets::{FinishReason, Group, Prompt, Rollout};
use insta::assert_snapshot;
use rollout::engine::{Engine, GenerateError, GroupRequest, Progress, SchedulerOptions};
use rollout::kv_cache::KvCache;
use rollout::model::checkpoint::load_weights;
use rollout::model::{
    ForwardOutput, Logits, Model, ModelConfig, Segment, TensorData, WeightUpdate, Weights, Workspace, checksum,
    to_engine_format,
};
use rollout::sampler::{SamplingParams, Scratch, Turn, draw};
use rollout::tokenizer::Tokenizer;

use crate::program::root;

/// The quick start's model in the engine's format: window, CSA and HCA layers, a hash layer, FP4 experts.
fn base() -> &'static (ModelConfig, Weights) {
    static BASE: OnceLock<(ModelConfig, Weights)> = OnceLock::new();
    BASE.get_or_init(|| {
        let dir = root().join("recipes/quickstart_base");
        let config = ModelConfig::load(&dir.join("config.json")).expect("a configuration");
        let weights = to_engine_format(&config, load_weights(&dir, &config).expect("weights"));
        (config, weights)
    })
}

fn engine_by(weights: &Weights, stop_tokens: &[u32], options: SchedulerOptions) -> Engine {
    let (config, _) = base();
    let tokenizer = Tokenizer::load(&root().join("recipes/quickstart_base"), config.vocab_size).expect("a tokenizer");
    Engine::new(Model::new(config, 0, weights), tokenizer, stop_tokens.to_vec(), options)
}

fn engine_with(weights: &Weights, num_threads: usize) -> Engine {
    let options = SchedulerOptions { num_threads, ..SchedulerOptions::default() };
    engine_by(weights, base().0.eos_token_id.ids(), options)
}

fn engine(num_threads: usize) -> Engine {
    engine_with(&base().1, num_threads)
}

/// Six prompts of different lengths, one of them longer than a prefill chunk, with one rollout or several.
fn requests() -> Vec<GroupRequest> {
    let engine = engine(1);
    let request = |(i, len): (usize, usize)| {
        let text: String = "pack my box with five dozen jugs of ".chars().cycle().take(len).collect();
        GroupRequest {
            group_id: i as u64,
            first_rollout_id: 100 * i as u64,
            group_size: 1 + i % 3,
            prompt_tokens: engine.tokenizer().encode(&text).expect("encodes").into(),
            prompt: Arc::new(Prompt { row: i, text, answer: String::new(), metadata: serde_json::Value::Null }),
        }
    };
    let requests: Vec<_> = [1, 3, 37, 64, 300, 120].into_iter().enumerate().map(request).collect();
    assert!(requests[4].prompt_tokens.len() > 256, "{} tokens fit into one chunk", requests[4].prompt_tokens.len());
    requests
}

/// Hot enough that a wrong logit in its last bits shows in some token, long enough that indexers select.
fn options() -> SamplingParams {
    SamplingParams { temperature: 2.0, seed: 11, max_tokens: 40, ..SamplingParams::default() }
}

#[track_caller]
fn generate(engine: &Engine, requests: &[GroupRequest], options: &SamplingParams) -> Vec<Group> {
    engine.generate(requests, options, &Progress::default()).expect("generates")
}

/// Everything that a rollout says, floats by their bits.
fn said(rollout: &Rollout) -> impl PartialEq + std::fmt::Debug {
    let logprobs: Vec<u32> = rollout.rollout_logprobs.iter().map(|x| x.to_bits()).collect();
    let choices = (rollout.routing.clone(), rollout.indexer.clone());
    (rollout.rollout_id, rollout.response_tokens.clone(), logprobs, rollout.weight_versions.clone(), choices)
}

fn all_said(groups: &[Group]) -> Vec<impl PartialEq + std::fmt::Debug> {
    groups.iter().flat_map(|group| &group.rollouts).map(said).collect()
}

#[test]
fn rollouts_do_not_depend_on_threads_batch_or_company() {
    let requests = requests();
    let want = generate(&engine(1), &requests, &options());
    assert_eq!(want.iter().map(|group| group.rollouts.len()).sum::<usize>(), 12);
    for num_threads in [2, 3, 4] {
        let got = generate(&engine(num_threads), &requests, &options());
        assert_eq!(all_said(&got), all_said(&want), "{num_threads} threads");
    }
    for max_batch_rollouts in [1, 2, 5] {
        let few = SchedulerOptions { num_threads: 1, max_batch: max_batch_rollouts, ..SchedulerOptions::default() };
        let got = generate(&engine_by(&base().1, base().0.eos_token_id.ids(), few), &requests, &options());
        assert_eq!(all_said(&got), all_said(&want), "batches of {max_batch_rollouts}");
    }
    for (request, want) in requests.iter().zip(&want) {
        let alone = generate(&engine(1), std::slice::from_ref(request), &options());
        assert_eq!(all_said(&alone), all_said(std::slice::from_ref(want)), "group {} alone", request.group_id);
    }
    let backward: Vec<GroupRequest> = requests.iter().rev().cloned().collect();
    let mut got = generate(&engine(2), &backward, &options());
    got.reverse();
    assert_eq!(all_said(&got), all_said(&want), "in the other order");
}

#[test]
fn a_response_ends_with_the_first_stop_token() {
    let requests = requests();
    let free = generate(&engine(1), &requests, &options());
    let middle = |group: &Group| group.rollouts[0].response_tokens[group.rollouts[0].response_tokens.len() / 2];
    let stop = [middle(&free[0]), middle(&free[1])];
    let stopped = generate(&engine_by(&base().1, &stop, SchedulerOptions::default()), &requests, &options());
    let mut num_stopped = 0;
    for (long, short) in free.iter().zip(&stopped).flat_map(|(a, b)| a.rollouts.iter().zip(&b.rollouts)) {
        let Some(end) = long.response_tokens.iter().position(|token| stop.contains(token)) else { continue };
        assert_eq!(short.response_tokens, long.response_tokens[..=end]);
        assert_eq!(short.finish_reason, FinishReason::Stop);
        num_stopped += 1;
    }
    assert!(num_stopped >= 2);
}

#[test]
fn the_seed_and_the_rollout_id_alone_choose_the_tokens() {
    let engine = engine(1);
    let tokens = |first_rollout_id: u64, group_id: u64, seed: u64| {
        let request = GroupRequest { group_id, first_rollout_id, group_size: 2, ..requests()[3].clone() };
        let groups = generate(&engine, &[request], &SamplingParams { seed, ..options() });
        groups[0].rollouts.iter().map(|r| r.response_tokens.clone()).collect::<Vec<_>>()
    };
    let first = tokens(7, 1, 11);
    assert_eq!(first, tokens(7, 2, 11), "the group's id plays no part");
    assert_eq!(first[1], tokens(8, 1, 11)[0], "rollout 8, whichever of its group it is");
    assert_ne!(first[0], first[1]);
    assert_ne!(first, tokens(7, 1, 12));
}

#[test]
fn choices_are_recorded_for_every_token_that_went_through() {
    let (config, _) = base();
    let groups = generate(&engine(1), &requests(), &options());
    let num_csa = config.csa_layers().count();
    let mut selected = 0;
    for (group, rollout) in groups.iter().flat_map(|group| group.rollouts.iter().map(move |r| (group, r))) {
        let num_response = rollout.response_tokens.len();
        let rows = group.prompt_tokens.len() + num_response - 1;
        let (routing, indexer) = (&rollout.routing, &rollout.indexer);
        assert_eq!((routing.num_layers, routing.num_experts_per_token), (config.num_hidden_layers, 2));
        assert_eq!(routing.expert_idx.len(), rows * config.num_hidden_layers * config.num_experts_per_tok);
        assert!(routing.expert_idx.iter().all(|&e| usize::from(e) < config.n_routed_experts));
        assert_eq!((indexer.num_layers, indexer.top_k), (num_csa, config.index_topk));
        assert_eq!(indexer.block_idx.len(), rows * num_csa * config.index_topk);
        for (row, picks) in indexer.block_idx.chunks_exact(num_csa * config.index_topk).enumerate() {
            // Blocks of 4 tokens that are complete by this row; all of them while there are no more than slots.
            let complete = (row + 1) / 4;
            for picks in picks.chunks_exact(config.index_topk) {
                let used: Vec<u32> = picks.iter().copied().filter(|&b| b != u32::MAX).collect();
                assert_eq!(used.len(), complete.min(config.index_topk), "row {row}");
                assert!(used.is_sorted_by(|a, b| a < b) && used.iter().all(|&b| (b as usize) < complete));
                selected += usize::from(complete > config.index_topk);
            }
        }
        assert_eq!(rollout.rollout_logprobs.len(), num_response);
        assert_eq!(rollout.weight_versions, vec![0; num_response]);
        let ended = rollout.response_tokens.last() == Some(&config.eos_token_id.first());
        assert_eq!(rollout.finish_reason == FinishReason::Stop, ended);
        assert!(ended || num_response == options().max_tokens);
    }
    assert!(selected > 1000, "the indexer had to choose in {selected} rows only");
}

#[test]
fn golden_rollouts_equal_a_prefill_of_their_tokens_bit_for_bit() {
    let (config, _) = base();
    let engine = engine(2);
    let model = engine.model();
    for temperature in [0.0, 1.0, 2.0] {
        let params = SamplingParams { temperature, ..options() };
        let groups = generate(&engine, &requests(), &params);
        for (group, rollout) in groups.iter().flat_map(|group| group.rollouts.iter().map(move |r| (group, r))) {
            let (tokens, n) = (&rollout.response_tokens, group.prompt_tokens.len());
            let fed: Vec<u32> = group.prompt_tokens.iter().chain(&tokens[..tokens.len() - 1]).copied().collect();
            let mut cache = KvCache::new(config);
            let mut out = ForwardOutput::default();
            let segment = Segment { cache: &mut cache, tokens: &fed, logits: Logits::All };
            model.forward(&mut [segment], &mut Workspace::default(), &mut out, None);
            assert_eq!(out.expert_idx, rollout.routing.expert_idx);
            assert_eq!(out.block_idx, rollout.indexer.block_idx);
            let chunks = out.chunks.chunks_exact_mut(config.vocab_size.div_ceil(CHUNK));
            let rows = out.logits.chunks_exact(config.vocab_size).zip(chunks).skip(n - 1);
            for (position, (logits, chunks)) in rows.enumerate() {
                let (rollout_id, position_id) = (rollout.rollout_id, position as u64);
                let turn = Turn { params: &params, rollout_id, position: position_id, counts: None, barred: &[] };
                let drawn = draw(logits, chunks, turn, &mut Scratch::default()).expect("finite logits");
                assert_eq!(drawn.token, tokens[position]);
                assert_eq!(drawn.logprob.to_bits(), rollout.rollout_logprobs[position].to_bits());
            }
        }
    }
}

fn update(version: u64, weights: &Weights) -> WeightUpdate {
    WeightUpdate { version, weights: weights.clone(), checksum: checksum(weights) }
}

/// A sentence with its checksums blotted out.
fn without_checksums(sentence: &str) -> String {
    let is_checksum = |word: &&str| word.len() >= 16 && word[..16].chars().all(|c| c.is_ascii_hexdigit());
    let words = sentence.split(' ').map(|word| if is_checksum(&word) { "<sum>" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn a_flipped_bit_is_refused_and_the_old_version_serves_on() {
    let engine = engine(1);
    let requests = &requests()[..3];
    let before = generate(&engine, requests, &options());
    let mut seen = Vec::new();
    type Flip = fn(&mut TensorData);
    let flips: [(&str, &str, Flip); 5] = [
        ("a vector", "layers.1.attn_norm.weight", |data| flip_f32(data, 0)),
        ("a matrix", "layers.2.attn.wq_b.weight", |data| flip_f32(data, 17)),
        ("a matrix in groups", "layers.0.attn.wo_a.weight", |data| flip_f32(data, 1000)),
        ("codes", "layers.3.ffn.experts.5.w2.weight", |data| {
            let TensorData::Mxfp4 { codes, .. } = data else { panic!("an expert is FP4") };
            codes[100] ^= 0x10;
        }),
        ("a hash table", "layers.0.ffn.gate.tid2eid", |data| {
            let TensorData::I64(table) = data else { panic!("a table holds integers") };
            table[33] ^= 1;
        }),
    ];
    for (what, name, flip) in flips {
        let mut update = update(1, &base().1);
        flip(&mut update.weights.get_mut(name).expect("a tensor of the model").data);
        let error = engine.update_weights(&update).expect_err(what);
        seen.push(without_checksums(&error.to_string()));
        assert_eq!(engine.model().version(), 0, "{what}");
        assert_eq!(all_said(&generate(&engine, requests, &options())), all_said(&before), "{what}");
    }
    seen.dedup();
    assert_snapshot!(seen.join("\n"), @"weights of version 1 arrived with checksum <sum> the sender made <sum> the engine keeps version 0: publish again");
    engine.update_weights(&update(1, &base().1)).expect("the same weights unharmed");
    assert_eq!(engine.model().version(), 1);
}

/// Flips the lowest bit of a value.
fn flip_f32(data: &mut TensorData, at: usize) {
    let TensorData::F32(values) = data else { panic!("plain values") };
    values[at] = f32::from_bits(values[at].to_bits() ^ 1);
}

#[test]
fn a_version_that_does_not_count_up_is_refused() {
    let engine = engine(1);
    engine.update_weights(&update(5, &base().1)).expect("counts up");
    let error = |version| engine.update_weights(&update(version, &base().1)).expect_err("stale").to_string();
    assert_snapshot!(error(5), @"weights of version 5 arrived, but the engine already serves version 5; versions must count up");
    assert_snapshot!(error(4), @"weights of version 4 arrived, but the engine already serves version 5; versions must count up");
    assert_eq!(engine.model().version(), 5);
}

#[test]
fn tokens_follow_new_weights_and_say_so() {
    let greedy = SamplingParams { temperature: 0.0, ..options() };
    let engine = engine(1);
    let before = generate(&engine, &requests(), &greedy);
    // One weight of the output row of a token that was said.
    let (config, mut weights) = base().clone();
    let token = before[2].rollouts[0].response_tokens[0] as usize;
    let TensorData::F32(head) = &mut weights.get_mut("head.weight").expect("the head").data else { panic!("f32") };
    head[token * config.hidden_size + 5] += 100.0;
    engine.update_weights(&update(3, &weights)).expect("counts up");
    let after = generate(&engine, &requests(), &greedy);
    let tokens = |groups: &[Group]| groups.iter().map(|g| g.rollouts[0].response_tokens.clone()).collect::<Vec<_>>();
    assert_ne!(tokens(&after), tokens(&before));
    let fresh = generate(&engine_with(&weights, 1), &requests(), &greedy);
    for (after, fresh) in after.iter().zip(&fresh).flat_map(|(a, f)| a.rollouts.iter().zip(&f.rollouts)) {
        assert_eq!(after.response_tokens, fresh.response_tokens);
        assert_eq!(after.rollout_logprobs, fresh.rollout_logprobs);
        assert_eq!(after.routing, fresh.routing);
        assert_eq!(after.weight_versions, vec![3; after.response_tokens.len()]);
    }
}

/// A request that goes on until it is cut: so hot that its end is unlikely, and long.
fn free() -> (Vec<GroupRequest>, SamplingParams) {
    let request = GroupRequest { group_size: 4, ..requests()[2].clone() };
    (vec![request], SamplingParams { temperature: 1000.0, seed: 3, max_tokens: 1000, ..SamplingParams::default() })
}

#[test]
fn a_running_rollout_goes_on_with_new_weights() {
    let engine = engine(1);
    let (requests, options) = free();
    let progress = Progress::default();
    let groups = std::thread::scope(|scope| {
        let running = scope.spawn(|| engine.generate(&requests, &options, &progress));
        while progress.tokens.load(Ordering::Relaxed) < 20 {
            assert!(!running.is_finished(), "it ended before the update");
            std::thread::yield_now();
        }
        engine.update_weights(&update(1, &base().1)).expect("counts up");
        running.join().expect("no panic").expect("generates")
    });
    let versions: Vec<&Vec<u64>> = groups[0].rollouts.iter().map(|r| &r.weight_versions).collect();
    assert!(versions.iter().all(|v| v.is_sorted() && v[0] == 0), "versions count up from 0: {versions:?}");
    assert!(versions.iter().any(|v| v.last() == Some(&1)), "no token came of the new weights");
    // The weights are the same, so the tokens are those of a run that was left in peace.
    let in_peace = generate(&self::engine(1), &requests, &options);
    let tokens = |groups: &[Group]| groups[0].rollouts.iter().map(|r| r.response_tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&groups), tokens(&in_peace));
}

#[test]
fn cancelling_ends_generation() {
    for num_threads in [1, 2] {
        let engine = engine(num_threads);
        let (request, options) = free();
        let requests: Vec<GroupRequest> = (0..50).flat_map(|_| request.clone()).collect();
        let progress = Progress::default();
        let result = std::thread::scope(|scope| {
            let running = scope.spawn(|| engine.generate(&requests, &options, &progress));
            while progress.tokens.load(Ordering::Relaxed) == 0 {
                assert!(!running.is_finished());
                std::thread::yield_now();
            }
            progress.cancel.store(true, Ordering::Relaxed);
            running.join().expect("no panic")
        });
        assert!(matches!(result, Err(GenerateError::Cancelled)), "{result:?}");
        let drawn = progress.tokens.load(Ordering::Relaxed);
        assert!(drawn < 50 * 4 * 100, "{drawn} tokens were drawn before it ended");
    }
}

#[test]
fn prompts_that_cannot_be_answered_stop_it_before_anything_runs() {
    let engine = engine(1);
    let error = |prompt_tokens: Arc<[u32]>| {
        let mut requests = requests();
        requests[4].prompt_tokens = prompt_tokens;
        let progress = Progress::default();
        let error = engine.generate(&requests, &options(), &progress).expect_err("cannot be answered");
        assert_eq!(progress.tokens.load(Ordering::Relaxed), 0, "something ran before {error}");
        error.to_string()
    };
    assert_snapshot!(error([].into()), @"prompt 4 has no token, expected at least one; give it text, or `prompts.template` a token");
    assert_snapshot!(error(vec![5; 4057].into()), @"prompt 4 has 4057 tokens; with up to 40 more it exceeds the model's context of 4096: shorten the prompt or lower `rollout.max_response_tokens`");
}
