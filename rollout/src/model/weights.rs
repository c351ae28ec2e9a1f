//! The engine's weights: packed for the kernels, one version at a time, each verified by checksum before it is used.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use half::bf16;
use kernels::linear::{Linear, fp8_is_exact};
use kernels::quant::{FP8_TILE, Fp8, Mxfp4};
use xxhash_rust::xxh3::Xxh3;

use super::checkpoint::{Checkpoint, CheckpointError, Format, is_routed_expert};
use super::{HostTensor, LayerKind, MTP_PREFIX, ModelConfig, TensorData, Weights};

/// New weights for the engine, as the trainer publishes them.
#[derive(Clone, Debug)]
pub struct WeightUpdate {
    /// Counts up; every token carries the version that made it.
    pub version: u64,
    /// All parameters and buffers in the engine's format (see [`to_engine_format`]).
    pub weights: Weights,
    /// [`checksum`] of `weights`, made by the sender.
    pub checksum: u64,
}

/// Why new weights were refused; the engine then still serves the old ones.
#[derive(Debug, thiserror::Error)]
pub enum WeightUpdateError {
    /// The engine holds something else than was sent.
    #[error(
        "weights of version {version} arrived with checksum {found:016x}, the sender made {expected:016x}; \
         the engine keeps version {current}: publish again"
    )]
    Checksum {
        /// The version that was to be loaded.
        version: u64,
        /// What the engine computed.
        found: u64,
        /// What the sender said.
        expected: u64,
        /// What the engine serves.
        current: u64,
    },
    /// A tensor that the model has not, or of another shape.
    #[error("tensor `{name}` of shape {found:?} arrived, expected {expected}; the engine keeps what it serves")]
    Tensor {
        /// Its name.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// What was expected.
        expected: String,
    },
    /// A tensor did not arrive.
    #[error("tensor `{name}` did not arrive with version {version}; the engine keeps what it serves: publish again")]
    Missing {
        /// Its name.
        name: String,
        /// The version that was to be loaded.
        version: u64,
    },
    /// A folder could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The version does not count up.
    #[error(
        "weights of version {version} arrived, but the engine already serves version {current}; versions must count up"
    )]
    Stale {
        /// The version that arrived.
        version: u64,
        /// What the engine serves.
        current: u64,
    },
}

/// The checksum over names, shapes and bytes of all tensors, in name order (xxh3, 64 bits).
pub fn checksum(weights: &Weights) -> u64 {
    checksum_of(weights.iter().map(|(name, tensor)| (name.as_str(), Cow::Borrowed(tensor))))
}

fn checksum_of<'a>(tensors: impl Iterator<Item = (&'a str, Cow<'a, HostTensor>)>) -> u64 {
    let mut hash = Xxh3::new();
    for (name, tensor) in tensors {
        hash.update(name.as_bytes());
        for dim in &tensor.shape {
            hash.update(&(*dim as u64).to_le_bytes());
        }
        hash.update(&tensor.bytes());
    }
    hash.digest()
}

/// Turns masters, or a checkpoint's tensors, into what the engine computes on: MXFP4 codes for the routed experts where
/// the model says so; other matrices as they are, in f32, bf16 or FP8; f32 for the rest.
///
/// This is the one place where weights are quantised for rollouts.
pub fn to_engine_format(config: &ModelConfig, weights: Weights) -> Weights {
    weights.into_iter().map(|(name, tensor)| (name.clone(), engine_tensor(config, &name, tensor))).collect()
}

/// [`to_engine_format`] for one tensor. Codes that the kernels compute on stay as they are.
fn engine_tensor(config: &ModelConfig, name: &str, tensor: HostTensor) -> HostTensor {
    let is_expert = is_routed_expert(name);
    match &tensor.data {
        TensorData::I64(_) => tensor,
        TensorData::Mxfp4 { .. } if is_expert => tensor,
        _ if config.experts_are_fp4() && is_expert => tensor.into_format(Format::Mxfp4),
        TensorData::Bf16(_) if is_matrix(name, &tensor.shape) => tensor,
        TensorData::Fp8 { codes, scales } if is_matrix(name, &tensor.shape) => {
            // The parts of a matrix of several groups are whole tiles, or they are no FP8 matrices themselves.
            let groups = num_parts(config, name);
            let whole_tiles = groups == 1 || (tensor.shape[0] / groups).is_multiple_of(FP8_TILE);
            if whole_tiles && fp8_is_exact(codes, scales) { tensor } else { tensor.into_f32() }
        }
        _ => tensor.into_f32(),
    }
}

