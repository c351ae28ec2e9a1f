//! What a product needs of a backend: sixteen f32 lanes, one per output of a panel, and the unpacking of codes into them.
//!
//! A value of a [`Lanes`] type is the proof that the CPU has its instructions: only probes make one. So the bodies in
//! `tile.rs` are written once, safely, and every backend does the same operations in the same order, with the same bits.

use super::{Cell, PANEL};

/// Sixteen lanes of a backend.
pub(super) trait Lanes: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen dwords.
    type D: Copy;
    /// Sixteen dwords of e2m1 codes, made ready for [`Lanes::e2m1`].
    type Codes: Copy;
    /// What the values of [`Lanes::e2m1`] must still be multiplied with.
    const E2M1_FACTOR: f32;

    fn zero(self) -> Self::V;
    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; PANEL]) -> Self::V;
    fn store(self, x: &mut [f32; PANEL], v: Self::V);
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x * w + sum`, rounded once.
    fn fma(self, x: Self::V, w: Self::V, sum: Self::V) -> Self::V;

    fn cell(self, cell: &Cell) -> Self::D;
    /// The dwords as f32.
    fn as_f32(self, d: Self::D) -> Self::V;
    /// The J-th bf16 of each dword.
    fn bf16<const J: usize>(self, d: Self::D) -> Self::V;
    /// The J-th e4m3 of each dword, times 2^-120.
    fn e4m3<const J: usize>(self, d: Self::D) -> Self::V;
    fn codes(self, d: Self::D) -> Self::Codes;
    /// The J-th e2m1 of each dword, divided by [`Lanes::E2M1_FACTOR`].
    fn e2m1<const J: usize>(self, codes: Self::Codes) -> Self::V;
    /// `2^(byte - 127)`.
    fn e8m0(self, bytes: &[u8; PANEL]) -> Self::V;
}

/// How the dwords of a cell hold weights: dword i of cell g holds those of output i for inputs `g * GROUP ..`.
pub(super) trait Format<S: Lanes> {
    /// Weights in a dword: consecutive inputs, the first in the lowest bits.
    const GROUP: usize;
    /// Inputs that share a scale; 0: there are no scales.
    const BLOCK: usize;
    /// A cell made ready.
    type Ready: Copy;

    fn ready(s: S, d: S::D) -> Self::Ready;
    /// Weights of the J-th input.
    fn at<const J: usize>(s: S, ready: Self::Ready, scale: S::V) -> S::V;
    /// The scales of a block, as [`Format::at`] wants them.
    fn scale(s: S, bytes: &[u8; PANEL]) -> S::V;
}

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct E4m3;
pub(super) struct E2m1;

impl<S: Lanes> Format<S> for F32 {
    const GROUP: usize = 1;
    const BLOCK: usize = 0;
    type Ready = S::V;

    #[inline(always)]
    fn ready(s: S, d: S::D) -> S::V {
        s.as_f32(d)
    }
    #[inline(always)]
    fn at<const J: usize>(_: S, ready: S::V, _: S::V) -> S::V {
        ready
    }
    #[inline(always)]
    fn scale(s: S, _: &[u8; PANEL]) -> S::V {
        s.zero()
    }
}

impl<S: Lanes> Format<S> for Bf16 {
    const GROUP: usize = 2;
    const BLOCK: usize = 0;
    type Ready = S::D;

    #[inline(always)]
    fn ready(_: S, d: S::D) -> S::D {
        d
    }
    #[inline(always)]
    fn at<const J: usize>(s: S, ready: S::D, _: S::V) -> S::V {
        s.bf16::<J>(ready)
    }
    #[inline(always)]
    fn scale(s: S, _: &[u8; PANEL]) -> S::V {
        s.zero()
    }
}

impl<S: Lanes> Format<S> for E4m3 {
    const GROUP: usize = 4;
    const BLOCK: usize = crate::quant::FP8_TILE;
    type Ready = S::D;

    #[inline(always)]
    fn ready(_: S, d: S::D) -> S::D {
        d
    }
    #[inline(always)]
    fn at<const J: usize>(s: S, ready: S::D, scale: S::V) -> S::V {
        s.mul(s.e4m3::<J>(ready), scale)
    }
    #[inline(always)]
    fn scale(s: S, bytes: &[u8; PANEL]) -> S::V {
        s.mul(s.e8m0(bytes), s.splat(f32::from_bits((120 + 127) << 23)))
    }
}

impl<S: Lanes> Format<S> for E2m1 {
    const GROUP: usize = 8;
    const BLOCK: usize = crate::quant::MXFP4_BLOCK;
    type Ready = S::Codes;

    #[inline(always)]
    fn ready(s: S, d: S::D) -> S::Codes {
        s.codes(d)
    }
    #[inline(always)]
    fn at<const J: usize>(s: S, ready: S::Codes, scale: S::V) -> S::V {
        s.mul(s.e2m1::<J>(ready), scale)
    }
    #[inline(always)]
    fn scale(s: S, bytes: &[u8; PANEL]) -> S::V {
        s.mul(s.e8m0(bytes), s.splat(S::E2M1_FACTOR))
    }
}
