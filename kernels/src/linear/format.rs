//! The four formats of packed weights: how the dwords of a cell turn into sixteen lanes of f32.

use super::PANEL;
use crate::lanes::Lanes;

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
        s.e8m0(bytes)
    }
}
