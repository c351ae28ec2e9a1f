//! From logits to probabilities: the log-sum-exp that log-probabilities and sampling share.

use crate::math::{exp, max, sum};

vectorised! {
    /// Turns `logits` into unnormalised probabilities `exp(logits / temperature - top)` in place and returns
    /// `(top, total)`: the log-probability of entry i is `logit_i / temperature - top - ln(total)`.
    ///
    /// # Panics
    /// When the temperature is not positive.
    pub fn softmax_parts(logits: &mut [f32], temperature: f32) -> (f32, f32) {
        assert!(temperature > 0.0, "temperature {temperature} is not positive");
        let inverse = 1.0 / temperature;
        for x in logits.iter_mut() {
            *x *= inverse;
        }
        let top = max(logits);
        for x in logits.iter_mut() {
            *x = exp(*x - top);
        }
        (top, sum(logits))
    }
}
