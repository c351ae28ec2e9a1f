//! Manifold-constrained hyper-connections, mHC (arXiv:2512.24880; v4/SPEC section 3).
//! Shapes: N streams, D width; streams `[N, D]` of one row.

use crate::lanes::{LANES, Lanes, load, store};
use crate::math::{exp, sigmoid};

/// Upper bound on the number of streams, so that a row's mixing matrix sits in registers and stack.
pub const MAX_STREAMS: usize = 8;

/// The three gating factors of a sub-layer and the numbers of its Sinkhorn iteration.
#[derive(Clone, Copy, Debug)]
pub struct Gates<'a> {
    /// `scale`, `[3]`: pre, post, comb.
    pub scale: &'a [f32],
    /// `base`, `[(2 + N) N]`.
    pub base: &'a [f32],
    /// N.
    pub num_streams: usize,
    /// `hc_sinkhorn_iters`.
    pub sinkhorn_iters: usize,
    /// `hc_eps`.
    pub eps: f32,
}

vectorised! {
    /// The mappings of one row: from `z = (fn . v) / rms(v)`, `[(2 + N) N]`, to `pre` `[N]`, `post` `[N]` and the doubly
    /// stochastic `comb` `[N, N]`, in place: `z` becomes `pre, post, comb`.
    ///
    /// The iteration starts from a row softmax and ends on columns, as the release's code does.
    ///
    /// # Panics
    /// When the sizes do not fit, or there are more than [`MAX_STREAMS`] streams.
    pub fn mappings(z: &mut [f32], gates: &Gates<'_>) {
        let n = gates.num_streams;
        assert!(n <= MAX_STREAMS && z.len() == (2 + n) * n, "{} mixes for {n} streams", z.len());
        let (pre_post, comb) = z.split_at_mut(2 * n);
        for i in 0..n {
            pre_post[i] = sigmoid(pre_post[i].mul_add(gates.scale[0], gates.base[i])) + gates.eps;
            pre_post[n + i] = 2.0 * sigmoid(pre_post[n + i].mul_add(gates.scale[1], gates.base[n + i]));
        }
        for (x, base) in comb.iter_mut().zip(&gates.base[2 * n..]) {
            *x = x.mul_add(gates.scale[2], *base);
        }
        if n == 4 {
            sinkhorn::<4>(comb, 4, gates);
        } else {
            sinkhorn::<MAX_STREAMS>(comb, n, gates);
        }
    }
}

/// Sinkhorn-Knopp on an `n x n` matrix held in `[[f32; W]; W]`.
#[inline(always)]
fn sinkhorn<const W: usize>(comb: &mut [f32], n: usize, gates: &Gates<'_>) {
    let eps = gates.eps;
    let mut c = [[0.0f32; W]; W];
    for i in 0..n {
        c[i][..n].copy_from_slice(&comb[i * n..][..n]);
        let max = c[i][..n].iter().fold(f32::NEG_INFINITY, |a, &x| if x > a { x } else { a });
        let mut sum = 0.0;
        for x in &mut c[i][..n] {
            *x = exp(*x - max);
            sum += *x;
        }
        for x in &mut c[i][..n] {
            *x = *x / sum + eps;
        }
    }
    columns(&mut c, n, eps);
    for _ in 1..gates.sinkhorn_iters {
        for row in c.iter_mut().take(n) {
            let sum = row[..n].iter().fold(0.0, |a, x| a + x) + eps;
            for x in &mut row[..n] {
                *x /= sum;
            }
        }
        columns(&mut c, n, eps);
    }
    for i in 0..n {
        comb[i * n..][..n].copy_from_slice(&c[i][..n]);
    }
}

#[inline(always)]
fn columns<const W: usize>(c: &mut [[f32; W]; W], n: usize, eps: f32) {
    let mut sums = [0.0f32; W];
    for row in c.iter().take(n) {
        for j in 0..W {
            sums[j] += row[j];
        }
    }
    for row in c.iter_mut().take(n) {
        for j in 0..W {
            row[j] /= sums[j] + eps;
        }
    }
}

