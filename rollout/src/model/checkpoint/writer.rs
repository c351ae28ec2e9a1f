//! Writing safetensors files tensor by tensor: the header follows from shapes and formats alone, so that no more than
//! one tensor is in memory; a file appears whole or not at all.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::names::{halves_of, hugging_face, scale_of};
use super::{CheckpointError, Format, HostTensor, INDEX_FILE, Naming, TensorData, WEIGHTS_FILE, Weights};

/// A tensor to be written: one parameter, or a stack of experts' matrices under one name.
#[derive(Clone, Debug)]
pub struct Item {
    name: String,
    format: Format,
    /// The parameters whose bytes follow each other, all of one shape.
    parts: Vec<String>,
    /// The shape of one part's values.
    part: Vec<usize>,
    /// In a stack, how many matrices of each expert stand below each other.
    halves: Option<usize>,
}

impl Item {
    /// A single tensor under its own name.
    pub fn single(name: &str, format: Format, shape: &[usize]) -> Self {
        let part = shape.to_vec();
        Self { name: name.to_owned(), format, parts: vec![name.to_owned()], part, halves: None }
    }

    /// The tensors of a checkpoint in `naming`, from its parameters in the release's names with format and shape.
    ///
    /// # Panics
    /// When a block format is to be named as the Hugging Face implementation does: it reads the release's names there.
    pub fn plan(parameters: Vec<(String, Format, Vec<usize>)>, naming: Naming) -> Vec<Self> {
        let mut items: Vec<Self> = Vec::new();
        let mut stacks: HashMap<String, usize> = HashMap::new();
        for (name, format, shape) in parameters {
            let place = match naming {
                Naming::Release => None,
                Naming::HuggingFace => Some(hugging_face(&name)),
            };
            let is_plain = !matches!(format, Format::Fp8 | Format::Mxfp4);
            assert!(is_plain || place.is_none(), "`{name}` in {format:?} has the release's name only");
            let Some(place) = place else {
                items.push(Self::single(&name, format, &shape));
                continue;
            };
            let Some((expert, half)) = place.slice else {
                items.push(Self { name: place.name, ..Self::single(&name, format, &shape) });
                continue;
            };
            let halves = halves_of(&place.name);
            let item_idx = *stacks.entry(place.name.clone()).or_insert_with(|| {
                items.push(Item { name: place.name, format, parts: Vec::new(), part: shape, halves: Some(halves) });
                items.len() - 1
            });
            let (item, at) = (&mut items[item_idx], expert * halves + half);
            item.parts.resize(item.parts.len().max(at + 1), String::new());
            item.parts[at] = name;
        }
        items
    }

    /// Name, type and shape of the tensors in the file: the elements, then the scales of a block format.
    fn entries(&self) -> Vec<(String, Dtype, Vec<usize>)> {
        let stacked = |shape: Vec<usize>| match self.halves {
            Some(halves) => vec![self.parts.len() / halves, halves * shape[0], shape[1]],
            None => shape,
        };
        let dtype = match self.format {
            Format::F32 => Dtype::F32,
            Format::Bf16 => Dtype::BF16,
            Format::I64 => Dtype::I64,
            Format::Fp8 => Dtype::F8_E4M3,
            Format::Mxfp4 => Dtype::I8,
        };
        let elements = (self.name.clone(), dtype, stacked(self.format.stored_shape(&self.part)));
        let scales = self.format.scale_shape(&self.part);
        let scales = scales.map(|shape| (scale_of(&self.name), Dtype::F8_E8M0, shape.to_vec()));
        std::iter::once(elements).chain(scales).collect()
    }

    /// Bytes in the file.
    pub fn num_bytes(&self) -> usize {
        self.parts.len() * self.format.num_bytes(&self.part)
    }
}

/// Writes `items` into folder `dir`: one file, or several of about `shard_bytes` with an index.
///
/// `tensor` gives a parameter in the format of its item; it is asked for one at a time.
///
/// # Errors
/// What `tensor` says, or the disk; files that were written whole stay.
pub fn write_sharded(
    dir: &Path,
    items: Vec<Item>,
    shard_bytes: usize,
    mut tensor: impl FnMut(&str) -> Result<HostTensor, CheckpointError>,
) -> Result<(), CheckpointError> {
    let total: usize = items.iter().map(Item::num_bytes).sum();
    let mut shards: Vec<(usize, Vec<Item>)> = Vec::new();
    for item in items {
        let bytes = item.num_bytes();
        match shards.last_mut() {
            Some((filled, shard)) if *filled + bytes <= shard_bytes => {
                *filled += bytes;
                shard.push(item);
            }
            _ => shards.push((bytes, vec![item])),
        }
    }
    let num_shards = shards.len();
    let mut weight_map = BTreeMap::new();
    for (shard_idx, (_, shard)) in shards.into_iter().enumerate() {
        let file = match num_shards {
            1 => WEIGHTS_FILE.to_owned(),
            _ => format!("model-{:05}-of-{num_shards:05}.safetensors", shard_idx + 1),
        };
        for item in &shard {
            weight_map.extend(item.entries().into_iter().map(|(name, _, _)| (name, file.clone())));
        }
        write_file(&dir.join(&file), shard, &mut tensor)?;
    }
    if num_shards == 1 {
        return Ok(());
    }
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let path = dir.join(INDEX_FILE);
    let text = serde_json::to_string_pretty(&index).expect("an index is JSON");
    write_atomically(&path, text.as_bytes()).map_err(|source| CheckpointError::Write { path, source })
}

