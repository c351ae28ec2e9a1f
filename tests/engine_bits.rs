//! The engine gives the same bits however it is fed: sequences cut anywhere, in any company, with caches forked on the
//! way and multi-token prediction following at a pace of its own.

use std::sync::OnceLock;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use rollout::kv_cache::KvCache;
use rollout::model::{ForwardOutput, Logits, Model, ModelConfig, Segment, TensorData, Workspace, to_engine_format};
use trainer::policy::initial_weights;

use crate::golden::cases;

/// Everything that the engine says of a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    logits: Vec<u32>,
    expert_idx: Vec<u16>,
    block_idx: Vec<u32>,
    mtp_logits: Vec<u32>,
    mtp_expert_idx: Vec<u16>,
}

/// A sequence on its way through the model.
struct Feed<'a> {
    tokens: &'a [u32],
    cache: KvCache,
    /// The streams of every token so far, which multi-token prediction starts from.
    streams: Vec<f32>,
    said: Said,
}

impl<'a> Feed<'a> {
    fn new(model: &Model, tokens: &'a [u32]) -> Self {
        Self { tokens, cache: KvCache::new(model.config()), streams: Vec::new(), said: Said::default() }
    }

    /// Its cache cloned and nothing said, as of a sequence that goes on with other tokens.
    fn fork<'b>(&self, tokens: &'b [u32]) -> Feed<'b> {
        Feed { tokens, cache: self.cache.clone(), streams: self.streams.clone(), said: Said::default() }
    }

    fn is_done(&self, has_mtp: bool) -> bool {
        let n = self.tokens.len();
        self.cache.len == n && (!has_mtp || self.cache.mtp_len == n - 1)
    }
}

/// One pass of the model, then one of multi-token prediction: how many tokens each sequence takes, as far as it has them.
#[derive(Clone, Debug)]
struct Pass {
    takes: Vec<usize>,
    mtp_takes: Vec<usize>,
    /// Before it every sequence is forked, and the fork goes another way.
    forks: bool,
    /// Before it every sequence reads its next token and a wrong one, which is taken back.
    drafts: bool,
}

fn bits(x: &[f32]) -> impl Iterator<Item = u32> + '_ {
    x.iter().map(|x| x.to_bits())
}

