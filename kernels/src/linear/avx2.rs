//! AVX2 with FMA: two registers a panel; six rows by one panel fill the sixteen registers there are.

use std::arch::x86_64::*;

use super::lanes::Lanes;
use super::tile::{Kernels, Scratch, Work};
use super::{Cell, PANEL, tile};

/// The CPU has AVX2 and FMA.
#[derive(Clone, Copy)]
struct Avx2(());

static KERNELS: Kernels = Kernels {
    // SAFETY: only `probe` hands these out, and only after the CPU reported AVX2 and FMA.
    few: |work| unsafe { few(work) },
    // SAFETY: as above.
    many: |work, scratch| unsafe { many(work, scratch) },
};

pub(super) fn probe() -> Option<&'static Kernels> {
    let has = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    has.then_some(&KERNELS)
}

#[target_feature(enable = "avx2,fma")]
fn few(work: &mut Work<'_, '_>) {
    tile::few(Avx2(()), work);
}

#[target_feature(enable = "avx2,fma")]
fn many(work: &mut Work<'_, '_>, scratch: &mut Scratch) {
    tile::many::<_, 6, 1>(Avx2(()), work, scratch);
}

/// Twice the values of the e2m1 codes, for both halves of a register.
const E2M1_TWICE: [i8; 32] = [
    0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, //
    0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
];

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

#[target_feature(enable = "avx2,fma")]
#[inline]
fn codes(d: __m256i) -> [__m256i; 2] {
    let nibble = _mm256_set1_epi8(15);
    // SAFETY: the table has 32 bytes, and the load asks for no alignment.
    let table = unsafe { _mm256_loadu_si256(E2M1_TWICE.as_ptr().cast()) };
    let even = _mm256_and_si256(d, nibble);
    let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(d), nibble);
    [_mm256_shuffle_epi8(table, even), _mm256_shuffle_epi8(table, odd)]
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn e2m1<const J: usize>(codes: [__m256i; 2]) -> __m256 {
    let bytes = codes[J % 2];
    let top = match J / 2 {
        0 => _mm256_slli_epi32::<24>(bytes),
        1 => _mm256_slli_epi32::<16>(bytes),
        2 => _mm256_slli_epi32::<8>(bytes),
        _ => bytes,
    };
    _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
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
    /// Of each register's dwords: the even nibbles as signed bytes, and the odd ones.
    type Codes = [[__m256i; 2]; 2];
    const E2M1_FACTOR: f32 = 0.5;

    #[inline(always)]
    fn zero(self) -> Self::V {
        unsafe { [_mm256_setzero_ps(); 2] }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, x: &[f32; PANEL]) -> Self::V {
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn store(self, x: &mut [f32; PANEL], v: Self::V) {
        unsafe {
            _mm256_storeu_ps(x.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(x.as_mut_ptr().add(8), v[1]);
        }
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
    fn cell(self, cell: &Cell) -> Self::D {
        let at = cell.0.as_ptr();
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
    fn e8m0(self, bytes: &[u8; PANEL]) -> Self::V {
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            [e8m0(bytes), e8m0(_mm_srli_si128::<8>(bytes))]
        }
    }
}
