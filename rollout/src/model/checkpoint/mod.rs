//! Checkpoints in the Hugging Face layout (`config.json`, `*.safetensors`, `tokenizer.json`), in the tensor names of
//! the published release. Read into host memory by name and written atomically.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::ModelConfig;

/// The file that holds a checkpoint's tensors.
pub const WEIGHTS_FILE: &str = "model.safetensors";

/// Why a checkpoint was refused or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file could not be read.
    #[error("cannot read {} (a model's folder holds config.json, {WEIGHTS_FILE} and tokenizer.json)", path.display())]
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
        size: usize,
    },
    /// A tensor that the configuration asks for is not there.
    #[error("{}: tensor `{name}` is missing; config.json asks for it with shape {expected:?}; copy the file again or correct config.json", path.display())]
    Missing {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// Its shape by the configuration.
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
    #[error("{}: tensor `{name}` is stored as {found}; expected F32 or BF16 (I64 or I32 for hash tables); convert it", path.display())]
    Dtype {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        name: String,
        /// Its type in the file.
        found: String,
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

/// A tensor in host memory, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: TensorData,
}

/// The elements of a [`HostTensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// Plain values.
    F32(Vec<f32>),
    /// Hash-routing tables.
    I64(Vec<i64>),
    /// MXFP4 of a matrix `[rows, columns]`: two e2m1 codes a byte (low nibble: even column) and one e8m0 scale per 32
    /// columns.
    Mxfp4 {
        /// `rows * columns / 2` bytes.
        codes: Vec<u8>,
        /// `rows * columns / 32` bytes.
        scales: Vec<u8>,
    },
}

impl HostTensor {
    /// A tensor of plain values.
    ///
    /// # Panics
    /// When `values` does not fill `shape`.
    pub fn f32(shape: &[usize], values: Vec<f32>) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "values do not fill shape {shape:?}");
        Self { shape: shape.to_vec(), data: TensorData::F32(values) }
    }

    /// The plain values.
    ///
    /// # Panics
    /// When the tensor holds something else.
    pub fn as_f32(&self) -> &[f32] {
        match &self.data {
            TensorData::F32(v) => v,
            other => panic!("expected f32 values, found {}", other.kind()),
        }
    }

    /// Little-endian bytes of the elements, codes before scales: what checksums are made over.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.data {
            TensorData::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::I64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::Mxfp4 { codes, scales } => [codes.as_slice(), scales].concat(),
        }
    }
}

impl TensorData {
    fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32 values",
            Self::I64(_) => "i64 values",
            Self::Mxfp4 { .. } => "MXFP4 codes",
        }
    }
}

/// The tensors of a checkpoint by name.
pub type Weights = BTreeMap<String, HostTensor>;

/// Reads every tensor that `config` names, as f32, and the hash tables; tensors outside the layers that it does
/// not name are left alone.
///
/// # Errors
/// When the file is missing or damaged, or a tensor is missing, of another shape or type, not finite, or of a layer that
/// `config` does not have.
pub fn load_weights(dir: &Path, config: &ModelConfig) -> Result<Weights, CheckpointError> {
    let path = dir.join(WEIGHTS_FILE);
    let bytes = std::fs::read(&path).map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| CheckpointError::Damaged {
        path: path.clone(),
        message: e.to_string(),
        size: bytes.len(),
    })?;
    let view = |name: &str, expected: &[usize]| {
        let view = file.tensor(name).map_err(|_| CheckpointError::Missing {
            path: path.clone(),
            name: name.to_owned(),
            expected: expected.to_vec(),
        })?;
        if view.shape() != expected {
            return Err(CheckpointError::Shape {
                path: path.clone(),
                name: name.to_owned(),
                found: view.shape().to_vec(),
                expected: expected.to_vec(),
            });
        }
        Ok(view)
    };
    let dtype = |name: &str, found: Dtype| CheckpointError::Dtype {
        path: path.clone(),
        name: name.to_owned(),
        found: format!("{found:?}"),
    };
    let value = |name: &str, found: String, at: usize, expected: String| CheckpointError::Value {
        path: path.clone(),
        name: name.to_owned(),
        found,
        at,
        expected,
    };
    let mut weights = Weights::new();
    for (name, shape) in config.parameters() {
        let view = view(&name, &shape)?;
        let values = read_f32(&view).ok_or_else(|| dtype(&name, view.dtype()))?;
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            return Err(value(&name, values[at].to_string(), at, "a finite number".into()));
        }
        weights.insert(name, HostTensor::f32(&shape, values));
    }
    let shape = [config.vocab_size, config.num_experts_per_tok];
    for name in config.hash_tables() {
        let view = view(&name, &shape)?;
        let values = read_i64(&view).ok_or_else(|| dtype(&name, view.dtype()))?;
        let experts = config.n_routed_experts as i64;
        if let Some(at) = values.iter().position(|v| !(0..experts).contains(v)) {
            return Err(value(&name, values[at].to_string(), at, format!("an expert from 0 to {}", experts - 1)));
        }
        weights.insert(name, HostTensor { shape: shape.to_vec(), data: TensorData::I64(values) });
    }
    // Beside a model's own tensors a file may hold others (multi-token prediction), but no layer more than it has.
    let is_known = |name: &str| weights.contains_key(name) || name.ends_with(".scale");
    match file.names().into_iter().filter(|name| name.starts_with("layers.") && !is_known(name)).min() {
        Some(name) => Err(CheckpointError::Unexpected { path, name: name.to_owned() }),
        None => Ok(weights),
    }
}

fn read_f32(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let data = view.data();
    match view.dtype() {
        Dtype::F32 => Some(data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        Dtype::BF16 => Some(data.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()),
        _ => None,
    }
}

fn read_i64(view: &TensorView<'_>) -> Option<Vec<i64>> {
    let data = view.data();
    match view.dtype() {
        Dtype::I64 => Some(data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        Dtype::I32 => Some(data.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect()),
        _ => None,
    }
}

/// Writes `tensors` to `path`, whole or not at all: a new file beside it is synced and renamed over it.
///
/// # Errors
/// When the disk refuses; the old file, if any, is then untouched.
///
/// # Panics
/// When a tensor holds MXFP4 codes: masters are what is written.
pub fn save_weights(path: &Path, tensors: &Weights) -> Result<(), CheckpointError> {
    let bytes: Vec<(String, Dtype, &[usize], Vec<u8>)> = tensors
        .iter()
        .map(|(name, t)| {
            let dtype = match t.data {
                TensorData::F32(_) => Dtype::F32,
                TensorData::I64(_) => Dtype::I64,
                TensorData::Mxfp4 { .. } => panic!("tensor `{name}`: codes are derived from masters, not saved"),
            };
            (name.clone(), dtype, t.shape.as_slice(), t.bytes())
        })
        .collect();
    let views = bytes.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.to_vec(), data).expect("a tensor's bytes fill its shape"))
    });
    let file = safetensors::serialize(views, None).expect("views of valid tensors serialise");
    write_atomically(path, &file).map_err(|source| CheckpointError::Write { path: path.to_owned(), source })
}

/// Writes a file so that a reader, or a kill at any instant, sees the old content or the new, never a part.
///
/// # Errors
/// What the file system says; the temporary file is removed.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or_else(|| std::io::Error::other("the path names no file"))?;
    let temporary = dir.join(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
    let written = (|| {
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        std::fs::File::open(dir)?.sync_all()
    })();
    if written.is_err() {
        // The first error is the one to report; what cannot be removed either is left.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
