//! What a sequence keeps between steps (v4/SPEC section 6): per layer the window's keys, the compressed entries, and
//! the open block of each compressor, all as rows in pages of one pool. One coherent value: cloning it forks the sequence
//! at its last token, and the pages are shared until one of the two writes into them.
//! Shapes: c head width, e index width, w window, m tokens per block.

use kernels::compressor::{Candidates, pool};
use kernels::indexer::{self, PANEL, put_key};
use kernels::pages::{OutOfPages, Page, PagePool, PagedRows, rows_per_page_log2};

use crate::model::{CSA_RATIO, LayerKind, ModelConfig, Trace};

/// Keys, or compressed entries, of a page.
const PAGE_ROWS: usize = 16;

/// A pool of `capacity` pages for sequences of this model: a page holds sixteen keys of a layer.
pub fn page_pool(config: &ModelConfig, capacity: usize) -> PagePool {
    PagePool::new(PAGE_ROWS * config.head_dim.max(config.index_head_dim), capacity)
}

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
    /// How many of the layers are the model's own.
    num_hidden_layers: usize,
    pages: PagePool,
}

/// A point to which [`KvCache::take_back`] can return: the rows of each compressor's previous block.
#[derive(Clone, Debug)]
pub struct Mark(Vec<RowPages>);

/// One layer's part.
#[derive(Clone, Debug)]
pub(crate) struct LayerCache {
    pub(crate) window: WindowCache,
    pub(crate) compressor: Option<CompressorCache>,
    pub(crate) indexer: Option<CompressorCache>,
}

/// Rows in pages, written at their end. `prepare` makes room; only then is there something to write to.
#[derive(Clone, Debug)]
struct RowPages {
    width: usize,
    /// Rows of a page, as a power of two.
    shift: u32,
    pages: Vec<Page>,
    len: usize,
}

impl RowPages {
    fn new(pool: &PagePool, width: usize) -> Self {
        Self { width, shift: rows_per_page_log2(pool.page_len(), width), pages: Vec::new(), len: 0 }
    }

    fn num_pages(&self, rows: usize) -> usize {
        rows.div_ceil(1 << self.shift)
    }

    fn view(&self) -> PagedRows<'_> {
        PagedRows::new(&self.pages, self.width, self.shift)
    }

    /// Makes rows `from..to` this sequence's own, whatever they hold.
    fn prepare(&mut self, pool: &PagePool, from: usize, to: usize) -> Result<(), OutOfPages> {
        if from >= to {
            return Ok(());
        }
        for at in from >> self.shift..self.num_pages(to) {
            match self.pages.get_mut(at) {
                Some(page) => page.make_unique()?,
                None => self.pages.push(pool.take()?),
            }
        }
        Ok(())
    }

    /// Gives back the pages behind the last row.
    fn release_spare(&mut self) {
        self.pages.truncate(self.num_pages(self.len));
    }

    fn row_mut(&mut self, i: usize) -> &mut [f32] {
        let page = self.pages[i >> self.shift].get_mut().expect("a page that was prepared for writing");
        &mut page[(i & ((1 << self.shift) - 1)) * self.width..][..self.width]
    }

    fn push(&mut self) -> &mut [f32] {
        self.len += 1;
        self.row_mut(self.len - 1)
    }

    fn to_vec(&self, from: usize, columns: std::ops::Range<usize>) -> Vec<f32> {
        let view = self.view();
        (from..self.len).flat_map(|i| view.row(i)[columns.clone()].iter().copied()).collect()
    }

    fn reserve(&mut self, rows: usize) {
        let pages = self.num_pages(rows);
        self.pages.reserve(pages.saturating_sub(self.pages.len()));
    }
}

/// The rotated keys of the last tokens, `[_, c]`; pages of older ones are given back between steps.
#[derive(Clone, Debug)]
pub(crate) struct WindowCache {
    window: usize,
    /// The position of the first row.
    first: usize,
    rows: RowPages,
}

/// A compressor's finished entries and its open block.
#[derive(Clone, Debug)]
pub(crate) struct CompressorCache {
    width: usize,
    ratio: usize,
    overlaps: bool,
    num_entries: usize,
    /// Finished entries, normalised and rotated: `[B, width]`, or an indexer's keys in panels, `[B / 16, width, 16]`.
    entries: RowPages,
    is_indexer: bool,
    /// The entry that is being finished.
    pooled: Vec<f32>,
    /// Rows of the open block, `[_, 2 series width]`: values, and gates with their position bias.
    pending: RowPages,
    /// The first halves of the previous block's rows, `[m, 2 width]`, values and gates (overlapping compressors).
    previous: RowPages,
}

impl KvCache {
    /// An empty sequence in memory of its own, which grows as it needs.
    pub fn new(config: &ModelConfig) -> Self {
        Self::in_pages(config, &page_pool(config, usize::MAX))
    }

