//! Which experts a token goes to, and with what weight (v4/SPEC section 7). Shapes: E experts, K chosen.

use crate::math::softplus;

vectorised! {
    /// `scores = sqrt(softplus(logits))`. (Torch's softplus(x) is x beyond 20, which is what it rounds to.)
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn score(logits: &[f32], scores: &mut [f32]) {
        assert_eq!(logits.len(), scores.len(), "logits and scores");
        for (score, logit) in scores.iter_mut().zip(logits) {
            *score = softplus(*logit).sqrt();
        }
    }
}

/// The experts with the K highest values of `score + bias`, best first; ties go to the lower expert.
pub fn choose(scores: &[f32], bias: &[f32], expert_idx: &mut [u16]) {
    let mut taken = 0;
    let mut chosen = [(f32::NEG_INFINITY, u16::MAX); 64];
    let k = expert_idx.len();
    assert!(k <= chosen.len(), "{k} experts per token; at most {} are supported", chosen.len());
    for (expert, (s, b)) in scores.iter().zip(bias).enumerate() {
        let value = s + b;
        let mut at = taken;
        while at > 0 && value > chosen[at - 1].0 {
            at -= 1;
        }
        if at < k {
            taken = (taken + 1).min(k);
            chosen.copy_within(at..taken - 1, at + 1);
            chosen[at] = (value, expert as u16);
        }
    }
    for (slot, (_, expert)) in expert_idx.iter_mut().zip(chosen) {
        *slot = expert;
    }
}

/// `p_k = score[k] / (sum + 1e-20) * factor` over the chosen experts; the bias never enters.
pub fn weights(scores: &[f32], expert_idx: &[u16], factor: f32, weights: &mut [f32]) {
    let mut sum = 0.0;
    for (w, &e) in weights.iter_mut().zip(expert_idx) {
        *w = scores[usize::from(e)];
        sum += *w;
    }
    for w in weights {
        *w = *w / (sum + 1e-20) * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_first_and_ties_to_the_lower_expert() {
        let mut idx = [0; 3];
        choose(&[1.0, 4.0, 2.0, 4.0, 3.0], &[0.0; 5], &mut idx);
        assert_eq!(idx, [1, 3, 4]);
        choose(&[1.0, 4.0, 2.0, 4.0, 3.0], &[9.0, 0.0, 0.0, 0.0, 0.0], &mut idx);
        assert_eq!(idx, [0, 1, 3]);
    }
}
