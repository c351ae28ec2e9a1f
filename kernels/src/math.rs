//! Small pieces that the ops share; all are inlined so that each backend compiles its own.

use crate::lanes::{LANES, Lanes, Scalar, load};

/// `sum_i a[i] * b[i]`.
#[inline(always)]
pub(crate) fn dot<S: Lanes>(s: S, a: &[f32], b: &[f32]) -> f32 {
    dots(s, [a], b)[0]
}

/// [`dot`] of several rows with one, which is read once for all of them.
#[inline(always)]
pub(crate) fn dots<S: Lanes, const N: usize>(s: S, a: [&[f32]; N], b: &[f32]) -> [f32; N] {
    let (chunks, tail) = b.as_chunks::<LANES>();
    let mut rows: [&[[f32; LANES]]; N] = [&[]; N];
    let mut lanes = [s.zero(); N];
    for n in 0..N {
        assert_eq!(a[n].len(), b.len(), "rows differ in length");
        rows[n] = &a[n].as_chunks::<LANES>().0[..chunks.len()];
    }
    for (k, b) in chunks.iter().enumerate() {
        let b = s.load(b);
        for n in 0..N {
            lanes[n] = s.fma(s.load(&rows[n][k]), b, lanes[n]);
        }
    }
    if !tail.is_empty() {
        let b = load(s, tail);
        for n in 0..N {
            lanes[n] = s.fma(load(s, &a[n][chunks.len() * LANES..]), b, lanes[n]);
        }
    }
    let mut out = [0.0; N];
    for n in 0..N {
        out[n] = s.sum(lanes[n]);
    }
    out
}

/// `sum_i x[i]`.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for x in chunks {
        for i in 0..LANES {
            lanes[i] += x[i];
        }
    }
    for (i, x) in tail.iter().enumerate() {
        lanes[i] += x;
    }
    Scalar.sum(lanes)
}

/// The largest element; negative infinity of nothing.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for x in chunks {
        for i in 0..LANES {
            lanes[i] = if x[i] > lanes[i] { x[i] } else { lanes[i] };
        }
    }
    for (i, &x) in tail.iter().enumerate() {
        lanes[i] = if x > lanes[i] { x } else { lanes[i] };
    }
    lanes.iter().fold(f32::NEG_INFINITY, |a, &x| if x > a { x } else { a })
}

vectorised! {
    /// `y[i] += a * x[i]`.
    pub fn add_scaled(y: &mut [f32], a: f32, x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = a.mul_add(*x, *y);
        }
    }
}

/// `e^x` within 2 units in the last place, without branches so that loops over it vectorise.
///
/// `x = n ln 2 + f` with |f| <= ln 2 / 2, and `e^f` by its Taylor polynomial of degree 7. Below -87.3 the result is
/// held at the smallest normal number's neighbourhood and then set to 0; above 88.7 it is infinity.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4; // 9 bits, so that n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding it rounds to an integer, which then sits in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let f = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.0 / 5040.0f32;
    p = p.mul_add(f, 1.0 / 720.0);
    p = p.mul_add(f, 1.0 / 120.0);
    p = p.mul_add(f, 1.0 / 24.0);
    p = p.mul_add(f, 1.0 / 6.0);
    p = p.mul_add(f, 0.5);
    p = p.mul_add(f, 1.0);
    p = p.mul_add(f, 1.0);
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    let y = p * power;
    let y = if x < -87.0 { 0.0 } else { y };
    if x > 88.0 { f32::INFINITY } else { y }
}

/// `ln(1 + e^x)` within a few units in the last place, without branches so that loops over it vectorise: `max(x, 0)` plus
/// `ln(1 + u)`, `u = e^-|x|` in (0, 1], by the series of `2 atanh(u / (2 + u))`, whose argument is at most 1/3.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    let u = exp(-x.abs());
    let s = u / (2.0 + u);
    let square = s * s;
    let mut p = 1.0 / 15.0f32;
    for odd in [13.0f32, 11.0, 9.0, 7.0, 5.0, 3.0] {
        p = p.mul_add(square, 1.0 / odd);
    }
    let log = 2.0 * s * square.mul_add(p, 1.0);
    if x > 0.0 { x + log } else { log }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            let got = f64::from(exp(x));
            assert!((got - want).abs() <= want * 2.4e-7, "exp({x}) = {got}, want {want}");
        }
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn softplus_is_within_three_ulp() {
        for i in -860_000..=400_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp().ln_1p();
            let got = f64::from(softplus(x));
            assert!((got - want).abs() <= want * 3.6e-7, "softplus({x}) = {got}, want {want}");
        }
        assert_eq!(softplus(f32::NEG_INFINITY), 0.0);
        assert_eq!(softplus(f32::INFINITY), f32::INFINITY);
        assert!(softplus(f32::NAN).is_nan());
    }

    #[test]
    fn sums_of_any_length_are_right() {
        for n in 0..70usize {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            assert_eq!(sum(&x), (n * n.saturating_sub(1) / 2) as f32);
            let [a, b] = dots(Scalar, [&x, &vec![1.0; n]], &vec![2.0; n]);
            assert_eq!((a, b), ((n * n.saturating_sub(1)) as f32, 2.0 * n as f32));
            assert_eq!(max(&x), if n == 0 { f32::NEG_INFINITY } else { (n - 1) as f32 });
        }
    }
}
