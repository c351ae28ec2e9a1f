//! Which instructions the kernels use: asked of the CPU once, or forced.

use std::sync::atomic::{AtomicU8, Ordering};

/// A set of instructions that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Backend {
    /// What every CPU of the architecture has: the reference.
    Scalar = 1,
    /// 256-bit vectors with fused multiply-add.
    Avx2 = 2,
    /// 512-bit vectors (F, BW, DQ, VL).
    Avx512 = 3,
}

impl Backend {
    /// All of them, the fastest last.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Scalar => true,
            Self::Avx2 => std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma"),
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Scalar
        }
    }
}

/// The backend in use as its number; 0 until it is asked for.
static BACKEND: AtomicU8 = AtomicU8::new(0);

/// The backend in use: the best that this CPU has, unless [`set_backend`] chose another.
#[inline]
pub fn backend() -> Backend {
    match BACKEND.load(Ordering::Relaxed) {
        1 => Backend::Scalar,
        2 => Backend::Avx2,
        3 => Backend::Avx512,
        _ => {
            let best = Backend::ALL.into_iter().rfind(|b| b.is_available()).unwrap_or(Backend::Scalar);
            BACKEND.store(best as u8, Ordering::Relaxed);
            best
        }
    }
}

/// Forces a backend for the whole process; false, and nothing changed, where this CPU lacks it.
pub fn set_backend(backend: Backend) -> bool {
    if backend.is_available() {
        BACKEND.store(backend as u8, Ordering::Relaxed);
    }
    backend.is_available()
}

/// Compiles one body for every backend and picks at the call. With `lanes s;` before the arguments, the body is generic
/// over [`Lanes`](crate::lanes::Lanes) and gets those of the backend as `s`.
///
/// The body spells its lanes out and its multiply-adds too ([`f32::mul_add`]), so the backends agree to the bit. What it
/// calls must be `#[inline(always)]`: a function, or a closure, that stays a call has none of the backend's instructions.
macro_rules! vectorised {
    ($(#[$meta:meta])* pub fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        vectorised! {
            $(#[$meta])* pub fn $name(lanes _lanes; $($arg: $ty),*) $(-> $ret)? $body
        }
    };
    ($(#[$meta:meta])* pub fn $name:ident(lanes $lanes:ident; $($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        pub fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<S: $crate::lanes::Lanes>($lanes: S, $($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function has these features.
                    body(unsafe { $crate::lanes::Avx2::assume() }, $($arg),*)
                }
                #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function has these features.
                    body(unsafe { $crate::lanes::Avx512::assume() }, $($arg),*)
                }
                match $crate::dispatch::backend() {
                    // SAFETY: the backend is in use only where the CPU reported what `is_available` asks for.
                    $crate::dispatch::Backend::Avx2 => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    $crate::dispatch::Backend::Avx512 => return unsafe { avx512($($arg),*) },
                    $crate::dispatch::Backend::Scalar => {}
                }
            }
            body($crate::lanes::Scalar, $($arg),*)
        }
    };
}
