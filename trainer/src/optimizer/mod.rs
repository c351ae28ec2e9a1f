//! Gradients in, better masters out.

mod adamw;
mod muon;

use rollout::model::{HostTensor, TensorData, Weights};
use tch::Tensor;

pub use self::adamw::AdamWConfig;
use self::adamw::Moments;
pub use self::muon::{MuonConfig, newton_schulz};
use crate::policy::{Gradients, Policy, to_vec_f32};
use crate::recipe::OptimizerConfig;

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
    #[error(
        "the optimizer's state has no tensor `{name}`; was it saved for another model, or by another `optimizer.type`?"
    )]
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

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps taken so far, this one included.
    pub step: u64,
    /// The norm of all gradients together, before clipping.
    pub grad_norm: f64,
    /// The learning rate of this step.
    pub learning_rate: f64,
}

/// An optimizer and what it remembers of each parameter.
pub struct Optimizer {
    adamw: AdamWConfig,
    muon: Option<MuonConfig>,
    step: u64,
    slots: Vec<(String, Slot)>,
}

/// What is remembered of one parameter, by who updates it.
enum Slot {
    AdamW(Moments),
    /// The momentum, shaped as the parameter.
    Muon(Tensor),
}

impl Slot {
    /// Handles to what is remembered.
    fn tensors(&self) -> Vec<(&'static str, Tensor)> {
        match self {
            Self::AdamW(Moments { mean, square }) => {
                vec![("mean", mean.shallow_clone()), ("square", square.shallow_clone())]
            }
            Self::Muon(momentum) => vec![("momentum", momentum.shallow_clone())],
        }
    }
}

impl Optimizer {
    /// The optimizer that a recipe names, before its first step.
    pub fn new(config: &OptimizerConfig, policy: &Policy) -> Self {
        match config {
            OptimizerConfig::AdamW(config) => Self::adamw(config, policy),
            OptimizerConfig::Muon(config) => Self::muon(config, policy),
        }
    }

    /// AdamW for every parameter.
    pub fn adamw(config: &AdamWConfig, policy: &Policy) -> Self {
        Self::build(config.clone(), None, policy)
    }

    /// Muon for matrices, AdamW for the rest; see [`MuonConfig`].
    pub fn muon(config: &MuonConfig, policy: &Policy) -> Self {
        Self::build(config.adamw(), Some(config.clone()), policy)
    }

    fn build(adamw: AdamWConfig, muon: Option<MuonConfig>, policy: &Policy) -> Self {
        let slots = policy.parameters().iter().map(|p| {
            let slot = match muon.is_some() && muon::takes(&p.name, p.master.dim()) {
                true => Slot::Muon(p.master.detach().zeros_like()),
                false => Slot::AdamW(Moments::new(p)),
            };
            (p.name.clone(), slot)
        });
        let slots = slots.collect();
        Self { adamw, muon, step: 0, slots }
    }

    /// Steps taken so far.
    pub fn num_steps(&self) -> u64 {
        self.step
    }

    /// Updates the masters from the gradients on the leaves, scaled down to the largest norm allowed, and refreshes what
    /// is computed from masters. A parameter without a gradient is left alone.
    ///
    /// # Errors
    /// When the gradient's norm is not finite: nothing is updated then. When the update overflows: the policy is then of
    /// no use.
    ///
    /// # Panics
    /// When `policy` is not the one, or shaped as the one, the optimizer was made for.
    pub fn step(&mut self, policy: &mut Policy, gradients: &Gradients) -> Result<StepReport, OptimizerError> {
        let step = self.step + 1;
        let grad_norm = gradients.norm();
        if !grad_norm.is_finite() {
            return Err(OptimizerError::NotFinite { step, norm: grad_norm });
        }
        assert_eq!(policy.parameters().len(), self.slots.len(), "the optimizer was made for another policy");
        self.step = step;
        let c = &self.adamw;
        let learning_rate = c.learning_rate * (step as f64 / c.warmup_steps.max(1) as f64).min(1.0);
        let clip = if grad_norm > c.max_grad_norm { c.max_grad_norm / grad_norm } else { 1.0 };
        tch::no_grad(|| {
            let parameters = policy.parameters_mut().iter_mut().zip(&mut self.slots);
            for ((p, (_, slot)), grad) in parameters.zip(gradients.tensors()) {
                if !grad.defined() {
                    continue;
                }
                let grad = if clip == 1.0 { grad.shallow_clone() } else { grad * clip };
                match (slot, &self.muon) {
                    (Slot::AdamW(moments), _) => moments.update(&mut p.master, &grad, step, learning_rate, c),
                    (Slot::Muon(momentum), Some(config)) => {
                        muon::update(&mut p.master, momentum, &grad, learning_rate, config);
                    }
                    (Slot::Muon(_), None) => unreachable!("only Muon has momenta"),
                }
            }
        });
        let is_finite = |t: &Tensor| bool::try_from(t.isfinite().all()).expect("a truth value");
        if let Some(p) = policy.parameters().iter().find(|p| !is_finite(&p.master)) {
            return Err(OptimizerError::Overflow { step, name: p.name.clone() });
        }
        policy.refresh_quantized();
        Ok(StepReport { step, grad_norm, learning_rate })
    }

    /// What is remembered, by name: `<parameter>.mean` and `<parameter>.square`, or `<parameter>.momentum`. With
    /// [`Optimizer::num_steps`], all there is to resume from.
    pub fn state(&self) -> Weights {
        let mut state = Weights::new();
        for (parameter, slot) in &self.slots {
            for (kind, t) in slot.tensors() {
                state.insert(format!("{parameter}.{kind}"), HostTensor::f32(&shape(&t), to_vec_f32(&t)));
            }
        }
        state
    }

    /// Goes back to a saved state.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit its parameter; the optimizer is then partly restored and of no use.
    pub fn restore(&mut self, state: &Weights, num_steps: u64) -> Result<(), OptimizerError> {
        for (parameter, slot) in &self.slots {
            for (kind, mut to) in slot.tensors() {
                let name = format!("{parameter}.{kind}");
                let Some(from) = state.get(&name) else { return Err(OptimizerError::Missing { name }) };
                let expected = shape(&to);
                match &from.data {
                    TensorData::F32(values) if from.shape == expected => {
                        to.copy_(&Tensor::from_slice(values).view_(to.size()));
                    }
                    _ => return Err(OptimizerError::Shape { name, found: from.shape.clone(), expected }),
                }
            }
        }
        self.step = num_steps;
        Ok(())
    }
}

fn shape(t: &Tensor) -> Vec<usize> {
    t.size().iter().map(|&n| n as usize).collect()
}
