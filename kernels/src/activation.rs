//! SwiGLU with V4's clamp (v4/SPEC section 7).

use crate::math::sigmoid;

vectorised! {
    /// `gate = silu(min(gate, limit)) * clamp(up, -limit, limit)`, in place in `gate`.
    pub fn swiglu(gate: &mut [f32], up: &[f32], limit: f32) {
        for (g, &u) in gate.iter_mut().zip(up) {
            let clamped = if *g > limit { limit } else { *g };
            let u = if u > limit { limit } else { u };
            let u = if u < -limit { -limit } else { u };
            *g = clamped * sigmoid(clamped) * u;
        }
    }
}
