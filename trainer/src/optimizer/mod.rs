//! Gradients in, better masters out: clipping and warm-up, who updates which parameter, and the state to resume from.

mod adamw;
mod muon;
#[cfg(test)]
mod tests;

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rollout::model::{HostTensor, TensorData, Weights};
use tch::Tensor;

pub use self::adamw::AdamWConfig;
use self::adamw::Moments;
use self::muon::Matrix;
pub use self::muon::{MuonConfig, newton_schulz};
use crate::parallel::in_order;
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
    /// The state is another optimizer's.
    #[error(
        "the optimizer's state was saved by `optimizer.type = \"{found}\"`, the recipe has \"{expected}\"; set it to \
         \"{found}\", or start a new run whose `model.path` is the checkpoint"
    )]
    Type {
        /// Whose state it is.
        found: &'static str,
        /// The recipe's.
        expected: &'static str,
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

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Steps taken so far, this one included.
    pub step: u64,
    /// The norm of all gradients together, before clipping.
    pub grad_norm: f64,
    /// The learning rate of this step: of Muon, where there is one.
    pub learning_rate: f64,
}

/// An optimizer and what it remembers of every trained parameter.
pub struct Optimizer {
    config: OptimizerConfig,
    threads: usize,
    step: u64,
    slots: Vec<Slot>,
}

/// What is remembered of one parameter, by whose rule it is updated.
struct Slot {
    name: String,
    memory: Memory,
}

enum Memory {
    AdamW(Moments),
    /// The momentum, shaped as the parameter.
    Muon(Tensor),
}

impl Memory {
    /// Handles to the tensors, with what their names end in.
    fn tensors(&self) -> Vec<(&'static str, Tensor)> {
        match self {
            Self::AdamW(Moments { mean, square }) => {
                vec![("mean", mean.shallow_clone()), ("square", square.shallow_clone())]
            }
            Self::Muon(momentum) => vec![(MOMENTUM, momentum.shallow_clone())],
        }
    }
}

/// What the names of Muon's tensors end in, and no other's.
const MOMENTUM: &str = "momentum";

impl Optimizer {
    /// The recipe's optimizer for the parameters of `policy`, before its first step.
    pub fn new(config: &OptimizerConfig, policy: &Policy) -> Self {
        let slots = policy.parameters().iter().map(|p| {
            let memory = match takes(config, &p.name, p.master.dim()) {
                true => Memory::Muon(p.master.detach().zeros_like()),
                false => Memory::AdamW(Moments::new(p)),
            };
            Slot { name: p.name.clone(), memory }
        });
        Self { config: config.clone(), threads: 1, step: 0, slots: slots.collect() }
    }

    /// AdamW for every parameter.
    pub fn adamw(config: &AdamWConfig, policy: &Policy) -> Self {
        Self::new(&OptimizerConfig::AdamW(config.clone()), policy)
    }

    /// Muon for matrices, AdamW for the rest; [`MuonConfig`] says which is which.
    pub fn muon(config: &MuonConfig, policy: &Policy) -> Self {
        Self::new(&OptimizerConfig::Muon(config.clone()), policy)
    }

    /// Updates Muon's matrices on so many threads instead of one. Each matrix is one thread's, so the bits are the same.
    pub fn with_threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Steps taken so far.
    pub fn num_steps(&self) -> u64 {
        self.step
    }

