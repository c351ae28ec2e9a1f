//! The model: its configuration, its checkpoint, its weights packed for the kernels, and the forward pass.

pub mod checkpoint;
mod config;
mod config_file;
mod forward;
mod sizes;
mod trace;
mod weights;

pub use checkpoint::{CheckpointError, HostTensor, TensorData, Weights, is_routed_expert};
pub use config::{CSA_RATIO, ConfigError, EosTokens, LayerKind, MTP_PREFIX, ModelConfig, PRESETS, RopeScaling};
pub(crate) use config_file::fp8_quantization;
pub use forward::{ForwardOutput, Logits, Segment, Workspace};
pub use sizes::{KindSize, Sizes};
pub use trace::{Difference, Extent, Trace, Values, compare, first_beyond};
pub use weights::{Model, ModelBuilder, WeightUpdate, WeightUpdateError, checksum, to_engine_format};
