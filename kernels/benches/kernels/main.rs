//! `cargo bench -p kernels [-- NAME]`: every op on every backend, as time, GB/s and GFLOP/s, and as fractions of the read
//! bandwidth and the multiply-adds that this machine was measured to give in the same run.

mod machine;

use kernels::linear::{Linear, PANEL, Rows, Scratch};
use kernels::pool::{Columns, Parts, Pool};
use kernels::quant;
use kernels::{Backend, set_backend};
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
        }
    }
}
