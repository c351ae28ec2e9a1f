//! Where the policy's tensors come from and go to: hub names outside, stacked experts inside, masters in f32.

use std::collections::HashMap;

use kernels::quant::{dequantize_mxfp4, quantize_mxfp4};
use rollout::model::{HostTensor, ModelConfig, TensorData, Weights};
use tch::{Device, Tensor};

/// Why weights do not make a policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// A tensor of the configuration is not among the weights.
    #[error("tensor `{name}` is missing from the weights; the configuration asks for shape {expected:?}")]
    Missing {
        /// Which tensor.
        name: String,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A tensor has another shape or type than the configuration says.
    #[error("tensor `{name}` holds {found}, the configuration says {expected:?}; they do not belong together")]
    Shape {
        /// Which tensor.
        name: String,
        /// Its shape and type.
        found: String,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
}

/// One tensor of the model.
#[derive(Debug)]
pub struct Parameter {
    /// The hub's name; the routed experts of a layer are stacked under `layers.i.ffn.experts.w1` (`w2`, `w3`).
    pub name: String,
    /// The f32 value that the optimizer updates.
    pub master: Tensor,
    /// What the forward pass reads and gradients gather on: the master itself, or for FP4 experts the values of its
    /// codes, whose gradient is taken as the master's (straight-through; SPEC section 11).
    pub leaf: Tensor,
    /// Whether `leaf` holds the values of the master's MXFP4 codes.
    pub quantized: bool,
}

impl Parameter {
    /// Another handle to the same memory.
    fn share(&self) -> Self {
        let (master, leaf) = (self.master.shallow_clone(), self.leaf.shallow_clone());
        Self { name: self.name.clone(), master, leaf, quantized: self.quantized }
    }

    /// Rounds the master to MXFP4 again, after an update. Nothing to do for other parameters.
    pub(super) fn refresh(&mut self) {
        if self.quantized {
            let values = dequantize_mxfp4(&quantize_mxfp4(&super::to_vec_f32(&self.master)));
            tch::no_grad(|| self.leaf.copy_(&Tensor::from_slice(&values).view_(self.leaf.size())));
        }
    }

    /// The master under its hub names.
    pub fn write(&self, to: &mut Weights) {
        let shape: Vec<usize> = self.master.size().iter().map(|&n| n as usize).collect();
        let values = super::to_vec_f32(&self.master);
        match self.name.split_once(".ffn.experts.") {
            Some((layer, w)) => {
                for (e, values) in values.chunks_exact(shape[1] * shape[2]).enumerate() {
                    let name = format!("{layer}.ffn.experts.{e}.{w}.weight");
                    to.insert(name, HostTensor::f32(&shape[1..], values.to_vec()));
                }
            }
            None => {
                to.insert(self.name.clone(), HostTensor::f32(&shape, values));
            }
        }
    }
}

/// Reads the tensors of a model one by one, in the order the modules ask for them.
pub(super) struct Loader<'a> {
    weights: &'a Weights,
    device: Device,
    fp4: bool,
    is_frozen: &'a dyn Fn(&str) -> bool,
    /// Parameters to share instead of reading them, by name; whether they are trained.
    shared: HashMap<&'a str, (&'a Parameter, bool)>,
    /// What the optimizer will update.
    pub parameters: Vec<Parameter>,
    /// What training leaves as it is.
    pub frozen: Vec<Parameter>,
    /// The hash-routing tables.
    pub tables: Weights,
}

impl<'a> Loader<'a> {
    pub fn new(
        weights: &'a Weights,
        config: &ModelConfig,
        device: Device,
        is_frozen: &'a dyn Fn(&str) -> bool,
    ) -> Self {
        let (parameters, frozen, tables) = (Vec::new(), Vec::new(), Weights::new());
        let (shared, fp4) = (HashMap::new(), config.experts_are_fp4());
        Self { weights, device, fp4, is_frozen, shared, parameters, frozen, tables }
    }

    /// A loader whose tensors are those of another policy: handles to the same memory.
    pub fn sharing(
        trained: &'a [Parameter],
        frozen: &'a [Parameter],
        tables: &'a Weights,
        config: &ModelConfig,
        device: Device,
    ) -> Self {
        let of = |parameters: &'a [Parameter], trained| parameters.iter().map(move |p| (p.name.as_str(), (p, trained)));
        let shared = of(trained, true).chain(of(frozen, false)).collect();
        Self { shared, ..Self::new(tables, config, device, &|_| false) }
    }

