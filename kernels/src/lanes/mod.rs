//! Sixteen f32 lanes: what the kernels need of a backend.
//!
//! A value of a [`Lanes`] type is the proof that the CPU has its instructions, so bodies over it are written once, in safe
//! code, and every backend does the same operations in the same order, with the same bits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use scalar::Scalar;

/// How many there are: two AVX2 registers, one AVX-512 register.
pub(crate) const LANES: usize = 16;

/// Sixteen lanes of a backend.
pub(crate) trait Lanes: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen dwords.
    type D: Copy;
    /// Sixteen dwords of e2m1 codes, made ready for [`Lanes::e2m1`].
    type Codes: Copy;

    /// Asks for the cache line at an address that will be read soon; any address is fine.
    fn prefetch<T>(self, at: *const T);
    /// Zeros.
    fn zero(self) -> Self::V;
    /// The same in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// From memory.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// To memory.
    fn store(self, x: &mut [f32; LANES], v: Self::V);
    /// The lanes added as a tree: i and i + 8, of those i and i + 4, and so on.
    fn sum(self, v: Self::V) -> f32;
    /// The larger of each lane and 0; of what is not a number, 0.
    fn relu(self, v: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x * w + sum`, rounded once.
    fn fma(self, x: Self::V, w: Self::V, sum: Self::V) -> Self::V;

    /// Sixteen dwords.
    fn dwords(self, d: &[u32; LANES]) -> Self::D;
    /// The dwords as f32.
    fn as_f32(self, d: Self::D) -> Self::V;
    /// The J-th bf16 of each dword.
    fn bf16<const J: usize>(self, d: Self::D) -> Self::V;
    /// The J-th e4m3 of each dword, times 2^-120.
    fn e4m3<const J: usize>(self, d: Self::D) -> Self::V;
    /// Sixteen times eight e2m1 codes.
    fn codes(self, d: Self::D) -> Self::Codes;
    /// The J-th e2m1 of each dword.
    fn e2m1<const J: usize>(self, codes: Self::Codes) -> Self::V;
    /// `2^(byte - 127)`.
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::V;
}

/// Up to sixteen values, and zeros.
#[inline(always)]
pub(crate) fn load<S: Lanes>(s: S, x: &[f32]) -> S::V {
    match x.as_array::<LANES>() {
        Some(x) => s.load(x),
        None => {
            let mut values = [0.0; LANES];
            values[..x.len()].copy_from_slice(x);
            s.load(&values)
        }
    }
}

/// The first lanes, as many as `x` holds.
#[inline(always)]
pub(crate) fn store<S: Lanes>(s: S, x: &mut [f32], v: S::V) {
    match x.as_mut_array::<LANES>() {
        Some(x) => s.store(x, v),
        None => {
            let mut values = [0.0; LANES];
            s.store(&mut values, v);
            x.copy_from_slice(&values[..x.len()]);
        }
    }
}
