//! The engine's forward against the recorded cases, and against itself: decode, chunks and batches give the same bits.

use rollout::kv_cache::KvCache;
use rollout::model::{ForwardOutput, Model, Segment, Workspace};

use crate::golden::{Case, cases, chosen, max_abs_diff};

const LOGITS_TOLERANCE: f32 = 2e-4;

fn run(model: &Model, sequences: &[Vec<u32>], trace: bool) -> ForwardOutput {
    let mut caches: Vec<KvCache> = sequences.iter().map(|_| KvCache::new(model.config())).collect();
    let mut segments: Vec<Segment<'_>> =
        caches.iter_mut().zip(sequences).map(|(cache, tokens)| Segment { cache, tokens, all_logits: true }).collect();
    let mut out = ForwardOutput::default();
    model.forward(&mut segments, &mut Workspace::default(), &mut out, trace);
    out
}

/// Logits of all positions when the sequence is fed in chunks of the given sizes.
fn chunked(model: &Model, tokens: &[u32], sizes: &[usize]) -> Vec<f32> {
    let mut cache = KvCache::new(model.config());
    let (mut out, mut ws, mut logits, mut from) = (ForwardOutput::default(), Workspace::default(), vec![], 0);
    for &size in sizes {
        let tokens = &tokens[from..from + size];
        model.forward(&mut [Segment { cache: &mut cache, tokens, all_logits: true }], &mut ws, &mut out, false);
        logits.extend_from_slice(&out.logits);
        from += size;
    }
    logits
}

fn check_runs(case: &Case, model: &Model) {
    let config = &case.config;
    let runs = case.files("run_");
    assert!(!runs.is_empty(), "{}: no run_*.safetensors", case.name);
    for recorded in runs {
        let sequences = recorded.input_ids();
        let num_rows: usize = sequences.iter().map(Vec::len).sum();
        let out = run(model, &sequences, true);
        let at = format!("{} {}", case.name, recorded.path.file_name().unwrap_or_default().to_string_lossy());
        // Layer by layer first, so that a failure names the first one that differs.
        let (layers, k) = (config.num_hidden_layers, config.num_experts_per_tok);
        let num_csa = config.csa_layers().count();
        for layer in 0..layers {
            if let Some((_, want)) = recorded.i32(&format!("layers.{layer}.router.experts")) {
                for (r, want) in want.chunks_exact(k).enumerate() {
                    let got = &out.expert_idx[(r * layers + layer) * k..][..k];
                    assert_eq!(chosen(got), chosen(want), "{at}: experts of layer {layer}, row {r}");
                }
            }
            let csa = config.csa_layers().position(|l| l == layer);
            if let (Some(csa), Some((shape, want))) = (csa, recorded.i32(&format!("layers.{layer}.indexer.topk"))) {
                let top_k = config.index_topk;
                for (r, want) in want.chunks_exact(shape[2]).enumerate() {
                    let got = &out.block_idx[(r * num_csa + csa) * top_k..][..top_k];
                    assert_eq!(chosen(got), chosen(want), "{at}: indexer of layer {layer}, row {r}");
                }
            }
            if let Some((shape, want)) = recorded.f32(&format!("layers.{layer}.streams_out"))
                && shape[0] * shape[1] == num_rows
            {
                let size = want.len();
                let diff = max_abs_diff(&out.streams[layer * size..][..size], &want);
                assert!(diff < LOGITS_TOLERANCE, "{at}: streams after layer {layer} differ by {diff}");
            }
        }
        let (_, want) = recorded.f32("logits").expect("every run records logits");
        let diff = max_abs_diff(&out.logits, &want);
        println!("{at}: largest logit difference {diff:.2e}");
        assert!(diff < LOGITS_TOLERANCE, "{at}: logits differ by {diff}");
    }
}

#[test]
fn golden_v4_engine_matches_the_reference() {
    for case in cases() {
        check_runs(&case, &Model::new(&case.config, 0, &case.weights));
    }
}

#[test]
fn golden_v4_engine_decode_matches_the_reference() {
    for case in cases() {
        let model = Model::new(&case.config, 0, &case.weights);
        for recorded in case.files("decode_") {
            let tokens = &recorded.input_ids()[0];
            let (_, prefill) = recorded.f32("prefill_logits").expect("decode files record prefill_logits");
            let (_, decode) = recorded.f32("decode_logits").expect("decode files record decode_logits");
            let vocab = case.config.vocab_size;
            let split = tokens.len() - decode.len() / vocab;
            let mut sizes = vec![split];
            sizes.resize(1 + tokens.len() - split, 1);
            let logits = chunked(&model, tokens, &sizes);
            let diff = max_abs_diff(&logits[(split - 1) * vocab..split * vocab], &prefill)
                .max(max_abs_diff(&logits[split * vocab..], &decode));
            println!("{}: decode from {split} differs by {diff:.2e}", case.name);
            assert!(diff < LOGITS_TOLERANCE, "{}: decode logits differ by {diff}", case.name);
        }
    }
}

#[test]
fn golden_v4_engine_gives_the_same_bits_however_it_is_fed() {
    for case in cases() {
        let model = Model::new(&case.config, 0, &case.weights);
        for recorded in case.files("run_") {
            let sequences = recorded.input_ids();
            let together = run(&model, &sequences, false).logits;
            let mut alone = Vec::new();
            for (s, tokens) in sequences.iter().enumerate() {
                let n = tokens.len();
                let one_by_one = chunked(&model, tokens, &vec![1; n]);
                for split in [1, n / 3, n / 2, n - 1] {
                    assert!(one_by_one == chunked(&model, tokens, &[split, n - split]), "{} {s} {split}", case.name);
                }
                alone.extend(one_by_one);
            }
            assert!(alone == together, "{}: a sequence alone and in a batch differ", case.name);
        }
    }
}