    /// The parameter `name`, if parameters are shared.
    fn share(&mut self, name: &str) -> Option<Tensor> {
        let (parameter, trained) = *self.shared.get(name)?;
        let leaf = parameter.leaf.shallow_clone();
        if trained { &mut self.parameters } else { &mut self.frozen }.push(parameter.share());
        Some(leaf)
    }

    pub fn device(&self) -> Device {
        self.device
    }

    fn find(&self, name: &str, shape: &[usize]) -> Result<&'a HostTensor, PolicyError> {
        let missing = || PolicyError::Missing { name: name.to_owned(), expected: shape.to_vec() };
        let tensor = self.weights.get(name).ok_or_else(missing)?;
        if tensor.shape != shape {
            return Err(wrong(name, tensor, shape));
        }
        Ok(tensor)
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<&'a [f32], PolicyError> {
        let tensor = self.find(name, shape)?;
        match &tensor.data {
            TensorData::F32(values) => Ok(values),
            _ => Err(wrong(name, tensor, shape)),
        }
    }

    fn tensor(&self, values: &[f32], shape: &[usize]) -> Tensor {
        let shape: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        Tensor::from_slice(values).view_(shape).to_device(self.device)
    }

    /// A parameter that gradients reach, unless it is frozen.
    pub fn trained(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, PolicyError> {
        let is_trained = !(self.is_frozen)(name);
        self.parameter(name, shape, is_trained)
    }

    /// A parameter that no gradient reaches.
    pub fn frozen(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, PolicyError> {
        self.parameter(name, shape, false)
    }

    fn parameter(&mut self, name: &str, shape: &[usize], is_trained: bool) -> Result<Tensor, PolicyError> {
        if let Some(leaf) = self.share(name) {
            return Ok(leaf);
        }
        let master = self.tensor(self.values(name, shape)?, shape).set_requires_grad(is_trained);
        let leaf = master.shallow_clone();
        let parameter = Parameter { name: name.to_owned(), master, leaf: leaf.shallow_clone(), quantized: false };
        if is_trained { &mut self.parameters } else { &mut self.frozen }.push(parameter);
        Ok(leaf)
    }

    /// One matrix of all routed experts of a layer, `[E, shape]`; `prefix` is `layers.i.ffn.experts`. They are frozen
    /// all or none.
    pub fn experts(&mut self, prefix: &str, w: &str, num: usize, shape: [usize; 2]) -> Result<Tensor, PolicyError> {
        let stack = format!("{prefix}.{w}");
        if let Some(leaf) = self.share(&stack) {
            return Ok(leaf);
        }
        let names: Vec<String> = (0..num).map(|e| format!("{prefix}.{e}.{w}.weight")).collect();
        let is_trained = !(self.is_frozen)(&names[0]);
        let is_uniform = names.iter().all(|name| (self.is_frozen)(name) != is_trained);
        assert!(is_uniform, "some of the experts in `{stack}` are frozen and some are not");
        let mut values = Vec::with_capacity(num * shape[0] * shape[1]);
        for name in &names {
            values.extend_from_slice(self.values(name, &shape)?);
        }
        let master = self.tensor(&values, &[num, shape[0], shape[1]]);
        let leaf = if self.fp4 { master.copy() } else { master.shallow_clone() }.set_requires_grad(is_trained);
        let mut parameter = Parameter { name: stack, master, leaf: leaf.shallow_clone(), quantized: self.fp4 };
        parameter.refresh();
        if is_trained { &mut self.parameters } else { &mut self.frozen }.push(parameter);
        Ok(leaf)
    }

    /// A hash-routing table.
    pub fn table(&mut self, name: &str, shape: &[usize]) -> Result<Vec<i64>, PolicyError> {
        let tensor = self.find(name, shape)?;
        let TensorData::I64(values) = &tensor.data else { return Err(wrong(name, tensor, shape)) };
        self.tables.insert(name.to_owned(), tensor.clone());
        Ok(values.clone())
    }
}

fn wrong(name: &str, tensor: &HostTensor, expected: &[usize]) -> PolicyError {
    let kind = tensor.data.kind();
    PolicyError::Shape {
        name: name.to_owned(),
        found: format!("{kind} of shape {:?}", tensor.shape),
        expected: expected.to_vec(),
    }
}