/// Whether a parameter is multiplied with, rather than looked up or added.
fn is_matrix(name: &str, shape: &[usize]) -> bool {
    shape.len() == 2 && !name.ends_with(".ape") && name != "embed.weight"
}

/// Matrices that stand one below the other in a parameter.
fn num_parts(config: &ModelConfig, name: &str) -> usize {
    if name.ends_with(".wo_a.weight") { config.o_groups } else { 1 }
}

/// Index of a matrix in [`Model::matrices`].
type MatrixId = usize;
/// Index of a vector in [`Model::vectors`].
type VectorId = usize;

/// A weight matrix: packed parts that stand one below the other (one, or one per output group).
#[derive(Debug)]
struct Matrix {
    name: String,
    shape: Vec<usize>,
    parts: Vec<Linear>,
}

/// A model ready to run: config, packed weights, and where each layer finds its own. Clones share the weights.
#[derive(Clone, Debug)]
pub struct Model {
    pub(super) config: ModelConfig,
    version: u64,
    matrices: Arc<Vec<Matrix>>,
    vectors: Arc<Vec<(String, HostTensor)>>,
    hash_tables: Arc<Vec<(String, HostTensor)>>,
    pub(super) embed: VectorId,
    pub(super) layers: Vec<Layer>,
    pub(super) collapse: Collapse,
    pub(super) head: MatrixId,
    pub(super) mtp: Option<Mtp>,
}

/// From streams to the normalised hidden state that the head reads.
#[derive(Clone, Debug)]
pub(super) struct Collapse {
    pub(super) gate: MatrixId,
    pub(super) base: VectorId,
    pub(super) scale: VectorId,
    pub(super) norm: VectorId,
}

/// The multi-token-prediction block; embedding and head are the model's.
#[derive(Clone, Debug)]
pub(super) struct Mtp {
    pub(super) e_proj: MatrixId,
    pub(super) h_proj: MatrixId,
    pub(super) enorm: VectorId,
    pub(super) hnorm: VectorId,
    pub(super) layer: Layer,
    pub(super) collapse: Collapse,
}

#[derive(Clone, Debug)]
pub(super) struct HyperConnection {
    pub(super) gate: MatrixId,
    pub(super) base: VectorId,
    pub(super) scale: VectorId,
}

#[derive(Clone, Debug)]
pub(super) struct Compressor {
    pub(super) wkv: MatrixId,
    pub(super) wgate: MatrixId,
    pub(super) ape: VectorId,
    pub(super) norm: VectorId,
}

#[derive(Clone, Debug)]
pub(super) struct Indexer {
    pub(super) compressor: Compressor,
    pub(super) wq_b: MatrixId,
    pub(super) weights_proj: MatrixId,
}

#[derive(Clone, Debug)]
pub(super) struct Expert {
    pub(super) w1: MatrixId,
    pub(super) w2: MatrixId,
    pub(super) w3: MatrixId,
}

#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// What its ops are called in a trace.
    pub(super) name: String,
    pub(super) kind: LayerKind,
    pub(super) hc_attn: HyperConnection,
    pub(super) attn_norm: VectorId,
    pub(super) wq_a: MatrixId,
    pub(super) q_norm: VectorId,
    pub(super) wq_b: MatrixId,
    pub(super) wkv: MatrixId,
    pub(super) kv_norm: VectorId,
    pub(super) sink: VectorId,
    pub(super) wo_a: MatrixId,
    pub(super) wo_b: MatrixId,
    pub(super) compressor: Option<Compressor>,
    pub(super) indexer: Option<Indexer>,
    pub(super) hc_ffn: HyperConnection,
    pub(super) ffn_norm: VectorId,
    pub(super) gate: MatrixId,
    /// Selection bias of a score-routed layer.
    pub(super) gate_bias: Option<VectorId>,
    pub(super) experts: Vec<Expert>,
    pub(super) shared: Expert,
}

impl Model {
    /// Packs `weights` (already in the engine's format) for the kernels.
    ///
    /// # Panics
    /// When a tensor that the configuration names is not there: readers and the trainer see to that.
    pub fn new(config: &ModelConfig, version: u64, weights: &Weights) -> Self {
        let packed = Self::pack(config, version, |name, _| match weights.get(name) {
            Some(tensor) => Ok::<_, Infallible>(Cow::Borrowed(tensor)),
            None => panic!("tensor `{name}` is missing"),
        });
        match packed {
            Ok(model) => model,
        }
    }

    /// Reads the checkpoint in folder `dir` and packs it tensor by tensor, as version 0: beside the packed model, no
    /// more than one tensor is in memory.
    ///
    /// # Errors
    /// As [`load_weights`](super::checkpoint::load_weights).
    pub fn load(dir: &Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        Self::load_as(dir, config, |_, tensor| tensor)
    }

