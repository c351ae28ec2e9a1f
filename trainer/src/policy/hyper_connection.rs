//! Manifold-constrained hyper-connections (SPEC section 3; arXiv:2512.24880): how N residual streams feed a sub-layer
//! and take its output back. Shapes: T positions, N streams, D model width.

use kernels::sinkhorn_jacobian::{MAX_N, sinkhorn_jacobian};
use rollout::model::ModelConfig;
use tch::{Device, Kind, Tensor};

use super::parameters::{Loader, PolicyError};

/// The connection of one sub-layer.
pub(super) struct HyperConnection {
    fn_md: Tensor,   // [(2 + N) N, N D]
    base_m: Tensor,  // [(2 + N) N]: pre, post, comb
    scale_3: Tensor, // [3]
    /// Which entry of `scale` each row of `fn` takes.
    part_m: Tensor,
    n: i64,
    iters: usize,
    hc_eps: f64,
    norm_eps: f64,
}

/// What a sub-layer reads, and how its output goes back.
pub(super) struct Mixed {
    /// `[T, D]`: the streams' weighted sum.
    pub x_td: Tensor,
    pub post_tn: Tensor,
    pub comb_tnn: Tensor,
}

impl HyperConnection {
    pub fn load(loader: &mut Loader<'_>, prefix: &str, config: &ModelConfig) -> Result<Self, PolicyError> {
        let (n, d) = (config.hc_mult, config.hidden_size);
        let mixes = (2 + n) * n;
        let parts: Vec<i64> = (0..mixes).map(|m| (m / n).min(2) as i64).collect();
        Ok(Self {
            fn_md: loader.trained(&format!("{prefix}_fn"), &[mixes, n * d])?,
            base_m: loader.trained(&format!("{prefix}_base"), &[mixes])?,
            scale_3: loader.trained(&format!("{prefix}_scale"), &[3])?,
            part_m: Tensor::from_slice(&parts).to_device(loader.device()),
            n: n as i64,
            iters: config.hc_sinkhorn_iters,
            hc_eps: f64::from(config.hc_eps),
            norm_eps: f64::from(config.rms_norm_eps),
        })
    }

    /// `hc_pre`: the sub-layer's input from the streams `[T, N, D]`, which must be contiguous.
    pub fn pre(&self, streams_tnd: &Tensor) -> Mixed {
        let n = self.n;
        let z_tm = project(streams_tnd, &self.fn_md, self.norm_eps);
        let z_tm = self.base_m.addcmul(&z_tm, &self.scale_3.index_select(0, &self.part_m));
        let [gates, comb] = halves(&z_tm, 2 * n);
        let [pre_tn, post_tn] = halves(&gates.sigmoid(), n);
        let comb_tnn = comb.reshape([-1, n, n]).softmax(-1, None::<Kind>) + self.hc_eps;
        Mixed {
            x_td: weighted_sum(&(pre_tn + self.hc_eps), streams_tnd),
            post_tn: post_tn * 2.0,
            comb_tnn: sinkhorn(&comb_tnn, self.iters, self.hc_eps),
        }
    }

    /// `hc_post`: `X'[k] = post[k] y + sum_j comb[j, k] X[j]`; the sum is over the first index of `comb`.
    pub fn post(&self, y_td: &Tensor, streams_tnd: &Tensor, mixed: &Mixed) -> Tensor {
        // The outer product as a matrix product, added to in place.
        let mut out_tnd = mixed.post_tn.unsqueeze(2).bmm(&y_td.unsqueeze(1));
        out_tnd.baddbmm_(&mixed.comb_tnn.transpose(1, 2), streams_tnd)
    }
}

/// The streams' last sum, before the final norm.
pub(super) struct HyperHead {
    fn_nd: Tensor,
    base_n: Tensor,
    scale_1: Tensor,
    hc_eps: f64,
    norm_eps: f64,
}

impl HyperHead {
    /// `prefix` is empty, or `mtp.0.`.
    pub fn load(loader: &mut Loader<'_>, prefix: &str, config: &ModelConfig) -> Result<Self, PolicyError> {
        let (n, d) = (config.hc_mult, config.hidden_size);
        Ok(Self {
            fn_nd: loader.trained(&format!("{prefix}hc_head_fn"), &[n, n * d])?,
            base_n: loader.trained(&format!("{prefix}hc_head_base"), &[n])?,
            scale_1: loader.trained(&format!("{prefix}hc_head_scale"), &[1])?,
            hc_eps: f64::from(config.hc_eps),
            norm_eps: f64::from(config.rms_norm_eps),
        })
    }

    /// `[T, N, D]` to `[T, D]`.
    pub fn forward(&self, streams_tnd: &Tensor) -> Tensor {
        let z_tn = project(streams_tnd, &self.fn_nd, self.norm_eps);
        let pre_tn = self.base_n.addcmul(&z_tn, &self.scale_1).sigmoid() + self.hc_eps;
        weighted_sum(&pre_tn, streams_tnd)
    }
}

