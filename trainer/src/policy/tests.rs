//! The policy against numbers from PyTorch (golden cases, SPEC section 15) and against itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use datasets::Sample;
use rollout::model::{ModelConfig, Weights, checkpoint};
use safetensors::tensor::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::pack::{PackConfig, pack};

/// A tensor of a golden file.
struct Golden {
    shape: Vec<usize>,
    values: Vec<f32>,
}

fn read_golden(path: &Path) -> BTreeMap<String, Golden> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let words = view.data().as_chunks::<4>().0.iter();
        let values = match view.dtype() {
            Dtype::F32 => words.map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::I32 => words.map(|b| i32::from_le_bytes(*b) as f32).collect(),
            other => panic!("{name}: {other:?}"),
        };
        (name, Golden { shape: view.shape().to_vec(), values })
    });
    tensors.collect()
}

fn max_diff(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |a, b| if b.is_nan() { f32::INFINITY } else { a.max(b) })
}

fn plain_sample(tokens: Vec<u32>) -> Sample {
    let n = tokens.len() - 1;
    Sample {
        group_id: 0,
        rollout_id: 0,
        tokens,
        loss_mask: vec![true; n],
        advantages: vec![1.0; n],
        rollout_logprobs: vec![0.0; n],
        routing: None,
        indexer: None,
    }
}

/// `[B, L]` ids as one row each; `append` adds a token, so that all `L` are read.
fn microbatch(ids: &Golden, append: bool) -> Microbatch {
    let rows = ids.values.chunks(ids.shape[1]);
    let samples: Vec<_> =
        rows.map(|row| plain_sample(row.iter().map(|&id| id as u32).chain(append.then_some(0)).collect())).collect();
    let tokens = ids.values.len();
    let mut packed = pack(&samples, &PackConfig { microbatch_tokens: tokens, row_tokens: tokens });
    assert_eq!(packed.len(), 1);
    packed.remove(0)
}

fn mean_cross_entropy(policy: &Policy, mb: &Microbatch) -> Tensor {
    let (logprobs, _) = policy.token_logprobs(mb, Replay::default(), 1.0);
    -logprobs.mean(None::<Kind>)
}

fn golden_cases() -> Vec<PathBuf> {
    let root = std::env::var_os("FURLONG_GOLDEN_V4")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/v4"), PathBuf::from);
    let mut cases: Vec<_> = std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().path()).collect();
    // Quantised cases store FP8, which the checkpoint reader does not take.
    let quantised = |dir: &Path| std::fs::read_to_string(dir.join("config.json")).unwrap().contains("quant_method");
    cases.retain(|dir| dir.join("config.json").exists() && !quantised(dir));
    cases.sort();
    assert!(!cases.is_empty(), "no case under {}", root.display());
    cases
}

fn runs(case: &Path) -> Vec<PathBuf> {
    let mut runs: Vec<_> = std::fs::read_dir(case).unwrap().map(|e| e.unwrap().path()).collect();
    runs.retain(|p| p.file_name().unwrap().to_string_lossy().starts_with("run_"));
    runs.sort();
    runs
}

fn load(case: &Path) -> (ModelConfig, Weights) {
    let config = ModelConfig::load(&case.join("config.json")).unwrap();
    let weights = checkpoint::load_weights(case, &config).unwrap();
    (config, weights)
}

#[test]
fn golden_v4_forward() {
    for case in golden_cases() {
        let (config, weights) = load(&case);
        let policy = Policy::from_weights(&config, &weights, Device::Cpu).unwrap();
        for run in runs(&case) {
            let golden = read_golden(&run);
            let mb = microbatch(&golden["input_ids"], true);
            let mut trace = Trace::default();
            let logits = tch::no_grad(|| policy.logits(&policy.forward(&mb, Replay::default(), Some(&mut trace))));
            let at = format!("{}/{}", case.file_name().unwrap().display(), run.file_stem().unwrap().display());

            let mut streams = 0f32;
            for (i, got) in trace.streams.iter().enumerate() {
                let got = match golden.get("kept_positions") {
                    Some(kept) => {
                        let kept: Vec<i64> = kept.values.iter().map(|&p| p as i64).collect();
                        got.index_select(1, &Tensor::from_slice(&kept))
                    }
                    None => got.shallow_clone(),
                };
                let want = &golden[&format!("layers.{i}.streams_out")];
                streams = streams.max(max_diff(&to_vec_f32(&got), &want.values));
                check_sets(&at, i, config.num_experts_per_tok, &trace.experts[i], &golden);
            }
            let error = max_diff(&to_vec_f32(&logits), &golden["logits"].values);
            println!("{at}: logits {error:.1e}, streams {streams:.1e}");
            assert!(error < 2e-4, "{at}: logits differ by {error}");
            assert!(streams < 2e-4, "{at}: streams differ by {streams}");
            for (layer, blocks) in config.csa_layers().zip(&trace.blocks) {
                let blocks = blocks.as_ref().expect("runs are longer than a block");
                let nb = blocks.size()[2] as usize;
                let picked = to_vec_f32(&blocks.to_kind(Kind::Float));
                let want = &golden[&format!("layers.{layer}.indexer.topk")];
                for (t, (picked, want)) in picked.chunks(nb).zip(want.values.chunks(want.shape[2])).enumerate() {
                    let got: Vec<i64> = (0..nb).filter(|&b| picked[b] > 0.0).map(|b| b as i64).collect();
                    assert_eq!(got, sorted(want), "{at}: layer {layer}, blocks of position {t}");
                }
            }
        }
    }
}