    /// [`Model::load`] with each parameter passed through `change` first, which keeps its shape.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_as(
        dir: &Path,
        config: &ModelConfig,
        change: impl Fn(&str, HostTensor) -> HostTensor,
    ) -> Result<Self, CheckpointError> {
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.check_against(config)?;
        let tables: HashSet<String> = config.hash_tables().into_iter().collect();
        Self::pack(config, 0, |name, shape| {
            let tensor = match tables.contains(name) {
                true => checkpoint.read_table(name, shape, config.n_routed_experts)?,
                false => engine_tensor(config, name, change(name, checkpoint.read(name, shape)?)),
            };
            Ok(Cow::Owned(tensor))
        })
    }

    /// Packs what `tensor` gives for a name and a shape.
    fn pack<'a, E>(
        config: &ModelConfig,
        version: u64,
        mut tensor: impl FnMut(&str, &[usize]) -> Result<Cow<'a, HostTensor>, E>,
    ) -> Result<Self, E> {
        let mut builder = ModelBuilder::new(config);
        let tables = config.hash_tables().into_iter().map(|name| (name, config.hash_table_shape().to_vec()));
        for (name, shape) in config.parameters().into_iter().chain(tables) {
            builder.push(&name, tensor(&name, &shape)?).unwrap_or_else(|error| panic!("{error}"));
        }
        Ok(builder.finish(version).unwrap_or_else(|error| panic!("{error}")))
    }

    /// The same weights under another version.
    pub fn with_version(&self, version: u64) -> Self {
        Self { version, ..self.clone() }
    }

    /// Its configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The version of its weights.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Bytes of the packed weights.
    pub fn num_bytes(&self) -> usize {
        let matrices: usize = self.matrices.iter().flat_map(|m| &m.parts).map(Linear::num_bytes).sum();
        let tensors = self.vectors.iter().chain(&*self.hash_tables);
        matrices + tensors.map(|(_, t)| t.bytes().len()).sum::<usize>()
    }

    /// Everything the kernels compute on, unpacked again: what the checksum after an update is made over.
    pub fn export(&self) -> Weights {
        let matrices = self.matrices.iter().map(|m| (m.name.clone(), unpack(m)));
        matrices.chain(self.vectors.iter().cloned()).chain(self.hash_tables.iter().cloned()).collect()
    }

    /// [`checksum`] of [`Model::export`], one tensor at a time.
    pub fn checksum(&self) -> u64 {
        let matrices = self.matrices.iter().map(|matrix| (matrix.name.as_str(), Err(matrix)));
        let tensors = self.vectors.iter().chain(&*self.hash_tables).map(|(name, tensor)| (name.as_str(), Ok(tensor)));
        let mut all: Vec<_> = matrices.chain(tensors).collect();
        all.sort_unstable_by_key(|(name, _)| *name);
        checksum_of(all.into_iter().map(|(name, tensor)| match tensor {
            Ok(tensor) => (name, Cow::Borrowed(tensor)),
            Err(matrix) => (name, Cow::Owned(unpack(matrix))),
        }))
    }

    pub(super) fn matrix(&self, id: MatrixId) -> &Linear {
        &self.matrices[id].parts[0]
    }

    pub(super) fn matrix_groups(&self, id: MatrixId) -> &[Linear] {
        &self.matrices[id].parts
    }

    pub(super) fn vector(&self, id: VectorId) -> &[f32] {
        self.vectors[id].1.as_f32()
    }

    /// The experts of `token` in hash layer `layer`.
    pub(super) fn hash_experts(&self, layer: usize, token: u32) -> &[i64] {
        let k = self.config.num_experts_per_tok;
        let TensorData::I64(table) = &self.hash_tables[layer].1.data else { panic!("a hash table holds integers") };
        &table[token as usize * k..][..k]
    }
}

/// A model in the making: its tensors come in any order, and each is packed as it comes.
#[derive(Debug)]
pub struct ModelBuilder {
    config: ModelConfig,
    /// What is still to come.
    shapes: HashMap<String, Vec<usize>>,
    matrices: HashMap<String, Matrix>,
    tensors: HashMap<String, HostTensor>,
}

impl ModelBuilder {
    /// For a model of which nothing is there yet.
    pub fn new(config: &ModelConfig) -> Self {
        let tables = config.hash_tables().into_iter().map(|name| (name, config.hash_table_shape().to_vec()));
        let shapes = config.parameters().into_iter().chain(tables).collect();
        Self { config: config.clone(), shapes, matrices: HashMap::new(), tensors: HashMap::new() }
    }