    /// An empty sequence in pages of `pages`, which is a [`page_pool`] of the same model.
    pub fn in_pages(config: &ModelConfig, pages: &PagePool) -> Self {
        let num_blocks = config.num_hidden_layers + config.num_nextn_predict_layers;
        let layers = (0..num_blocks).map(|i| {
            let kind = config.layer_kind(i);
            let compressor = |width, ratio, is_indexer| {
                let overlaps = kind == LayerKind::Csa;
                CompressorCache {
                    width,
                    ratio,
                    overlaps,
                    num_entries: 0,
                    entries: RowPages::new(pages, if is_indexer { PANEL * width } else { width }),
                    is_indexer,
                    pooled: Vec::new(),
                    pending: RowPages::new(pages, if overlaps { 4 * width } else { 2 * width }),
                    previous: RowPages::new(pages, 2 * width),
                }
            };
            let window = RowPages::new(pages, config.head_dim);
            LayerCache {
                window: WindowCache { window: config.sliding_window, first: 0, rows: window },
                compressor: kind.ratio().map(|m| compressor(config.head_dim, m, false)),
                indexer: (kind == LayerKind::Csa).then(|| compressor(config.index_head_dim, CSA_RATIO, true)),
            }
        });
        let num_hidden_layers = config.num_hidden_layers;
        Self { len: 0, mtp_len: 0, layers: layers.collect(), num_hidden_layers, pages: pages.clone() }
    }

    /// Takes the pages for `tokens` more, copies of shared ones among them, and gives back those that no later query
    /// sees. A forward pass does so by itself, and panics where this says that there is no page.
    ///
    /// # Errors
    /// When the pool has too few; the sequence is as it was.
    pub fn prepare(&mut self, tokens: usize) -> Result<(), OutOfPages> {
        self.prepare_layers(0..self.num_hidden_layers, tokens)
    }

    /// The same for `tokens` more of the multi-token-prediction block.
    ///
    /// # Errors
    /// As [`KvCache::prepare`].
    pub fn prepare_mtp(&mut self, tokens: usize) -> Result<(), OutOfPages> {
        self.prepare_layers(self.num_hidden_layers..self.layers.len(), tokens)
    }

    fn prepare_layers(&mut self, layers: std::ops::Range<usize>, tokens: usize) -> Result<(), OutOfPages> {
        let pool = &self.pages;
        let layers = &mut self.layers[layers];
        let prepared = layers.iter_mut().try_for_each(|layer| {
            layer.window.trim();
            let rows = &mut layer.window.rows;
            rows.prepare(pool, rows.len, rows.len + tokens)?;
            let mut compressors = [&mut layer.compressor, &mut layer.indexer].into_iter().flatten();
            compressors.try_for_each(|cache| cache.prepare(pool, tokens))
        });
        if prepared.is_err() {
            for layer in layers {
                layer.window.rows.release_spare();
                for cache in [&mut layer.compressor, &mut layer.indexer].into_iter().flatten() {
                    for rows in [&mut cache.entries, &mut cache.pending, &mut cache.previous] {
                        rows.release_spare();
                    }
                }
            }
        }
        prepared
    }

    /// Lets the multi-token-prediction block go on at `position`, seeing nothing of what is before it: for where it did not
    /// follow. False where there is no such block, or it keeps more than a window.
    pub fn restart_mtp(&mut self, position: usize) -> bool {
        let blocks = &mut self.layers[self.num_hidden_layers..];
        if blocks.is_empty() || blocks.iter().any(|block| block.compressor.is_some()) {
            return false;
        }
        for block in blocks {
            block.window.first = position;
            block.window.rows.len = 0;
            block.window.rows.release_spare();
        }
        self.mtp_len = position;
        true
    }

    /// What [`KvCache::take_back`] needs of the state as it is now.
    pub fn mark(&self) -> Mark {
        Mark(self.compressors().map(|cache| cache.previous.clone()).collect())
    }

    /// The state before the last token that the model read, which was the first or the second one after the mark: of what
    /// that token changed only the previous block's rows are written over.
    pub fn take_back(&mut self, mark: Mark) {
        self.len -= 1;
        let mut marked = mark.0.into_iter();
        for layer in &mut self.layers[..self.num_hidden_layers] {
            layer.window.rows.len -= 1;
            layer.window.rows.release_spare();
            for cache in [&mut layer.compressor, &mut layer.indexer].into_iter().flatten() {
                cache.take_back(marked.next().expect("a mark of the same sequence"));
            }
        }
    }

    /// Those of the model's own layers.
    fn compressors(&self) -> impl Iterator<Item = &CompressorCache> {
        let layers = self.layers[..self.num_hidden_layers].iter();
        layers.flat_map(|layer| [&layer.compressor, &layer.indexer].into_iter().flatten())
    }

