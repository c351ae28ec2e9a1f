//! What this machine can do at most, measured: read bandwidth, copy bandwidth, multiply-adds. And how a thing is timed.

use std::hint::black_box;
use std::time::Instant;

use kernels::Backend;
use kernels::pool::{Parts, Pool, share};

/// Megabytes that no cache holds.
const LARGE: usize = 256 << 20;

/// Ceilings of the machine, for all threads of a pool together.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Bytes per second of reading memory.
    pub read: f64,
    /// Bytes per second copied (read once and written once).
    pub copy: f64,
    /// Floating-point operations per second of fused multiply-adds in registers; one is two operations.
    pub fma: f64,
}

impl Machine {
    pub fn measure(pool: &mut Pool) -> Self {
        let source = vec![1u64; LARGE / 8];
        let mut target = vec![2u64; LARGE / 8];
        let num_threads = pool.num_threads();
        let read = median(15, || {
            pool.run(&|t| {
                let part = &source[share(source.len(), t, num_threads)];
                black_box(read(part));
            });
        });
        let copy = median(9, || {
            let target = Parts::new(&mut target, 1, num_threads);
            pool.run(&|t| target.take(t).copy_from_slice(&source[target.share(t)]));
        });
        let mut operations = 0.0;
        let fma = median(9, || {
            let flops = std::sync::atomic::AtomicU64::new(0);
            pool.run(&|_| {
                flops.fetch_add(fma(), std::sync::atomic::Ordering::Relaxed);
            });
            operations = flops.into_inner() as f64;
        });
        Self { read: LARGE as f64 / read, copy: LARGE as f64 / copy, fma: operations / fma }
    }
}

/// Reads four streams at a time, which is faster than one.
fn read(data: &[u64]) -> u64 {
    #[inline(always)]
    fn body(data: &[u64]) -> u64 {
        let quarter = data.len() / 4;
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| data[i * quarter..][..quarter].as_chunks::<16>().0);
        let mut sums = [[0u64; 16]; 4];
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for (sums, chunk) in sums.iter_mut().zip([a, b, c, d]) {
                for i in 0..16 {
                    sums[i] ^= chunk[i];
                }
            }
        }
        sums.iter().flatten().fold(0, |a, b| a ^ b)
    }
    #[cfg(target_arch = "x86_64")]
    if kernels::backend() != Backend::Scalar {
        #[target_feature(enable = "avx2")]
        fn avx2(data: &[u64]) -> u64 {
            body(data)
        }
        // SAFETY: both other backends are in use only where the CPU has AVX2.
        return unsafe { avx2(data) };
    }
    body(data)
}

/// Multiply-adds in twelve registers; returns how many operations that were.
fn fma() -> u64 {
    const TURNS: u64 = 4_000_000;
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        /// In intrinsics: of a plain loop the compiler keeps the sums in memory.
        macro_rules! turns {
            ($set:ident, $fma:ident, $lanes:expr) => {{
                let (a, b) = ($set(black_box(1.0)), $set(black_box(1e-9)));
                let mut sums = [b; 12];
                for _ in 0..TURNS {
                    for sum in &mut sums {
                        *sum = $fma(*sum, a, b);
                    }
                }
                black_box(sums);
                TURNS * 12 * $lanes * 2
            }};
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2() -> u64 {
            turns!(_mm256_set1_ps, _mm256_fmadd_ps, 8)
        }
        #[target_feature(enable = "avx512f")]
        fn avx512() -> u64 {
            turns!(_mm512_set1_ps, _mm512_fmadd_ps, 16)
        }
        match kernels::backend() {
            // SAFETY: the backend is in use only where the CPU has its instructions.
            Backend::Avx2 => return unsafe { avx2() },
            // SAFETY: as above.
            Backend::Avx512 => return unsafe { avx512() },
            Backend::Scalar => {}
        }
    }
    let (a, b) = (black_box([1.0f32; 4]), black_box([1e-9f32; 4]));
    let mut sums = [[0.0f32; 4]; 12];
    for _ in 0..TURNS {
        for sum in &mut sums {
            for i in 0..4 {
                sum[i] = sum[i].mul_add(a[i], b[i]);
            }
        }
    }
    black_box(sums);
    TURNS * 12 * 4 * 2
}

/// The median of `runs` times of `work`, in seconds, after one that is not counted.
pub fn median(runs: usize, mut work: impl FnMut()) -> f64 {
    work();
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[runs / 2]
}
