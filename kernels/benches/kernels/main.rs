//! `cargo bench -p kernels [-- NAME]`: every op on every backend, as time, GB/s and GFLOP/s, and as fractions of the read
//! bandwidth and the multiply-adds that this machine was measured to give in the same run. `--scalar` runs the reference
//! instead, which is slow. Operations of exponentials are counted as those of their polynomial.

mod machine;

use kernels::hyper_connection as hc;
use kernels::linear::{Linear, PANEL, Rows, Scratch};
use kernels::pages::OwnedRows;
use kernels::pool::{Columns, Parts, Pool};
use kernels::{Backend, activation, attention, compressor, experts, indexer, logits, norm, quant, router, set_backend};
use machine::{Machine, median};

/// Weights that are used in turn, so that each use reads them from memory.
const IN_TURN: usize = 192 << 20;

struct Bench {
    pool: Pool,
    machine: Machine,
    backend: &'static str,
    filter: Option<String>,
}

impl Bench {
    /// Times `work`, which touches `bytes` and does `flops`, and prints a line.
    fn time(&mut self, name: &str, bytes: f64, flops: f64, mut work: impl FnMut(&mut Pool)) {
        if self.filter.as_ref().is_some_and(|filter| !name.contains(filter)) {
            return;
        }
        let once = median(1, || work(&mut self.pool));
        let runs = ((0.3 / once) as usize).clamp(5, 301) | 1;
        let time = median(runs, || work(&mut self.pool));
        let (read, fma) = (bytes / time, flops / time);
        println!(
            "{name:<44} {:<7} {:>10.1} us {:>7.1} GB/s {:>4.0} % {:>8.1} GFLOP/s {:>4.0} %",
            self.backend,
            time * 1e6,
            read / 1e9,
            100.0 * read / self.machine.read,
            fma / 1e9,
            100.0 * fma / self.machine.fma,
        );
    }
}

fn values(n: usize) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn weight(format: &str, outputs: usize, inputs: usize) -> Linear {
    let plain = values(outputs * inputs);
    match format {
        "f32" => Linear::from_f32(outputs, inputs, &plain),
        "bf16" => {
            let bits: Vec<u16> = plain.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
            Linear::from_bf16(outputs, inputs, &bits)
        }
        "FP8" => Linear::from_fp8(outputs, inputs, &quant::quantize_fp8(&plain, outputs, inputs)).expect("exact"),
        _ => Linear::from_mxfp4(outputs, inputs, &quant::quantize_mxfp4(&plain)),
    }
}

fn products(bench: &mut Bench) {
    for (inputs, outputs) in [(4096, 2048), (512, 512)] {
        for format in ["f32", "bf16", "FP8", "MXFP4"] {
            let first = weight(format, outputs, inputs);
            let bytes = first.num_bytes();
            let weights = vec![first; (IN_TURN / bytes).clamp(1, 64)];
            for rows in [1, 4, 8, 16, 32, 128] {
                let (x, mut y) = (values(rows * inputs), vec![0.0; rows * outputs]);
                let mut turn = 0;
                let name = format!("product {inputs}x{outputs} {format}, {rows} rows");
                let num_threads = bench.pool.num_threads();
                let mut scratch: Vec<Scratch> = (0..num_threads).map(|_| Scratch::default()).collect();
                bench.time(&name, bytes as f64, 2.0 * (rows * inputs * outputs) as f64, |pool| {
                    turn = (turn + 1) % weights.len();
                    let y = Columns::new(&mut y, outputs, PANEL, num_threads);
                    let scratch = Parts::new(&mut scratch, 1, num_threads);
                    pool.run(&|t| {
                        weights[turn].forward(Rows::new(&x, inputs), &mut y.take(t), &mut scratch.take(t)[0]);
                    });
                });
            }
        }
    }
}