    /// Pages that it holds, alone or with others.
    pub fn num_pages(&self) -> usize {
        let of = |cache: &CompressorCache| [&cache.entries, &cache.pending, &cache.previous].map(|r| r.pages.len());
        let compressors = |layer: &LayerCache| {
            let caches = [&layer.compressor, &layer.indexer].into_iter().flatten();
            caches.flat_map(of).sum::<usize>()
        };
        self.layers.iter().map(|layer| layer.window.rows.pages.len() + compressors(layer)).sum()
    }

    /// What is kept, under the names of golden cases: `layers.i.window_kv` (what the next query sees of the past),
    /// `layers.i.compressor.compressed_kv`, of the open block `buffer_kv` and `buffer_gate` (position bias included),
    /// of the block before `overlap_kv` and `overlap_gate`; the same for `layers.i.indexer`.
    pub fn trace(&self) -> Trace {
        let mut trace = Trace::default();
        for (i, layer) in self.layers.iter().enumerate() {
            let (window, width) = (&layer.window, layer.window.rows.width);
            let from = window.rows.len.saturating_sub(window.window.saturating_sub(1));
            trace.numbers(format!("layers.{i}.window_kv"), &[width], window.rows.to_vec(from, 0..width));
            for (name, cache) in [("compressor", &layer.compressor), ("indexer", &layer.indexer)] {
                let Some(cache) = cache else { continue };
                // A row of an open block has a series for each block that it will be part of.
                let (width, row) = (cache.width, cache.pending.width / 2);
                for (part, width, values) in [
                    ("compressed_kv", width, cache.to_rows()),
                    ("buffer_kv", row, cache.pending.to_vec(0, 0..row)),
                    ("buffer_gate", row, cache.pending.to_vec(0, row..2 * row)),
                    ("overlap_kv", width, cache.previous.to_vec(0, 0..width)),
                    ("overlap_gate", width, cache.previous.to_vec(0, width..2 * width)),
                ] {
                    trace.numbers(format!("layers.{i}.{name}.{part}"), &[width], values);
                }
            }
        }
        trace
    }

    /// Makes room for `tokens` more, so that decoding them one by one allocates nothing.
    pub fn reserve(&mut self, tokens: usize) {
        let before = self.num_pages();
        let mut after = 0;
        for layer in &mut self.layers {
            let rows = &mut layer.window.rows;
            let window = (layer.window.window + 2 * (1 << rows.shift)).min(rows.len + tokens);
            rows.reserve(window);
            after += rows.num_pages(window);
            for cache in [&mut layer.compressor, &mut layer.indexer].into_iter().flatten() {
                let entries = cache.num_entries + tokens.div_ceil(cache.ratio);
                let entry_rows = if cache.is_indexer { entries.div_ceil(PANEL) } else { entries };
                let previous = if cache.overlaps { cache.ratio } else { 0 };
                for (rows, most) in [
                    (&mut cache.entries, entry_rows),
                    (&mut cache.pending, cache.ratio),
                    (&mut cache.previous, previous),
                ] {
                    rows.reserve(most);
                    after += rows.num_pages(most);
                }
                cache.pooled.reserve(cache.width);
            }
        }
        self.pages.reserve(after.saturating_sub(before));
    }

    /// Pages that a sequence of `len` tokens holds at most, before the next `chunk` of them go through the model.
    pub fn num_pages_at(config: &ModelConfig, len: usize) -> usize {
        let page_len = PAGE_ROWS * config.head_dim.max(config.index_head_dim);
        let pages = |rows: usize, width: usize| rows.div_ceil(1 << rows_per_page_log2(page_len, width));
        let layer = |i: usize| {
            let kind = config.layer_kind(i);
            let (c, e) = (config.head_dim, config.index_head_dim);
            // The first and the last page of a window are partly beyond it.
            let window = pages(len.min(config.sliding_window), c) + 1;
            let compressed = match kind {
                LayerKind::Window => 0,
                LayerKind::Csa => {
                    let open = |width: usize| pages(CSA_RATIO, 4 * width) + pages(CSA_RATIO, 2 * width);
                    let blocks = len / CSA_RATIO;
                    pages(blocks, c) + open(c) + pages(blocks.div_ceil(PANEL), PANEL * e) + open(e)
                }
                LayerKind::Hca { ratio } => pages(len / ratio, c) + pages(ratio, 2 * c),
            };
            window + compressed
        };
        (0..config.num_hidden_layers + config.num_nextn_predict_layers).map(layer).sum()
    }

    /// Bytes that a sequence of `len` tokens keeps at most.
    pub fn num_bytes_at(config: &ModelConfig, len: usize) -> usize {
        4 * PAGE_ROWS * config.head_dim.max(config.index_head_dim) * Self::num_pages_at(config, len)
    }
}

