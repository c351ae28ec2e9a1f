//! `cargo bench -p rollout -- [tiny|small] [BATCH,BATCH..] [--context N] [--fp8]`: tokens per second of prefill and decode,
//! sampled at temperature 1, of models with random weights: the same two shapes and the same work (prompts of 64 tokens,
//! 64 new ones) as the transformers peer of `scripts/bench-decode`. `--context N`: a decode step after N tokens instead.
//! `--fp8`: matrices outside the experts in FP8, as V4 is released, instead of f32.

use std::time::Instant;

use rollout::kv_cache::KvCache;
use rollout::model::checkpoint::Format;
use rollout::model::{
    ForwardOutput, HostTensor, Logits, Model, ModelConfig, Segment, TensorData, Weights, Workspace, to_engine_format,
};
use rollout::sampler::{Drawn, Sampler, SamplingParams, Turn};

const PROMPT: usize = 64;
const NEW: usize = 64;
/// Prompt tokens of one pass, as in the engine.
const CHUNK: usize = 256;

fn config(small: bool) -> ModelConfig {
    let pick = |tiny: usize, of_small: usize| if small { of_small } else { tiny };
    let (layers, hca) = (pick(4, 8), pick(32, 128));
    let ratios: Vec<usize> = (0..layers)
        .map(|i| {
            if i == 0 {
                0
            } else if i % 2 == 1 {
                4
            } else {
                hca
            }
        })
        .collect();
    let json = serde_json::json!({
        "model_type": "deepseek_v4", "vocab_size": pick(512, 8192), "hidden_size": pick(128, 512),
        "num_hidden_layers": layers, "num_attention_heads": pick(4, 8), "num_key_value_heads": 1,
        "head_dim": pick(64, 128), "qk_rope_head_dim": pick(16, 32), "q_lora_rank": pick(64, 256),
        "o_groups": pick(2, 4), "o_lora_rank": pick(32, 128), "n_routed_experts": pick(16, 32), "n_shared_experts": 1,
        "num_experts_per_tok": pick(4, 6), "moe_intermediate_size": pick(64, 256), "num_hash_layers": 1,
        "norm_topk_prob": true, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "sliding_window": pick(32, 128),
        "index_n_heads": pick(4, 8), "index_head_dim": pick(32, 64), "index_topk": pick(16, 64), "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0, "compress_ratios": ratios, "max_position_embeddings": 1 << 17,
        "expert_dtype": "fp4", "bos_token_id": 0, "eos_token_id": 1,
    });
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(&file, json.to_string()).expect("room for a configuration");
    ModelConfig::load(file.path()).unwrap_or_else(|error| panic!("{error}"))
}

fn weights(config: &ModelConfig, fp8: bool) -> Weights {
    let mut state = 1u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut weights = Weights::new();
    for (name, shape) in config.parameters() {
        let std = if name.ends_with("norm.weight") { 0.0 } else { (3.0 / shape[shape.len() - 1] as f32).sqrt() };
        let mean = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values = (0..shape.iter().product()).map(|_| mean + std * uniform()).collect();
        let tensor = HostTensor::f32(&shape, values);
        let fp8 = fp8 && shape.len() == 2 && !name.ends_with(".ape");
        weights.insert(name, if fp8 { tensor.into_format(Format::Fp8) } else { tensor });
    }
    let (e, k) = (config.n_routed_experts, config.num_experts_per_tok);
    for name in config.hash_tables() {
        let table = (0..config.vocab_size * k).map(|i| ((i / k * 7 + i % k) % e) as i64).collect();
        weights.insert(name, HostTensor { shape: vec![config.vocab_size, k], data: TensorData::I64(table) });
    }
    to_engine_format(config, weights)
}

struct Run {
    model: Model,
    workspace: Workspace,
    out: ForwardOutput,
    sampler: Sampler,
    drawn: Vec<Option<Drawn>>,
}

