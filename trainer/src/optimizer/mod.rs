//! Gradients in, better masters out.

mod adamw;

pub use adamw::{AdamW, AdamWConfig, StepReport};

/// Why a step was not taken, or a saved state refused.
#[derive(Debug, thiserror::Error)]
pub enum OptimizerError {
    /// Nothing was updated.
    #[error(
        "the gradient norm of step {step} is {norm}; the weights are as they were before it. Lower \
         `optimizer.learning_rate`, or look at the samples of this step"
    )]
    NotFinite {
        /// The step that was not taken, counted from 1.
        step: u64,
        /// The norm.
        norm: f64,
    },
    /// The update itself overflowed.
    #[error(
        "the update of step {step} made `{name}` infinite or not a number; the weights are of no use any more. Lower \
         `optimizer.learning_rate` or `optimizer.weight_decay`, and start again from the last checkpoint"
    )]
    Overflow {
        /// The step, counted from 1.
        step: u64,
        /// The first parameter it happened to.
        name: String,
    },
    /// A saved moment is not there.
    #[error("the optimizer's state has no tensor `{name}`; was it saved for another model?")]
    Missing {
        /// Which tensor.
        name: String,
    },
    /// A saved moment has another shape than its parameter.
    #[error("tensor `{name}` of the optimizer's state has shape {found:?}, its parameter has {expected:?}")]
    Shape {
        /// Which tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The parameter's.
        expected: Vec<usize>,
    },
}