fn sorted(values: &[f32]) -> Vec<i64> {
    let mut set: Vec<i64> = values.iter().map(|&v| v as i64).filter(|&v| v >= 0).collect();
    set.sort_unstable();
    set
}

fn check_sets(at: &str, layer: usize, k: usize, got: &[i64], golden: &BTreeMap<String, Golden>) {
    let want = &golden[&format!("layers.{layer}.router.experts")];
    assert_eq!(got.len(), want.values.len());
    for (t, (got, want)) in got.chunks(k).zip(want.values.chunks(k)).enumerate() {
        let mut got = got.to_vec();
        got.sort_unstable();
        assert_eq!(got, sorted(want), "{at}: layer {layer}, experts of position {t}");
    }
}

#[test]
fn golden_v4_gradients() {
    for case in golden_cases() {
        let (config, weights) = load(&case);
        let policy = Policy::from_weights(&config, &weights, Device::Cpu).unwrap();
        let meta: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(case.join("meta.json")).unwrap()).unwrap();
        let at = meta["grad_at"].as_array().unwrap();
        let golden = read_golden(&case.join(format!("run_{}x{}.safetensors", at[0], at[1])));
        let loss = mean_cross_entropy(&policy, &microbatch(&golden["input_ids"], false));
        assert!((loss.double_value(&[]) - meta["loss"].as_f64().unwrap()).abs() < 1e-4);
        let gradients = Gradients::of(&loss, &policy);
        let mut grads = Weights::new();
        for (p, gradient) in policy.parameters().iter().zip(gradients.tensors()) {
            let master = if gradient.defined() { gradient.shallow_clone() } else { p.leaf.zeros_like() };
            Parameter { name: p.name.clone(), master, leaf: p.leaf.shallow_clone(), quantized: false }
                .write(&mut grads);
        }
        let want = read_golden(&case.join("grads.safetensors"));
        let mut worst = (0f32, String::new());
        for (name, want) in want.iter().filter(|(name, _)| *name != "loss") {
            let got = grads[name].as_f32();
            let max = want.values.iter().fold(0f32, |a, b| a.max(b.abs()));
            let error = max_diff(got, &want.values) / max.max(1e-12);
            if error >= worst.0 {
                worst = (error, name.clone());
            }
        }
        println!("{}: gradients {:.1e} ({})", case.file_name().unwrap().display(), worst.0, worst.1);
        assert!(worst.0 < 1e-4, "{}: {worst:?}", case.display());
        // And nothing has a gradient that the reference has not.
        for name in grads.keys().filter(|name| !want.contains_key(*name)) {
            assert!(grads[name].as_f32().iter().all(|&g| g == 0.0), "{}: `{name}` has a gradient", case.display());
        }
    }
}

/// A small model of every kind of layer, with weights that make every choice matter.
fn small_config(fp4: bool) -> ModelConfig {
    let mut json = serde_json::json!({
        "model_type": "deepseek_v4", "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2,
        "o_lora_rank": 8, "sliding_window": 6, "compress_ratios": [0, 4, 8, 4], "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0, "max_position_embeddings": 4096, "index_n_heads": 4, "index_head_dim": 16,
        "index_topk": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_hash_layers": 1, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
        "initializer_range": 0.5
    });
    if fp4 {
        json["expert_dtype"] = "fp4".into();
    }
    serde_json::from_value(json).unwrap()
}

fn small_policy(fp4: bool) -> Policy {
    let config = small_config(fp4);
    Policy::from_weights(&config, &initial_weights(&config, 3), Device::Cpu).unwrap()
}

fn samples(lens: &[usize]) -> Vec<Sample> {
    let token = |i: usize, t: usize| ((i * 11 + t * t * 7 + t * 3) % 40) as u32;
    lens.iter().enumerate().map(|(i, &n)| plain_sample((0..n).map(|t| token(i, t)).collect())).collect()
}