    /// Takes a tensor in the engine's format.
    ///
    /// # Errors
    /// When the model has no such tensor, or it came before.
    pub fn push(&mut self, name: &str, tensor: Cow<'_, HostTensor>) -> Result<(), WeightUpdateError> {
        let refuse =
            |expected| Err(WeightUpdateError::Tensor { name: name.to_owned(), found: tensor.shape.clone(), expected });
        match self.shapes.get(name) {
            None => return refuse("each of the model's tensors once and no other".to_owned()),
            Some(shape) if *shape != tensor.shape => return refuse(format!("shape {shape:?}")),
            Some(_) => {}
        }
        let is_table = self.config.hash_tables().iter().any(|table| table == name);
        match (is_table, matches!(tensor.data, TensorData::I64(_))) {
            (true, false) => return refuse("integers".to_owned()),
            (false, true) => return refuse("numbers that are no integers".to_owned()),
            _ => {}
        }
        self.shapes.remove(name);
        if is_matrix(name, &tensor.shape) && !is_table {
            self.matrices.insert(name.to_owned(), pack(name.to_owned(), &tensor, num_parts(&self.config, name)));
        } else {
            self.tensors.insert(name.to_owned(), tensor.into_owned());
        }
        Ok(())
    }

    /// The model, when everything has come.
    ///
    /// # Errors
    /// When a tensor has not.
    pub fn finish(mut self, version: u64) -> Result<Model, WeightUpdateError> {
        if let Some(name) = self.shapes.into_keys().min() {
            return Err(WeightUpdateError::Missing { name, version });
        }
        let config = &self.config;
        let (mut matrices, mut vectors, mut ids) = (Vec::new(), Vec::new(), HashMap::new());
        for (name, _) in config.parameters() {
            if let Some(matrix) = self.matrices.remove(&name) {
                ids.insert(name, matrices.len());
                matrices.push(matrix);
            } else if let Some(tensor) = self.tensors.remove(&name) {
                ids.insert(name.clone(), vectors.len());
                vectors.push((name, tensor));
            }
        }
        let tables = config.hash_tables().into_iter();
        let hash_tables = tables.filter_map(|name| self.tensors.remove(&name).map(|table| (name, table))).collect();
        let id = |name: &str| *ids.get(name).unwrap_or_else(|| panic!("`{name}` is not a parameter of this model"));
        let layers = (0..config.num_hidden_layers).map(|i| layer(config, i, &format!("layers.{i}"), &id)).collect();
        let collapse = |prefix: &str| Collapse {
            gate: id(&format!("{prefix}hc_head_fn")),
            base: id(&format!("{prefix}hc_head_base")),
            scale: id(&format!("{prefix}hc_head_scale")),
            norm: id(&format!("{prefix}norm.weight")),
        };
        let mtp = config.has_mtp().then(|| Mtp {
            e_proj: id(&format!("{MTP_PREFIX}.e_proj.weight")),
            h_proj: id(&format!("{MTP_PREFIX}.h_proj.weight")),
            enorm: id(&format!("{MTP_PREFIX}.enorm.weight")),
            hnorm: id(&format!("{MTP_PREFIX}.hnorm.weight")),
            layer: Layer { name: "mtp".into(), ..layer(config, config.num_hidden_layers, MTP_PREFIX, &id) },
            collapse: collapse(&format!("{MTP_PREFIX}.")),
        });
        Ok(Model {
            config: self.config.clone(),
            version,
            matrices: Arc::new(matrices),
            vectors: Arc::new(vectors),
            hash_tables: Arc::new(hash_tables),
            embed: id("embed.weight"),
            layers,
            collapse: collapse(""),
            head: id("head.weight"),
            mtp,
        })
    }
}

