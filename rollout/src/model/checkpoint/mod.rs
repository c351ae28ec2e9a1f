//! Checkpoints in the Hugging Face layout (`config.json`, `*.safetensors`, `tokenizer.json`), in the tensor names of
//! the published release or of the Hugging Face implementation, in f32, bf16, FP8 and MXFP4.

mod layout;
mod names;
mod reader;
mod tensor;
mod writer;

use std::path::{Path, PathBuf};

pub use layout::{Format, Layout, is_routed_expert};
pub use names::Naming;
pub use reader::Checkpoint;
pub use tensor::{HostTensor, TensorData, Weights};
pub use writer::{Item, save_weights, write_atomically, write_sharded};

use super::ModelConfig;

/// The file that holds a checkpoint's tensors, if one does.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// The file that says which file holds which tensor, if there are several.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Why a checkpoint was refused or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file could not be read.
    #[error("cannot read {} (a model's folder holds config.json, {WEIGHTS_FILE} or {INDEX_FILE} with its files, and tokenizer.json)", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The bytes are not a safetensors file, or it ends early.
    #[error("{}: damaged or not a safetensors file ({message}; {size} bytes); copy it again", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What the reader said.
        message: String,
        /// How long it is.
        size: u64,
    },
    /// The index is no index, or says what is not so.
    #[error("{}: {message}; copy the folder again", path.display())]
    Index {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A tensor that the configuration asks for is not there.
    #[error("{}: tensor `{name}` is missing; {asker} for it with shape {expected:?}; {advice}", path.display())]
    Missing {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// Who asks for it.
        asker: &'static str,
        /// What to do.
        advice: &'static str,
        /// The shape asked for.
        expected: Vec<usize>,
    },
    /// A layer's tensor that the configuration knows nothing of.
    #[error(
        "{}: tensor `{name}` is not part of the model that config.json describes; the two files do not belong \
         together; take both from one folder",
        path.display()
    )]
    Unexpected {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{}: tensor `{name}` has shape {found:?}, config.json says {expected:?}; the two files do not belong together; take both from one folder", path.display())]
    Shape {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A tensor is stored in a type that is not read.
    #[error("{}: tensor `{name}` is stored as {found}; expected {expected}; convert it", path.display())]
    Dtype {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// Its type in the file.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// A value that no arithmetic survives.
    #[error("{}: tensor `{name}` holds {found} at element {at}; expected {expected}; take an earlier checkpoint", path.display())]
    Value {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// The value.
        found: String,
        /// Where.
        at: usize,
        /// What would do.
        expected: String,
    },
    /// Two tensors are one by name.
    #[error("{}: tensors `{name}` and `{other}` are the same parameter in two namings; remove one", path.display())]
    Twice {
        /// Which file.
        path: PathBuf,
        /// The second.
        name: String,
        /// The first.
        other: String,
    },
    /// Values that a format has no room for.
    #[error("tensor `{name}` holds values near the end of f32's range, for which {format} has no room; convert to f32")]
    Range {
        /// Which tensor.
        name: String,
        /// The layout asked for.
        format: String,
    },
    /// The checkpoint could not be written.
    #[error("cannot write {}; nothing of it was kept", path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Reads every tensor that `config` names, as f32, and the hash tables: the masters that training starts from.
///
/// # Errors
/// When the checkpoint is missing or damaged, or a tensor is missing, of another shape or type, not finite, or of a
/// layer that `config` does not have.
pub fn load_weights(dir: &Path, config: &ModelConfig) -> Result<Weights, CheckpointError> {
    let checkpoint = Checkpoint::open(dir)?;
    let mut weights = Weights::new();
    checkpoint.check_against(config)?;
    for (name, shape) in config.parameters() {
        let tensor = checkpoint.read(&name, &shape)?.into_f32();
        weights.insert(name, tensor);
    }
    for name in config.hash_tables() {
        let table = checkpoint.read_table(&name, &config.hash_table_shape(), config.n_routed_experts)?;
        weights.insert(name, table);
    }
    Ok(weights)
}
