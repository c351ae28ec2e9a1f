//! What a sequence keeps between steps (v4/SPEC section 6): per layer the window's keys, the compressed entries, and
//! the open block of each compressor. One coherent value: cloning it forks the sequence at its last token.
//! Shapes: c head width, e index width, w window, m tokens per block.

use kernels::compressor::{Candidates, pool};
use kernels::indexer;

use crate::model::{CSA_RATIO, LayerKind, ModelConfig, Trace};

/// The state of one sequence after `len` tokens.
#[derive(Clone, Debug)]
pub struct KvCache {
    /// Tokens that went through the model.
    pub len: usize,
    /// Tokens that went through its multi-token-prediction block: at most `len`, each with the one after it. Where it
    /// equals `len` that block has read the next token already, so a fork from here cannot take another.
    pub mtp_len: usize,
    /// Of each layer, and of the multi-token-prediction block, if there is one.
    pub(crate) layers: Vec<LayerCache>,
}

/// One layer's part.
#[derive(Clone, Debug)]
pub(crate) struct LayerCache {
    pub(crate) window: WindowCache,
    pub(crate) compressor: Option<CompressorCache>,
    pub(crate) indexer: Option<CompressorCache>,
}

/// The rotated keys of the last tokens, `[_, c]`; older ones are dropped now and then, not at every token.
#[derive(Clone, Debug)]
pub(crate) struct WindowCache {
    width: usize,
    window: usize,
    first: usize,
    rows: Vec<f32>,
}

/// A compressor's finished entries and its open block.
#[derive(Clone, Debug)]
pub(crate) struct CompressorCache {
    width: usize,
    ratio: usize,
    overlaps: bool,
    /// Finished entries, normalised and rotated.
    entries: Entries,
    /// The entry that is being finished.
    pooled: Vec<f32>,
    /// Rows of the open block, `[_, series * width]`: values, and gates with their position bias.
    pending: Rows,
    /// The first halves of the previous block's rows, `[m, width]` (overlapping compressors).
    previous: Rows,
}

/// Finished entries of a compressor, as their kernel wants them.
#[derive(Clone, Debug)]
enum Entries {
    /// What attention reads: `[B, width]`.
    Rows(Vec<f32>),
    /// What the indexer scores.
    Keys(indexer::Keys),
}