/// Writes `tensors` to `path`, whole or not at all: a new file beside it is synced and renamed over it.
///
/// # Errors
/// When the disk refuses; the old file, if any, is then untouched.
pub fn save_weights(path: &Path, tensors: &Weights) -> Result<(), CheckpointError> {
    let items = tensors.iter().map(|(name, t)| Item::single(name, t.data.format(), &t.shape)).collect();
    write_file(path, items, &mut |name| Ok(tensors[name].clone()))
}

fn write_file(
    path: &Path,
    mut items: Vec<Item>,
    tensor: &mut impl FnMut(&str) -> Result<HostTensor, CheckpointError>,
) -> Result<(), CheckpointError> {
    // Wide elements first: then every tensor lies at a multiple of its element's size.
    let width = |item: &Item| match item.format {
        Format::I64 => 0,
        Format::F32 => 1,
        Format::Bf16 => 2,
        Format::Fp8 | Format::Mxfp4 => 3,
    };
    items.sort_by_key(width);
    let mut end = 0;
    let mut infos = Vec::new();
    for (name, dtype, shape) in items.iter().flat_map(Item::entries) {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        infos.push((name, TensorInfo { dtype, shape, data_offsets: (start, end) }));
    }
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos).expect("tensors that follow each other are a valid header");
    let mut header = serde_json::to_vec(&metadata).expect("a header is JSON");
    header.resize(header.len().next_multiple_of(8), b' ');
    let refused = |source| CheckpointError::Write { path: path.to_owned(), source };
    write_atomically_with(path, refused, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(refused)?;
        file.write_all(&header).map_err(refused)?;
        for item in &items {
            for part in &item.parts {
                let HostTensor { shape, data } = tensor(part)?;
                assert_eq!((&shape, data.format()), (&item.part, item.format), "tensor `{part}`");
                match data {
                    TensorData::F32(values) => write_elements(file, &values, |v| v.to_le_bytes()),
                    TensorData::Bf16(values) => write_elements(file, &values, |v| v.to_le_bytes()),
                    TensorData::I64(values) => write_elements(file, &values, |v| v.to_le_bytes()),
                    TensorData::Fp8 { codes, scales } | TensorData::Mxfp4 { codes, scales } => {
                        file.write_all(&codes).and_then(|()| file.write_all(&scales))
                    }
                }
                .map_err(refused)?;
            }
        }
        Ok(())
    })
}

fn write_elements<T: Copy, const N: usize>(
    file: &mut impl Write,
    values: &[T],
    bytes: impl Fn(T) -> [u8; N],
) -> std::io::Result<()> {
    // By the chunk: a call for every element costs more than the bytes.
    let mut buffer = Vec::with_capacity(4096 * N);
    for chunk in values.chunks(4096) {
        buffer.clear();
        buffer.extend(chunk.iter().flat_map(|v| bytes(*v)));
        file.write_all(&buffer)?;
    }
    Ok(())
}

/// Writes a file so that a reader, or a kill at any instant, sees the old content or the new, never a part.
///
/// # Errors
/// What the file system says; the temporary file is removed.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    write_atomically_with(path, |error| error, |file| file.write_all(bytes))
}

fn write_atomically_with<E>(
    path: &Path,
    refused: impl Fn(std::io::Error) -> E,
    fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
) -> Result<(), E> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or_else(|| refused(std::io::Error::other("the path names no file")))?;
    let temporary: PathBuf = dir.join(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
    let written = (|| {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&temporary).map_err(&refused)?);
        fill(&mut file)?;
        let file = file.into_inner().map_err(|e| refused(e.into_error()))?;
        let moved = file.sync_all().and_then(|()| std::fs::rename(&temporary, path));
        moved.and_then(|()| File::open(dir)?.sync_all()).map_err(&refused)
    })();
    if written.is_err() {
        // The first error is the one to report; what cannot be removed either is left.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