/// The ops of a layer besides products, at the sizes of the 122.5 M model: hidden 512, 8 heads of 128, window 128.
fn small_ops(bench: &mut Bench) {
    const ROWS: usize = 64;
    let (d, h, c, n) = (512, 8, 128, 4);
    let streams = values(ROWS * n * d);
    let num_threads = bench.pool.num_threads();
    let f32s = |n: usize| 4.0 * n as f64;

    let (mut x, weight) = (values(ROWS * d), vec![1.0; d]);
    bench.time("rms_norm 64x512", 2.0 * f32s(ROWS * d), 4.0 * (ROWS * d) as f64, |pool| {
        let x = Parts::new(&mut x, d, num_threads);
        pool.run(&|t| norm::rms_norm(x.take(t), &weight, 1e-6));
    });

    let mixes = (2 + n) * n;
    let (scale, base, z) = ([0.1; 3], values(mixes), values(ROWS * mixes));
    let gates = hc::Gates { scale: &scale, base: &base, num_streams: n, sinkhorn_iters: 20, eps: 1e-6 };
    let mut mapped = z.clone();
    bench.time("mHC mappings, 64 rows, 20 rounds", f32s(ROWS * mixes), (ROWS * 20 * 4 * n * n) as f64, |pool| {
        mapped.copy_from_slice(&z);
        let mapped = Parts::new(&mut mapped, mixes, num_threads);
        pool.run(&|t| mapped.take(t).chunks_exact_mut(mixes).for_each(|z| hc::mappings(z, &gates)));
    });
    let mut collapsed = vec![0.0; ROWS * d];
    bench.time("mHC collapse 64x4x512", f32s(ROWS * (n + 1) * d), (2 * ROWS * n * d) as f64, |pool| {
        let x = Parts::new(&mut collapsed, d, num_threads);
        pool.run(&|t| {
            for (x, r) in x.take(t).chunks_exact_mut(d).zip(x.share(t)) {
                hc::collapse(&streams[r * n * d..][..n * d], &mapped[r * mixes..][..n], x);
            }
        });
    });
    let mut expanded = streams.clone();
    let flops = (2 * ROWS * (n * n + n) * d) as f64;
    bench.time("mHC expand 64x4x512", f32s(ROWS * (2 * n + 1) * d), flops, |pool| {
        let streams = Parts::new(&mut expanded, n * d, num_threads);
        pool.run(&|t| {
            for (streams, r) in streams.take(t).chunks_exact_mut(n * d).zip(streams.share(t)) {
                let mix = &mapped[r * mixes..][..mixes];
                hc::expand(streams, &collapsed[r * d..][..d], &mix[n..2 * n], &mix[2 * n..]);
            }
        });
    });

    let (mut gate, up) = (values(ROWS * d), values(ROWS * d));
    bench.time("swiglu 64x512", 3.0 * f32s(ROWS * d), (20 * ROWS * d) as f64, |pool| {
        let gate = Parts::new(&mut gate, d, num_threads);
        pool.run(&|t| activation::swiglu(gate.take(t), &up[gate.share(t).start * d..gate.share(t).end * d], 10.0));
    });

    let [window, entries] = [128, 512].map(|rows| OwnedRows::new(&values(rows * c), c, 16 * c));
    let (window, entries) = (window.view(), entries.view());
    let sink = vec![0.0; h];
    for (name, num_picks) in [("window", 0), ("CSA", 64), ("HCA of 64K", 512)] {
        let picks: Vec<u32> = (0..num_picks as u32).collect();
        let keys = attention::Keys { window, range: 0..128, entries, picks: &picks };
        let (q, mut out) = (values(ROWS * h * c), vec![0.0; ROWS * h * c]);
        let num_keys = 128 + num_picks;
        let flops = (ROWS * h * num_keys * (4 * c + 20)) as f64;
        bench.time(&format!("attention {name}, 64 rows"), f32s(ROWS * num_keys * c), flops, |pool| {
            let out = Parts::new(&mut out, h * c, num_threads);
            pool.run(&|t| {
                let mut scratch = attention::Scratch::default();
                for (out, r) in out.take(t).chunks_exact_mut(h * c).zip(out.share(t)) {
                    attention::attend(&q[r * h * c..][..h * c], keys.clone(), &sink, &mut scratch, out);
                }
            });
        });
    }

    let (num_blocks, e, heads) = (16_384, 64, 8);
    let panels =
        OwnedRows::new(&indexer::to_panels(&values(num_blocks * e), e), indexer::PANEL * e, 2 * indexer::PANEL * e);
    let keys = indexer::Keys::new(panels.view(), num_blocks);
    let (q, weight) = (values(heads * e), values(heads));
    let mut scores = vec![0.0; num_blocks];
    let flops = (2 * num_blocks * heads * e) as f64;
    bench.time("indexer scores, 16384 blocks", f32s(num_blocks * e), flops, |pool| {
        let scores = Parts::new(&mut scores, PANEL, num_threads);
        pool.run(&|t| {
            let blocks = scores.share(t).start * PANEL..scores.share(t).end * PANEL;
            indexer::scores(&q, &weight, keys, blocks, scores.take(t));
        });
    });
    let mut picks = Vec::new();
    bench.time("top 64 of 16384 (one thread)", f32s(num_blocks), num_blocks as f64, |_| {
        indexer::top_k(&scores, 64, &mut picks);
    });

    let (open, mut pooled) = (OwnedRows::new(&values(128 * 2 * c), 2 * c, 16 * c), vec![0.0; c]);
    let block = |len: usize| compressor::Candidates { rows: open.view(), len, kv: 0, gate: c };
    bench.time("compressor pool of 128 (one thread)", 2.0 * f32s(128 * c), (16 * 128 * c) as f64, |_| {
        compressor::pool([block(0), block(128)], &mut pooled);
    });

    let row = values(129_280);
    let mut chunks = vec![logits::Chunk::default(); row.len().div_ceil(logits::CHUNK)];
    bench.time("log-sum-exp of 129280 logits (one thread)", f32s(row.len()), (18 * row.len()) as f64, |_| {
        logits::summarise(&row, 0.7, &mut chunks);
    });
    let summed = chunks.clone();
    let flops = (18 * (chunks.len() + logits::CHUNK)) as f64;
    bench.time("draw of 129280 (one thread)", f32s(2 * chunks.len() + logits::CHUNK), flops, |_| {
        chunks.copy_from_slice(&summed);
        let sum = logits::total(&mut chunks);
        std::hint::black_box(logits::at_cumulative(&row, 0.7, sum.greatest, &chunks, 0.7 * sum.total));
    });
    let (scored, bias, mut chosen) = (values(256), vec![0.0; 256], [0; 6]);
    let mut row = scored.clone();
    bench.time("router, 256 experts (one thread)", f32s(256), (30 * 256) as f64, |_| {
        router::score(&scored, &mut row);
        router::choose(&row, &bias, &mut chosen);
    });
}

