//! Sinkhorn normalisation of small matrices together with its derivative, for training. Shapes: T matrices of `[N, N]`.

/// The largest `N` that [`sinkhorn_jacobian`] does: the Jacobian has `N^4` entries a matrix.
pub const MAX_N: usize = 4;

/// Normalises each positive matrix of `k_tnn` (SPEC section 3: columns first, then `iters - 1` rounds of rows and
/// columns, every divisor plus `eps`) into `comb_tnn`, and writes the Jacobian `d comb_ij / d log k_ab` as
/// `[T, N*N, N*N]` into `jacobian`, if given.
///
/// The derivative is that of the unrolled iterations, not of their limit. Every round only rescales rows and columns,
/// `comb_ij = r_i k_ij c_j`, so forward-mode carries the `2N` logarithms of `r` and `c` instead of `N^2` entries: with
/// `u_i = d log r_i` and `w_j = d log c_j`, a row round is
/// `u_i <- u_i (1 - s_i / (s_i + eps)) - sum_j comb'_ij (d log k_ij + w_j)`, `s_i` being the row's sum before and
/// `comb'` the matrix after it; a column round mirrors it.
///
/// # Panics
/// When `n` is not 2, 3 or 4, `iters` is 0, or the slices do not hold the same number of matrices.
pub fn sinkhorn_jacobian(
    k_tnn: &[f32],
    n: usize,
    iters: usize,
    eps: f32,
    comb_tnn: &mut [f32],
    jacobian: Option<&mut [f32]>,
) {
    assert!(iters > 0, "Sinkhorn needs at least one round");
    assert_eq!(k_tnn.len(), comb_tnn.len(), "one result per matrix");
    if let Some(j) = &jacobian {
        assert_eq!(j.len(), k_tnn.len() * n * n, "one Jacobian per matrix");
    }
    match n {
        2 => all::<2, 4>(k_tnn, iters, eps, comb_tnn, jacobian),
        3 => all::<3, 9>(k_tnn, iters, eps, comb_tnn, jacobian),
        4 => all::<4, 16>(k_tnn, iters, eps, comb_tnn, jacobian),
        _ => panic!("n is {n}, expected 2 to {MAX_N}"),
    }
}

fn all<const N: usize, const L: usize>(
    k: &[f32],
    iters: usize,
    eps: f32,
    comb: &mut [f32],
    jacobian: Option<&mut [f32]>,
) {
    let matrices = k.chunks_exact(L).zip(comb.chunks_exact_mut(L));
    match jacobian {
        Some(jacobian) => {
            for ((k, comb), jacobian) in matrices.zip(jacobian.chunks_exact_mut(L * L)) {
                one::<N, L>(k, iters, eps, comb, jacobian);
            }
        }
        None => {
            for (k, comb) in matrices {
                let mut c: [[f32; N]; N] = std::array::from_fn(|i| std::array::from_fn(|j| k[i * N + j]));
                columns(&mut c, eps);
                for _ in 1..iters {
                    rows(&mut c, eps);
                    columns(&mut c, eps);
                }
                for i in 0..N {
                    comb[i * N..(i + 1) * N].copy_from_slice(&c[i]);
                }
            }
        }
    }
}

/// Divides every row by its sum; returns `1 - s / (s + eps)` of each.
fn rows<const N: usize>(c: &mut [[f32; N]; N], eps: f32) -> [f32; N] {
    std::array::from_fn(|i| {
        let sum: f32 = c[i].iter().sum();
        let scale = 1.0 / (sum + eps);
        c[i].iter_mut().for_each(|x| *x *= scale);
        eps * scale
    })
}

/// Divides every column by its sum; returns `1 - s / (s + eps)` of each.
fn columns<const N: usize>(c: &mut [[f32; N]; N], eps: f32) -> [f32; N] {
    let mut sum = [0.0; N];
    for row in c.iter() {
        for j in 0..N {
            sum[j] += row[j];
        }
    }
    let scale = sum.map(|s| 1.0 / (s + eps));
    for row in c.iter_mut() {
        for j in 0..N {
            row[j] *= scale[j];
        }
    }
    scale.map(|s| eps * s)
}

