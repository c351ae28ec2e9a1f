//! Reading a checkpoint tensor by tensor: the headers are read once, each tensor with positioned reads when it is asked
//! for, so that nothing but the tensor at hand is in memory. (A mapping would do the same and die by SIGBUS where a
//! file is cut short under it; a read says so.)

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;

use super::names::{SCALE, halves_of, hugging_face, release, scale_of};
use super::tensor::{MAX_FP8_SCALE, MAX_MXFP4_SCALE};
use super::{CheckpointError, Format, HostTensor, INDEX_FILE, Naming, TensorData, WEIGHTS_FILE};
use crate::model::{MTP_PREFIX, ModelConfig};

/// The longest header that is read, as in the format's own library.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes that are read and converted at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A checkpoint that is open for reading: one file or several with an index, in the release's names or the Hugging Face
/// implementation's.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<(PathBuf, File)>,
    /// By the release's name; a stack of experts by its own without the leading `model.`.
    tensors: BTreeMap<String, Stored>,
    naming: Naming,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Stored {
    /// Index in [`Checkpoint::files`].
    file: usize,
    /// Its name in the file, for messages.
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Position of its first byte in the file.
    at: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens the checkpoint in folder `dir` and reads the headers of its files.
    ///
    /// # Errors
    /// When a file is missing, damaged or cut short, or the index names what is not there.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let (single, index) = (dir.join(WEIGHTS_FILE), dir.join(INDEX_FILE));
        let mut this = Self { files: Vec::new(), tensors: BTreeMap::new(), naming: Naming::Release };
        if single.exists() || !index.exists() {
            this.add(&single, |_| true)?;
            return Ok(this);
        }
        let text = std::fs::read(&index).map_err(|source| CheckpointError::Read { path: index.clone(), source })?;
        let damaged = |message: String| CheckpointError::Index { path: index.clone(), message };
        let Index { weight_map } = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
        if weight_map.is_empty() {
            return Err(damaged("`weight_map` names no tensor".into()));
        }
        let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (name, file) in weight_map {
            if file.is_empty() || file.contains('/') || file.starts_with('.') {
                return Err(damaged(format!(
                    "tensor `{name}` is said to lie in `{file}`, which is no file of this folder"
                )));
            }
            files.entry(file).or_default().insert(name);
        }
        for (file, names) in files {
            let found = this.add(&dir.join(&file), |name| names.contains(name))?;
            if found < names.len() {
                let missing = names.iter().find(|name| this.tensors.values().all(|t| t.name != **name));
                let name = missing.map_or("", String::as_str);
                return Err(damaged(format!("tensor `{name}` is said to lie in {file}, but it does not")));
            }
        }
        Ok(this)
    }

    /// Reads a file's header and takes in its tensors that are `wanted`; how many those were.
    fn add(&mut self, path: &Path, wanted: impl Fn(&str) -> bool) -> Result<usize, CheckpointError> {
        let unreadable = |source| CheckpointError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let damaged = |message: String| CheckpointError::Damaged { path: path.to_owned(), message, size };
        let mut length = [0; 8];
        if size < 8 {
            return Err(damaged("it ends before its header".into()));
        }
        file.read_exact_at(&mut length, 0).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES || length + 8 > size {
            return Err(damaged(format!("its header would be {length} bytes long")));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(unreadable)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| damaged(format!("its header: {e}")))?;
        let end = 8 + length + metadata.data_len() as u64;
        if end != size {
            return Err(damaged(format!("by its header it would be {end} bytes long")));
        }
        let mut count = 0;
        for name in metadata.offset_keys().into_iter().filter(|name| wanted(name)) {
            let info = metadata.info(&name).expect("a name of the header has an entry");
            let (dtype, shape) = (info.dtype, info.shape.clone());
            let at = 8 + length + info.data_offsets.0 as u64;
            if name.starts_with("model.") || name == "lm_head.weight" {
                self.naming = Naming::HuggingFace;
            }
            let key = release(&name);
            let stored = Stored { file: self.files.len(), name: name.clone(), dtype, shape, at };
            if let Some(other) = self.tensors.insert(key, stored) {
                return Err(CheckpointError::Twice { path: path.to_owned(), name, other: other.name });
            }
            count += 1;
        }
        self.files.push((path.to_owned(), file));
        Ok(count)
    }

    /// Whose names its tensors have.
    pub fn naming(&self) -> Naming {
        self.naming
    }

    /// The format that parameter `name` is stored in, if it is there in one that is read.
    pub fn format(&self, name: &str) -> Option<Format> {
        match self.find(name)?.1.dtype {
            Dtype::F32 => Some(Format::F32),
            Dtype::BF16 => Some(Format::Bf16),
            Dtype::F8_E4M3 => Some(Format::Fp8),
            Dtype::I8 | Dtype::U8 => Some(Format::Mxfp4),
            Dtype::I64 | Dtype::I32 => Some(Format::I64),
            _ => None,
        }
    }

    /// Refuses a checkpoint with a layer's tensor that `config` knows nothing of, or with a stack of experts of another
    /// shape: config and tensors do not belong together then. Tensors outside the layers may be more than the model has.
    ///
    /// # Errors
    /// With the first such tensor by name.
    pub fn check_against(&self, config: &ModelConfig) -> Result<(), CheckpointError> {
        let mut known = BTreeSet::new();
        let names = config.parameters().into_iter().map(|(name, _)| name).chain(config.hash_tables());
        for name in names {
            for name in [scale_of(&name), name] {
                known.extend(self.find(&name).map(|(key, _)| key));
            }
        }
        self.check_stacks(config)?;
        match self.tensors.iter().find(|(key, _)| key.starts_with("layers.") && !known.contains(*key)) {
            Some((_, stored)) => {
                Err(CheckpointError::Unexpected { path: self.files[stored.file].0.clone(), name: stored.name.clone() })
            }
            None => Ok(()),
        }
    }

    /// Refuses stacks of experts of another shape than `config` says: their parts would be cut out in the wrong places.
    fn check_stacks(&self, config: &ModelConfig) -> Result<(), CheckpointError> {
        let (experts, width, d) = (config.n_routed_experts, config.moe_intermediate_size, config.hidden_size);
        for (suffix, rows, columns) in [("gate_up_proj", 2 * width, d), ("down_proj", d, width)] {
            let is_stack = |key: &str| key.strip_suffix(suffix).is_some_and(|key| key.ends_with(".mlp.experts."));
            for (_, stored) in self.tensors.iter().filter(|(key, _)| is_stack(key)) {
                let packed = matches!(stored.dtype, Dtype::I8 | Dtype::U8);
                self.check_shape(stored, &[experts, rows, if packed { columns / 2 } else { columns }])?;
            }
        }
        Ok(())
    }

    /// The tensor of parameter `name`, in the format that it is stored in. `shape` is that of its values.
    ///
    /// # Errors
    /// When it is missing, of another shape or in a format that is not read, holds a value that is not finite, or
    /// cannot be read.
    pub fn read(&self, name: &str, shape: &[usize]) -> Result<HostTensor, CheckpointError> {
        let stored = self.stored(name, shape)?;
        let is_matrix = shape.len() == 2;
        let data = match stored.dtype {
            Dtype::F32 => {
                self.check_shape(&stored, shape)?;
                let values = self.elements(&stored, f32::from_le_bytes)?;
                self.check_values(&stored, &values, |v| v.is_finite(), "a finite number")?;
                TensorData::F32(values)
            }
            Dtype::BF16 => {
                self.check_shape(&stored, shape)?;
                let values = self.elements(&stored, bf16::from_le_bytes)?;
                self.check_values(&stored, &values, |v| v.is_finite(), "a finite number")?;
                TensorData::Bf16(values)
            }
            Dtype::F8_E4M3 if is_matrix => {
                self.check_shape(&stored, shape)?;
                let codes = self.elements(&stored, u8::from_le_bytes)?;
                self.check_values(&stored, &codes, |code| code & 0x7f != 0x7f, "an e4m3 code of a number")?;
                TensorData::Fp8 { codes, scales: self.scales(name, Format::Fp8, shape, MAX_FP8_SCALE)? }
            }
            Dtype::I8 | Dtype::U8 if Format::Mxfp4.fits(shape) => {
                self.check_shape(&stored, &Format::Mxfp4.stored_shape(shape))?;
                let codes = self.elements(&stored, u8::from_le_bytes)?;
                TensorData::Mxfp4 { codes, scales: self.scales(name, Format::Mxfp4, shape, MAX_MXFP4_SCALE)? }
            }
            _ => return Err(self.dtype(&stored, "F32, BF16, F8_E4M3 or I8 (MXFP4)")),
        };
        Ok(HostTensor { shape: shape.to_vec(), data })
    }

    /// The hash-routing table `name`, whose entries are experts below `num_experts`.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], or when an entry is no expert.
    pub fn read_table(&self, name: &str, shape: &[usize], num_experts: usize) -> Result<HostTensor, CheckpointError> {
        let stored = self.stored(name, shape)?;
        self.check_shape(&stored, shape)?;
        let values = match stored.dtype {
            Dtype::I64 => self.elements(&stored, i64::from_le_bytes)?,
            Dtype::I32 => self.elements(&stored, |b| i64::from(i32::from_le_bytes(b)))?,
            _ => return Err(self.dtype(&stored, "I64 or I32")),
        };
        let expected = format!("an expert from 0 to {}", num_experts - 1);
        self.check_values(&stored, &values, |v| (0..num_experts as i64).contains(v), &expected)?;
        Ok(HostTensor { shape: shape.to_vec(), data: TensorData::I64(values) })
    }

    /// The scales of weight `name` as e8m0 bytes, at most `largest`; f32 ones are taken where they are powers of two.
    fn scales(&self, name: &str, format: Format, shape: &[usize], largest: u8) -> Result<Vec<u8>, CheckpointError> {
        let shape = format.scale_shape(shape).expect("a block format has scales");
        let stored = self.stored(&scale_of(name), &shape)?;
        self.check_shape(&stored, &shape)?;
        match stored.dtype {
            Dtype::F8_E8M0 | Dtype::U8 => {
                let scales = self.elements(&stored, u8::from_le_bytes)?;
                let expected = format!("an e8m0 scale of at most 2^{}", i32::from(largest) - 127);
                self.check_values(&stored, &scales, |&scale| scale <= largest, &expected)?;
                Ok(scales)
            }
            Dtype::F32 => {
                let scales = self.elements(&stored, f32::from_le_bytes)?;
                let is_power = |s: &f32| s.is_normal() && *s > 0.0 && s.to_bits().trailing_zeros() >= 23;
                self.check_values(&stored, &scales, is_power, "a power of two (`scale_fmt` ue8m0)")?;
                Ok(scales.into_iter().map(|s| (s.to_bits() >> 23) as u8).collect())
            }
            _ => Err(self.dtype(&stored, "F8_E8M0, or F32 with powers of two")),
        }
    }

    /// The key and place of release name `name`: a tensor, or a slice of a stack of experts.
    fn find(&self, name: &str) -> Option<(String, Stored)> {
        if let Some(stored) = self.tensors.get(name) {
            return Some((name.to_owned(), stored.clone()));
        }
        let place = hugging_face(name);
        let (expert, half) = place.slice?;
        let key = place.name.strip_prefix("model.")?;
        let stack = self.tensors.get(key)?;
        let &[num_experts, rows, columns] = stack.shape.as_slice() else { return None };
        let halves = halves_of(key);
        let rows = rows / halves;
        let at = stack.at + ((expert * halves + half) * rows * columns * stack.dtype.bitsize() / 8) as u64;
        let slice = Stored { shape: vec![rows, columns], at, ..stack.clone() };
        (expert < num_experts).then(|| (key.to_owned(), slice))
    }

    fn stored(&self, name: &str, expected: &[usize]) -> Result<Stored, CheckpointError> {
        self.find(name).map(|(_, stored)| stored).ok_or_else(|| {
            // Where its neighbours are in another naming, its name is too.
            let shown = if self.naming == Naming::HuggingFace { hugging_face(name).name } else { name.to_owned() };
            let is_scale = name.ends_with(SCALE);
            CheckpointError::Missing {
                path: self.files.first().map_or_else(PathBuf::new, |(path, _)| path.clone()),
                name: shown,
                advice: if name.starts_with(MTP_PREFIX) {
                    "set `num_nextn_predict_layers` to 0 in config.json if the model comes without multi-token prediction"
                } else {
                    "copy the file again or correct config.json"
                },
                asker: if is_scale { "its weight's codes ask" } else { "config.json asks" },
                expected: expected.to_vec(),
            }
        })
    }

    fn path(&self, stored: &Stored) -> PathBuf {
        self.files[stored.file].0.clone()
    }

    fn check_shape(&self, stored: &Stored, expected: &[usize]) -> Result<(), CheckpointError> {
        if stored.shape == expected {
            return Ok(());
        }
        let (name, found) = (stored.name.clone(), stored.shape.clone());
        Err(CheckpointError::Shape { path: self.path(stored), name, found, expected: expected.to_vec() })
    }

    fn dtype(&self, stored: &Stored, expected: &'static str) -> CheckpointError {
        let found = stored.dtype.to_string();
        CheckpointError::Dtype { path: self.path(stored), name: stored.name.clone(), found, expected }
    }

    fn check_values<T: std::fmt::Display>(
        &self,
        stored: &Stored,
        values: &[T],
        is_good: impl Fn(&T) -> bool,
        expected: &str,
    ) -> Result<(), CheckpointError> {
        let Some(at) = values.iter().position(|v| !is_good(v)) else { return Ok(()) };
        let (path, name, found) = (self.path(stored), stored.name.clone(), values[at].to_string());
        Err(CheckpointError::Value { path, name, found, at, expected: expected.to_owned() })
    }

    /// Reads a tensor's elements, a chunk at a time.
    fn elements<T, const N: usize>(
        &self,
        stored: &Stored,
        from: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, CheckpointError> {
        let (path, file) = &self.files[stored.file];
        let count: usize = stored.shape.iter().product();
        let mut out = Vec::with_capacity(count);
        let mut buffer = vec![0; (count * N).min(CHUNK_BYTES)];
        let mut at = stored.at;
        while out.len() < count {
            let chunk = buffer.len().min((count - out.len()) * N);
            let chunk = &mut buffer[..chunk];
            file.read_exact_at(chunk, at).map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
            at += chunk.len() as u64;
            out.extend(chunk.as_chunks().0.iter().map(|bytes| from(*bytes)));
        }
        Ok(out)
    }
}
