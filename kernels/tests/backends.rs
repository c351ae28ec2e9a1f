//! Every op that is one body compiled for several backends gives the same bits on each of them, at sizes around the
//! vector width. One test in a binary of its own: the backend is a setting of the whole process.

use kernels::hyper_connection::{self as hc, Gates};
use kernels::pages::OwnedRows;
use kernels::{
    Backend, activation, attention, backend, compressor, indexer, logits, norm, quant, rope, router, set_backend,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Numbers of both signs and several magnitudes.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let unit = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            unit * [0.1, 1.0, 8.0][(state % 3) as usize]
        })
        .collect()
}

/// The results of all ops for heads of `width` channels, a few rows each.
fn all_ops(width: usize, seed: u64) -> Vec<(&'static str, Vec<f32>)> {
    // More heads than are done together, and a rest.
    let rows = 6;
    let mut out = Vec::new();
    let x = values(rows * width, seed);
    let weight = values(width, seed + 1);

    let mut y = x.clone();
    norm::rms_norm(&mut y, &weight, 1e-6);
    out.push(("rms_norm", y));
    let mut y = x.clone();
    norm::rms_norm_unweighted(&mut y, width, 1e-6);
    out.push(("rms_norm_unweighted", y));

    let half = width / 2;
    let (cos, sin) = (values(half, seed + 2), values(half, seed + 3));
    let mut y = x.clone();
    rope::rotate(&mut y, width, &cos, &sin, 1.0);
    out.push(("rotate", y));

    for n in 1..=hc::MAX_STREAMS {
        let mixes = (2 + n) * n;
        let (base, scale) = (values(mixes, seed + 4), values(3, seed + 5));
        let gates = Gates { scale: &scale, base: &base, num_streams: n, sinkhorn_iters: 20, eps: 1e-6 };
        let mut z = values(mixes, seed + 6);
        hc::mappings(&mut z, &gates);
        let mut streams = values(n * width, seed + 7);
        hc::expand(&mut streams, &weight, &z[n..2 * n], &z[2 * n..]);
        let mut collapsed = vec![0.0; width];
        hc::collapse(&streams, &z[..n], &mut collapsed);
        let mut head = values(n, seed + 8);
        hc::scale_by_inverse_rms(&mut head, &streams, 1e-6);
        hc::head_gates(&mut head, 0.7, &base[..n], 1e-6);
        out.push(("hyper_connection", [z, streams, collapsed, head].concat()));
    }

    let (window, entries) = (values(5 * width, seed + 9), values(7 * width, seed + 10));
    let mut attended = vec![0.0; rows * width];
    let [paged_window, paged_entries] = [&window, &entries].map(|rows| OwnedRows::new(rows, width, 3 * width));
    let (window_rows, entries_rows) = (paged_window.view(), paged_entries.view());
    let keys = attention::Keys { window: window_rows, range: 0..5, entries: entries_rows, picks: &[1, 3, 6] };
    attention::attend(&x, keys, &values(rows, seed + 11), &mut attention::Scratch::default(), &mut attended);
    out.push(("attend", attended));

    let half = (width / 2).max(1);
    let candidates = OwnedRows::new(&values(5 * 2 * width, seed + 9), 2 * width, 5 * width);
    let candidates = [(2, 0), (5, width - half)].map(|(len, from)| compressor::Candidates {
        rows: candidates.view(),
        len,
        kv: from,
        gate: width + from,
    });
    let mut pooled = vec![0.0; half];
    compressor::pool(candidates, &mut pooled);
    out.push(("pool", pooled));

    let panels = indexer::to_panels(&values(35 * width, seed + 10), width);
    let panels = OwnedRows::new(&panels, width * indexer::PANEL, 2 * width * indexer::PANEL);
    let keys = indexer::Keys::new(panels.view(), 35);
    let mut scores = vec![0.0; 35];
    indexer::scores(&x, &values(rows, seed + 12), keys, 0..35, &mut scores);
    out.push(("indexer", scores));

    let mut gate = x.clone();
    activation::swiglu(&mut gate, &values(rows * width, seed + 13), 2.0);
    out.push(("swiglu", gate));

    let row = values(30 * width, seed + 15);
    let mut chunks = vec![logits::Chunk::default(); row.len().div_ceil(logits::CHUNK)];
    logits::summarise(&row, 0.7, &mut chunks);
    let sum = logits::total(&mut chunks);
    let drawn = logits::at_cumulative(&row, 0.7, sum.greatest, &chunks, 0.3 * sum.total);
    out.push(("logits", chunks.iter().flat_map(|c| [c.greatest, c.sum]).chain([drawn as f32]).collect()));

    let mut scores = vec![0.0; x.len()];
    router::score(&x, &mut scores);
    out.push(("router", scores));

    let codes = |bytes: &[u8]| bytes.iter().map(|&byte| f32::from(byte)).collect::<Vec<f32>>();
    let mxfp4 = quant::quantize_mxfp4(&values(4 * quant::MXFP4_BLOCK, seed + 14));
    out.push(("quantize_mxfp4", codes(&[mxfp4.codes, mxfp4.scales].concat())));
    let fp8 = quant::quantize_fp8(&x, rows, width);
    out.push(("quantize_fp8", codes(&[fp8.codes, fp8.scales].concat())));

    out
}

#[test]
fn every_backend_gives_the_bits_of_scalar() {
    if backend() == Backend::Scalar {
        println!("this CPU has no AVX2 with FMA: there is only the scalar backend to test");
    }
    let mut runner = TestRunner::new(Config::with_cases(200));
    let cases = (1usize..40, any::<u32>());
    runner
        .run(&cases, |(width, seed)| {
            assert!(set_backend(Backend::Scalar));
            let want = all_ops(width, u64::from(seed));
            for other in Backend::ALL {
                if set_backend(other) {
                    for ((name, got), (_, want)) in all_ops(width, u64::from(seed)).iter().zip(&want) {
                        let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                        prop_assert_eq!(bits(got), bits(want), "{} on {:?}, width {}", name, other, width);
                    }
                }
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
}
