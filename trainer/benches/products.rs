//! `cargo bench -p trainer --bench products`: the engine's products beside libtorch's f32 product of the same shape, in
//! turn in one run, on two threads each: medians and ratios.

use std::time::Instant;

use kernels::linear::{Linear, PANEL, Rows, Scratch};
use kernels::pool::{Columns, Parts, Pool};
use kernels::quant;
use tch::{Kind, Tensor};

const RUNS: usize = 41;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn main() {
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
    tch::set_num_threads(num_threads as i32);
    let mut pool = Pool::new(num_threads, "bench");
    let mut scratch: Vec<Scratch> = (0..num_threads).map(|_| Scratch::default()).collect();
    println!("{num_threads} threads, {:?} kernels", kernels::backend());
    for (inputs, outputs) in [(4096usize, 2048usize), (512, 512)] {
        let plain: Vec<f32> = (0..inputs * outputs)
            .map(|i| ((i as u32).wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 23) as f32 - 1.0)
            .collect();
        let bits: Vec<u16> = plain.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        let fp8 = quant::quantize_fp8(&plain, outputs, inputs);
        let ours = [
            ("f32", Linear::from_f32(outputs, inputs, &plain)),
            ("bf16", Linear::from_bf16(outputs, inputs, &bits)),
            ("FP8", Linear::from_fp8(outputs, inputs, &fp8).expect("exact")),
            ("MXFP4", Linear::from_mxfp4(outputs, inputs, &quant::quantize_mxfp4(&plain))),
        ];
        let theirs = Tensor::from_slice(&plain).view([outputs as i64, inputs as i64]).transpose(0, 1);
        for rows in [1, 8, 32, 128] {
            let x: Vec<f32> = plain[..rows * inputs].to_vec();
            let x_tensor = Tensor::from_slice(&x).view([rows as i64, inputs as i64]).to_kind(Kind::Float);
            let mut y = vec![0.0; rows * outputs];
            let mut times = vec![Vec::new(); 1 + ours.len()];
            for _ in 0..RUNS {
                times[0].push(timed(|| {
                    let _ = x_tensor.matmul(&theirs);
                }));
                // Its threads go on spinning for a while, on the cores that ours are about to use.
                std::thread::sleep(std::time::Duration::from_millis(20));
                for ((_, weight), times) in ours.iter().zip(&mut times[1..]) {
                    times.push(timed(|| {
                        let y = Columns::new(&mut y, outputs, PANEL, num_threads);
                        let scratch = Parts::new(&mut scratch, 1, num_threads);
                        pool.run(&|t| {
                            weight.forward(Rows::new(&x, inputs), &mut y.take(t), &mut scratch.take(t)[0]);
                        });
                    }));
                }
            }
            let flops = 2.0 * (rows * inputs * outputs) as f64;
            let times: Vec<f64> = times.into_iter().map(median).collect();
            print!("{inputs}x{outputs}, {rows:>3} rows: libtorch f32 {:>6.1} GFLOP/s", flops / times[0] / 1e9);
            for ((name, _), time) in ours.iter().zip(&times[1..]) {
                print!(", {name} {:.1} ({:.2})", flops / time / 1e9, times[0] / time);
            }
            println!();
        }
    }
}
