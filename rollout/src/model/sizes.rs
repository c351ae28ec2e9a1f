//! How large a model is, from its configuration alone: parameters by kind, bytes by layout, cache bytes by context.
//! Nothing is allocated, so that models of any size can be asked about.

use std::fmt;

use super::checkpoint::{Format, Layout, is_routed_expert};
use super::{LayerKind, MTP_PREFIX, ModelConfig};
use crate::kv_cache::KvCache;

/// Context lengths that caches are told for: 4K, 128K and 1M tokens.
const CONTEXTS: [usize; 3] = [4096, 131_072, 1_048_576];
/// What multi-token prediction is called; a token uses it in training only.
const MTP: &str = "multi-token prediction";

/// Parameters of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindSize {
    /// What they are for.
    pub kind: &'static str,
    /// How many there are.
    pub total: usize,
    /// How many of them one token uses.
    pub active: usize,
}

/// The sizes of a model; displayed as a table.
#[derive(Clone, Debug)]
pub struct Sizes<'a> {
    config: &'a ModelConfig,
    parameters: Vec<(String, Vec<usize>)>,
    /// By kind, in the order of a forward pass.
    pub kinds: Vec<KindSize>,
}

fn kind_of(name: &str) -> &'static str {
    let contains = |part: &str| name.contains(part);
    match name {
        "embed.weight" => "embedding",
        "head.weight" => "output head",
        _ if name.starts_with(MTP_PREFIX) => MTP,
        _ if contains("hc_") => "hyper-connections",
        _ if is_routed_expert(name) => "routed experts",
        _ if contains(".shared_experts.") => "shared experts",
        _ if contains(".ffn.gate.") => "routers",
        _ if contains(".indexer.") => "indexers",
        _ if contains(".compressor.") => "compressors",
        _ if contains("norm") => "norms",
        _ => "attention",
    }
}

impl<'a> Sizes<'a> {
    /// Counts the parameters of `config`.
    pub fn new(config: &'a ModelConfig) -> Self {
        let order = [
            "embedding",
            "hyper-connections",
            "norms",
            "attention",
            "compressors",
            "indexers",
            "routers",
            "routed experts",
            "shared experts",
            "output head",
            MTP,
        ];
        let mut kinds: Vec<KindSize> = order.map(|kind| KindSize { kind, total: 0, active: 0 }).into();
        let parameters = config.parameters();
        for (name, shape) in &parameters {
            let kind = kind_of(name);
            let size = kinds.iter_mut().find(|size| size.kind == kind).expect("every kind is in the list");
            size.total += shape.iter().product::<usize>();
        }
        for size in &mut kinds {
            size.active = match size.kind {
                // Every expert of a layer is as large as the other.
                "routed experts" => size.total / config.n_routed_experts * config.num_experts_per_tok,
                MTP => 0,
                _ => size.total,
            };
        }
        kinds.retain(|size| size.total > 0);
        Self { config, parameters, kinds }
    }

    /// All parameters, and those that one token uses (its share of the routed experts; no multi-token prediction).
    pub fn total(&self) -> (usize, usize) {
        let sum = |f: fn(&KindSize) -> usize| self.kinds.iter().map(f).sum();
        (sum(|size| size.total), sum(|size| size.active))
    }

    /// Bytes of a checkpoint in `layout`, hash tables included.
    pub fn checkpoint_bytes(&self, layout: Layout) -> usize {
        let parameters: usize = self.parameters.iter().map(|(name, shape)| layout.format(name).num_bytes(shape)).sum();
        let tables = self.config.num_hash_layers * Format::I64.num_bytes(&self.config.hash_table_shape());
        parameters + tables
    }

    /// Bytes that a sequence of `len` tokens keeps in the release's cache layout (v4/SPEC section 6), indexer keys in
    /// FP8 or FP4; without the open blocks, which do not grow with the sequence.
    pub fn release_cache_bytes(&self, len: usize, fp4_index: bool) -> usize {
        let (c, r, e) = (self.config.head_dim, self.config.qk_rope_head_dim, self.config.index_head_dim);
        // e4m3 channels, bf16 rotary channels, one scale per 64 channels, padded to 8 bytes.
        let entry = (c - r + 2 * r + (c - r).div_ceil(64)).next_multiple_of(8);
        let key = if fp4_index { e / 2 + e / 32 } else { e + 4 };
        let layer = |layer| {
            let window = len.min(self.config.sliding_window) * entry;
            let kind = self.config.layer_kind(layer);
            let blocks = kind.ratio().map_or(0, |m| len / m);
            let keys = if kind == LayerKind::Csa { blocks * key } else { 0 };
            window + blocks * entry + keys
        };
        (0..self.config.num_hidden_layers).map(layer).sum()
    }
}

/// `1234567` as `1,234,567`.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap_or("")).collect();
    groups.join(",")
}

/// A count in billions where it is that large.
fn billions(n: usize) -> String {
    if n < 100_000_000 { grouped(n) } else { format!("{:.2}e9", n as f64 / 1e9) }
}

fn bytes(n: usize) -> String {
    match n as f64 {
        n if n >= 1e10 => format!("{:.1} GB", n / 1e9),
        n if n >= 1e7 => format!("{:.1} MB", n / 1e6),
        n => format!("{:.1} kB", n / 1e3),
    }
}

impl fmt::Display for Sizes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<24}{:>20}{:>20}", "parameters", "in all", "used by a token")?;
        for KindSize { kind, total, active } in &self.kinds {
            writeln!(f, "  {kind:<22}{:>20}{:>20}", grouped(*total), grouped(*active))?;
        }
        let (total, active) = self.total();
        writeln!(f, "  {:<22}{:>20}{:>20}", "sum", grouped(total), grouped(active))?;
        let of = |kind| self.kinds.iter().find(|size| size.kind == kind).map_or(0, |size| size.total);
        let (mtp, embedding) = (of(MTP), of("embedding"));
        let without_mtp = match mtp {
            0 => String::new(),
            mtp => format!("without {MTP} {}; ", billions(total - mtp)),
        };
        let multiplied = billions(active - embedding);
        writeln!(f, "  {without_mtp}a token looks one row up in the embedding and multiplies by {multiplied}")?;
        writeln!(f, "checkpoint")?;
        for layout in Layout::ALL {
            writeln!(f, "  {:<22}{:>20}", layout.to_string(), bytes(self.checkpoint_bytes(layout)))?;
        }
        let [engine, fp8, fp4] = ["this engine, f32", "FP8, index FP8", "FP8, index FP4"];
        writeln!(f, "{:<24}{engine:>26}{fp8:>26}{fp4:>26}", "cache of a sequence")?;
        for len in CONTEXTS.into_iter().filter(|&len| len <= self.config.max_position_embeddings) {
            let cell = |n: usize| format!("{} ({} B/token)", bytes(n), n.div_ceil(len));
            writeln!(
                f,
                "  {:<22}{:>26}{:>26}{:>26}",
                format!("{len} tokens"),
                cell(KvCache::num_bytes_at(self.config, len)),
                cell(self.release_cache_bytes(len, false)),
                cell(self.release_cache_bytes(len, true)),
            )?;
        }
        Ok(())
    }
}
