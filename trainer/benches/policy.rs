//! Tokens per second of the policy's forward and backward pass, on a model of the quick start's size:
//! `cargo bench -p trainer --profile dev [-- MICROBATCH_TOKENS ...]`.

use std::hint::black_box;
use std::time::Instant;

use datasets::Sample;
use rollout::model::ModelConfig;
use tch::{Device, Kind};
use trainer::optimizer::{AdamWConfig, MuonConfig, Optimizer};
use trainer::pack::{PackConfig, pack};
use trainer::policy::{Gradients, Policy, Replay, initial_weights};

const CONFIG: &str = r#"{
    "model_type": "deepseek_v4", "vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2,
    "o_lora_rank": 32, "sliding_window": 32, "compress_ratios": [0, 4, 16, 4], "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "max_position_embeddings": 4096, "index_n_heads": 4, "index_head_dim": 32,
    "index_topk": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "num_hash_layers": 1, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1
}"#;

fn main() {
    let sizes: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![1024, 2048, 4096, 16384] } else { sizes };
    let config: ModelConfig = serde_json::from_str(CONFIG).expect("the configuration above is whole");
    let mut policy = Policy::from_weights(&config, &initial_weights(&config, 1), Device::Cpu).expect("just made");
    let mut optimizer = Optimizer::adamw(&AdamWConfig::default(), &policy);
    let samples: Vec<Sample> = (0..256u32).map(|i| sample(i, 64)).collect();
    println!("{} threads, 256 samples of 64 tokens", tch::get_num_threads());
    for microbatch_tokens in sizes {
        let packed = pack(&samples, &PackConfig { microbatch_tokens, ..PackConfig::default() });
        let (mut forward_s, mut backward_s, mut no_grad_s, mut step_s) = (0.0, 0.0, 0.0, 0.0);
        let (mut tokens, mut gradients) = (0, Gradients::default());
        for round in 0..3 {
            for mb in &packed {
                let start = Instant::now();
                let _ = tch::no_grad(|| black_box(policy.token_logprobs(mb, Replay::default(), 1.0)));
                let no_grad = start.elapsed().as_secs_f64();
                let start = Instant::now();
                let (logprobs, _) = policy.token_logprobs(mb, Replay::default(), 1.0);
                let loss = -logprobs.mean(None::<Kind>);
                let forward = start.elapsed().as_secs_f64();
                gradients = black_box(Gradients::of(&loss, &policy));
                if round > 0 {
                    tokens += mb.num_tokens();
                    no_grad_s += no_grad;
                    forward_s += forward;
                    backward_s += start.elapsed().as_secs_f64() - forward;
                }
            }
            let start = Instant::now();
            optimizer.step(&mut policy, &gradients).expect("gradients are finite");
            step_s = start.elapsed().as_secs_f64();
        }
        println!(
            "microbatch_tokens {microbatch_tokens:6}: {:6.0} tokens/s forward+backward (forward {:.0}%); \
             {:6.0} tokens/s forward without gradients; optimizer step {:.1} ms",
            tokens as f64 / (forward_s + backward_s),
            100.0 * forward_s / (forward_s + backward_s),
            tokens as f64 / no_grad_s,
            1e3 * step_s,
        );
    }
    step_times(&mut policy, &samples[..16]);
}

/// Milliseconds of a step of either optimizer by one gradient, in turn; the median of eleven.
fn step_times(policy: &mut Policy, samples: &[Sample]) {
    tch::set_num_threads(1); // as in a run
    let mb = pack(samples, &PackConfig::default()).remove(0);
    let loss = -policy.token_logprobs(&mb, Replay::default(), 1.0).0.mean(None::<Kind>);
    let gradients = Gradients::of(&loss, policy);
    let mut optimizers = vec![("AdamW".to_owned(), Optimizer::adamw(&AdamWConfig::default(), policy), Vec::new())];
    for threads in [1, 2] {
        let optimizer = Optimizer::muon(&MuonConfig::default(), policy).with_threads(threads);
        optimizers.push((format!("Muon, {threads} threads"), optimizer, Vec::new()));
    }
    for _ in 0..11 {
        for (_, optimizer, times_ms) in &mut optimizers {
            let start = Instant::now();
            optimizer.step(policy, &gradients).expect("gradients are finite");
            times_ms.push(1e3 * start.elapsed().as_secs_f64());
        }
    }
    for (name, _, times_ms) in &mut optimizers {
        times_ms.sort_by(f64::total_cmp);
        println!("optimizer step {:6.1} ms ({name})", times_ms[times_ms.len() / 2]);
    }
}

fn sample(i: u32, n: usize) -> Sample {
    Sample {
        group_id: 0,
        rollout_id: u64::from(i),
        tokens: (0..n as u32).map(|t| (i * 7919 + t * t * 31 + t * 17) % 260).collect(),
        loss_mask: vec![true; n - 1],
        advantages: vec![1.0; n - 1],
        rollout_logprobs: vec![0.0; n - 1],
        routing: None,
        indexer: None,
    }
}
