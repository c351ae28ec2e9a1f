//! Decoding allocates nothing: a binary of its own, since it counts the allocations of the whole process.

use rollout::kv_cache::KvCache;
use rollout::model::{
    ForwardOutput, HostTensor, Logits, Model, ModelConfig, Segment, TensorData, Weights, Workspace, to_engine_format,
};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const CONFIG: &str = r#"{
    "model_type": "deepseek_v4", "vocab_size": 70, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "num_hash_layers": 1, "norm_topk_prob": true, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "sliding_window": 8,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "compress_ratios": [0, 4, 8, 4, 8],
    "max_position_embeddings": 4096, "expert_dtype": "fp4", "bos_token_id": 0, "eos_token_id": 1
}"#;

fn model() -> Model {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(&file, CONFIG).expect("room for a configuration");
    let config = ModelConfig::load(file.path()).expect("a configuration");
    let mut weights = Weights::new();
    for (name, shape) in config.parameters() {
        let n = shape.iter().product::<usize>() as u32;
        let values = (0..n).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 26) as f32 - 0.125).collect();
        weights.insert(name, HostTensor::f32(&shape, values));
    }
    for name in config.hash_tables() {
        let table = (0..70 * 2).map(|i| i * 3 % 8).collect();
        weights.insert(name, HostTensor { shape: vec![70, 2], data: TensorData::I64(table) });
    }
    Model::new(&config, 0, &to_engine_format(&config, weights))
}

/// Decodes `num_steps` tokens of every sequence, and returns how many blocks of memory that took.
fn decode(model: &Model, caches: &mut [KvCache], ws: &mut Workspace, out: &mut ForwardOutput, num_steps: u32) -> u64 {
    // The list of segments is the caller's, and so is its memory.
    let tokens: Vec<[u32; 1]> = (0..caches.len() as u32 + num_steps).map(|i| [i * 7 % 70]).collect();
    let mut blocks = 0;
    for step in 0..num_steps as usize {
        let mut segments: Vec<Segment<'_>> = caches
            .iter_mut()
            .zip(&tokens[step..])
            .map(|(cache, tokens)| Segment { cache, tokens, logits: Logits::Last })
            .collect();
        let before = dhat::HeapStats::get().total_blocks;
        model.forward(&mut segments, ws, out, None);
        blocks += dhat::HeapStats::get().total_blocks - before;
    }
    blocks
}

#[test]
fn a_decode_step_allocates_nothing() {
    let model = model();
    let _profiler = dhat::Profiler::builder().testing().build();
    for num_threads in [1, 2] {
        let (mut ws, mut out) = (Workspace::new(num_threads), ForwardOutput::default());
        let mut caches: Vec<KvCache> = (0..3).map(|_| KvCache::new(model.config())).collect();
        for (i, cache) in caches.iter_mut().enumerate() {
            let prompt: Vec<u32> = (0..5 + 9 * i as u32).collect();
            let segment = Segment { cache, tokens: &prompt, logits: Logits::Last };
            model.forward(&mut [segment], &mut ws, &mut out, None);
            cache.reserve(200);
        }
        ws.reserve(model.config(), 300);
        let first = decode(&model, &mut caches, &mut ws, &mut out, 1);
        assert!(first > 0, "the counter counts");
        let later = decode(&model, &mut caches, &mut ws, &mut out, 199);
        assert_eq!(later, 0, "blocks of memory for 199 steps on {num_threads} threads");
    }
}
