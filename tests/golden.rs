//! Golden cases found by folder: what every test of the model's numbers reads.

use std::path::{Path, PathBuf};

use rollout::model::{ModelConfig, Weights, checkpoint::load_weights};
use safetensors::{Dtype, SafeTensors};

/// One folder with `config.json`, `model.safetensors` and recorded results.
pub struct Case {
    pub name: String,
    pub dir: PathBuf,
    pub config: ModelConfig,
    pub weights: Weights,
}

/// Every case under `FURLONG_GOLDEN_V4`, or under `tests/golden/v4`.
pub fn cases() -> Vec<Case> {
    let root = std::env::var_os("FURLONG_GOLDEN_V4")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v4"), PathBuf::from);
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(&root)
        .unwrap_or_else(|e| panic!("cannot list {}: {e}", root.display()))
        .map(|entry| entry.expect("a folder can be listed").path())
        .filter(|dir| dir.join("config.json").is_file())
        .collect();
    dirs.sort();
    let cases: Vec<Case> = dirs.iter().map(|dir| case(dir)).collect();
    assert!(!cases.is_empty(), "no case with config.json under {}", root.display());
    cases
}

fn case(dir: &Path) -> Case {
    let config = ModelConfig::load(&dir.join("config.json")).unwrap_or_else(|e| panic!("{e}"));
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let weights = load_weights(dir, &config).unwrap_or_else(|e| panic!("{e}"));
    Case { name, dir: dir.to_owned(), config, weights }
}

impl Case {
    /// The recorded files whose name starts with `prefix`.
    pub fn files(&self, prefix: &str) -> Vec<Recorded> {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(&self.dir)
            .expect("a case's folder can be listed")
            .map(|entry| entry.expect("a folder can be listed").path())
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
            .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix)))
            .collect();
        paths.sort();
        paths.iter().map(|path| Recorded::read(path)).collect()
    }
}

/// A file of recorded tensors.
pub struct Recorded {
    pub path: PathBuf,
    bytes: Vec<u8>,
}

impl Recorded {
    /// The file at `path`.
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { bytes, path: path.to_owned() }
    }

    /// The names of its tensors, in order.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors().names().into_iter().map(str::to_owned).collect();
        names.sort();
        names
    }

    /// The bytes of a tensor of bytes.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        let file = self.tensors();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(matches!(view.dtype(), Dtype::U8 | Dtype::I8), "{name}");
        view.data().to_vec()
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap_or_else(|e| panic!("{}: {e}", self.path.display()))
    }

    /// A tensor of floats with its shape, if it was recorded.
    pub fn f32(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let file = self.tensors();
        let view = file.tensor(name).ok()?;
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        Some((view.shape().to_vec(), view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()))
    }

    /// A tensor of integers with its shape, if it was recorded.
    pub fn i32(&self, name: &str) -> Option<(Vec<usize>, Vec<i32>)> {
        let file = self.tensors();
        let view = file.tensor(name).ok()?;
        assert_eq!(view.dtype(), Dtype::I32, "{name}");
        Some((view.shape().to_vec(), view.data().as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect()))
    }

    /// The token ids of the run, one row per sequence.
    pub fn input_ids(&self) -> Vec<Vec<u32>> {
        let (shape, ids) = self.i32("input_ids").expect("every run records input_ids");
        ids.chunks_exact(shape[1]).map(|row| row.iter().map(|&id| id as u32).collect()).collect()
    }
}

/// The largest absolute difference.
pub fn max_abs_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |m, (a, b)| m.max((a - b).abs()))
}

/// Slots of chosen indices as a set: order is not part of the choice, and negative or maximal slots are unused.
pub fn chosen<T: Copy + TryInto<u32>>(slots: &[T]) -> Vec<u32> {
    let mut set: Vec<u32> = slots.iter().filter_map(|&x| x.try_into().ok()).filter(|&x| x != u32::MAX).collect();
    set.sort_unstable();
    set
}
