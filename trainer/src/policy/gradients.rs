//! The gradient of a loss with respect to every trained tensor, as a value of its own: microbatches can be
//! differentiated on several threads and their gradients added in one order, so the sum has the same bits whatever the
//! number of threads.

use tch::{Kind, Tensor};

use super::Policy;

/// One gradient per parameter, in the order of [`Policy::parameters`]; undefined where the loss does not reach one.
#[derive(Debug, Default)]
pub struct Gradients(Vec<Tensor>);

impl Gradients {
    /// The gradient of a scalar `loss` made by `policy`. The loss's graph is freed.
    pub fn of(loss: &Tensor, policy: &Policy) -> Self {
        let leaves: Vec<&Tensor> = policy.parameters().iter().map(|p| &p.leaf).collect();
        Self(Tensor::run_backward(&[loss], &leaves, false, false))
    }

    /// One gradient per parameter, given.
    pub fn from_tensors(tensors: Vec<Tensor>) -> Self {
        Self(tensors)
    }

    /// In the order of [`Policy::parameters`]; empty when nothing was added yet.
    pub fn tensors(&self) -> &[Tensor] {
        &self.0
    }

    /// Adds another loss's gradient.
    ///
    /// # Panics
    /// When it belongs to another policy.
    pub fn add(&mut self, other: Self) {
        if self.0.is_empty() {
            *self = other;
            return;
        }
        assert_eq!(self.0.len(), other.0.len(), "gradients of two different policies");
        for (sum, grad) in self.0.iter_mut().zip(other.0) {
            match (sum.defined(), grad.defined()) {
                (true, true) => {
                    let _ = tch::no_grad(|| sum.g_add_(&grad));
                }
                (false, true) => *sum = grad,
                (_, false) => {}
            }
        }
    }

    /// The Euclidean norm of all of them together; 0 where there are none.
    pub fn norm(&self) -> f64 {
        let norms: Vec<Tensor> = self.0.iter().filter(|g| g.defined()).map(Tensor::norm).collect();
        if norms.is_empty() { 0.0 } else { Tensor::stack(&norms, 0).to_kind(Kind::Double).norm().double_value(&[]) }
    }
}
