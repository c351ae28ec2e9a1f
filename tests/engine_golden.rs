//! The engine's forward against the recorded cases, op by op, and against itself: decode, chunks and batches give the
//! same bits.

use rollout::kv_cache::KvCache;
use rollout::model::checkpoint::Format;
use rollout::model::{
    ForwardOutput, HostTensor, LayerKind, Logits, Model, Segment, Trace, Values, Weights, Workspace, to_engine_format,
};

use crate::golden::{Case, Recorded, cases, check_traces, copies, print_table};

/// A forward pass over whole sequences, multi-token prediction behind it where the model has it: every op.
pub fn run(model: &Model, sequences: &[Vec<u32>]) -> Trace {
    let config = model.config();
    let (mut workspace, mut out, mut trace) = (Workspace::default(), ForwardOutput::default(), Trace::default());
    let mut caches: Vec<KvCache> = sequences.iter().map(|_| KvCache::new(config)).collect();
    let mut segments: Vec<Segment<'_>> = caches
        .iter_mut()
        .zip(sequences)
        .map(|(cache, tokens)| Segment { cache, tokens, logits: Logits::All })
        .collect();
    model.forward(&mut segments, &mut workspace, &mut out, Some(&mut trace));
    if config.has_mtp() {
        // Every position but a sequence's last has a next token.
        let row = config.hc_mult * config.hidden_size;
        let mut streams = workspace.streams().to_vec();
        let mut at = 0;
        for tokens in sequences {
            at += tokens.len() - 1;
            streams.drain(at * row..(at + 1) * row);
        }
        for (segment, tokens) in segments.iter_mut().zip(sequences) {
            segment.tokens = &tokens[1..];
        }
        model.forward_mtp(&streams, &mut segments, &mut workspace, &mut out, Some(&mut trace));
    }
    trace
}

/// Logits of all positions when the sequence is fed in chunks of the given sizes, then those of multi-token prediction
/// where the model has it (all positions but the last).
fn chunked(model: &Model, tokens: &[u32], sizes: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let mut cache = KvCache::new(model.config());
    let (mut out, mut ws) = (ForwardOutput::default(), Workspace::default());
    let (mut logits, mut mtp_logits, mut from) = (vec![], vec![], 0);
    for &size in sizes {
        let chunk = from..from + size;
        let segment = Segment { cache: &mut cache, tokens: &tokens[chunk.clone()], logits: Logits::All };
        model.forward(&mut [segment], &mut ws, &mut out, None);
        logits.extend_from_slice(&out.logits);
        let next = &tokens[chunk.start + 1..(chunk.end + 1).min(tokens.len())];
        if model.config().has_mtp() && !next.is_empty() {
            let streams = ws.streams()[..next.len() * model.config().hc_mult * model.config().hidden_size].to_vec();
            let segment = Segment { cache: &mut cache, tokens: next, logits: Logits::All };
            model.forward_mtp(&streams, &mut [segment], &mut ws, &mut out, None);
            mtp_logits.extend_from_slice(&out.logits);
        }
        from += size;
    }
    (logits, mtp_logits)
}

/// Weights in bf16 and FP8 stay what they are in the engine: it computes on their values, to the bit.
#[test]
fn golden_v4_engine_computes_on_bf16_and_fp8_as_on_their_values() {
    for case in cases() {
        for format in [Format::Bf16, Format::Fp8] {
            let is_matrix = |tensor: &HostTensor| tensor.shape.len() == 2 && tensor.data.format() != Format::I64;
            let stored = case.weights.clone().into_iter().map(|(name, tensor)| {
                let tensor = if is_matrix(&tensor) { tensor.into_format(format) } else { tensor };
                (name, tensor)
            });
            let stored: Weights = stored.collect();
            let values = stored.iter().map(|(name, tensor)| (name.clone(), tensor.clone().into_f32())).collect();
            let [packed, plain] =
                [stored, values].map(|w| Model::new(&case.config, 0, &to_engine_format(&case.config, w)));
            assert!(packed.num_bytes() < plain.num_bytes(), "{}: {format:?} takes as much room as f32", case.name);
            let tokens: Vec<u32> = (0..60).map(|i| i * 7 % case.config.vocab_size as u32).collect();
            let sizes = [30, 1, 1, 28];
            assert_eq!(
                chunked(&packed, &tokens, &sizes),
                chunked(&plain, &tokens, &sizes),
                "{}, {format:?}",
                case.name
            );
        }
    }
}

#[test]
fn golden_v4_engine_matches_the_reference() {
    let mut table = Vec::new();
    for case in cases() {
        let model = Model::load(&case.dir, &case.config).unwrap_or_else(|e| panic!("{e}"));
        let runs = case.files("run_");
        assert!(!runs.is_empty(), "{}: no run_*.safetensors", case.name);
        for recorded in runs {
            table.push(recorded.check(&format!("engine {}", case.name), run(&model, &recorded.input_ids())));
        }
    }
    print_table(&table);
}

/// The run of `case` that has `len` tokens in one sequence.
fn sequence_of(case: &Case, recorded: &Recorded, len: usize) -> Vec<u32> {
    std::iter::once(recorded.input_ids())
        .chain(case.files("run_").iter().map(Recorded::input_ids))
        .find(|sequences| sequences.len() == 1 && sequences[0].len() == len)
        .unwrap_or_else(|| panic!("{}: no sequence of {len} tokens, which the chunks sum up to", case.name))
        .swap_remove(0)
}