const LENS: [usize; 9] = [31, 5, 17, 2, 9, 26, 12, 3, 40];

/// Target log-probabilities of every sample, and the gradient of their sum.
fn logprobs_and_grads(policy: &Policy, samples: &[Sample], config: &PackConfig) -> (Vec<Vec<f32>>, Gradients) {
    let mut gradients = Gradients::default();
    let mut logprobs = vec![Vec::new(); samples.len()];
    for mb in pack(samples, config) {
        let (got, _) = policy.token_logprobs(&mb, Replay::default(), 1.0);
        let mask: Vec<f32> = mb.segment_ids.iter().map(|&s| f32::from(s >= 0)).collect();
        gradients.add(Gradients::of(&(got.view([-1]) * Tensor::from_slice(&mask)).sum(None::<Kind>), policy));
        let got = to_vec_f32(&got);
        for s in &mb.segments {
            let at = s.row * mb.row_len + s.start;
            logprobs[s.sample_idx] = got[at..at + s.len].to_vec();
        }
    }
    (logprobs, gradients)
}

#[test]
fn packing_does_not_change_the_result() {
    let policy = small_policy(false);
    let samples = samples(&LENS);
    // Every sample alone, then side by side in rows and microbatches of several sizes.
    let alone = logprobs_and_grads(&policy, &samples, &PackConfig { microbatch_tokens: 1, row_tokens: 1 });
    for (microbatch_tokens, row_tokens) in [(39, 39), (90, 64), (400, 20), (400, 400)] {
        let config = PackConfig { microbatch_tokens, row_tokens };
        let packed = logprobs_and_grads(&policy, &samples, &config);
        let mean = |logprobs: &[Vec<f32>]| {
            let all: Vec<f64> = logprobs.iter().flatten().map(|&x| f64::from(x)).collect();
            all.iter().sum::<f64>() / all.len() as f64
        };
        let error = (mean(&packed.0) - mean(&alone.0)).abs();
        assert!(error < 1e-6, "{config:?}: the loss differs by {error}");
        // Matrix products of other sizes add in another order: f32 rounding is what is left.
        let error = max_diff(&packed.0.concat(), &alone.0.concat());
        assert!(error < 5e-6, "{config:?}: log-probabilities differ by {error}");
        for ((got, want), p) in packed.1.tensors().iter().zip(alone.1.tensors()).zip(policy.parameters()) {
            let (got, want) = (to_vec_f32(got), to_vec_f32(want));
            let max = want.iter().fold(1e-3f32, |a, b| a.max(b.abs()));
            let error = max_diff(&got, &want) / max;
            assert!(error < 1e-4, "{config:?}: gradients of `{}` differ by {error}", p.name);
        }
    }
}

#[test]
fn replayed_choices_are_the_ones_used() {
    let policy = small_policy(false);
    let config = PackConfig { microbatch_tokens: 90, row_tokens: 64 };
    for mut mb in pack(&samples(&LENS), &config) {
        let mut own = Trace::default();
        let want = policy.forward(&mb, Replay::default(), Some(&mut own));
        let blocks = mb.blocks(4);
        let recorded = |choices: &[Vec<i64>], width| crate::pack::Choices {
            num_layers: choices.len(),
            width,
            idx: choices.concat(),
        };
        mb.routing = Some(recorded(&own.experts, 2));
        // Block numbers within the sample, from masks over the row.
        let picks: Vec<Vec<i64>> = own
            .blocks
            .iter()
            .map(|picked| {
                let picked = picked.as_ref().map(|p| to_vec_f32(&p.to_kind(Kind::Float))).unwrap_or_default();
                let mut idx = Vec::new();
                for q in 0..mb.num_rows * mb.row_len {
                    let row = q / mb.row_len * blocks.num_blocks;
                    let seen = (0..blocks.num_blocks).filter(|b| picked[q * blocks.num_blocks + b] > 0.0);
                    let mut seen: Vec<i64> = seen.map(|b| blocks.ordinals[row + b]).collect();
                    seen.resize(2, -1);
                    idx.extend(seen);
                }
                idx
            })
            .collect();
        mb.indexer = Some(recorded(&picks, 2));
        let replay = Replay { experts: true, indexer: true };
        let got = policy.forward(&mb, replay, None);
        assert_eq!(to_vec_f32(&got), to_vec_f32(&want), "replaying the policy's own choices changes nothing");

        let routing = mb.routing.as_mut().unwrap();
        routing.idx.iter_mut().filter(|e| **e >= 0).for_each(|e| *e = (*e + 1) % 6);
        let mut other = Trace::default();
        let _ = policy.forward(&mb, replay, Some(&mut other));
        assert_eq!(other.experts.concat(), mb.routing.as_ref().unwrap().idx);
    }
}

