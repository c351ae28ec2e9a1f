//! AVX2 with FMA: two registers for sixteen lanes.

use std::arch::x86_64::*;

use super::{LANES, Lanes};
use crate::quant::E2M1;

/// The CPU has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has AVX2 and FMA.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

/// The upper two bytes of the f32 values of the e2m1 codes (the lower ones are zeros), for both halves of a register.
const E2M1_BYTES: [[u8; 32]; 2] = {
    let mut bytes = [[0; 32]; 2];
    let mut code = 0;
    while code < 16 {
        let [_, _, low, high] = E2M1[code].to_bits().to_le_bytes();
        bytes[0][code] = low;
        bytes[0][16 + code] = low;
        bytes[1][code] = high;
        bytes[1][16 + code] = high;
        code += 1;
    }
    bytes
};

/// Of four dwords, the first two bytes of each, side by side in words, then the last two.
const PAIRS: [u8; 32] = [
    0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, //
    0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
];

#[target_feature(enable = "avx2,fma")]
#[inline]
fn sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn bf16<const J: usize>(d: __m256i) -> __m256 {
    _mm256_castsi256_ps(match J {
        0 => _mm256_slli_epi32::<16>(d),
        _ => _mm256_and_si256(d, _mm256_set1_epi32(0xffff_0000_u32 as i32)),
    })
}

/// Sign to bit 31, four bits of exponent to 26..23, three of mantissa to 22..20.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn e4m3<const J: usize>(d: __m256i) -> __m256 {
    let top = match J {
        0 => _mm256_slli_epi32::<24>(d),
        1 => _mm256_slli_epi32::<16>(d),
        2 => _mm256_slli_epi32::<8>(d),
        _ => d,
    };
    _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32::<4>(top), _mm256_set1_epi32(0x87f0_0000_u32 as i32)))
}

/// The values of eight times eight codes as bf16 words: `[n][i]` holds those of nibble n of bytes 2i and 2i + 1 of each
/// dword, the former in its lower word.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn codes(d: __m256i) -> [[__m256i; 2]; 2] {
    let nibble = _mm256_set1_epi8(15);
    // SAFETY: the tables have 32 bytes each, and the loads ask for no alignment.
    let [low, high, pairs] =
        unsafe { [&E2M1_BYTES[0], &E2M1_BYTES[1], &PAIRS].map(|bytes| _mm256_loadu_si256(bytes.as_ptr().cast())) };
    let d = _mm256_shuffle_epi8(d, pairs);
    let even = _mm256_and_si256(d, nibble);
    let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(d), nibble);
    let (even_low, even_high) = (_mm256_shuffle_epi8(low, even), _mm256_shuffle_epi8(high, even));
    let (odd_low, odd_high) = (_mm256_shuffle_epi8(low, odd), _mm256_shuffle_epi8(high, odd));
    [
        [_mm256_unpacklo_epi8(even_low, even_high), _mm256_unpackhi_epi8(even_low, even_high)],
        [_mm256_unpacklo_epi8(odd_low, odd_high), _mm256_unpackhi_epi8(odd_low, odd_high)],
    ]
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn e2m1<const J: usize>(codes: [[__m256i; 2]; 2]) -> __m256 {
    let (nibble, byte) = (J % 2, J / 2);
    let words = codes[nibble][byte / 2];
    match byte % 2 {
        0 => bf16::<0>(words),
        _ => bf16::<1>(words),
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn e8m0(bytes: __m128i) -> __m256 {
    let exponent = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(bytes));
    // 2^-127 is below the normal numbers.
    _mm256_castsi256_ps(_mm256_max_epi32(exponent, _mm256_set1_epi32(1 << 22)))
}

// SAFETY of all blocks below: an `Avx2` exists, so the CPU has AVX2 and FMA; the loads and stores are unaligned ones of
// as many bytes as the array references name.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them, above")]
impl Lanes for Avx2 {
    type V = [__m256; 2];
    type D = [__m256i; 2];
    /// Of each register's dwords, what `codes` gives.
    type Codes = [[[__m256i; 2]; 2]; 2];

    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    fn zero(self) -> Self::V {
        unsafe { [_mm256_setzero_ps(); 2] }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn store(self, x: &mut [f32; LANES], v: Self::V) {
        unsafe {
            _mm256_storeu_ps(x.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(x.as_mut_ptr().add(8), v[1]);
        }
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        unsafe { sum(_mm256_add_ps(v[0], v[1])) }
    }
    #[inline(always)]
    fn relu(self, v: Self::V) -> Self::V {
        unsafe { [_mm256_max_ps(v[0], _mm256_setzero_ps()), _mm256_max_ps(v[1], _mm256_setzero_ps())] }
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn fma(self, x: Self::V, w: Self::V, sum: Self::V) -> Self::V {
        unsafe { [_mm256_fmadd_ps(x[0], w[0], sum[0]), _mm256_fmadd_ps(x[1], w[1], sum[1])] }
    }
    #[inline(always)]
    fn dwords(self, d: &[u32; LANES]) -> Self::D {
        let at = d.as_ptr();
        unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(8).cast())] }
    }
    #[inline(always)]
    fn as_f32(self, d: Self::D) -> Self::V {
        unsafe { [_mm256_castsi256_ps(d[0]), _mm256_castsi256_ps(d[1])] }
    }
    #[inline(always)]
    fn bf16<const J: usize>(self, d: Self::D) -> Self::V {
        unsafe { [bf16::<J>(d[0]), bf16::<J>(d[1])] }
    }
    #[inline(always)]
    fn e4m3<const J: usize>(self, d: Self::D) -> Self::V {
        unsafe { [e4m3::<J>(d[0]), e4m3::<J>(d[1])] }
    }
    #[inline(always)]
    fn codes(self, d: Self::D) -> Self::Codes {
        unsafe { [codes(d[0]), codes(d[1])] }
    }
    #[inline(always)]
    fn e2m1<const J: usize>(self, codes: Self::Codes) -> Self::V {
        unsafe { [e2m1::<J>(codes[0]), e2m1::<J>(codes[1])] }
    }
    #[inline(always)]
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::V {
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            [e8m0(bytes), e8m0(_mm_srli_si128::<8>(bytes))]
        }
    }
}
