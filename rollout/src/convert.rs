//! `rollout convert`: a checkpoint into another number format or naming, tensor by tensor, codes carried as they are.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::model::checkpoint::{
    Checkpoint, CheckpointError, Format, HostTensor, Item, Layout, Naming, write_atomically, write_sharded,
};
use crate::model::{ConfigError, ModelConfig, fp8_quantization};

/// Files beside the tensors that belong to the model in any format.
const COMPANIONS: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
];

/// Which tensor is to be in which format.
#[derive(Clone, Copy, Debug)]
pub struct Formats {
    /// The layout of the whole.
    pub layout: Layout,
    /// With [`Layout::Mxfp4`]: the format of everything but the routed experts, if not the release's FP8 and bf16, so
    /// that they lose nothing.
    pub others: Option<Format>,
}

impl Formats {
    /// The format of the parameter `name`.
    pub fn of(&self, name: &str) -> Format {
        match (self.layout.format(name), self.others) {
            (Format::Bf16 | Format::Fp8, Some(others)) if self.layout == Layout::Mxfp4 => others,
            (format, _) => format,
        }
    }

    /// Whether every parameter of the model fits its format.
    ///
    /// # Errors
    /// With the first matrix whose rows are not whole blocks.
    pub fn check(&self, config: &ModelConfig) -> Result<(), ConvertError> {
        match config.parameters().into_iter().find(|(name, shape)| !self.of(name).fits(shape)) {
            Some((name, shape)) => Err(ConvertError::Shape { name, shape }),
            None => Ok(()),
        }
    }

    /// The configuration of a model in these formats.
    pub fn config(&self, config: &ModelConfig) -> ModelConfig {
        let mut config = config.clone();
        config.other.shift_remove("quantization_config");
        if self.of("layers.0.attn.wq_a.weight") == Format::Fp8 {
            config.other.insert("quantization_config".into(), fp8_quantization());
        }
        config.expert_dtype = (self.layout == Layout::Mxfp4).then(|| "fp4".to_owned());
        let plain = match self.of("embed.weight") {
            Format::F32 => "float32",
            _ => "bfloat16",
        };
        config.other.shift_remove("dtype");
        config.other.insert("torch_dtype".into(), json!(plain));
        config
    }
}

/// What to convert to.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The number formats.
    pub formats: Formats,
    /// Whose names: of the tensors, and of the configuration's fields. Quantised tensors have the release's in both,
    /// as transformers expects them.
    pub naming: Naming,
    /// About how large a file gets, in bytes, before another is begun.
    pub shard_bytes: usize,
}

/// What became of the parameters, in tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Had the format already: their bytes are the same.
    pub carried: usize,
    /// Another format, the same values.
    pub exact: usize,
    /// Rounded to what the format can hold.
    pub rounded: usize,
    /// Bytes written.
    pub num_bytes: usize,
}

/// Why a conversion was refused or broke off; the destination is then not there.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The configuration of the source.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor could not be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The destination holds something.
    #[error("{}: already there; name a folder that is not, or remove this one", path.display())]
    Exists {
        /// Which folder.
        path: PathBuf,
    },
    /// A tensor does not fit the format.
    #[error("tensor `{name}` has shape {shape:?}, and MXFP4 needs rows of whole blocks of 32; convert to fp8 or bf16")]
    Shape {
        /// Which tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The naming cannot say what the model is.
    #[error(
        "the Hugging Face implementation has one ratio for all heavily compressed layers, but {found}; use release names"
    )]
    Naming {
        /// The field and its values.
        found: String,
    },
    /// A file or folder could not be written.
    #[error("cannot write {}; nothing was kept", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Converts the checkpoint in folder `from` into the new folder `to`, which appears whole or not at all.
