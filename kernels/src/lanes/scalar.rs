//! The reference: plain loops over sixteen lanes. Its multiply-adds round once, as those of all backends.

use super::{LANES, Lanes};
use crate::quant::{E2M1, e4m3_value, e8m0_value};

/// What every CPU has.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn lanes<T>(f: impl FnMut(usize) -> T) -> [T; LANES] {
    std::array::from_fn(f)
}

impl Lanes for Scalar {
    type V = [f32; LANES];
    type D = [u32; LANES];
    type Codes = [u32; LANES];

    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
    #[inline(always)]
    fn zero(self) -> Self::V {
        [0.0; LANES]
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        *x
    }
    #[inline(always)]
    fn store(self, x: &mut [f32; LANES], v: Self::V) {
        *x = v;
    }
    #[inline(always)]
    fn sum(self, mut v: Self::V) -> f32 {
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                v[i] += v[i + width];
            }
        }
        v[0]
    }
    #[inline(always)]
    fn relu(self, v: Self::V) -> Self::V {
        lanes(|i| if v[i] > 0.0 { v[i] } else { 0.0 })
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn fma(self, x: Self::V, w: Self::V, sum: Self::V) -> Self::V {
        lanes(|i| x[i].mul_add(w[i], sum[i]))
    }
    #[inline(always)]
    fn dwords(self, d: &[u32; LANES]) -> Self::D {
        *d
    }
    #[inline(always)]
    fn as_f32(self, d: Self::D) -> Self::V {
        d.map(f32::from_bits)
    }
    #[inline(always)]
    fn bf16<const J: usize>(self, d: Self::D) -> Self::V {
        d.map(|d| f32::from_bits(d >> (16 * J) << 16))
    }
    #[inline(always)]
    fn e4m3<const J: usize>(self, d: Self::D) -> Self::V {
        d.map(|d| e4m3_value((d >> (8 * J)) as u8) * f32::from_bits((127 - 120) << 23))
    }
    #[inline(always)]
    fn codes(self, d: Self::D) -> Self::Codes {
        d
    }
    #[inline(always)]
    fn e2m1<const J: usize>(self, codes: Self::Codes) -> Self::V {
        codes.map(|d| E2M1[(d >> (4 * J)) as usize & 15])
    }
    #[inline(always)]
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::V {
        bytes.map(e8m0_value)
    }
}