vectorised! {
    /// `x = sum_n pre[n] * streams[n]`: the sub-layer's input.
    pub fn collapse(lanes s; streams: &[f32], pre: &[f32], x: &mut [f32]) {
        let d = x.len();
        for (from, x) in (0..d).step_by(LANES).zip(x.chunks_mut(LANES)) {
            let mut sum = s.zero();
            for (stream, pre) in streams.chunks_exact(d).zip(pre) {
                sum = s.fma(s.splat(*pre), load(s, &stream[from..from + x.len()]), sum);
            }
            store(s, x, sum);
        }
    }
}

vectorised! {
    /// `streams'[k] = post[k] * y + sum_j comb[j, k] * streams[j]`: contracts the first index of `comb`.
    pub fn expand(lanes s; streams: &mut [f32], y: &[f32], post: &[f32], comb: &[f32]) {
        let (n, d) = (post.len(), y.len());
        assert!(n <= MAX_STREAMS && streams.len() == n * d, "{} values of {n} streams", streams.len());
        if n == 4 {
            expand_streams::<S, 4>(s, streams, y, post, comb);
        } else {
            expand_streams::<S, MAX_STREAMS>(s, streams, y, post, comb);
        }
    }
}

/// [`expand`] for at most N streams.
#[inline(always)]
fn expand_streams<S: Lanes, const N: usize>(s: S, streams: &mut [f32], y: &[f32], post: &[f32], comb: &[f32]) {
    let (n, d) = (post.len(), y.len());
    for (from, y) in (0..d).step_by(LANES).zip(y.chunks(LANES)) {
        let channels = from..from + y.len();
        let y = load(s, y);
        let mut new = [s.zero(); N];
        for k in 0..n {
            new[k] = s.mul(s.splat(post[k]), y);
        }
        for (j, stream) in streams.chunks_exact(d).enumerate() {
            let old = load(s, &stream[channels.clone()]);
            for k in 0..n {
                new[k] = s.fma(s.splat(comb[j * n + k]), old, new[k]);
            }
        }
        for (stream, new) in streams.chunks_exact_mut(d).zip(new) {
            store(s, &mut stream[channels.clone()], new);
        }
    }
}

vectorised! {
    /// The weights of the head's collapse, in place: `sigmoid(z * scale + base) + eps`.
    pub fn head_gates(z: &mut [f32], scale: f32, base: &[f32], eps: f32) {
        for (z, base) in z.iter_mut().zip(base) {
            *z = sigmoid(z.mul_add(scale, *base)) + eps;
        }
    }
}

vectorised! {
    /// `z *= 1 / sqrt(mean(v^2) + eps)`: one RMS over all N D values of a row's streams.
    pub fn scale_by_inverse_rms(lanes s; z: &mut [f32], v: &[f32], eps: f32) {
        let scale = crate::norm::inverse_rms(s, v, eps);
        for z in z {
            *z *= scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comb_is_doubly_stochastic_and_columns_are_exact() {
        for n in 1..=MAX_STREAMS {
            let base: Vec<f32> = (0..(2 + n) * n).map(|i| (i as f32 * 0.7).sin()).collect();
            let mut z: Vec<f32> = (0..(2 + n) * n).map(|i| (i as f32 * 1.3).cos() * 2.0).collect();
            let gates = Gates { scale: &[0.5, 0.6, 0.7], base: &base, num_streams: n, sinkhorn_iters: 20, eps: 1e-6 };
            mappings(&mut z, &gates);
            let comb = &z[2 * n..];
            for i in 0..n {
                let row: f32 = (0..n).map(|j| comb[i * n + j]).sum();
                let column: f32 = (0..n).map(|j| comb[j * n + i]).sum();
                assert!((row - 1.0).abs() < 1e-3, "row {i} of {n} sums to {row}");
                assert!((column - 1.0).abs() < 1e-5, "column {i} of {n} sums to {column}");
            }
        }
    }
}