/// One matrix and its Jacobian; `L` is `N * N`. The inner loops run over the `L` entries of `log k` that the derivatives
/// are with respect to: plain arrays of constant length, which the compiler turns into vectors.
fn one<const N: usize, const L: usize>(k: &[f32], iters: usize, eps: f32, comb: &mut [f32], jacobian: &mut [f32]) {
    let mut c: [[f32; N]; N] = std::array::from_fn(|i| std::array::from_fn(|j| k[i * N + j]));
    let mut u = [[0.0f32; L]; N];
    let mut w = [[0.0f32; L]; N];
    for round in 0..iters {
        if round > 0 {
            let keep = rows(&mut c, eps);
            for i in 0..N {
                let mut next: [f32; L] = std::array::from_fn(|x| u[i][x] * keep[i]);
                for j in 0..N {
                    next[i * N + j] -= c[i][j];
                }
                for j in 0..N {
                    subtract(&mut next, c[i][j], &w[j]);
                }
                u[i] = next;
            }
        }
        let keep = columns(&mut c, eps);
        for j in 0..N {
            let mut next: [f32; L] = std::array::from_fn(|x| w[j][x] * keep[j]);
            for i in 0..N {
                next[i * N + j] -= c[i][j];
            }
            for i in 0..N {
                subtract(&mut next, c[i][j], &u[i]);
            }
            w[j] = next;
        }
    }
    for i in 0..N {
        for j in 0..N {
            let x = c[i][j];
            comb[i * N + j] = x;
            let out = &mut jacobian[(i * N + j) * L..][..L];
            for ab in 0..L {
                out[ab] = x * (u[i][ab] + w[j][ab]);
            }
            out[i * N + j] += x;
        }
    }
}

#[inline(always)]
fn subtract<const L: usize>(to: &mut [f32; L], scale: f32, from: &[f32; L]) {
    for ab in 0..L {
        to[ab] -= scale * from[ab];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formula in f64, and its derivative by central differences.
    fn reference(k: &[f64], n: usize, iters: usize, eps: f64) -> Vec<f64> {
        let mut c = k.to_vec();
        let mut normalise = |step: usize, stride: usize| {
            for line in 0..n {
                let at = |x: usize| line * step + x * stride;
                let sum: f64 = (0..n).map(|x| c[at(x)]).sum();
                (0..n).for_each(|x| c[at(x)] /= sum + eps);
            }
        };
        normalise(1, n);
        for _ in 1..iters {
            normalise(n, 1);
            normalise(1, n);
        }
        c
    }

    fn check(n: usize, iters: usize, eps: f32) {
        let k: Vec<f32> = (0..n * n).map(|x| 0.05 + ((x * 37 + n) % 11) as f32 / 7.0).collect();
        let (mut comb, mut value) = (vec![0.0; n * n], vec![0.0; n * n]);
        let mut jacobian = vec![0.0; n.pow(4)];
        sinkhorn_jacobian(&k, n, iters, eps, &mut comb, Some(&mut jacobian));
        sinkhorn_jacobian(&k, n, iters, eps, &mut value, None);
        assert_eq!(comb, value);
        let k: Vec<f64> = k.iter().map(|&x| f64::from(x)).collect();
        let eps = f64::from(eps);
        for (got, want) in comb.iter().zip(reference(&k, n, iters, eps)) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} is not {want}");
        }
        let h = 1e-5f64;
        for ab in 0..n * n {
            let moved = |by: f64| {
                let mut k = k.clone();
                k[ab] *= by.exp();
                reference(&k, n, iters, eps)
            };
            let (up, down) = (moved(h), moved(-h));
            for ij in 0..n * n {
                let (got, want) = (f64::from(jacobian[ij * n * n + ab]), (up[ij] - down[ij]) / (2.0 * h));
                assert!((got - want).abs() < 1e-6, "d comb[{ij}] / d log k[{ab}]: {got} is not {want}");
            }
        }
    }

    #[test]
    fn derivative_of_four_streams() {
        check(4, 20, 1e-6);
    }
    #[test]
    fn derivative_before_convergence() {
        check(4, 2, 1e-3);
        check(3, 1, 1e-2);
        check(2, 3, 1e-3);
    }
}