fn pack(name: String, tensor: &HostTensor, num_parts: usize) -> Matrix {
    let (rows, columns) = (tensor.shape[0] / num_parts, tensor.shape[1]);
    let size = rows * columns;
    let parts = match &tensor.data {
        TensorData::F32(values) => {
            values.chunks_exact(size).map(|part| Linear::from_f32(rows, columns, part)).collect()
        }
        TensorData::Bf16(values) => {
            let bits: Vec<u16> = values.iter().map(|v| v.to_bits()).collect();
            bits.chunks_exact(size).map(|part| Linear::from_bf16(rows, columns, part)).collect()
        }
        TensorData::Fp8 { codes, scales } => {
            let parts = codes.chunks_exact(size).zip(scales.chunks_exact(scales.len() / num_parts));
            let part = |(codes, scales): (&[u8], &[u8])| Fp8 { codes: codes.to_vec(), scales: scales.to_vec() };
            let packed = parts.map(|m| Linear::from_fp8(rows, columns, &part(m)));
            packed
                .map(|part| part.unwrap_or_else(|| panic!("tensor `{name}` holds FP8 codes beyond the kernels")))
                .collect()
        }
        TensorData::Mxfp4 { codes, scales } => {
            assert_eq!(num_parts, 1, "tensor `{name}`: only experts are MXFP4");
            let m = Mxfp4 { codes: codes.clone(), scales: scales.clone() };
            vec![Linear::from_mxfp4(rows, columns, &m)]
        }
        other => panic!("tensor `{name}` holds {}, which is not the engine's format", other.kind()),
    };
    Matrix { name, shape: tensor.shape.clone(), parts }
}

fn unpack(matrix: &Matrix) -> HostTensor {
    let shape = matrix.shape.clone();
    let mut data: Option<TensorData> = None;
    for part in &matrix.parts {
        let part = None
            .or_else(|| part.to_f32().map(TensorData::F32))
            .or_else(|| part.to_bf16().map(|bits| TensorData::Bf16(bits.into_iter().map(bf16::from_bits).collect())))
            .or_else(|| part.to_fp8().map(|Fp8 { codes, scales }| TensorData::Fp8 { codes, scales }))
            .or_else(|| part.to_mxfp4().map(|Mxfp4 { codes, scales }| TensorData::Mxfp4 { codes, scales }));
        match (&mut data, part.expect("a packed matrix is in one of four formats")) {
            (None, part) => data = Some(part),
            (Some(TensorData::F32(all)), TensorData::F32(part)) => all.extend(part),
            (Some(TensorData::Bf16(all)), TensorData::Bf16(part)) => all.extend(part),
            (Some(TensorData::Fp8 { codes, scales }), TensorData::Fp8 { codes: more, scales: more_scales }) => {
                codes.extend(more);
                scales.extend(more_scales);
            }
            (Some(all), part) => panic!("parts in {} and {}", all.kind(), part.kind()),
        }
    }
    HostTensor { shape, data: data.expect("a matrix has a part") }
}

fn layer(config: &ModelConfig, i: usize, prefix: &str, id: &dyn Fn(&str) -> usize) -> Layer {
    let of = |name: &str| id(&format!("{prefix}.{name}"));
    let hyper = |part: &str| HyperConnection {
        gate: of(&format!("hc_{part}_fn")),
        base: of(&format!("hc_{part}_base")),
        scale: of(&format!("hc_{part}_scale")),
    };
    let compressor = |prefix: &str| Compressor {
        wkv: of(&format!("{prefix}compressor.wkv.weight")),
        wgate: of(&format!("{prefix}compressor.wgate.weight")),
        ape: of(&format!("{prefix}compressor.ape")),
        norm: of(&format!("{prefix}compressor.norm.weight")),
    };
    let expert = |prefix: &str| Expert {
        w1: of(&format!("ffn.{prefix}.w1.weight")),
        w2: of(&format!("ffn.{prefix}.w2.weight")),
        w3: of(&format!("ffn.{prefix}.w3.weight")),
    };
    let kind = config.layer_kind(i);
    Layer {
        name: prefix.to_owned(),
        kind,
        hc_attn: hyper("attn"),
        attn_norm: of("attn_norm.weight"),
        wq_a: of("attn.wq_a.weight"),
        q_norm: of("attn.q_norm.weight"),
        wq_b: of("attn.wq_b.weight"),
        wkv: of("attn.wkv.weight"),
        kv_norm: of("attn.kv_norm.weight"),
        sink: of("attn.attn_sink"),
        wo_a: of("attn.wo_a.weight"),
        wo_b: of("attn.wo_b.weight"),
        compressor: kind.ratio().map(|_| compressor("attn.")),
        indexer: (kind == LayerKind::Csa).then(|| Indexer {
            compressor: compressor("attn.indexer."),
            wq_b: of("attn.indexer.wq_b.weight"),
            weights_proj: of("attn.indexer.weights_proj.weight"),
        }),
        hc_ffn: hyper("ffn"),
        ffn_norm: of("ffn_norm.weight"),
        gate: of("ffn.gate.weight"),
        gate_bias: (!config.is_hash_layer(i)).then(|| of("ffn.gate.bias")),
        experts: (0..config.n_routed_experts).map(|e| expert(&format!("experts.{e}"))).collect(),
        shared: expert("shared_experts"),
    }
}
