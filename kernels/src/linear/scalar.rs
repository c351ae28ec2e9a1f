//! The reference: plain loops over sixteen lanes. Its multiply-adds round once, as those of all backends.

use super::lanes::Lanes;
use super::tile::Kernels;
use super::{Cell, PANEL, tile};
use crate::quant::{E2M1, e4m3_value, e8m0_value};

#[derive(Clone, Copy)]
struct Scalar;

pub(super) static KERNELS: Kernels =
    Kernels { few: |work| tile::few(Scalar, work), many: |work, scratch| tile::many::<_, 4, 1>(Scalar, work, scratch) };

#[inline(always)]
fn lanes<T>(f: impl FnMut(usize) -> T) -> [T; PANEL] {
    std::array::from_fn(f)
}

impl Lanes for Scalar {
    type V = [f32; PANEL];
    type D = [u32; PANEL];
    type Codes = [u32; PANEL];
    const E2M1_FACTOR: f32 = 1.0;

    fn zero(self) -> Self::V {
        [0.0; PANEL]
    }
    fn splat(self, x: f32) -> Self::V {
        [x; PANEL]
    }
    fn load(self, x: &[f32; PANEL]) -> Self::V {
        *x
    }
    fn store(self, x: &mut [f32; PANEL], v: Self::V) {
        *x = v;
    }
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }
    fn fma(self, x: Self::V, w: Self::V, sum: Self::V) -> Self::V {
        lanes(|i| x[i].mul_add(w[i], sum[i]))
    }
    fn cell(self, cell: &Cell) -> Self::D {
        cell.0
    }
    fn as_f32(self, d: Self::D) -> Self::V {
        d.map(f32::from_bits)
    }
    fn bf16<const J: usize>(self, d: Self::D) -> Self::V {
        d.map(|d| f32::from_bits(d >> (16 * J) << 16))
    }
    fn e4m3<const J: usize>(self, d: Self::D) -> Self::V {
        d.map(|d| e4m3_value((d >> (8 * J)) as u8) * f32::from_bits((127 - 120) << 23))
    }
    fn codes(self, d: Self::D) -> Self::Codes {
        d
    }
    fn e2m1<const J: usize>(self, codes: Self::Codes) -> Self::V {
        codes.map(|d| E2M1[(d >> (4 * J)) as usize & 15])
    }
    fn e8m0(self, bytes: &[u8; PANEL]) -> Self::V {
        bytes.map(e8m0_value)
    }
}