    /// Updates the masters by the gradients, scaled down together to the largest norm allowed, and refreshes what is
    /// computed from masters. A parameter without a gradient is left alone.
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
        let (adamw, muon) = match &self.config {
            OptimizerConfig::AdamW(config) => (config.clone(), None),
            OptimizerConfig::Muon(config) => (config.adamw(), Some(config)),
        };
        let warmup = (step as f64 / adamw.warmup_steps.max(1) as f64).min(1.0);
        let adamw_rate = adamw.learning_rate * warmup;
        let muon_rate = muon.map(|config| config.learning_rate * warmup);
        let clip = if grad_norm > adamw.max_grad_norm { adamw.max_grad_norm / grad_norm } else { 1.0 };
        let clipped = |grad: &Tensor| if clip == 1.0 { grad.shallow_clone() } else { grad * clip };
        let mut matrices = Vec::new();
        tch::no_grad(|| {
            let parameters = policy.parameters_mut().iter_mut().zip(&mut self.slots);
            for ((p, slot), grad) in parameters.zip(gradients.tensors()).filter(|(_, grad)| grad.defined()) {
                match &mut slot.memory {
                    Memory::AdamW(moments) => moments.update(&mut p.master, &clipped(grad), step, adamw_rate, &adamw),
                    Memory::Muon(momentum) => {
                        matrices.extend(Matrix::all_of(&p.master, momentum, grad).into_iter().map(Mutex::new));
                    }
                }
            }
        });
        if let (Some(config), Some(rate)) = (muon, muon_rate) {
            let update = |(): &mut (), i: usize| {
                let mut matrix = matrices[i].lock().expect("each matrix is one thread's");
                tch::no_grad(|| matrix.update(clip, rate, config));
            };
            in_order(&mut vec![(); self.threads], matrices.len(), &AtomicBool::new(false), update, |_, ()| {});
        }
        let is_finite = |t: &Tensor| bool::try_from(t.isfinite().all()).expect("a truth value");
        if let Some(p) = policy.parameters().iter().find(|p| !is_finite(&p.master)) {
            return Err(OptimizerError::Overflow { step, name: p.name.clone() });
        }
        policy.refresh_quantized();
        Ok(StepReport { step, grad_norm, learning_rate: muon_rate.unwrap_or(adamw_rate) })
    }

    /// What is remembered, by name: `<parameter>.mean` and `<parameter>.square`, or `<parameter>.momentum`. With
    /// [`Optimizer::num_steps`], all there is to resume from.
    pub fn state(&self) -> Weights {
        let tensors =
            self.slots.iter().flat_map(|s| s.memory.tensors().into_iter().map(|(kind, t)| (&s.name, kind, t)));
        tensors.map(|(name, kind, t)| (format!("{name}.{kind}"), HostTensor::f32(&shape(&t), to_vec_f32(&t)))).collect()
    }

    /// Goes back to a saved state.
    ///
    /// # Errors
    /// When it is that of another type of optimizer; nothing is restored then. When a tensor is missing or does not fit
    /// its parameter; the optimizer is then partly restored and of no use.
    pub fn restore(&mut self, state: &Weights, num_steps: u64) -> Result<(), OptimizerError> {
        let type_of = |is_muon: bool| if is_muon { "muon" } else { "adamw" };
        let found = state.keys().any(|name| name.rsplit('.').next() == Some(MOMENTUM));
        let expected = self.slots.iter().any(|slot| matches!(slot.memory, Memory::Muon(_)));
        if found != expected {
            return Err(OptimizerError::Type { found: type_of(found), expected: type_of(expected) });
        }
        for slot in &self.slots {
            for (kind, mut to) in slot.memory.tensors() {
                let name = format!("{}.{kind}", slot.name);
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

/// Bytes of f32 state that a trained parameter of this hub name and shape takes: AdamW's two moments or Muon's one
/// momentum.
pub fn state_bytes(config: &OptimizerConfig, name: &str, shape: &[usize]) -> usize {
    let num_tensors = if takes(config, name, shape.len()) { 1 } else { 2 };
    4 * num_tensors * shape.iter().product::<usize>()
}

/// Whether Muon updates a parameter.
fn takes(config: &OptimizerConfig, name: &str, num_dims: usize) -> bool {
    matches!(config, OptimizerConfig::Muon(_)) && muon::takes(name, num_dims)
}

fn shape(t: &Tensor) -> Vec<usize> {
    t.size().iter().map(|&n| n as usize).collect()
}
