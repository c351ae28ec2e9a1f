//! Rotary position embedding on interleaved pairs of the last r channels (arXiv:2104.09864; v4/SPEC 4.1).

/// Cosines and sines of a row's position: `[r / 2]` each.
#[derive(Clone, Debug, Default)]
pub struct Rotation {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotation {
    /// Angles are `position * frequency`, multiplied in f32 as the references do.
    pub fn set(&mut self, position: usize, frequencies: &[f32]) {
        self.cos.clear();
        self.sin.clear();
        for f in frequencies {
            let (sin, cos) = (position as f32 * f).sin_cos();
            self.cos.push(cos);
            self.sin.push(sin);
        }
    }

    /// Rotates the last channels of every head of `width` channels in `x`, forwards.
    pub fn apply(&self, x: &mut [f32], width: usize) {
        rotate(x, width, &self.cos, &self.sin, 1.0);
    }

    /// Rotates back: the inverse of [`Rotation::apply`].
    pub fn apply_inverse(&self, x: &mut [f32], width: usize) {
        rotate(x, width, &self.cos, &self.sin, -1.0);
    }
}

vectorised! {
    /// Multiplies pair p of each head's last channels, as a complex number, by `cos[p] + i * direction * sin[p]`.
    ///
    /// # Panics
    /// When the heads are narrower than the rotation.
    pub fn rotate(x: &mut [f32], width: usize, cos: &[f32], sin: &[f32], direction: f32) {
        let rotary = 2 * cos.len();
        assert!(rotary <= width && x.len().is_multiple_of(width), "heads of {width} channels, {rotary} rotate");
        for head in x.chunks_exact_mut(width) {
            let pairs = head[width - rotary..].as_chunks_mut::<2>().0;
            for ((pair, cos), sin) in pairs.iter_mut().zip(cos).zip(sin) {
                let ([a, b], sin) = (*pair, direction * sin);
                *pair = [a.mul_add(*cos, -(b * sin)), a.mul_add(sin, b * cos)];
            }
        }
    }
}