impl WindowCache {
    /// Gives back the pages that no later query sees.
    fn trim(&mut self) {
        let rows = &mut self.rows;
        let unseen = rows.len.saturating_sub(self.window - 1) >> rows.shift;
        rows.pages.drain(..unseen);
        rows.len -= unseen << rows.shift;
        self.first += unseen << rows.shift;
    }

    pub(crate) fn push(&mut self, kv: &[f32]) {
        self.rows.push().copy_from_slice(kv);
    }

    pub(crate) fn rows(&self) -> PagedRows<'_> {
        self.rows.view()
    }

    /// The rows that the query at `position` sees, its own included: at most w.
    pub(crate) fn visible(&self, position: usize) -> std::ops::Range<usize> {
        (position + 1).saturating_sub(self.window).max(self.first) - self.first..position + 1 - self.first
    }
}

impl CompressorCache {
    fn prepare(&mut self, pool: &PagePool, tokens: usize) -> Result<(), OutOfPages> {
        let (open, ratio) = (self.pending.len, self.ratio);
        let finished = (open + tokens) / ratio;
        // Past the end of a block rows are written from the first on.
        let from = if open + tokens > ratio { 0 } else { open };
        self.pending.prepare(pool, from, (open + tokens).min(ratio))?;
        if finished > 0 {
            if self.overlaps {
                self.previous.prepare(pool, 0, ratio)?;
            }
            let unit = if self.is_indexer { PANEL } else { 1 };
            let (from, to) = (self.num_entries, self.num_entries + finished);
            self.entries.prepare(pool, from / unit, to.div_ceil(unit))?;
        }
        Ok(())
    }

    /// Takes the next token's row, the gate's position bias `ape` apart; at the end of a block `finish` (norm, rotation) is
    /// given its number and its pooled entry, which is then kept.
    pub(crate) fn push(&mut self, kv: &[f32], gate: &[f32], ape: &[f32], finish: impl FnOnce(usize, &mut [f32])) {
        let row = kv.len();
        let (kept_kv, kept_gate) = self.pending.push().split_at_mut(row);
        kept_kv.copy_from_slice(kv);
        for ((kept, gate), ape) in kept_gate.iter_mut().zip(gate).zip(ape) {
            *kept = gate + ape;
        }
        if self.pending.len < self.ratio {
            return;
        }
        let width = self.width;
        self.pooled.resize(width, 0.0);
        let before = Candidates { rows: self.previous.view(), len: self.previous.len, kv: 0, gate: width };
        // The current block's series is the second half of a row where blocks overlap, the whole row else.
        let current = Candidates { rows: self.pending.view(), len: self.ratio, kv: row - width, gate: 2 * row - width };
        pool([before, current], &mut self.pooled);
        if self.overlaps {
            self.previous.len = self.ratio;
            for i in 0..self.ratio {
                let of = self.pending.view().row(i);
                let (kv, gate) = self.previous.row_mut(i).split_at_mut(width);
                kv.copy_from_slice(&of[..width]);
                gate.copy_from_slice(&of[row..row + width]);
            }
        }
        self.pending.len = 0;
        let entry = self.num_entries;
        finish(entry, &mut self.pooled);
        self.num_entries += 1;
        if self.is_indexer {
            put_key(self.entries.row_mut(entry / PANEL), entry, &self.pooled);
            self.entries.len = self.num_entries.div_ceil(PANEL);
        } else {
            self.entries.push().copy_from_slice(&self.pooled);
        }
    }

    /// Undoes the last push, before which the previous block had these rows.
    fn take_back(&mut self, previous: RowPages) {
        if self.pending.len > 0 {
            self.pending.len -= 1;
            return;
        }
        // It finished a block, whose rows are still where they were.
        self.pending.len = self.ratio - 1;
        self.previous = previous;
        self.num_entries -= 1;
        self.entries.len = if self.is_indexer { self.num_entries.div_ceil(PANEL) } else { self.num_entries };
        self.entries.release_spare();
    }

    /// Finished entries, `[B, width]`.
    pub(crate) fn entries(&self) -> PagedRows<'_> {
        debug_assert!(!self.is_indexer, "an indexer keeps keys, not entries");
        self.entries.view()
    }

    /// An indexer's keys.
    pub(crate) fn keys(&self) -> indexer::Keys<'_> {
        indexer::Keys::new(self.entries.view(), self.num_entries)
    }

    /// Finished entries one after the other, for traces.
    pub(crate) fn to_rows(&self) -> Vec<f32> {
        if self.is_indexer { self.keys().to_rows() } else { self.entries.to_vec(0, 0..self.width) }
    }

    /// Blocks that the query at `position` may see: those whose last token is no later than itself.
    pub(crate) fn num_visible(&self, position: usize) -> usize {
        (position + 1) / self.ratio
    }
}
