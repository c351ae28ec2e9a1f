//! AVX-512: one register for sixteen lanes.

use std::arch::x86_64::*;

use super::{LANES, Lanes};
use crate::quant::E2M1;

/// The CPU has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

// SAFETY of all blocks below: an `Avx512` exists, so the CPU has AVX-512 F; the loads and stores are unaligned ones of as
// many bytes as the array references name.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, above")]
impl Lanes for Avx512 {
    type V = __m512;
    type D = __m512i;
    type Codes = __m512i;

    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    fn zero(self) -> Self::V {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, x: &mut [f32; LANES], v: Self::V) {
        unsafe { _mm512_storeu_ps(x.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        unsafe {
            let high = _mm512_castpd_ps(_mm512_castpd256_pd512(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v))));
            let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_castps512_ps256(high));
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn relu(self, v: Self::V) -> Self::V {
        unsafe { _mm512_max_ps(v, _mm512_setzero_ps()) }
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, x: Self::V, w: Self::V, sum: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(x, w, sum) }
    }
    #[inline(always)]
    fn dwords(self, d: &[u32; LANES]) -> Self::D {
        unsafe { _mm512_loadu_si512(d.as_ptr().cast()) }
    }
    #[inline(always)]
    fn as_f32(self, d: Self::D) -> Self::V {
        unsafe { _mm512_castsi512_ps(d) }
    }
    #[inline(always)]
    fn bf16<const J: usize>(self, d: Self::D) -> Self::V {
        unsafe {
            _mm512_castsi512_ps(match J {
                0 => _mm512_slli_epi32::<16>(d),
                _ => _mm512_and_si512(d, _mm512_set1_epi32(0xffff_0000_u32 as i32)),
            })
        }
    }
    #[inline(always)]
    fn e4m3<const J: usize>(self, d: Self::D) -> Self::V {
        // Sign to bit 31, four bits of exponent to 26..23, three of mantissa to 22..20.
        unsafe {
            let top = match J {
                0 => _mm512_slli_epi32::<24>(d),
                1 => _mm512_slli_epi32::<16>(d),
                2 => _mm512_slli_epi32::<8>(d),
                _ => d,
            };
            let bits = _mm512_and_si512(_mm512_srai_epi32::<4>(top), _mm512_set1_epi32(0x87f0_0000_u32 as i32));
            _mm512_castsi512_ps(bits)
        }
    }
    #[inline(always)]
    fn codes(self, d: Self::D) -> Self::Codes {
        d
    }
    #[inline(always)]
    fn e2m1<const J: usize>(self, codes: Self::Codes) -> Self::V {
        // The permutation looks at the lowest four bits of each dword only.
        unsafe {
            let code = match J {
                0 => codes,
                1 => _mm512_srli_epi32::<4>(codes),
                2 => _mm512_srli_epi32::<8>(codes),
                3 => _mm512_srli_epi32::<12>(codes),
                4 => _mm512_srli_epi32::<16>(codes),
                5 => _mm512_srli_epi32::<20>(codes),
                6 => _mm512_srli_epi32::<24>(codes),
                _ => _mm512_srli_epi32::<28>(codes),
            };
            _mm512_permutexvar_ps(code, _mm512_loadu_ps(E2M1.as_ptr()))
        }
    }
    #[inline(always)]
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::V {
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            let exponent = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(bytes));
            // 2^-127 is below the normal numbers.
            _mm512_castsi512_ps(_mm512_max_epi32(exponent, _mm512_set1_epi32(1 << 22)))
        }
    }
}
