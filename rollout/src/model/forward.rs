//! The forward pass on `kernels`: a ragged batch of tokens, each row computed alone and in one fixed order, so that
//! prefill, chunks, decode, any batch and any number of threads give the same bits.
//!
//! A layer is ten parallel regions: products are cut by outputs, all between them by rows (by heads, where there are
//! fewer rows than threads), and the small operations ride along with their row.
//! Shapes: R rows, D width, N streams, H heads, c head width, K experts per token, V vocabulary, T threads.

use std::ops::Range;

use kernels::experts::{self, Pairs};
use kernels::linear::{PANEL, Rows, Scratch};
use kernels::logits::{self, Chunk};
use kernels::pages::PagedRows;
use kernels::pool::{ColumnPart, Columns, Parts, Pool, share};
use kernels::{attention, hyper_connection as hc, indexer, norm, rope::Rotation, router};

use super::weights::{Collapse, Compressor, Expert, HyperConnection, Indexer, Layer, Model};
use super::{CSA_RATIO, LayerKind, ModelConfig, Trace};
use crate::kv_cache::{CompressorCache, KvCache, LayerCache};

/// A run of consecutive tokens of one sequence.
#[derive(Debug)]
pub struct Segment<'a> {
    /// The sequence's state; the tokens follow its last one.
    pub cache: &'a mut KvCache,
    /// The tokens to process.
    pub tokens: &'a [u32],
    /// Of which tokens.
    pub logits: Logits,
}

/// Which of a segment's tokens get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the sequence follows.
    None,
    /// The last one.
    Last,
    /// Every one.
    All,
}

/// What a forward pass gives.
#[derive(Clone, Debug, Default)]
pub struct ForwardOutput {
    /// `[_, V]`: for each segment in turn, of the rows that it wants.
    pub logits: Vec<f32>,
    /// Their sums under temperature 1, chunk by chunk: `[_, ceil(V / CHUNK)]`.
    pub chunks: Vec<Chunk>,
    /// V.
    pub vocab_size: usize,
    /// Expert choices of all rows, `[R, layers, K]`; of multi-token prediction `[R, 1, K]`.
    pub expert_idx: Vec<u16>,
    /// Indexer selections of all rows, `[R, CSA layers, index_topk]`; unused slots hold `u32::MAX`.
    pub block_idx: Vec<u32>,
}

/// The threads of a forward pass and the buffers that live from step to step, so that a step allocates nothing.
#[derive(Debug)]
pub struct Workspace {
    pool: Pool,
    threads: Vec<ThreadScratch>,
    rows: Vec<Row>,
    /// The token of each row.
    tokens: Vec<u32>,
    /// The first row of each segment, and the number of rows.
    first_rows: Vec<usize>,
    /// The rows that each thread takes where it needs whole segments: `[T + 1]`.
    row_bounds: Vec<usize>,
    window_rotations: Vec<Rotation>,
    compressed_rotations: Vec<Rotation>,
    window_frequencies: Vec<f32>,
    compressed_frequencies: Vec<f32>,
    streams: Vec<f32>,
    /// `y` and `mixes` hold the result of a sub-layer that is not in the streams yet.
    pending: bool,
    mixes: Vec<f32>,
    x: Vec<f32>,
    y: Vec<f32>,
    q_residual: Vec<f32>,
    q: Vec<f32>,
    kv: Vec<f32>,
    series: Series,
    index_series: Series,
    index_q: Vec<f32>,
    index_weight: Vec<f32>,
    scores: Vec<f32>,
    picks: Vec<u32>,
    attended: Vec<f32>,
    grouped: Vec<f32>,
    expert_weight: Vec<f32>,
    pairs: Pairs,
    hidden: Vec<f32>,
    shared_hidden: Vec<f32>,
    gathered: Vec<f32>,
    router_logits: Vec<f32>,
}

/// What a compressor's two products give for each row.
#[derive(Debug, Default)]
struct Series {
    kv: Vec<f32>,
    gate: Vec<f32>,
}

/// A thread's own buffers.
#[derive(Debug, Default)]
struct ThreadScratch {
    linear: Scratch,
    experts: experts::Scratch,
    /// A key, or an indexer's weights.
    row: Vec<f32>,
    scores: Vec<f32>,
    attention: attention::Scratch,
    picks: Vec<u32>,
    rotation: Rotation,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    segment: usize,
    position: usize,
}

/// Sizes a buffer whose every element is about to be written.
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.resize(len, 0.0);
    buffer
}

/// `[R, stride]`, to be written by columns.
fn columns<'a>(buffer: &'a mut Vec<f32>, num_rows: usize, stride: usize, num_threads: usize) -> Columns<'a> {
    Columns::new(sized(buffer, num_rows * stride), stride, PANEL, num_threads)
}

/// `[R, width]`, to be written by rows.
fn rows<'a>(buffer: &'a mut Vec<f32>, num_rows: usize, width: usize, num_threads: usize) -> Parts<'a, f32> {
    Parts::new(sized(buffer, num_rows * width), width, num_threads)
}

/// A thread's own scratch.
fn own<'a>(threads: &Parts<'a, ThreadScratch>, t: usize) -> &'a mut ThreadScratch {
    &mut threads.take(t)[0]
}

impl Default for Workspace {
    fn default() -> Self {
        Self::new(1)
    }
}

