//! Which instructions the kernels use: asked of the CPU once, or forced.

use std::sync::atomic::{AtomicU8, Ordering};

/// A set of instructions that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// What every CPU of the architecture has: the reference.
    Scalar,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
}

const UNKNOWN: u8 = 0;
const SCALAR: u8 = 1;
const AVX2: u8 = 2;
static BACKEND: AtomicU8 = AtomicU8::new(UNKNOWN);

/// The backend in use: the best that this CPU has, unless [`set_backend`] chose another.
#[inline]
pub fn backend() -> Backend {
    match BACKEND.load(Ordering::Relaxed) {
        SCALAR => Backend::Scalar,
        AVX2 => Backend::Avx2,
        _ => {
            let best = if has_avx2() { Backend::Avx2 } else { Backend::Scalar };
            BACKEND.store(if best == Backend::Avx2 { AVX2 } else { SCALAR }, Ordering::Relaxed);
            best
        }
    }
}

/// Forces a backend for the whole process; false, and nothing changed, where this CPU lacks it.
pub fn set_backend(backend: Backend) -> bool {
    if backend == Backend::Avx2 && !has_avx2() {
        return false;
    }
    BACKEND.store(if backend == Backend::Avx2 { AVX2 } else { SCALAR }, Ordering::Relaxed);
    true
}

fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Compiles one body for every backend and picks at the call.
///
/// The body uses no fused multiply-add and spells its lanes out, so the backends agree to the bit.
macro_rules! vectorised {
    ($(#[$meta:meta])* pub fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        pub fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                if $crate::dispatch::backend() == $crate::dispatch::Backend::Avx2 {
                    // SAFETY: the backend is Avx2 only where the CPU reported AVX2 and FMA.
                    return unsafe { wide($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}