///
/// Peak memory is one tensor in both formats (a stack of experts counts expert by expert).
///
/// # Errors
/// When `from` cannot be read whole, `to` is there already, or a format cannot hold a tensor.
pub fn convert(from: &Path, to: &Path, target: Target) -> Result<Summary, ConvertError> {
    let config = ModelConfig::load(&from.join("config.json"))?;
    let checkpoint = Checkpoint::open(from)?;
    checkpoint.check_against(&config)?;
    let exists = || ConvertError::Exists { path: to.to_owned() };
    // A dangling link is there too.
    let name = to.file_name().filter(|_| to.symlink_metadata().is_err()).ok_or_else(exists)?.to_string_lossy();
    target.formats.check(&config)?;
    let named = config.parameters();
    let with_format = |(name, shape): &(String, Vec<usize>)| (name.clone(), target.formats.of(name), shape.clone());
    let mut parameters: Vec<(String, Format, Vec<usize>)> = named.iter().map(with_format).collect();
    let shapes: HashMap<String, Vec<usize>> = named.into_iter().collect();
    let tables = config.hash_tables().into_iter();
    parameters.extend(tables.map(|name| (name, Format::I64, config.hash_table_shape().to_vec())));
    let text = config_text(&config, &target)?;
    // transformers stacks experts as it loads them; stacks that have scales it would read without them.
    let is_quantised = matches!(target.formats.layout, Layout::Mxfp4 | Layout::Fp8);
    let items = Item::plan(parameters, if is_quantised { Naming::Release } else { target.naming });
    let mut summary = Summary { num_bytes: items.iter().map(Item::num_bytes).sum(), ..Summary::default() };
    let read = |name: &str| match shapes.get(name) {
        None => checkpoint.read_table(name, &config.hash_table_shape(), config.n_routed_experts),
        Some(shape) => {
            let (tensor, change) = converted(checkpoint.read(name, shape)?, target.formats.of(name));
            if !tensor.is_readable() {
                let format = target.formats.layout.to_string();
                return Err(CheckpointError::Range { name: name.to_owned(), format });
            }
            match change {
                Change::Carried => summary.carried += 1,
                Change::Exact => summary.exact += 1,
                Change::Rounded => summary.rounded += 1,
            }
            Ok(tensor)
        }
    };
    // Beside the destination, so that the rename stays within one file system; this process's own, so that two
    // conversions to one place do not mix.
    let prefix = format!(".{name}.partial-");
    remove_abandoned(to, &prefix, from);
    let partial = to.with_file_name(format!("{prefix}{}", std::process::id()));
    std::fs::create_dir_all(to.parent().unwrap_or(Path::new("")))
        .and_then(|()| std::fs::create_dir(&partial))
        .map_err(|source| ConvertError::Write { path: to.to_owned(), source })?;
    let written = fill(from, &partial, items, target.shard_bytes, &text, read).and_then(|()| {
        // A folder is never renamed over one that holds something.
        std::fs::rename(&partial, to).map_err(|source| match to.exists() {
            true => exists(),
            false => ConvertError::Write { path: to.to_owned(), source },
        })
    });
    if let Err(error) = written {
        // The first error is the one to report; what cannot be removed either is left.
        let _ = std::fs::remove_dir_all(&partial);
        return Err(error);
    }
    Ok(summary)
}

fn fill(
    from: &Path,
    partial: &Path,
    items: Vec<Item>,
    shard_bytes: usize,
    config: &str,
    read: impl FnMut(&str) -> Result<HostTensor, CheckpointError>,
) -> Result<(), ConvertError> {
    let refused = |path: &Path| {
        let path = path.to_owned();
        move |source| ConvertError::Write { path, source }
    };
    write_sharded(partial, items, shard_bytes, read)?;
    for name in COMPANIONS {
        let (path, copy) = (from.join(name), partial.join(name));
        if path.is_file() {
            let bytes = std::fs::read(&path).map_err(|source| CheckpointError::Read { path, source })?;
            std::fs::write(&copy, bytes).map_err(refused(&copy))?;
        }
    }
    let path = partial.join("config.json");
    write_atomically(&path, config.as_bytes()).map_err(refused(&path))
}

/// Removes what conversions to `to` left that were killed: folders of this name whose process is gone.
fn remove_abandoned(to: &Path, prefix: &str, from: &Path) {
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let source = from.canonicalize().unwrap_or_default();
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(process) = name.strip_prefix(prefix).and_then(|id| id.parse::<u32>().ok()) else { continue };
        let holds_source = entry.path().canonicalize().is_ok_and(|path| source.starts_with(path));
        if !Path::new(&format!("/proc/{process}")).exists() && !holds_source {
            // What cannot be removed hinders nobody.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

enum Change {
    Carried,
    Exact,
    Rounded,
}

fn converted(tensor: HostTensor, format: Format) -> (HostTensor, Change) {
    if tensor.data.format() == format {
        return (tensor, Change::Carried);
    }
    if format == Format::F32 {
        return (tensor.into_f32(), Change::Exact); // every other format's values are f32 values
    }
    let before = tensor.clone().into_f32();
    let tensor = tensor.into_format(format);
    let after = tensor.clone().into_f32();
    let is_same = before.as_f32().iter().zip(after.as_f32()).all(|(a, b)| a.to_bits() == b.to_bits());
    let change = if is_same { Change::Exact } else { Change::Rounded };
    (tensor, change)
}

/// The `config.json` of the converted model.
fn config_text(config: &ModelConfig, target: &Target) -> Result<String, ConvertError> {
    let config = target.formats.config(config);
    let text = match target.naming {
        Naming::Release => serde_json::to_string_pretty(&config),
        Naming::HuggingFace => {
            let value = config.to_hugging_face().map_err(|found| ConvertError::Naming { found })?;
            serde_json::to_string_pretty(&value)
        }
    };
    Ok(text.expect("a configuration is JSON"))
}

/// A sentence on what was written.
impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} tensors carried as they were, {} in another format with the same values, {} rounded; {:.1} MB of tensors",
            self.carried,
            self.exact,
            self.rounded,
            self.num_bytes as f64 / 1e6
        )
    }
}