#[test]
fn golden_v4_engine_decode_matches_the_reference() {
    let mut table = Vec::new();
    for case in cases() {
        let model = Model::load(&case.dir, &case.config).unwrap_or_else(|e| panic!("{e}"));
        let vocab = case.config.vocab_size;
        for recorded in case.files("decode_") {
            let tokens = &recorded.input_ids()[0];
            let number = |name: &str| recorded.f32(name).unwrap_or_else(|| panic!("{name} is not recorded")).1;
            let split = tokens.len() - number("decode_logits").len() / vocab;
            // Prefill, then a token at a time, with all that each step chose.
            let mut cache = KvCache::new(&case.config);
            let (mut out, mut ws) = (ForwardOutput::default(), Workspace::default());
            let segment = Segment { cache: &mut cache, tokens: &tokens[..split], logits: Logits::Last };
            model.forward(&mut [segment], &mut ws, &mut out, None);
            let mut got = Trace::default();
            got.numbers("prefill_logits", &[vocab], out.logits.clone());
            table.extend(check_cache(&case, split, &cache));
            let mut logits = Vec::new();
            let mut picks: Vec<(String, Vec<Vec<u32>>)> = Vec::new();
            for token in &tokens[split..] {
                let mut trace = Trace::default();
                let segment = Segment { cache: &mut cache, tokens: &[*token], logits: Logits::All };
                model.forward(&mut [segment], &mut ws, &mut out, Some(&mut trace));
                logits.extend_from_slice(&out.logits);
                for (name, values) in trace.ops() {
                    let Values::Choices(rows) = values else { continue };
                    match picks.iter_mut().find(|(op, _)| op == name) {
                        Some((_, all)) => all.extend(rows.clone()),
                        None => picks.push((name.clone(), rows.clone())),
                    }
                }
            }
            for (name, rows) in picks {
                got.choices(name, rows);
            }
            got.numbers("decode_logits", &[vocab], logits);
            let (_, sizes) = recorded.i32("chunk_sizes").expect("chunk_sizes are recorded");
            let sizes: Vec<usize> = sizes.iter().map(|&size| size as usize).collect();
            let sequence = sequence_of(&case, &recorded, sizes.iter().sum());
            let (logits, _) = chunked(&model, &sequence, &sizes);
            let mut ends = sizes.iter().scan(0, |end, size| {
                *end += size;
                Some(*end)
            });
            let last = ends.by_ref().flat_map(|end| &logits[(end - 1) * vocab..end * vocab]).copied().collect();
            got.numbers("chunked_last_logits", &[vocab], last);
            let at = format!("engine {} {}", case.name, recorded.name());
            table.push(check_traces(&at, &got, &recorded.decode_trace()));
        }
    }
    print_table(&table);
}

/// What the cache keeps after a prefill of `len` tokens, against the reference's, if that was recorded.
fn check_cache(case: &Case, len: usize, cache: &KvCache) -> Option<String> {
    let recorded = case.files(&format!("cache_after_prefill_{len}.")).pop()?;
    let mut want = Trace::default();
    for name in recorded.names() {
        let (shape, mut values) = recorded.f32(&name).expect("a cache holds numbers");
        // The reference keeps the open block's gates without the position bias, the engine with it.
        if let Some(prefix) = name.strip_suffix(".buffer_gate") {
            let parts: Vec<&str> = prefix.split('.').collect();
            let at = if parts[2] == "indexer" { "attn.indexer.compressor" } else { "attn.compressor" };
            let bias = case.weights[&format!("layers.{}.{at}.ape", parts[1])].as_f32();
            // The open block's rows are the first of a block.
            assert!(values.len() <= bias.len(), "{name}: {shape:?}");
            values.iter_mut().zip(bias).for_each(|(gate, bias)| *gate += bias);
        }
        want.numbers(name, &shape[2..], values);
    }
    Some(check_traces(&format!("engine {} {}", case.name, recorded.name()), &cache.trace(), &want))
}

#[test]
fn golden_v4_engine_gives_the_same_bits_however_it_is_fed() {
    for case in cases() {
        let model = Model::load(&case.dir, &case.config).unwrap_or_else(|e| panic!("{e}"));
        for recorded in case.files("run_") {
            let sequences = recorded.input_ids();
            let together = run(&model, &sequences);
            let (mut alone, mut mtp_alone) = (Vec::new(), Vec::new());
            for (s, tokens) in sequences.iter().enumerate() {
                let n = tokens.len();
                let one_by_one = chunked(&model, tokens, &vec![1; n]);
                for split in [1, n / 3, n / 2, n - 1] {
                    assert!(one_by_one == chunked(&model, tokens, &[split, n - split]), "{} {s} {split}", case.name);
                    let mut sizes = vec![split, 1, 1];
                    sizes.push(n.saturating_sub(split + 2));
                    if sizes.iter().sum::<usize>() == n && sizes[3] > 0 {
                        assert!(one_by_one == chunked(&model, tokens, &sizes), "{} {s} {sizes:?}", case.name);
                    }
                }
                alone.extend(one_by_one.0);
                mtp_alone.extend(one_by_one.1);
            }
            let same = |name: &str, alone: &[f32]| {
                assert!(
                    alone == together.numbers_of(name),
                    "{}: {name} of a sequence alone and in a batch differ",
                    case.name
                );
            };
            same("logits", &alone);
            if case.config.has_mtp() {
                same("mtp.logits", &mtp_alone);
            }
        }
    }
}

#[test]
fn every_kind_of_layer_is_in_some_copy() {
    let has = |wanted: fn(LayerKind) -> bool| {
        copies().iter().any(|case| (0..case.config.num_hidden_layers).any(|l| wanted(case.config.layer_kind(l))))
    };
    assert!(has(|kind| kind == LayerKind::Window));
    assert!(has(|kind| kind == LayerKind::Csa));
    assert!(has(|kind| matches!(kind, LayerKind::Hca { .. })));
}