/// Feeds `takes` tokens of each sequence in one pass; those that take none are not in it.
fn feed(model: &Model, feeds: &mut [Feed<'_>], takes: &[usize], ws: &mut Workspace) {
    let config = model.config();
    let row = config.hc_mult * config.hidden_size;
    let mut fed: Vec<(&mut Feed<'_>, usize)> =
        feeds.iter_mut().zip(takes.iter().copied()).filter(|(_, take)| *take > 0).collect();
    let mut out = ForwardOutput::default();
    let mut segments: Vec<Segment<'_>> = fed
        .iter_mut()
        .map(|(feed, take)| {
            let tokens = &feed.tokens[feed.cache.len..][..*take];
            Segment { cache: &mut feed.cache, tokens, logits: Logits::All }
        })
        .collect();
    if segments.is_empty() {
        return;
    }
    model.forward(&mut segments, ws, &mut out, None);
    let num_rows: usize = fed.iter().map(|(_, take)| take).sum();
    let mut from = 0;
    for (feed, take) in fed {
        let of = |width: usize| from * width..(from + take) * width;
        feed.streams.extend_from_slice(&ws.streams()[of(row)]);
        feed.said.logits.extend(bits(&out.logits[of(config.vocab_size)]));
        feed.said.expert_idx.extend_from_slice(&out.expert_idx[of(out.expert_idx.len() / num_rows)]);
        feed.said.block_idx.extend_from_slice(&out.block_idx[of(out.block_idx.len() / num_rows)]);
        from += take;
    }
}

/// The same for multi-token prediction.
fn feed_mtp(model: &Model, feeds: &mut [Feed<'_>], takes: &[usize], ws: &mut Workspace) {
    let config = model.config();
    let row = config.hc_mult * config.hidden_size;
    let mut fed: Vec<(&mut Feed<'_>, usize)> =
        feeds.iter_mut().zip(takes.iter().copied()).filter(|(_, take)| *take > 0).collect();
    let (mut out, mut streams) = (ForwardOutput::default(), Vec::new());
    let mut segments = Vec::new();
    for (feed, take) in &mut fed {
        let from = feed.cache.mtp_len;
        streams.extend_from_slice(&feed.streams[from * row..(from + *take) * row]);
        let tokens = &feed.tokens[from + 1..][..*take];
        segments.push(Segment { cache: &mut feed.cache, tokens, logits: Logits::All });
    }
    if segments.is_empty() {
        return;
    }
    model.forward_mtp(&streams, &mut segments, ws, &mut out, None);
    let mut from = 0;
    for (feed, take) in fed {
        let of = |width: usize| from * width..(from + take) * width;
        feed.said.mtp_logits.extend(bits(&out.logits[of(config.vocab_size)]));
        feed.said.mtp_expert_idx.extend_from_slice(&out.expert_idx[of(config.num_experts_per_tok)]);
        from += take;
    }
}

/// How many tokens of each sequence multi-token prediction can take: those whose predecessor the model has seen.
fn mtp_room(feed: &Feed<'_>) -> usize {
    feed.cache.len.min(feed.tokens.len() - 1) - feed.cache.mtp_len
}

/// What is said of a sequence alone, in one piece.
fn whole(model: &Model, tokens: &[u32]) -> Said {
    let mut feeds = [Feed::new(model, tokens)];
    let ws = &mut Workspace::default();
    feed(model, &mut feeds, &[tokens.len()], ws);
    if model.config().has_mtp() {
        let room = mtp_room(&feeds[0]);
        feed_mtp(model, &mut feeds, &[room], ws);
    }
    let [Feed { said, .. }] = feeds;
    said
}

/// Forks every sequence, sends the forks another way, and holds what they say against whole sequences of that way.
fn check_forks(model: &Model, feeds: &[Feed<'_>], ws: &mut Workspace) -> Result<(), TestCaseError> {
    let vocab = model.config().vocab_size;
    let ways: Vec<Vec<u32>> = feeds
        .iter()
        .map(|feed| {
            // Multi-token prediction may have read the next token already: then the ways part behind it.
            let len = feed.cache.len.max(if feed.cache.mtp_len > 0 { feed.cache.mtp_len + 1 } else { 0 });
            let other = feed.tokens.iter().cycle().skip(len).take(7).map(|token| (token + 1) % vocab as u32);
            feed.tokens[..len].iter().copied().chain(other).collect()
        })
        .collect();
    let mut forks: Vec<Feed<'_>> = feeds.iter().zip(&ways).map(|(feed, way)| feed.fork(way)).collect();
    let rest: Vec<usize> = forks.iter().map(|fork| fork.tokens.len() - fork.cache.len).collect();
    feed(model, &mut forks, &rest, ws);
    let has_mtp = model.config().has_mtp();
    if has_mtp {
        let room: Vec<usize> = forks.iter().map(mtp_room).collect();
        feed_mtp(model, &mut forks, &room, ws);
    }
    for ((feed, way), fork) in feeds.iter().zip(&ways).zip(&forks) {
        let want = whole(model, way);
        prop_assert!(fork.said.logits == want.logits[feed.cache.len * vocab..], "a fork at {}", feed.cache.len);
        if has_mtp {
            let from = feed.cache.mtp_len * vocab;
            prop_assert!(fork.said.mtp_logits == want.mtp_logits[from..], "a fork at {}: mtp", feed.cache.len);
        }
    }
    Ok(())
}

/// Feeds every sequence its next token, if there is one, and a wrong one, and takes the latter back.
fn feed_and_take_back(model: &Model, feeds: &mut [Feed<'_>], ws: &mut Workspace) {
    let config = model.config();
    for feed in feeds.iter_mut().filter(|feed| feed.cache.len < feed.tokens.len()) {
        let next = feed.tokens[feed.cache.len];
        let tokens = [&feed.tokens[..feed.cache.len], &[next, (next + 1) % config.vocab_size as u32]].concat();
        let mark = feed.cache.mark();
        let mut fork = feed.fork(&tokens);
        feed.cache = KvCache::new(config);
        self::feed(model, std::slice::from_mut(&mut fork), &[2], ws);
        let Feed { mut cache, mut streams, said, .. } = fork;
        cache.take_back(mark);
        streams.truncate(cache.len * config.hc_mult * config.hidden_size);
        (feed.cache, feed.streams) = (cache, streams);
        feed.said.logits.extend(&said.logits[..config.vocab_size]);
        feed.said.expert_idx.extend(&said.expert_idx[..said.expert_idx.len() / 2]);
        feed.said.block_idx.extend(&said.block_idx[..said.block_idx.len() / 2]);
    }
}

/// Feeds `sequences` by `passes`, again and again until they end, and expects what is said of each alone in one piece.
fn check(model: &Model, sequences: &[&[u32]], passes: &[Pass]) -> Result<(), TestCaseError> {
    let has_mtp = model.config().has_mtp();
    // The whole sequences are fed on one thread, the pieces on one to three.
    let ws = &mut Workspace::new(1 + passes.len() % 3);
    let mut feeds: Vec<Feed<'_>> = sequences.iter().map(|tokens| Feed::new(model, tokens)).collect();
    for pass in passes.iter().cycle() {
        if feeds.iter().all(|feed| feed.is_done(has_mtp)) {
            break;
        }
        if pass.forks {
            check_forks(model, &feeds, ws)?;
        }
        if pass.drafts {
            feed_and_take_back(model, &mut feeds, ws);
        }
        let room = |feed: &Feed<'_>| feed.tokens.len() - feed.cache.len;
        let takes: Vec<usize> = feeds.iter().zip(&pass.takes).map(|(feed, take)| room(feed).min(*take)).collect();
        feed(model, &mut feeds, &takes, ws);
        if has_mtp {
            let takes = feeds.iter().zip(&pass.mtp_takes).map(|(feed, take)| mtp_room(feed).min(*take));
            let takes: Vec<usize> = takes.collect();
            feed_mtp(model, &mut feeds, &takes, ws);
        }
    }
    for (s, feed) in feeds.iter().enumerate() {
        let want = whole(model, feed.tokens);
        prop_assert!(feed.said.logits.len() == feed.tokens.len() * model.config().vocab_size);
        prop_assert!(feed.said == want, "sequence {s} of {} says something else", feeds.len());
    }
    Ok(())
}

/// At most this many sequences side by side.
const NUM_SEQUENCES: usize = 3;

/// Passes that take up to `most` tokens of a sequence; the last one takes some of all, so that every sequence ends.
fn passes(most: usize) -> impl Strategy<Value = Vec<Pass>> {
    let takes = |least: usize| prop::collection::vec(least..=most, NUM_SEQUENCES);
    let pass = |least: usize| {
        (takes(least), takes(least), prop::bool::weighted(0.2), prop::bool::weighted(0.4))
            .prop_map(|(takes, mtp_takes, forks, drafts)| Pass { takes, mtp_takes, forks, drafts })
    };
    (prop::collection::vec(pass(0), 0..6), pass(1)).prop_map(|(mut passes, last)| {
        passes.push(last);
        passes
    })
}

/// A small model of layers of every kind, with multi-token prediction or without.
fn small_config() -> impl Strategy<Value = ModelConfig> {
    let ratios = prop::sample::select(vec![vec![0], vec![4], vec![3], vec![0, 4, 8, 4], vec![6, 4, 0], vec![4, 4, 5]]);
    let sizes = (1_usize..9, 1_usize..4, 1_usize..5, 0_usize..2, 1_usize..4);
    (ratios, sizes, any::<bool>(), prop::bool::weighted(0.7)).prop_map(
        |(ratios, (window, index_topk, hc_mult, num_hash_layers, k), fp4, has_mtp)| {
            let mut json = serde_json::json!({
                "model_type": "deepseek_v4", "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": ratios.len(),
                "num_attention_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2,
                "o_lora_rank": 8, "sliding_window": window, "compress_ratios": ratios, "rope_theta": 10000.0,
                "compress_rope_theta": 160000.0, "max_position_embeddings": 4096, "index_n_heads": 4,
                "index_head_dim": 16, "index_topk": index_topk, "n_routed_experts": 6, "num_experts_per_tok": k,
                "moe_intermediate_size": 32, "num_hash_layers": num_hash_layers, "routed_scaling_factor": 1.5,
                "swiglu_limit": 10.0, "hc_mult": hc_mult, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
                "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.5,
                "num_nextn_predict_layers": usize::from(has_mtp),
            });
            if fp4 {
                json["expert_dtype"] = "fp4".into();
            }
            serde_json::from_value(json).expect("a configuration")
        },
    )
}

/// A model whose every number plays a part: fresh weights are the same everywhere in norms, sinks and biases.
fn model(config: &ModelConfig, seed: u64) -> Model {
    let mut weights = initial_weights(config, seed);
    for tensor in weights.values_mut() {
        if let TensorData::F32(values) = &mut tensor.data {
            let noise = |i: u32| (i.wrapping_mul(2_654_435_769) >> 8) as f32 / (1 << 24) as f32 - 0.5;
            (0..).zip(values).for_each(|(i, x)| *x += 0.4 * noise(i));
        }
    }
    Model::new(config, 0, &to_engine_format(config, weights))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_cut_company_and_fork_gives_the_same_bits(
        config in small_config(),
        seed in any::<u64>(),
        sequences in prop::collection::vec(prop::collection::vec(0_u32..40, 1..40), 1..=NUM_SEQUENCES),
        passes in passes(12),
    ) {
        let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        check(&model(&config, seed), &sequences, &passes)?;
    }
}

/// Every golden model, with the tokens of its longest run.
fn golden_models() -> &'static [(String, Model, Vec<u32>)] {
    static MODELS: OnceLock<Vec<(String, Model, Vec<u32>)>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let load = |case: crate::golden::Case| {
            let model = Model::load(&case.dir, &case.config).unwrap_or_else(|e| panic!("{e}"));
            let runs = case.files("run_").into_iter().flat_map(|recorded| recorded.input_ids());
            (case.name, model, runs.max_by_key(Vec::len).expect("a case has runs"))
        };
        cases().into_iter().map(load).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn golden_v4_any_cut_company_and_fork_gives_the_same_bits(
        spans in prop::collection::vec((0_usize..400, 1_usize..180), 1..=NUM_SEQUENCES),
        passes in passes(70),
    ) {
        for (name, model, tokens) in golden_models() {
            let sequences: Vec<&[u32]> = spans
                .iter()
                .map(|&(from, len)| {
                    let from = from % tokens.len();
                    &tokens[from..(from + len).min(tokens.len())]
                })
                .collect();
            check(model, &sequences, &passes).map_err(|e| TestCaseError::fail(format!("{name}: {e}")))?;
        }
    }
}