impl Entries {
    fn to_rows(&self) -> Vec<f32> {
        match self {
            Self::Rows(rows) => rows.clone(),
            Self::Keys(keys) => keys.to_rows(),
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Rows {
    kv: Vec<f32>,
    gate: Vec<f32>,
}

impl Rows {
    fn candidates(&self, stride: usize, from: usize) -> Candidates<'_> {
        Candidates { kv: &self.kv, gate: &self.gate, stride, from }
    }

    fn clear(&mut self) {
        self.kv.clear();
        self.gate.clear();
    }

    fn keep_first_halves(&mut self, of: &Self, row: usize, width: usize) {
        self.clear();
        for (kv, gate) in of.kv.chunks_exact(row).zip(of.gate.chunks_exact(row)) {
            self.kv.extend_from_slice(&kv[..width]);
            self.gate.extend_from_slice(&gate[..width]);
        }
    }

    fn reserve(&mut self, len: usize) {
        self.kv.reserve(len.saturating_sub(self.kv.len()));
        self.gate.reserve(len.saturating_sub(self.gate.len()));
    }
}

impl KvCache {
    /// An empty sequence.
    pub fn new(config: &ModelConfig) -> Self {
        let num_blocks = config.num_hidden_layers + config.num_nextn_predict_layers;
        let layers = (0..num_blocks).map(|i| {
            let kind = config.layer_kind(i);
            let compressor = |width, ratio, entries| CompressorCache {
                width,
                ratio,
                overlaps: kind == LayerKind::Csa,
                entries,
                pooled: Vec::new(),
                pending: Rows::default(),
                previous: Rows::default(),
            };
            LayerCache {
                window: WindowCache {
                    width: config.head_dim,
                    window: config.sliding_window,
                    first: 0,
                    rows: Vec::new(),
                },
                compressor: kind.ratio().map(|m| compressor(config.head_dim, m, Entries::Rows(Vec::new()))),
                indexer: (kind == LayerKind::Csa).then(|| {
                    let keys = indexer::Keys::new(config.index_head_dim);
                    compressor(config.index_head_dim, CSA_RATIO, Entries::Keys(keys))
                }),
            }
        });
        Self { len: 0, mtp_len: 0, layers: layers.collect() }
    }

    /// What is kept, under the names of golden cases: `layers.i.window_kv` (what the next query sees of the past),
    /// `layers.i.compressor.compressed_kv`, of the open block `buffer_kv` and `buffer_gate` (position bias included),
    /// of the block before `overlap_kv` and `overlap_gate`; the same for `layers.i.indexer`.
    pub fn trace(&self) -> Trace {
        let mut trace = Trace::default();
        for (i, layer) in self.layers.iter().enumerate() {
            let window = &layer.window;
            let seen = window.window.saturating_sub(1) * window.width;
            let rows = &window.rows[window.rows.len().saturating_sub(seen)..];
            trace.numbers(format!("layers.{i}.window_kv"), &[window.width], rows.to_vec());
            for (name, cache) in [("compressor", &layer.compressor), ("indexer", &layer.indexer)] {
                let Some(cache) = cache else { continue };
                // A row of an open block has a series for each block that it will be part of.
                let (width, series) = (cache.width, if cache.overlaps { 2 } else { 1 });
                for (part, width, values) in [
                    ("compressed_kv", width, &cache.entries.to_rows()),
                    ("buffer_kv", series * width, &cache.pending.kv),
                    ("buffer_gate", series * width, &cache.pending.gate),
                    ("overlap_kv", width, &cache.previous.kv),
                    ("overlap_gate", width, &cache.previous.gate),
                ] {
                    trace.numbers(format!("layers.{i}.{name}.{part}"), &[width], values.clone());
                }
            }
        }
        trace
    }

    /// Makes room for `tokens` more, so that decoding them one by one allocates nothing.
    pub fn reserve(&mut self, tokens: usize) {
        for layer in &mut self.layers {
            let window = &mut layer.window;
            let rows = window.rows.len() / window.width;
            let most = (2 * window.window).max(rows + 1).min(rows + tokens);
            window.rows.reserve((most - rows) * window.width);
            for cache in [&mut layer.compressor, &mut layer.indexer].into_iter().flatten() {
                let series = if cache.overlaps { 2 } else { 1 };
                let more = tokens.div_ceil(cache.ratio);
                match &mut cache.entries {
                    Entries::Rows(rows) => rows.reserve(more * cache.width),
                    Entries::Keys(keys) => keys.reserve(more),
                }
                cache.pooled.reserve(cache.width);
                cache.pending.reserve(cache.ratio * series * cache.width);
                cache.previous.reserve((series - 1) * cache.ratio * cache.width);
            }
        }
    }

    /// Bytes that a sequence of `len` tokens keeps at most.
    pub fn num_bytes_at(config: &ModelConfig, len: usize) -> usize {
        let layer = |i: usize| {
            let kind = config.layer_kind(i);
            let (c, e) = (config.head_dim, config.index_head_dim);
            let window = len.min(2 * config.sliding_window) * c;
            let compressed = |width: usize, m: usize, series: usize| len / m * width + 2 * 2 * m * series * width;
            window
                + match kind {
                    LayerKind::Window => 0,
                    LayerKind::Csa => compressed(c, CSA_RATIO, 2) + compressed(e, CSA_RATIO, 2),
                    LayerKind::Hca { ratio } => compressed(c, ratio, 1),
                }
        };
        4 * (0..config.num_hidden_layers).map(layer).sum::<usize>()
    }
}

impl WindowCache {
    /// Forgets what no later query sees. Called between steps, so that a chunk's own queries find all they need.
    pub(crate) fn trim(&mut self) {
        let rows = self.rows.len() / self.width;
        if rows >= 2 * self.window {
            let drop = rows - (self.window - 1);
            self.rows.drain(..drop * self.width);
            self.first += drop;
        }
    }

    pub(crate) fn push(&mut self, kv: &[f32]) {
        self.rows.extend_from_slice(kv);
    }

    /// The keys that the query at `position` sees, its own included: `[min(w, position + 1), c]`.
    pub(crate) fn visible(&self, position: usize) -> &[f32] {
        let from = (position + 1).saturating_sub(self.window);
        &self.rows[(from - self.first) * self.width..(position + 1 - self.first) * self.width]
    }
}

impl CompressorCache {
    /// Takes the next token's row, the gate's position bias `ape` apart; at the end of a block `finish` (norm, rotation) is
    /// given its number and its pooled entry, which is then kept.
    pub(crate) fn push(&mut self, kv: &[f32], gate: &[f32], ape: &[f32], finish: impl FnOnce(usize, &mut [f32])) {
        let row = kv.len();
        self.pending.kv.extend_from_slice(kv);
        self.pending.gate.extend(gate.iter().zip(ape).map(|(gate, ape)| gate + ape));
        if self.pending.kv.len() < self.ratio * row {
            return;
        }
        let width = self.width;
        // The current block's series is the second half of a row where blocks overlap, the whole row else.
        self.pooled.resize(width, 0.0);
        pool([self.previous.candidates(width, 0), self.pending.candidates(row, row - width)], &mut self.pooled);
        if self.overlaps {
            self.previous.keep_first_halves(&self.pending, row, width);
        }
        self.pending.clear();
        match &mut self.entries {
            Entries::Rows(rows) => {
                finish(rows.len() / width, &mut self.pooled);
                rows.extend_from_slice(&self.pooled);
            }
            Entries::Keys(keys) => {
                finish(keys.len(), &mut self.pooled);
                keys.push(&self.pooled);
            }
        }
    }

    /// Finished entries, `[B, width]`.
    ///
    /// # Panics
    /// When it is an indexer's.
    pub(crate) fn entries(&self) -> &[f32] {
        let Entries::Rows(rows) = &self.entries else { panic!("an indexer keeps keys, not entries") };
        rows
    }

    /// An indexer's keys.
    ///
    /// # Panics
    /// When it is another compressor's.
    pub(crate) fn keys(&self) -> &indexer::Keys {
        let Entries::Keys(keys) = &self.entries else { panic!("only an indexer keeps keys") };
        keys
    }

    /// Finished entries one after the other, for traces.
    pub(crate) fn to_rows(&self) -> Vec<f32> {
        self.entries.to_rows()
    }

    /// Blocks that the query at `position` may see: those whose last token is no later than itself.
    pub(crate) fn num_visible(&self, position: usize) -> usize {
        (position + 1) / self.ratio
    }
}
