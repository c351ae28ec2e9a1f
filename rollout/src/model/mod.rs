//! The model: its configuration, its checkpoint, its weights packed for the kernels, and the forward pass.

pub mod checkpoint;
mod config;
mod forward;
mod weights;

pub use checkpoint::{CheckpointError, HostTensor, TensorData, Weights};
pub use config::{CSA_RATIO, ConfigError, LayerKind, ModelConfig, RopeScaling};
pub use forward::{ForwardOutput, Segment, Workspace};
pub use weights::{Model, WeightUpdate, WeightUpdateError, checksum, is_routed_expert, to_engine_format};