impl Workspace {
    /// For forward passes on `num_threads` threads, the caller's being one of them.
    ///
    /// # Panics
    /// As [`Pool::new`].
    pub fn new(num_threads: usize) -> Self {
        Self {
            pool: Pool::new(num_threads, "rollout"),
            threads: (0..num_threads).map(|_| ThreadScratch::default()).collect(),
            rows: Vec::new(),
            tokens: Vec::new(),
            first_rows: Vec::new(),
            row_bounds: Vec::new(),
            window_rotations: Vec::new(),
            compressed_rotations: Vec::new(),
            window_frequencies: Vec::new(),
            compressed_frequencies: Vec::new(),
            streams: Vec::new(),
            pending: false,
            mixes: Vec::new(),
            x: Vec::new(),
            y: Vec::new(),
            q_residual: Vec::new(),
            q: Vec::new(),
            kv: Vec::new(),
            series: Series::default(),
            index_series: Series::default(),
            index_q: Vec::new(),
            index_weight: Vec::new(),
            scores: Vec::new(),
            picks: Vec::new(),
            attended: Vec::new(),
            grouped: Vec::new(),
            expert_weight: Vec::new(),
            pairs: Pairs::default(),
            hidden: Vec::new(),
            shared_hidden: Vec::new(),
            gathered: Vec::new(),
            router_logits: Vec::new(),
        }
    }

    /// Makes room for sequences of up to `len` tokens: what else grows with them, from step to step.
    pub fn reserve(&mut self, config: &ModelConfig, len: usize) {
        let ratios = (0..config.num_hidden_layers).map(|i| config.layer_kind(i));
        let every_entry = ratios.filter_map(|kind| match kind {
            LayerKind::Hca { ratio } => Some(len / ratio),
            LayerKind::Csa | LayerKind::Window => None,
        });
        let (blocks, picks) = (len / CSA_RATIO, every_entry.max().unwrap_or(0).max(len.min(config.index_topk)));
        let reserve = |buffer: &mut Vec<f32>, len: usize| buffer.reserve(len.saturating_sub(buffer.len()));
        reserve(&mut self.scores, 2 * self.threads.len() * blocks);
        for scratch in &mut self.threads {
            reserve(&mut scratch.scores, blocks.max(config.n_routed_experts));
            scratch.attention.reserve(config.sliding_window + picks);
            scratch.picks.reserve(blocks.max(picks).saturating_sub(scratch.picks.len()));
        }
    }

    /// The streams after the last layer of the pass before, `[R, N, D]`: what multi-token prediction starts from.
    pub fn streams(&self) -> &[f32] {
        &self.streams
    }

    /// The threads, for work between passes.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }
}