impl Run {
    /// Takes `take` tokens of each sequence from its prompt, draws one for each that is at its end.
    fn pass(&mut self, caches: &mut [KvCache], tokens: &mut [Vec<u32>], take: usize) {
        let mut segments: Vec<Segment<'_>> = caches
            .iter_mut()
            .zip(tokens.iter())
            .map(|(cache, tokens)| Segment { tokens: &tokens[cache.len..][..take], cache, logits: Logits::Last })
            .collect();
        self.model.forward(&mut segments, &mut self.workspace, &mut self.out, None);
        let params = &SamplingParams::default();
        let turn = |i| Some(Turn { params, rollout_id: i as u64, position: 0, counts: None, barred: &[] });
        self.sampler.draw_rows(&mut self.workspace, &mut self.out, &mut self.drawn, turn);
        for ((tokens, cache), next) in tokens.iter_mut().zip(caches).zip(&self.drawn) {
            if cache.len == tokens.len() {
                tokens.push(next.as_ref().expect("finite logits").token);
            }
        }
    }

    fn start(&mut self, batch: usize, len: usize) -> (Vec<KvCache>, Vec<Vec<u32>>) {
        let vocab = self.model.config().vocab_size;
        let tokens =
            (0..batch).map(|b| (0..len).map(|i| ((b * 31 + i * 17) % (vocab - 2) + 2) as u32).collect()).collect();
        let mut caches = vec![KvCache::new(self.model.config()); batch];
        caches.iter_mut().for_each(|cache| cache.reserve(len + NEW));
        (caches, tokens)
    }

    /// Seconds of prefill and of decode.
    fn generate(&mut self, batch: usize) -> (f64, f64) {
        let (mut caches, mut tokens) = self.start(batch, PROMPT);
        let start = Instant::now();
        for first in (0..batch).step_by(CHUNK / PROMPT) {
            let range = first..batch.min(first + CHUNK / PROMPT);
            self.pass(&mut caches[range.clone()], &mut tokens[range], PROMPT);
        }
        let prefill = start.elapsed().as_secs_f64();
        let start = Instant::now();
        for _ in 1..NEW {
            self.pass(&mut caches, &mut tokens, 1);
        }
        (prefill, start.elapsed().as_secs_f64())
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let small = args.first().is_some_and(|name| name == "small");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let fp8 = args.iter().any(|arg| arg == "--fp8");
    let config = config(small);
    let parameters: usize = config.parameters().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let model = Model::new(&config, 0, &weights(&config, fp8));
    println!(
        "{:.2} M parameters, {:.1} MB packed, {threads} threads, {:?} kernels",
        parameters as f64 / 1e6,
        model.num_bytes() as f64 / 1e6,
        kernels::backend()
    );
    let mut run = Run {
        model,
        workspace: Workspace::new(threads),
        out: ForwardOutput::default(),
        sampler: Sampler::default(),
        drawn: Vec::new(),
    };
    if let Some(at) = args.iter().position(|arg| arg == "--context") {
        let context: usize = args[at + 1].parse().expect("a number of tokens");
        let (mut caches, mut tokens) = run.start(1, context);
        while caches[0].len < context {
            let take = CHUNK.min(context - caches[0].len);
            run.pass(&mut caches, &mut tokens, take);
        }
        let times = (0..4 * NEW).map(|_| {
            let start = Instant::now();
            run.pass(&mut caches, &mut tokens, 1);
            start.elapsed().as_secs_f64()
        });
        println!("context {context}: decode step {:.3} ms", 1e3 * median(times.collect()));
        return;
    }
    let batches = args
        .get(1)
        .filter(|arg| !arg.starts_with('-'))
        .map_or(if small { "1,8,32" } else { "1,8,128" }, String::as_str);
    for batch in batches.split(',').map(|batch| batch.parse::<usize>().expect("a batch size")) {
        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        for i in 0..6 {
            let (p, d) = run.generate(batch);
            if i > 0 {
                prefill.push(p);
                decode.push(d);
            }
        }
        let (prefill, decode) = (median(prefill), median(decode));
        println!(
            "batch {batch:>3}: prefill {:>8.0} tok/s, decode {:>8.0} tok/s, {:.3} ms a step",
            (batch * PROMPT) as f64 / prefill,
            (batch * (NEW - 1)) as f64 / decode,
            1e3 * decode / (NEW - 1) as f64
        );
    }
}