/// `fn v / rms(v)`, one RMS over all `N D` values of a position.
fn project(streams_tnd: &Tensor, fn_md: &Tensor, norm_eps: f64) -> Tensor {
    let v = streams_tnd.flatten(1, 2);
    v.linear(fn_md, None::<&Tensor>) * super::inverse_rms(&v, norm_eps)
}

/// `sum_n weight[n] X[n]`.
fn weighted_sum(weight_tn: &Tensor, streams_tnd: &Tensor) -> Tensor {
    weight_tn.unsqueeze(1).bmm(streams_tnd).squeeze_dim(1)
}

/// Columns before `at`, and the rest. A split's gradient is one concatenation; that of two `narrow`s is two padded sums.
fn halves(x: &Tensor, at: i64) -> [Tensor; 2] {
    let rest = x.size()[1] - at;
    let [a, b] = x.split_with_sizes([at, rest], 1).try_into().expect("two sizes give two parts");
    [a, b]
}

/// Sinkhorn normalisation of positive matrices `[T, N, N]`: columns first, then `iters - 1` rounds of rows and columns.
///
/// Twenty rounds by autograd are some 350 small tensor operations a sub-layer. On the CPU we therefore compute value
/// and Jacobian outside the graph and enter it as `value + J (log k - detach(log k))`: the value is exact, the last
/// factor being zero, and the gradient is that of the unrolled iterations.
fn sinkhorn(k_tnn: &Tensor, iters: usize, eps: f64) -> Tensor {
    let n = k_tnn.size()[1];
    if k_tnn.device() != Device::Cpu || !(2..=MAX_N as i64).contains(&n) {
        return sinkhorn_unrolled(k_tnn, iters, eps);
    }
    let size = (n * n) as usize;
    let k = super::to_vec_f32(k_tnn);
    let mut comb = vec![0.0; k.len()];
    let mut jacobian = if k_tnn.requires_grad() { vec![0.0; k.len() * size] } else { Vec::new() };
    let threads = (tch::get_num_threads().max(1) as usize).min((k.len() / size).div_ceil(256).max(1));
    let per_thread = (k.len() / size).div_ceil(threads) * size;
    if per_thread > 0 {
        std::thread::scope(|scope| {
            let mut jacobians = jacobian.chunks_mut(per_thread * size);
            for (k, comb) in k.chunks(per_thread).zip(comb.chunks_mut(per_thread)) {
                let jacobian = jacobians.next();
                scope.spawn(move || sinkhorn_jacobian(k, n as usize, iters, eps as f32, comb, jacobian));
            }
        });
    }
    let comb_tnn = Tensor::from_slice(&comb).view_(k_tnn.size());
    if jacobian.is_empty() {
        return comb_tnn;
    }
    let jacobian = Tensor::from_slice(&jacobian).view_([-1, n * n, n * n]);
    let log_k = k_tnn.log();
    let zero = (&log_k - log_k.detach()).view([-1, n * n, 1]);
    comb_tnn + jacobian.bmm(&zero).view_(k_tnn.size())
}

/// [`sinkhorn`] as the formula has it.
fn sinkhorn_unrolled(k_tnn: &Tensor, iters: usize, eps: f64) -> Tensor {
    let normalise = |c: &Tensor, dim: i64| c / (c.sum_dim_intlist(dim, true, None::<Kind>) + eps);
    let mut c = normalise(k_tnn, 1);
    for _ in 1..iters {
        c = normalise(&normalise(&c, 2), 1);
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(n: i64, iters: usize, eps: f64) {
        tch::manual_seed(7);
        let z = (Tensor::randn([600, n, n], (Kind::Float, Device::Cpu)) * 1.5).set_requires_grad(true);
        let upstream = Tensor::randn([600, n, n], (Kind::Float, Device::Cpu));
        let run = |f: fn(&Tensor, usize, f64) -> Tensor| {
            let c = f(&(z.softmax(-1, None::<Kind>) + eps), iters, eps);
            let grad = Tensor::run_backward(&[(&c * &upstream).sum(None::<Kind>)], &[&z], false, false);
            (c.detach(), grad[0].copy())
        };
        let ((c, grad), (want_c, want_grad)) = (run(sinkhorn), run(sinkhorn_unrolled));
        assert!((c - want_c).abs().max().double_value(&[]) < 1e-6);
        assert!((grad - want_grad).abs().max().double_value(&[]) < 1e-6);
    }

    #[test]
    fn sinkhorn_by_jacobian_is_the_unrolled_one() {
        check(4, 20, 1e-6);
        check(4, 3, 1e-3);
        check(2, 1, 1e-3);
    }
}