/// The routed experts of a V4-Flash layer, 64 of its 256: gate and up, SwiGLU, down, weighted sum.
fn expert_layers(bench: &mut Bench) {
    let (d, inter, num_experts, k) = (4096, 2048, 64, 6);
    if bench.filter.as_ref().is_some_and(|filter| !"expert layer".contains(filter.as_str())) {
        return;
    }
    let (up, down) = (weight("MXFP4", inter, d), weight("MXFP4", d, inter));
    let w1: Vec<Linear> = vec![up; num_experts];
    let (w3, w2) = (w1.clone(), vec![down; num_experts]);
    let expert = |e: usize| experts::Expert { gate: &w1[e], up: &w3[e], down: &w2[e] };
    let num_threads = bench.pool.num_threads();
    let mut scratch: Vec<experts::Scratch> = (0..num_threads).map(|_| Default::default()).collect();
    let mut pairs = experts::Pairs::default();
    for tokens in [1, 32, 128] {
        let x = values(tokens * d);
        // Token r goes to experts r * 11, r * 11 + 7, ...: nobody twice.
        let chosen: Vec<u16> =
            (0..tokens).flat_map(|r| (0..k).map(move |i| ((r * 11 + i * 7) % num_experts) as u16)).collect();
        pairs.order(num_experts, &vec![0.25; tokens * k], k, |r| &chosen[r * k..][..k]);
        let (mut hidden, mut y) = (vec![0.0; tokens * k * inter], vec![0.0; tokens * d]);
        let bytes = (pairs.runs().len() * (2 * w1[0].num_bytes() + w2[0].num_bytes())) as f64;
        let flops = (2 * 3 * tokens * k * d * inter) as f64;
        bench.time(&format!("expert layer 4096-2048-4096, top 6, {tokens} tokens"), bytes, flops, |pool| {
            let (pairs, x) = (&pairs, Rows::new(&x, d));
            {
                let hidden = Columns::new(&mut hidden, inter, PANEL, num_threads);
                let scratch = Parts::new(&mut scratch, 1, num_threads);
                pool.run(&|t| {
                    experts::hidden(pairs, expert, x, 10.0, &mut hidden.take(t), &mut scratch.take(t)[0]);
                });
            }
            y.fill(0.0);
            let (y, hidden) = (Columns::new(&mut y, d, PANEL, num_threads), &hidden);
            let scratch = Parts::new(&mut scratch, 1, num_threads);
            pool.run(&|t| experts::add_outputs(pairs, expert, hidden, &mut y.take(t), &mut scratch.take(t)[0]));
        });
    }
}