impl Model {
    /// Runs `segments` through the model, advances their caches and fills `out`, and `trace` if one is given.
    ///
    /// # Panics
    /// When a token is not of the vocabulary, or a cache's pool has no pages for it (see [`KvCache::prepare`]).
    pub fn forward(
        &self,
        segments: &mut [Segment<'_>],
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        mut trace: Option<&mut Trace>,
    ) {
        let config = &self.config;
        for segment in segments.iter_mut() {
            segment.cache.prepare(segment.tokens.len()).expect("pages for the tokens of a segment");
        }
        self.start(segments, |cache| cache.len, ws);
        let num_rows = ws.rows.len();
        out.expert_idx.clear();
        out.expert_idx.resize(num_rows * self.layers.len() * config.num_experts_per_tok, 0);
        out.block_idx.clear();
        out.block_idx.resize(num_rows * config.csa_layers().count() * config.index_topk, u32::MAX);
        let (d, n) = (config.hidden_size, config.hc_mult);
        let embed = self.vector(self.embed);
        let streams = sized(&mut ws.streams, num_rows * n * d);
        for (&token, streams) in ws.tokens.iter().zip(streams.chunks_exact_mut(n * d)) {
            for stream in streams.chunks_exact_mut(d) {
                stream.copy_from_slice(&embed[token as usize * d..][..d]);
            }
        }
        ws.pending = false;
        for (i, layer) in self.layers.iter().enumerate() {
            self.block(i, layer, segments, ws, out, trace.as_deref_mut());
        }
        for segment in segments.iter_mut() {
            segment.cache.len += segment.tokens.len();
        }
        self.head(&self.collapse, "", segments, ws, out, trace);
    }

    /// Multi-token prediction (v4/SPEC section 8): from the streams after the last layer, `[R, N, D]` for all tokens of
    /// `segments`, which here are those *after* the ones the streams belong to, to logits of the tokens after those.
    /// [`Workspace::streams`] has the streams of the forward pass before.
    ///
    /// # Panics
    /// When the model has no such block, the streams do not fit, a token is not of the vocabulary, or one comes before the
    /// model itself has seen the token in front of it.
    pub fn forward_mtp(
        &self,
        streams: &[f32],
        segments: &mut [Segment<'_>],
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        mut trace: Option<&mut Trace>,
    ) {
        let mtp = self.mtp.as_ref().expect("a model with a multi-token-prediction block");
        let config = &self.config;
        let (d, n, eps) = (config.hidden_size, config.hc_mult, config.rms_norm_eps);
        for segment in segments.iter_mut() {
            segment.cache.prepare_mtp(segment.tokens.len()).expect("pages for the tokens of a segment");
        }
        self.start(segments, |cache| cache.mtp_len, ws);
        let num_rows = ws.rows.len();
        assert_eq!(streams.len(), num_rows * n * d, "streams of {num_rows} rows");
        out.expert_idx.clear();
        out.expert_idx.resize(num_rows * config.num_experts_per_tok, 0);
        out.block_idx.clear();
        // e_proj · enorm(embedding of the next token), to be added to every stream's h_proj · hnorm(stream).
        let embed = self.vector(self.embed);
        let x = sized(&mut ws.x, num_rows * d);
        for (&token, x) in ws.tokens.iter().zip(x.chunks_exact_mut(d)) {
            x.copy_from_slice(&embed[token as usize * d..][..d]);
        }
        norm::rms_norm(x, self.vector(mtp.enorm), eps);
        let normed = sized(&mut ws.gathered, num_rows * n * d);
        normed.copy_from_slice(streams);
        norm::rms_norm(normed, self.vector(mtp.hnorm), eps);
        let num_threads = ws.pool.num_threads();
        let scratch = Parts::new(&mut ws.threads, 1, num_threads);
        let e = columns(&mut ws.y, num_rows, d, num_threads);
        let mixed = columns(&mut ws.streams, num_rows * n, d, num_threads);
        let (x, normed) = (&*ws.x, &*ws.gathered);
        ws.pool.run(&|t| {
            let scratch = own(&scratch, t);
            self.matrix(mtp.e_proj).forward(Rows::new(x, d), &mut e.take(t), &mut scratch.linear);
            self.matrix(mtp.h_proj).forward(Rows::new(normed, d), &mut mixed.take(t), &mut scratch.linear);
        });
        for (streams, e) in ws.streams.chunks_exact_mut(n * d).zip(ws.y.chunks_exact(d)) {
            for stream in streams.chunks_exact_mut(d) {
                stream.iter_mut().zip(e).for_each(|(x, e)| *x += e);
            }
        }
        ws.pending = false;
        self.block(config.num_hidden_layers, &mtp.layer, segments, ws, out, trace.as_deref_mut());
        for Segment { cache, tokens, .. } in segments.iter_mut() {
            cache.mtp_len += tokens.len();
            let (mtp_len, len) = (cache.mtp_len, cache.len);
            assert!(mtp_len <= len, "{mtp_len} tokens of multi-token prediction after {len} of the model");
        }
        self.head(&mtp.collapse, "mtp.", segments, ws, out, trace);
    }

    /// Attention and experts of one block, on `ws.streams`.
    fn block(
        &self,
        layer_idx: usize,
        layer: &Layer,
        segments: &mut [Segment<'_>],
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        mut trace: Option<&mut Trace>,
    ) {
        self.hyper_pre(&layer.hc_attn, layer.attn_norm, ws, layer.op("hc_attn", &mut trace), &|_, _, _| ());
        self.attention(layer_idx, layer, segments, ws, out, trace.as_deref_mut());
        ws.pending = true;
        self.experts(layer_idx, layer, ws, out, trace.as_deref_mut());
        ws.pending = true;
        if let Some(trace) = trace {
            self.settle(ws);
            let (n, d) = (self.config.hc_mult, self.config.hidden_size);
            trace.numbers(format!("{}.streams_out", layer.name), &[n, d], ws.streams.clone());
        }
    }

    /// Lays out the rows of `segments`, which follow the `len_of` tokens of their caches, with their rotations.
    fn start(&self, segments: &[Segment<'_>], len_of: impl Fn(&KvCache) -> usize, ws: &mut Workspace) {
        let config = &self.config;
        ws.rows.clear();
        ws.tokens.clear();
        ws.first_rows.clear();
        for (s, segment) in segments.iter().enumerate() {
            let positions = len_of(segment.cache)..;
            ws.first_rows.push(ws.rows.len());
            ws.rows.extend(positions.take(segment.tokens.len()).map(|position| Row { segment: s, position }));
            ws.tokens.extend_from_slice(segment.tokens);
        }
        ws.first_rows.push(ws.rows.len());
        for &token in &ws.tokens {
            let vocab_size = config.vocab_size;
            assert!((token as usize) < vocab_size, "token {token} is not of the vocabulary of {vocab_size}");
        }
        let num_threads = ws.pool.num_threads();
        ws.row_bounds.clear();
        let bounds = (0..=num_threads).map(|t| ws.first_rows[share(segments.len(), t, num_threads).start]);
        ws.row_bounds.extend(bounds);
        if ws.window_frequencies.is_empty() {
            ws.window_frequencies = config.rope_frequencies(LayerKind::Window);
            ws.compressed_frequencies = config.rope_frequencies(LayerKind::Csa);
        }
        ws.window_rotations.resize_with(ws.rows.len(), Rotation::default);
        ws.compressed_rotations.resize_with(ws.rows.len(), Rotation::default);
        let window = Parts::new(&mut ws.window_rotations, 1, num_threads);
        let compressed = Parts::new(&mut ws.compressed_rotations, 1, num_threads);
        let (rows, window_frequencies, frequencies) = (&ws.rows, &ws.window_frequencies, &ws.compressed_frequencies);
        ws.pool.run_items(rows.len(), &|t| {
            let rotations = window.take(t).iter_mut().zip(compressed.take(t));
            for (row, (window, compressed)) in rows[window.share(t)].iter().zip(rotations) {
                window.set(row.position, window_frequencies);
                compressed.set(row.position, frequencies);
            }
        });
    }

    /// Mixes the last sub-layer's result into the streams, if that was not done yet.
    fn settle(&self, ws: &mut Workspace) {
        let (d, n, num_rows) = (self.config.hidden_size, self.config.hc_mult, ws.rows.len());
        if std::mem::take(&mut ws.pending) {
            let num_threads = ws.pool.num_threads();
            let streams = rows(&mut ws.streams, num_rows, n * d, num_threads);
            let (y, mixes) = (&*ws.y, &*ws.mixes);
            let num_mixes = (2 + n) * n;
            ws.pool.run_items(num_rows, &|t| {
                let share = streams.share(t);
                let (y, mixes) =
                    (&y[share.start * d..share.end * d], &mixes[share.start * num_mixes..share.end * num_mixes]);
                expand(n, streams.take(t), y, mixes);
            });
        }
    }

    /// Mappings of a sub-layer and its normalised input: settles the streams, fills `ws.mixes` `[R, (2 + N) N]` and
    /// `ws.x` `[R, D]`, and hands each thread the rows of x that it made.
    fn hyper_pre(
        &self,
        hyper: &HyperConnection,
        norm_weight: usize,
        ws: &mut Workspace,
        trace: Option<(&mut Trace, String)>,
        then: &(dyn Fn(usize, &[f32], &mut ThreadScratch) + Sync),
    ) {
        let config = &self.config;
        let (d, n, num_rows) = (config.hidden_size, config.hc_mult, ws.rows.len());
        let num_mixes = (2 + n) * n;
        let gates = hc::Gates {
            scale: self.vector(hyper.scale),
            base: self.vector(hyper.base),
            num_streams: n,
            sinkhorn_iters: config.hc_sinkhorn_iters,
            eps: config.hc_eps,
        };
        let traced = trace.is_some();
        let num_threads = ws.pool.num_threads();
        let pending = std::mem::take(&mut ws.pending);
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let streams = rows(&mut ws.streams, num_rows, n * d, num_threads);
        let mixes = rows(&mut ws.mixes, num_rows, num_mixes, num_threads);
        let xs = rows(&mut ws.x, num_rows, d, num_threads);
        let y = &*ws.y;
        let norm_weight = self.vector(norm_weight);
        ws.pool.run_items(num_rows, &|t| {
            let scratch = own(&threads, t);
            let (streams, z, x) = (streams.take(t), mixes.take(t), xs.take(t));
            if pending {
                let share = xs.share(t);
                expand(n, streams, &y[share.start * d..share.end * d], z);
            }
            let gate = self.matrix(hyper.gate);
            gate.forward(Rows::new(streams, n * d), &mut ColumnPart::new(z, 0..num_mixes), &mut scratch.linear);
            for ((z, v), x) in z.chunks_exact_mut(num_mixes).zip(streams.chunks_exact(n * d)).zip(x.chunks_exact_mut(d))
            {
                hc::scale_by_inverse_rms(z, v, config.rms_norm_eps);
                hc::mappings(z, &gates);
                hc::collapse(v, &z[..n], x);
            }
            if !traced {
                norm::rms_norm(x, norm_weight, config.rms_norm_eps);
                then(t, x, scratch);
            }
        });
        let Some((trace, op)) = trace else { return };
        let part =
            |from: usize, to: usize| ws.mixes.chunks_exact(num_mixes).flat_map(|z| &z[from..to]).copied().collect();
        trace.numbers(format!("{op}.post"), &[n], part(n, 2 * n));
        trace.numbers(format!("{op}.comb"), &[n, n], part(2 * n, num_mixes));
        trace.numbers(format!("{op}.collapsed"), &[d], ws.x.clone());
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let xs = rows(&mut ws.x, num_rows, d, num_threads);
        ws.pool.run_items(num_rows, &|t| {
            let (scratch, x) = (own(&threads, t), xs.take(t));
            norm::rms_norm(x, norm_weight, config.rms_norm_eps);
            then(t, x, scratch);
        });
    }

    /// From `ws.x` to `ws.y`, both `[R, D]`.
    fn attention(
        &self,
        layer_idx: usize,
        layer: &Layer,
        segments: &mut [Segment<'_>],
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        mut trace: Option<&mut Trace>,
    ) {
        let config = &self.config;
        self.project(layer, ws);
        self.remember(layer_idx, layer, segments, ws);
        if let Some((trace, op)) = layer.op("q_residual", &mut trace) {
            trace.numbers(op, &[config.q_lora_rank], ws.q_residual.clone());
        }
        self.query(layer, ws);
        self.attend(layer_idx, layer, segments, ws, out, trace.as_deref_mut());
        self.attention_output(layer, ws);
        if let Some(trace) = trace {
            let name = &layer.name;
            let entries = |of: fn(&LayerCache) -> Option<&CompressorCache>| {
                let caches = segments.iter().filter_map(|s| of(&s.cache.layers[layer_idx]));
                caches.flat_map(CompressorCache::to_rows).collect::<Vec<f32>>()
            };
            if layer.compressor.is_some() {
                let entries = entries(|cache| cache.compressor.as_ref());
                trace.numbers(format!("{name}.compressed_kv"), &[config.head_dim], entries);
            }
            if layer.indexer.is_some() {
                let keys = entries(|cache| cache.indexer.as_ref());
                trace.numbers(format!("{name}.indexer.keys"), &[config.index_head_dim], keys);
            }
            trace.numbers(format!("{name}.attn_out"), &[config.hidden_size], ws.y.clone());
        }
    }

    /// Outputs of a compressor's products; 0 where there is none.
    fn series_width(&self, compressor: Option<&Compressor>) -> usize {
        compressor.map_or(0, |compressor| self.matrix(compressor.wkv).outputs())
    }

    /// All products of `ws.x`: the query's residual, the row's key, the compressors' series, the indexer's weights.
    fn project(&self, layer: &Layer, ws: &mut Workspace) {
        let config = &self.config;
        let (num_rows, num_threads) = (ws.rows.len(), ws.pool.num_threads());
        let indexer = layer.indexer.as_ref();
        let width = self.series_width(layer.compressor.as_ref());
        let index_width = self.series_width(indexer.map(|indexer| &indexer.compressor));
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let residual = columns(&mut ws.q_residual, num_rows, config.q_lora_rank, num_threads);
        let kv = columns(&mut ws.kv, num_rows, config.head_dim, num_threads);
        let series_kv = columns(&mut ws.series.kv, num_rows, width, num_threads);
        let series_gate = columns(&mut ws.series.gate, num_rows, width, num_threads);
        let index_kv = columns(&mut ws.index_series.kv, num_rows, index_width, num_threads);
        let index_gate = columns(&mut ws.index_series.gate, num_rows, index_width, num_threads);
        let index_weight = columns(&mut ws.index_weight, num_rows, config.index_n_heads, num_threads);
        let x = Rows::new(&ws.x, config.hidden_size);
        ws.pool.run(&|t| {
            let scratch = &mut own(&threads, t).linear;
            self.matrix(layer.wq_a).forward(x, &mut residual.take(t), scratch);
            self.matrix(layer.wkv).forward(x, &mut kv.take(t), scratch);
            if let Some(compressor) = &layer.compressor {
                self.matrix(compressor.wkv).forward(x, &mut series_kv.take(t), scratch);
                self.matrix(compressor.wgate).forward(x, &mut series_gate.take(t), scratch);
            }
            if let Some(indexer) = indexer {
                self.matrix(indexer.compressor.wkv).forward(x, &mut index_kv.take(t), scratch);
                self.matrix(indexer.compressor.wgate).forward(x, &mut index_gate.take(t), scratch);
                self.matrix(indexer.weights_proj).forward(x, &mut index_weight.take(t), scratch);
            }
        });
    }

    /// Normalises the residual, and puts keys and compressed entries into the caches: each thread for whole segments,
    /// token after token.
    fn remember(&self, layer_idx: usize, layer: &Layer, segments: &mut [Segment<'_>], ws: &mut Workspace) {
        let config = &self.config;
        let (c, eps) = (config.head_dim, config.rms_norm_eps);
        let num_threads = ws.pool.num_threads();
        let num_segments = segments.len();
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let residual = Parts::at(&mut ws.q_residual, config.q_lora_rank, &ws.row_bounds);
        let segments = Parts::new(segments, 1, num_threads);
        let (q_norm, kv_norm) = (self.vector(layer.q_norm), self.vector(layer.kv_norm));
        let rotations = rotations(layer, &ws.window_rotations, &ws.compressed_rotations);
        let frequencies = &ws.compressed_frequencies;
        let compress = |compressor: &Compressor,
                        cache: &mut CompressorCache,
                        series: &Series,
                        r: usize,
                        rotation: &mut Rotation| {
            let (ape, series_width) = (self.vector(compressor.ape), self.series_width(Some(compressor)));
            let ratio = ape.len() / series_width;
            let at = r * series_width..(r + 1) * series_width;
            let ape = &ape[ws.rows[r].position % ratio * series_width..][..series_width];
            cache.push(&series.kv[at.clone()], &series.gate[at], ape, |block, entry| {
                norm::rms_norm(entry, self.vector(compressor.norm), eps);
                rotation.set(block * ratio, frequencies);
                let width = entry.len();
                rotation.apply(entry, width);
            });
        };
        ws.pool.run_items(num_segments, &|t| {
            let scratch = own(&threads, t);
            norm::rms_norm(residual.take(t), q_norm, eps);
            let first = segments.share(t).start;
            let segments = segments.take(t);
            for r in residual.share(t) {
                let row = &ws.rows[r];
                let cache = &mut segments[row.segment - first].cache.layers[layer_idx];
                scratch.row.clear();
                scratch.row.extend_from_slice(&ws.kv[r * c..][..c]);
                norm::rms_norm(&mut scratch.row, kv_norm, eps);
                rotations[r].apply(&mut scratch.row, c);
                cache.window.push(&scratch.row);
                if let (Some(compressor), Some(cache)) = (&layer.compressor, &mut cache.compressor) {
                    compress(compressor, cache, &ws.series, r, &mut scratch.rotation);
                }
                if let (Some(Indexer { compressor, .. }), Some(cache)) = (&layer.indexer, &mut cache.indexer) {
                    compress(compressor, cache, &ws.index_series, r, &mut scratch.rotation);
                }
            }
        });
    }

    /// From the residual to queries, of the heads and of the indexer; neither is rotated yet.
    fn query(&self, layer: &Layer, ws: &mut Workspace) {
        let config = &self.config;
        let (num_rows, num_threads) = (ws.rows.len(), ws.pool.num_threads());
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let q = columns(&mut ws.q, num_rows, config.num_attention_heads * config.head_dim, num_threads);
        let index_q = columns(&mut ws.index_q, num_rows, config.index_n_heads * config.index_head_dim, num_threads);
        let residual = Rows::new(&ws.q_residual, config.q_lora_rank);
        ws.pool.run(&|t| {
            let scratch = &mut own(&threads, t).linear;
            self.matrix(layer.wq_b).forward(residual, &mut q.take(t), scratch);
            if let Some(indexer) = &layer.indexer {
                self.matrix(indexer.wq_b).forward(residual, &mut index_q.take(t), scratch);
            }
        });
    }

    /// From queries to `ws.attended` `[R, H c]`, rotated back.
    fn attend(
        &self,
        layer_idx: usize,
        layer: &Layer,
        segments: &[Segment<'_>],
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        trace: Option<&mut Trace>,
    ) {
        let config = &self.config;
        let (c, h, eps) = (config.head_dim, config.num_attention_heads, config.rms_norm_eps);
        let (num_rows, num_threads) = (ws.rows.len(), ws.pool.num_threads());
        let cache_of = |row: &Row| &segments[row.segment].cache.layers[layer_idx];
        // Where there are too few rows for the threads, a row's heads are shared out; they need all its scores first.
        let num_parts = match num_rows < 2 * num_threads {
            true => (1..=num_threads.min(h)).rev().find(|parts| h.is_multiple_of(*parts)).unwrap_or(1),
            false => 1,
        };
        let scores_first = layer.indexer.is_some() && (num_parts > 1 || trace.is_some());
        let visible = |row: &Row| cache_of(row).compressor.as_ref().map_or(0, |cache| cache.num_visible(row.position));
        let most_visible = ws.rows.iter().map(visible).max().unwrap_or(0);
        let (e, n) = (config.index_head_dim, config.index_n_heads);
        let factor = 1.0 / ((e * n) as f32).sqrt();
        let index_weight = &*ws.index_weight;
        let score = |r: usize, q: &[f32], keys: Range<usize>, weight: &mut Vec<f32>, scores: &mut [f32]| {
            let cache = cache_of(&ws.rows[r]).indexer.as_ref().expect("a CSA layer has an indexer's cache");
            weight.clear();
            weight.extend(index_weight[r * n..][..n].iter().map(|w| w * factor));
            indexer::scores(q, weight, cache.keys(), keys, scores);
        };
        if scores_first {
            let index_q = rows(&mut ws.index_q, num_rows, n * e, num_threads);
            ws.pool.run_items(num_rows, &|t| {
                let rotations = &ws.compressed_rotations[index_q.share(t)];
                for (q, rotation) in index_q.take(t).chunks_exact_mut(n * e).zip(rotations) {
                    rotation.apply(q, e);
                }
            });
            let threads = Parts::new(&mut ws.threads, 1, num_threads);
            let scores = columns(&mut ws.scores, num_rows, most_visible, num_threads);
            let index_q = &*ws.index_q;
            ws.pool.run(&|t| {
                let (mut scores, weight) = (scores.take(t), &mut own(&threads, t).row);
                for (r, row) in ws.rows.iter().enumerate() {
                    let Range { start, end } = scores.columns();
                    let keys = start.min(visible(row))..end.min(visible(row));
                    if !keys.is_empty() {
                        score(r, &index_q[r * n * e..][..n * e], keys.clone(), weight, scores.row(r, keys));
                    }
                }
            });
        }

        let top_k = config.index_topk;
        let num_items = num_rows * num_parts;
        let sink = self.vector(layer.sink);
        let rotations = rotations(layer, &ws.window_rotations, &ws.compressed_rotations);
        let all_scores = &*ws.scores;
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let width = h * c / num_parts;
        let q = rows(&mut ws.q, num_items, width, num_threads);
        let attended = rows(&mut ws.attended, num_items, width, num_threads);
        let index_q = rows(&mut ws.index_q, num_rows, n * e, num_threads);
        // Every item notes its selection; all of a row note the same.
        ws.picks.clear();
        ws.picks.resize(if layer.indexer.is_some() { num_items * top_k } else { 0 }, u32::MAX);
        let picks = Parts::new(&mut ws.picks, if layer.indexer.is_some() { top_k } else { 1 }, num_threads);
        ws.pool.run_items(num_items, &|t| {
            let scratch = own(&threads, t);
            let mut index_q = (!scores_first).then(|| index_q.take(t).chunks_exact_mut((n * e).max(1)));
            let mut picks = picks.take(t).chunks_exact_mut(top_k.max(1));
            let items = q.share(t).zip(q.take(t).chunks_exact_mut(width)).zip(attended.take(t).chunks_exact_mut(width));
            for ((item, q), attended) in items {
                let (r, part) = (item / num_parts, item % num_parts);
                let row = &ws.rows[r];
                let cache = cache_of(row);
                norm::rms_norm_unweighted(q, c, eps);
                rotations[r].apply(q, c);
                let entries = cache.compressor.as_ref().map_or(PagedRows::none(c), |cache| cache.entries());
                let visible = visible(row);
                if layer.indexer.is_none() {
                    scratch.picks.clear();
                    scratch.picks.extend(0..visible as u32);
                } else {
                    let scores = if scores_first {
                        &all_scores[r * most_visible..][..visible]
                    } else {
                        let index_q = index_q.as_mut().and_then(Iterator::next).expect("queries for each row");
                        ws.compressed_rotations[r].apply(index_q, e);
                        score(r, index_q, 0..visible, &mut scratch.row, sized(&mut scratch.scores, visible));
                        &*scratch.scores
                    };
                    indexer::top_k(scores, top_k, &mut scratch.picks);
                    let noted = picks.next().expect("room for the selection of each item");
                    noted[..scratch.picks.len()].copy_from_slice(&scratch.picks);
                }
                let (window, range) = (cache.window.rows(), cache.window.visible(row.position));
                let keys = attention::Keys { window, range, entries, picks: &scratch.picks };
                let sink = &sink[part * (h / num_parts)..][..h / num_parts];
                attention::attend(q, keys, sink, &mut scratch.attention, attended);
                rotations[r].apply_inverse(attended, c);
            }
        });
        if layer.indexer.is_none() {
            return;
        }
        let csa_idx = config.csa_layers().take_while(|&l| l < layer_idx).count();
        let num_csa = config.csa_layers().count();
        for (slots, picks) in out.block_idx.chunks_exact_mut(num_csa * top_k).zip(ws.picks.chunks(num_parts * top_k)) {
            slots[csa_idx * top_k..][..top_k].copy_from_slice(&picks[..top_k]);
        }
        if let Some(trace) = trace {
            let scores = ws.rows.iter().enumerate().flat_map(|(r, row)| &ws.scores[r * most_visible..][..visible(row)]);
            trace.numbers(format!("{}.indexer.scores", layer.name), &[], scores.copied().collect());
            let picks = ws
                .picks
                .chunks(num_parts * top_k)
                .map(|picks| picks[..top_k].iter().copied().filter(|&pick| pick != u32::MAX).collect());
            trace.choices(format!("{}.indexer.topk", layer.name), picks);
        }
    }

    /// From `ws.attended` to `ws.y`, through the groups' low-rank product.
    fn attention_output(&self, layer: &Layer, ws: &mut Workspace) {
        let config = &self.config;
        let (num_rows, num_threads) = (ws.rows.len(), ws.pool.num_threads());
        let (groups, rank) = (config.o_groups, config.o_lora_rank);
        let stride = config.num_attention_heads * config.head_dim;
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        // A thread's columns begin at panels of their group.
        let unit = if rank.is_multiple_of(PANEL) { PANEL } else { rank };
        let grouped = Columns::new(sized(&mut ws.grouped, num_rows * groups * rank), groups * rank, unit, num_threads);
        let attended = &*ws.attended;
        ws.pool.run(&|t| {
            let (mut y, scratch) = (grouped.take(t), &mut own(&threads, t).linear);
            for (g, part) in self.matrix_groups(layer.wo_a).iter().enumerate() {
                let x = Rows::columns(attended, stride, g * (stride / groups), stride / groups);
                part.forward(x, &mut y.within(g * rank..(g + 1) * rank), scratch);
            }
        });
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let y = columns(&mut ws.y, num_rows, config.hidden_size, num_threads);
        let grouped = Rows::new(&ws.grouped, groups * rank);
        ws.pool.run(&|t| self.matrix(layer.wo_b).forward(grouped, &mut y.take(t), &mut own(&threads, t).linear));
    }

    /// From the streams to `ws.y`: the second sub-layer's input, its router, the routed experts, each for all of its
    /// rows at once, and the shared one.
    fn experts(
        &self,
        layer_idx: usize,
        layer: &Layer,
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        mut trace: Option<&mut Trace>,
    ) {
        let config = &self.config;
        let (d, k, num_rows) = (config.hidden_size, config.num_experts_per_tok, ws.rows.len());
        let num_experts = config.n_routed_experts;
        let num_threads = ws.pool.num_threads();
        // As many layers as `out` has room for: all of the model's, or multi-token prediction alone.
        let num_layers = out.expert_idx.len() / (num_rows * k).max(1);
        let slot = layer_idx % num_layers.max(1) * k;
        {
            let mut logits = std::mem::take(&mut ws.router_logits);
            let mut weight = std::mem::take(&mut ws.expert_weight);
            let tokens = std::mem::take(&mut ws.tokens);
            let logit_rows = rows(&mut logits, num_rows, num_experts, num_threads);
            let weight_rows = rows(&mut weight, num_rows, k, num_threads);
            let chosen_rows = Parts::new(&mut out.expert_idx, num_layers * k, num_threads);
            let bias = layer.gate_bias.map(|bias| self.vector(bias));
            let route = |t: usize, x: &[f32], scratch: &mut ThreadScratch| {
                let logits = logit_rows.take(t);
                let gate = self.matrix(layer.gate);
                gate.forward(Rows::new(x, d), &mut ColumnPart::new(logits, 0..num_experts), &mut scratch.linear);
                let scores = sized(&mut scratch.scores, logits.len());
                router::score(logits, scores);
                let rows = scores.chunks_exact(num_experts).zip(weight_rows.take(t).chunks_exact_mut(k));
                let rows = rows.zip(chosen_rows.take(t).chunks_exact_mut(num_layers * k));
                for (r, ((scores, weight), chosen)) in weight_rows.share(t).zip(rows) {
                    let chosen = &mut chosen[slot..][..k];
                    match bias {
                        Some(bias) => router::choose(scores, bias, chosen),
                        None => {
                            let experts = self.hash_experts(layer_idx, tokens[r]);
                            chosen.iter_mut().zip(experts).for_each(|(to, &expert)| *to = expert as u16);
                        }
                    }
                    router::weights(scores, chosen, config.routed_scaling_factor, weight);
                }
            };
            let traced = layer.op("hc_ffn", &mut trace);
            self.hyper_pre(&layer.hc_ffn, layer.ffn_norm, ws, traced, &route);
            (ws.router_logits, ws.expert_weight, ws.tokens) = (logits, weight, tokens);
        }
        let chosen = |r: usize| &out.expert_idx[r * num_layers * k + slot..][..k];
        ws.pairs.order(num_experts, &ws.expert_weight, k, chosen);

        self.expert_hidden(layer, ws);
        let Workspace { pool, threads, pairs, hidden, shared_hidden, y, .. } = ws;
        let threads = Parts::new(threads, 1, num_threads);
        let shared_hidden = Rows::new(shared_hidden, self.matrix(layer.shared.w2).inputs());
        if let Some((trace, op)) = layer.op("shared_out", &mut trace) {
            let mut shared = vec![0.0; num_rows * d];
            let all = &mut ColumnPart::new(&mut shared, 0..d);
            self.matrix(layer.shared.w2).forward(shared_hidden, all, &mut Scratch::default());
            trace.numbers(op, &[d], shared);
        }
        let y = columns(y, num_rows, d, num_threads);
        pool.run(&|t| {
            let (mut y, scratch) = (y.take(t), own(&threads, t));
            self.matrix(layer.shared.w2).forward(shared_hidden, &mut y, &mut scratch.linear);
            let expert = |idx: usize| self.expert(&layer.experts[idx]);
            experts::add_outputs(pairs, expert, hidden, &mut y, &mut scratch.experts);
        });

        if let Some(trace) = trace {
            // In the order of ascending experts, in which every implementation can tell them.
            let runs = ws.pairs.runs().iter().flat_map(|(expert, run)| run.clone().map(move |pair| (*expert, pair)));
            let mut pairs: Vec<_> = runs.map(|(expert, pair)| (ws.pairs.rows()[pair], expert as u32, pair)).collect();
            pairs.sort_unstable();
            let name = &layer.name;
            trace.numbers(format!("{name}.router.logits"), &[num_experts], ws.router_logits.clone());
            let experts = pairs.chunks_exact(k).map(|row| row.iter().map(|&(_, expert, _)| expert).collect());
            trace.choices(format!("{name}.router.experts"), experts);
            let weights = pairs.iter().map(|&(_, _, pair)| ws.pairs.weights()[pair]).collect();
            trace.numbers(format!("{name}.router.weights"), &[k], weights);
            trace.numbers(format!("{name}.ffn_out"), &[d], ws.y.clone());
        }
    }

    /// `silu(x W1^T) * (x W3^T)` of the routed pairs, into `ws.hidden`, and of the shared expert, into `ws.shared_hidden`.
    fn expert_hidden(&self, layer: &Layer, ws: &mut Workspace) {
        let config = &self.config;
        let (limit, num_threads) = (config.swiglu_limit, ws.pool.num_threads());
        let Workspace { pool, threads, pairs, hidden, shared_hidden, x, rows, .. } = ws;
        let threads = Parts::new(threads, 1, num_threads);
        let hidden = columns(hidden, pairs.rows().len(), config.moe_intermediate_size, num_threads);
        let shared = self.expert(&layer.shared);
        let shared_hidden = columns(shared_hidden, rows.len(), shared.gate.outputs(), num_threads);
        let x = Rows::new(x, config.hidden_size);
        pool.run(&|t| {
            let scratch = &mut own(&threads, t).experts;
            shared.hidden(x, limit, &mut shared_hidden.take(t), scratch);
            let expert = |idx: usize| self.expert(&layer.experts[idx]);
            experts::hidden(pairs, expert, x, limit, &mut hidden.take(t), scratch);
        });
    }

    fn expert(&self, expert: &Expert) -> experts::Expert<'_> {
        let [gate, up, down] = [expert.w1, expert.w3, expert.w2].map(|id| self.matrix(id));
        experts::Expert { gate, up, down }
    }

    /// Logits of the rows that were asked for, with the sums of their chunks.
    fn head(
        &self,
        collapse: &Collapse,
        prefix: &str,
        segments: &[Segment<'_>],
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        trace: Option<&mut Trace>,
    ) {
        let config = &self.config;
        let (d, n) = (config.hidden_size, config.hc_mult);
        self.settle(ws);
        ws.gathered.clear();
        for (segment, from) in segments.iter().zip(&ws.first_rows) {
            let end = from + segment.tokens.len();
            let wanted = match segment.logits {
                Logits::None => end..end,
                Logits::Last => end - 1..end,
                Logits::All => *from..end,
            };
            ws.gathered.extend_from_slice(&ws.streams[wanted.start * n * d..wanted.end * n * d]);
        }
        let num_rows = ws.gathered.len() / (n * d);
        if num_rows == 0 {
            out.logits.clear();
            out.chunks.clear();
            return;
        }
        let num_threads = ws.pool.num_threads();
        let (scale, base) = (self.vector(collapse.scale)[0], self.vector(collapse.base));
        let norm_weight = self.vector(collapse.norm);
        let traced = trace.is_some();
        {
            let threads = Parts::new(&mut ws.threads, 1, num_threads);
            let mixes = rows(&mut ws.mixes, num_rows, n, num_threads);
            let xs = rows(&mut ws.x, num_rows, d, num_threads);
            let gathered = &*ws.gathered;
            ws.pool.run_items(num_rows, &|t| {
                let (z, x, share) = (mixes.take(t), xs.take(t), xs.share(t));
                let streams = &gathered[share.start * n * d..share.end * n * d];
                let scratch = &mut own(&threads, t).linear;
                let gate = self.matrix(collapse.gate);
                gate.forward(Rows::new(streams, n * d), &mut ColumnPart::new(z, 0..n), scratch);
                for ((z, v), x) in z.chunks_exact_mut(n).zip(streams.chunks_exact(n * d)).zip(x.chunks_exact_mut(d)) {
                    hc::scale_by_inverse_rms(z, v, config.rms_norm_eps);
                    hc::head_gates(z, scale, base, config.hc_eps);
                    hc::collapse(v, z, x);
                    if !traced {
                        norm::rms_norm(x, norm_weight, config.rms_norm_eps);
                    }
                }
            });
        }
        let collapsed = traced.then(|| ws.x.clone());
        if traced {
            norm::rms_norm(&mut ws.x, norm_weight, config.rms_norm_eps);
        }
        let threads = Parts::new(&mut ws.threads, 1, num_threads);
        let (vocab_size, num_chunks) = (config.vocab_size, config.vocab_size.div_ceil(logits::CHUNK));
        out.vocab_size = vocab_size;
        out.chunks.resize(num_rows * num_chunks, Chunk::default());
        let logits =
            Columns::new(sized(&mut out.logits, num_rows * vocab_size), vocab_size, logits::CHUNK, num_threads);
        let chunks = Columns::new(&mut out.chunks, num_chunks, 1, num_threads);
        let x = Rows::new(&ws.x, d);
        ws.pool.run(&|t| {
            let (mut logits, mut chunks) = (logits.take(t), chunks.take(t));
            self.matrix(self.head).forward(x, &mut logits, &mut own(&threads, t).linear);
            let (columns, chunk_columns) = (logits.columns(), chunks.columns());
            for r in 0..num_rows {
                let chunks = chunks.row(r, chunk_columns.clone());
                logits::summarise(logits.row(r, columns.clone()), 1.0, chunks);
            }
        });
        if let (Some(trace), Some(collapsed)) = (trace, collapsed) {
            trace.numbers(format!("{prefix}head_collapsed"), &[d], collapsed);
            trace.numbers(format!("{prefix}final_norm"), &[d], ws.x.clone());
            trace.numbers(format!("{prefix}logits"), &[config.vocab_size], out.logits.clone());
        }
    }
}

impl Layer {
    /// The trace, if one is kept, and the full name of an op of this layer.
    fn op<'t>(&self, name: &str, trace: &'t mut Option<&mut Trace>) -> Option<(&'t mut Trace, String)> {
        trace.as_deref_mut().map(|trace| (trace, format!("{}.{name}", self.name)))
    }
}

/// The rotations of a layer's kind: compressed layers have their own base and YaRN for everything.
fn rotations<'a>(layer: &Layer, window: &'a [Rotation], compressed: &'a [Rotation]) -> &'a [Rotation] {
    if layer.kind == LayerKind::Window { window } else { compressed }
}

/// Mixes the results `y` of some rows into their streams.
fn expand(num_streams: usize, streams: &mut [f32], y: &[f32], mixes: &[f32]) {
    let (n, num_mixes) = (num_streams, (2 + num_streams) * num_streams);
    let d = y.len() * num_mixes / mixes.len().max(1);
    for ((streams, y), mix) in
        streams.chunks_exact_mut((n * d).max(1)).zip(y.chunks_exact(d.max(1))).zip(mixes.chunks_exact(num_mixes))
    {
        hc::expand(streams, y, &mix[n..2 * n], &mix[2 * n..]);
    }
}
