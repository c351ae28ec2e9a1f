//! AVX2 with FMA: six rows by one panel in twelve accumulators.

use std::arch::x86_64::{
    __m256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

use super::{PANEL, PanelFn};

/// Rows that share one pass over the panel: 12 accumulators, 2 registers of weights and 1 of x fill the 16 there are.
const ROWS: usize = 6;

pub(super) fn probe() -> Option<(&'static str, PanelFn)> {
    let has = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    has.then_some(("avx2", run as PanelFn))
}

fn run(x: &[f32], x_stride: usize, rows: usize, panel: &[f32], y: &mut [f32], y_stride: usize, n: usize) {
    // SAFETY: only `probe` hands `run` out, and only after the CPU reported AVX2 and FMA.
    unsafe { panel_avx2(x, x_stride, rows, panel, y, y_stride, n) }
}

#[target_feature(enable = "avx2,fma")]
fn panel_avx2(x: &[f32], x_stride: usize, rows: usize, panel: &[f32], y: &mut [f32], y_stride: usize, n: usize) {
    let mut r = 0;
    while r < rows {
        let (x, y) = (&x[r * x_stride..], &mut y[r * y_stride..]);
        match rows - r {
            ROWS.. => tile::<ROWS>(x, x_stride, panel, y, y_stride, n),
            5 => tile::<5>(x, x_stride, panel, y, y_stride, n),
            4 => tile::<4>(x, x_stride, panel, y, y_stride, n),
            3 => tile::<3>(x, x_stride, panel, y, y_stride, n),
            2 => tile::<2>(x, x_stride, panel, y, y_stride, n),
            _ => tile::<1>(x, x_stride, panel, y, y_stride, n),
        }
        r += ROWS;
    }
}

/// R rows by one panel. Each output is one chain of fused multiply-adds over K, whatever R is.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn tile<const R: usize>(x: &[f32], x_stride: usize, panel: &[f32], y: &mut [f32], y_stride: usize, n: usize) {
    let (weights, _) = panel.as_chunks::<PANEL>();
    let rows: [&[f32]; R] = std::array::from_fn(|r| &x[r * x_stride..][..weights.len()]);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for (k, w) in weights.iter().enumerate() {
        let (low, high) = w.split_at(8);
        let w = [load8(low), load8(high)];
        for r in 0..R {
            let x = _mm256_set1_ps(rows[r][k]);
            sums[r][0] = _mm256_fmadd_ps(x, w[0], sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(x, w[1], sums[r][1]);
        }
    }
    for r in 0..R {
        let mut out = [0.0f32; PANEL];
        let (low, high) = out.split_at_mut(8);
        store8(low, sums[r][0]);
        store8(high, sums[r][1]);
        y[r * y_stride..][..n].copy_from_slice(&out[..n]);
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn load8(x: &[f32]) -> __m256 {
    assert!(x.len() == 8);
    // SAFETY: `x` is 8 readable f32, and `loadu` asks for no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store8(x: &mut [f32], v: __m256) {
    assert!(x.len() == 8);
    // SAFETY: `x` is 8 writable f32, and `storeu` asks for no alignment.
    unsafe { _mm256_storeu_ps(x.as_mut_ptr(), v) }
}