fn quantisers(bench: &mut Bench) {
    let num_threads = bench.pool.num_threads();
    let n = 32 << 20;
    let plain = values(n);
    let (mut codes, mut scales) = (vec![0u8; n / 2], vec![0u8; n / quant::MXFP4_BLOCK]);
    // Against copying: bytes read and written, as the copy bandwidth counts them once.
    bench.time("quantise f32 to MXFP4, 128 MiB", 4.0 * n as f64, 12.0 * n as f64, |pool| {
        let codes = Parts::new(&mut codes, quant::MXFP4_BLOCK / 2, num_threads);
        let scales = Parts::new(&mut scales, 1, num_threads);
        pool.run(&|t| {
            let blocks = scales.share(t);
            let values = &plain[blocks.start * quant::MXFP4_BLOCK..blocks.end * quant::MXFP4_BLOCK];
            quant::quantize_mxfp4_into(values, codes.take(t), scales.take(t));
        });
    });
    let (rows, columns) = (2048, 4096);
    bench.time(
        "quantise f32 to FP8, 32 MiB (one thread)",
        4.0 * (rows * columns) as f64,
        8.0 * (rows * columns) as f64,
        |_| {
            quant::quantize_fp8(&plain[..rows * columns], rows, columns);
        },
    );
}

fn main() {
    // Cargo passes `--bench`.
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let with_scalar = std::env::args().any(|arg| arg == "--scalar");
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
    for num_threads in [num_threads, 1] {
        for backend in Backend::ALL {
            if !set_backend(backend) || (backend == Backend::Scalar) != with_scalar {
                continue;
            }
            let mut pool = Pool::new(num_threads, "bench");
            let machine = Machine::measure(&mut pool);
            println!(
                "\n{backend:?}, {num_threads} threads: reads {:.1} GB/s, copies {:.1} GB/s, multiply-adds {:.1} GFLOP/s",
                machine.read / 1e9,
                machine.copy / 1e9,
                machine.fma / 1e9
            );
            let mut bench = Bench {
                pool,
                machine,
                backend: match backend {
                    Backend::Scalar => "scalar",
                    Backend::Avx2 => "avx2",
                    Backend::Avx512 => "avx512",
                },
                filter: filter.clone(),
            };
            products(&mut bench);
            expert_layers(&mut bench);
            small_ops(&mut bench);
            quantisers(&mut bench);
        }
    }
}