#[test]
fn fp4_experts_compute_on_their_codes_and_train_their_masters() {
    let weights = initial_weights(&small_config(true), 3);
    let mut policy = small_policy(true);
    assert_eq!(policy.to_weights(), weights, "masters are kept as they came");
    // The same model with the rounded values as plain weights.
    let mut rounded = weights.clone();
    for (name, tensor) in &mut rounded {
        if name.contains(".ffn.experts.") {
            let codes = kernels::quant::quantize_mxfp4(tensor.as_f32());
            let values = kernels::quant::dequantize_mxfp4(&codes);
            assert_ne!(values, tensor.as_f32());
            *tensor = rollout::model::HostTensor::f32(&tensor.shape.clone(), values);
        }
    }
    let plain = Policy::from_weights(&small_config(false), &rounded, Device::Cpu).unwrap();
    let samples = samples(&LENS);
    let config = PackConfig::default();
    let (got, gradients) = logprobs_and_grads(&policy, &samples, &config);
    let (want, plain_gradients) = logprobs_and_grads(&plain, &samples, &config);
    assert_eq!(got, want);
    let values = |g: &Gradients| g.tensors().iter().map(to_vec_f32).collect::<Vec<_>>();
    assert_eq!(values(&gradients), values(&plain_gradients), "straight-through: the gradient at the rounded values");

    // A step moves the master by less than a rounding step; the codes follow only when it has moved far enough.
    let cfg = crate::optimizer::AdamWConfig { learning_rate: 1e-4, weight_decay: 0.0, ..Default::default() };
    let mut optimizer = crate::optimizer::AdamW::new(&cfg, &policy);
    optimizer.step(&mut policy, &gradients).unwrap();
    for p in policy.parameters().iter().filter(|p| p.quantized) {
        let (master, leaf) = (to_vec_f32(&p.master), to_vec_f32(&p.leaf));
        assert_eq!(leaf, kernels::quant::dequantize_mxfp4(&kernels::quant::quantize_mxfp4(&master)));
        let (name, w) = p.name.split_once(".ffn.experts.").unwrap();
        let before = weights[&format!("{name}.ffn.experts.0.{w}.weight")].as_f32();
        assert!(master.iter().zip(before).any(|(a, b)| a != b), "`{}` did not move", p.name);
    }
}

#[test]
fn weights_survive_the_round_trip() {
    let (config, weights) = load(&golden_cases()[0]);
    let policy = Policy::from_weights(&config, &weights, Device::Cpu).unwrap();
    assert_eq!(policy.to_weights(), weights);
    let mut broken = weights.clone();
    broken.remove("norm.weight");
    let missing = Policy::from_weights(&config, &broken, Device::Cpu).err().unwrap().to_string();
    assert!(missing.starts_with("tensor `norm.weight` is missing"), "{missing}");
}

#[test]
fn initial_weights_are_whole_and_hash_tables_fair() {
    let config = small_config(false);
    let weights = initial_weights(&config, 3);
    assert_eq!(weights, initial_weights(&config, 3));
    assert_ne!(weights, initial_weights(&config, 4));
    assert_eq!(weights.len(), config.parameters().len() + config.hash_tables().len());
    let rollout::model::TensorData::I64(table) = &weights[&config.hash_tables()[0]].data else { panic!("not a table") };
    let mut uses = [0; 6];
    for experts in table.chunks(2) {
        assert_ne!(experts[0], experts[1]);
        experts.iter().for_each(|&e| uses[e as usize] += 1);
    }
    assert!(uses.iter().max().unwrap() - uses.iter().min().unwrap() <= 1, "{uses:?}");
}

#[test]
fn a_small_model_learns_its_samples() {
    let config = ModelConfig { initializer_range: None, ..small_config(true) };
    let mut policy = Policy::from_weights(&config, &initial_weights(&config, 5), Device::Cpu).unwrap();
    let cfg = crate::optimizer::AdamWConfig { learning_rate: 1e-2, ..Default::default() };
    let mut optimizer = crate::optimizer::AdamW::new(&cfg, &policy);
    let mb = pack(&samples(&[40; 8]), &PackConfig::default()).remove(0);
    let mut losses = Vec::new();
    for _ in 0..30 {
        let loss = mean_cross_entropy(&policy, &mb);
        losses.push(loss.double_value(&[]));
        let gradients = Gradients::of(&loss, &policy);
        optimizer.step(&mut policy, &gradients).unwrap();
    }
    assert!((losses[0] - 40f64.ln()).abs() < 0.1, "starts near the uniform distribution: {}", losses[0]);
    assert!(losses[29] < 1.5, "{losses:?}");
}
