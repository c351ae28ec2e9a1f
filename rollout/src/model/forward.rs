//! The forward pass on `kernels`: a ragged batch of tokens, each row computed alone and in one fixed order, so that
//! prefill, chunks, decode and any batch give the same bits.
//! Shapes: R rows, D width, N streams, H heads, c head width, K experts per token, V vocabulary.

use kernels::{activation, attention, hyper_connection as hc, indexer, norm, rope::Rotation, router};

use super::weights::{Collapse, Compressor, Expert, HyperConnection, Indexer, Layer, Model};
use super::{LayerKind, ModelConfig, Trace};
use crate::kv_cache::{CompressorCache, KvCache, LayerCache};

/// A run of consecutive tokens of one sequence.
#[derive(Debug)]
pub struct Segment<'a> {
    /// The sequence's state; the tokens follow its last one.
    pub cache: &'a mut KvCache,
    /// The tokens to process.
    pub tokens: &'a [u32],
    /// Logits of every token, or of the last one only.
    pub all_logits: bool,
}

/// What a forward pass gives.
#[derive(Clone, Debug, Default)]
pub struct ForwardOutput {
    /// `[_, V]`: for each segment in turn, its last row or all of its rows.
    pub logits: Vec<f32>,
    /// Expert choices of all rows, `[R, layers, K]`; of multi-token prediction `[R, 1, K]`.
    pub expert_idx: Vec<u16>,
    /// Indexer selections of all rows, `[R, CSA layers, index_topk]`; unused slots hold `u32::MAX`.
    pub block_idx: Vec<u32>,
}

/// Buffers that live from step to step, so that a step allocates next to nothing.
#[derive(Debug, Default)]
pub struct Workspace {
    rows: Vec<Row>,
    window_rotations: Vec<Rotation>,
    compressed_rotations: Vec<Rotation>,
    block_rotation: Rotation,
    window_frequencies: Vec<f32>,
    compressed_frequencies: Vec<f32>,
    streams: Vec<f32>,
    old_streams: Vec<f32>,
    mixes: Vec<f32>,
    x: Vec<f32>,
    y: Vec<f32>,
    q_residual: Vec<f32>,
    q: Vec<f32>,
    kv: Vec<f32>,
    series_kv: Vec<f32>,
    series_gate: Vec<f32>,
    index_q: Vec<f32>,
    index_weight: Vec<f32>,
    scores: Vec<f32>,
    picks: Vec<u32>,
    attended: Vec<f32>,
    grouped: Vec<f32>,
    router: Vec<f32>,
    expert_weight: Vec<f32>,
    pairs: Vec<(u16, u32)>,
    gathered: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    slot: Vec<u32>,
    unpacked: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    segment: usize,
    position: usize,
    token: u32,
}

/// Clears and sizes a buffer whose every element is about to be written.
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.resize(len, 0.0);
    buffer
}

impl Workspace {
    /// The streams after the last layer of the pass before, `[R, N, D]`: what multi-token prediction starts from.
    pub fn streams(&self) -> &[f32] {
        &self.streams
    }
}

impl Model {
    /// Runs `segments` through the model, advances their caches and fills `out`, and `trace` if one is given.
    ///
    /// # Panics
    /// When a token is not of the vocabulary.
    pub fn forward(
        &self,
        segments: &mut [Segment<'_>],
        ws: &mut Workspace,
        out: &mut ForwardOutput,
        mut trace: Option<&mut Trace>,
    ) {
        let config = &self.config;
        self.start(segments, |cache| cache.len, ws);
        let num_rows = ws.rows.len();
        out.expert_idx.clear();
        out.expert_idx.resize(num_rows * self.layers.len() * config.num_experts_per_tok, 0);
        out.block_idx.clear();
        out.block_idx.resize(num_rows * config.csa_layers().count() * config.index_topk, u32::MAX);
        let (d, n) = (config.hidden_size, config.hc_mult);
        let embed = self.vector(self.embed);
        let streams = sized(&mut ws.streams, num_rows * n * d);
        for (row, streams) in ws.rows.iter().zip(streams.chunks_exact_mut(n * d)) {
            for stream in streams.chunks_exact_mut(d) {
                stream.copy_from_slice(&embed[row.token as usize * d..][..d]);
            }
        }
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
        self.start(segments, |cache| cache.mtp_len, ws);
        let num_rows = ws.rows.len();
        assert_eq!(streams.len(), num_rows * n * d, "streams of {num_rows} rows");
        out.expert_idx.clear();
        out.expert_idx.resize(num_rows * config.num_experts_per_tok, 0);
        out.block_idx.clear();
        // e_proj · enorm(embedding of the next token), to be added to every stream's h_proj · hnorm(stream).
        let embed = self.vector(self.embed);
        let x = sized(&mut ws.x, num_rows * d);
        for (row, x) in ws.rows.iter().zip(x.chunks_exact_mut(d)) {
            x.copy_from_slice(&embed[row.token as usize * d..][..d]);
        }
        norm::rms_norm(x, self.vector(mtp.enorm), eps);
        let e = sized(&mut ws.y, num_rows * d);
        self.matrix(mtp.e_proj).forward(x, e, &mut ws.unpacked);
        let normed = sized(&mut ws.gathered, num_rows * n * d);
        normed.copy_from_slice(streams);
        norm::rms_norm(normed, self.vector(mtp.hnorm), eps);
        let mixed = sized(&mut ws.streams, num_rows * n * d);
        self.matrix(mtp.h_proj).forward(normed, mixed, &mut ws.unpacked);
        for (streams, e) in mixed.chunks_exact_mut(n * d).zip(e.chunks_exact(d)) {
            for stream in streams.chunks_exact_mut(d) {
                stream.iter_mut().zip(e).for_each(|(x, e)| *x += e);
            }
        }
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
        self.hyper_pre(&layer.hc_attn, layer.attn_norm, ws, layer.op("hc_attn", &mut trace));
        self.attention(layer_idx, layer, segments, ws, out, trace.as_deref_mut());
        expand(&self.config, ws);
        self.hyper_pre(&layer.hc_ffn, layer.ffn_norm, ws, layer.op("hc_ffn", &mut trace));
        self.experts(layer_idx, layer, ws, out, trace.as_deref_mut());
        expand(&self.config, ws);
        if let Some(trace) = trace {
            let (n, d) = (self.config.hc_mult, self.config.hidden_size);
            trace.numbers(format!("{}.streams_out", layer.name), &[n, d], ws.streams.clone());
        }
    }

    /// Lays out the rows of `segments`, which follow the `len_of` tokens of their caches, with their rotations.
    fn start(&self, segments: &mut [Segment<'_>], len_of: impl Fn(&KvCache) -> usize, ws: &mut Workspace) {
        let config = &self.config;
        ws.rows.clear();
        for (s, segment) in segments.iter_mut().enumerate() {
            for layer in &mut segment.cache.layers {
                layer.window.trim();
            }
            let positions = len_of(segment.cache)..;
            ws.rows.extend(segment.tokens.iter().zip(positions).map(|(&token, position)| Row {
                segment: s,
                position,
                token,
            }));
        }
        if ws.window_frequencies.is_empty() {
            ws.window_frequencies = config.rope_frequencies(LayerKind::Window);
            ws.compressed_frequencies = config.rope_frequencies(LayerKind::Csa);
        }
        ws.window_rotations.resize_with(ws.rows.len(), Rotation::default);
        ws.compressed_rotations.resize_with(ws.rows.len(), Rotation::default);
        for (r, row) in ws.rows.iter().enumerate() {
            ws.window_rotations[r].set(row.position, &ws.window_frequencies);
            ws.compressed_rotations[r].set(row.position, &ws.compressed_frequencies);
            let (token, vocab_size) = (row.token, config.vocab_size);
            assert!((token as usize) < vocab_size, "token {token} is not of the vocabulary of {vocab_size}");
        }
    }

    /// Mappings of a sub-layer and its normalised input: fills `ws.mixes` `[R, (2 + N) N]` and `ws.x` `[R, D]`.
    fn hyper_pre(
        &self,
        hyper: &HyperConnection,
        norm_weight: usize,
        ws: &mut Workspace,
        trace: Option<(&mut Trace, String)>,
    ) {
        let config = &self.config;
        let (d, n, num_rows) = (config.hidden_size, config.hc_mult, ws.rows.len());
        let mixes = (2 + n) * n;
        let z = sized(&mut ws.mixes, num_rows * mixes);
        self.matrix(hyper.gate).forward(&ws.streams, z, &mut ws.unpacked);
        let x = sized(&mut ws.x, num_rows * d);
        let gates = hc::Gates {
            scale: self.vector(hyper.scale),
            base: self.vector(hyper.base),
            num_streams: n,
            sinkhorn_iters: config.hc_sinkhorn_iters,
            eps: config.hc_eps,
        };
        for ((z, v), x) in z.chunks_exact_mut(mixes).zip(ws.streams.chunks_exact(n * d)).zip(x.chunks_exact_mut(d)) {
            hc::scale_by_inverse_rms(z, v, config.rms_norm_eps);
            hc::mappings(z, &gates);
            hc::collapse(v, &z[..n], x);
        }
        if let Some((trace, op)) = trace {
            let part = |from: usize, to: usize| z.chunks_exact(mixes).flat_map(|z| &z[from..to]).copied().collect();
            trace.numbers(format!("{op}.post"), &[n], part(n, 2 * n));
            trace.numbers(format!("{op}.comb"), &[n, n], part(2 * n, mixes));
            trace.numbers(format!("{op}.collapsed"), &[d], x.to_vec());
        }
        norm::rms_norm(x, self.vector(norm_weight), config.rms_norm_eps);
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
        let (c, h, num_rows) = (config.head_dim, config.num_attention_heads, ws.rows.len());
        let eps = config.rms_norm_eps;
        let rank = config.q_lora_rank;
        let qr = sized(&mut ws.q_residual, num_rows * rank);
        self.matrix(layer.wq_a).forward(&ws.x, qr, &mut ws.unpacked);
        norm::rms_norm(qr, self.vector(layer.q_norm), eps);
        if let Some((trace, op)) = layer.op("q_residual", &mut trace) {
            trace.numbers(op, &[rank], qr.to_vec());
        }
        let q = sized(&mut ws.q, num_rows * h * c);
        self.matrix(layer.wq_b).forward(qr, q, &mut ws.unpacked);
        norm::rms_norm_unweighted(q, c, eps);
        let kv = sized(&mut ws.kv, num_rows * c);
        self.matrix(layer.wkv).forward(&ws.x, kv, &mut ws.unpacked);
        norm::rms_norm(kv, self.vector(layer.kv_norm), eps);
        let rows = ws.rows.iter().zip(rotations(layer, &ws.window_rotations, &ws.compressed_rotations));
        for ((row, rotation), (q, kv)) in rows.zip(q.chunks_exact_mut(h * c).zip(kv.chunks_exact_mut(c))) {
            rotation.apply(q, c);
            rotation.apply(kv, c);
            segments[row.segment].cache.layers[layer_idx].window.push(kv);
        }
        if let Some(compressor) = &layer.compressor {
            self.compress(compressor, c, segments, ws, |cache| cache.layers[layer_idx].compressor.as_mut());
        }
        if let Some(indexer) = &layer.indexer {
            let width = config.index_head_dim;
            self.compress(&indexer.compressor, width, segments, ws, |cache| cache.layers[layer_idx].indexer.as_mut());
            self.index_queries(indexer, ws);
        }
        let mut picked = layer.indexer.as_ref().and(trace.as_ref()).map(|_| IndexerTrace::default());

        let rotations = rotations(layer, &ws.window_rotations, &ws.compressed_rotations);
        let attended = sized(&mut ws.attended, num_rows * h * c);
        let sink = self.vector(layer.sink);
        let top_k = config.index_topk;
        let csa_idx = config.csa_layers().take_while(|&l| l < layer_idx).count();
        let num_csa = config.csa_layers().count();
        let index_width = config.index_n_heads * config.index_head_dim;
        for (r, row) in ws.rows.iter().enumerate() {
            let cache = &segments[row.segment].cache.layers[layer_idx];
            ws.picks.clear();
            let entries: &[f32] = match (&cache.compressor, &cache.indexer) {
                (Some(entries), Some(keys)) => {
                    let visible = entries.num_visible(row.position);
                    let scores = sized(&mut ws.scores, visible);
                    let q = &ws.index_q[r * index_width..][..index_width];
                    let weight = &ws.index_weight[r * config.index_n_heads..][..config.index_n_heads];
                    indexer::scores(q, weight, &keys.entries, scores);
                    indexer::top_k(scores, top_k, &mut ws.picks);
                    if let Some(picked) = &mut picked {
                        picked.scores.extend_from_slice(scores);
                        picked.blocks.push(ws.picks.clone());
                    }
                    let slots = &mut out.block_idx[(r * num_csa + csa_idx) * top_k..][..top_k];
                    slots[..ws.picks.len()].copy_from_slice(&ws.picks);
                    &entries.entries
                }
                (Some(entries), None) => {
                    ws.picks.extend(0..entries.num_visible(row.position) as u32);
                    &entries.entries
                }
                (None, _) => &[],
            };
            let q = &ws.q[r * h * c..][..h * c];
            let o = &mut attended[r * h * c..][..h * c];
            attention::attend(q, cache.window.visible(row.position), entries, &ws.picks, sink, &mut ws.scores, o);
            rotations[r].apply_inverse(o, c);
        }

        let (groups, group_rank) = (config.o_groups, config.o_lora_rank);
        let grouped = sized(&mut ws.grouped, num_rows * groups * group_rank);
        for (g, part) in self.matrix_groups(layer.wo_a).iter().enumerate() {
            let (x, y) = (&ws.attended[g * h * c / groups..], &mut grouped[g * group_rank..]);
            part.forward_strided(x, h * c, y, groups * group_rank, num_rows, &mut ws.unpacked);
        }
        let y = sized(&mut ws.y, num_rows * config.hidden_size);
        self.matrix(layer.wo_b).forward(grouped, y, &mut ws.unpacked);

        if let Some(trace) = trace {
            let name = &layer.name;
            let entries = |of: fn(&LayerCache) -> Option<&CompressorCache>| {
                let caches = segments.iter().filter_map(|s| of(&s.cache.layers[layer_idx]));
                caches.flat_map(|cache| &cache.entries).copied().collect::<Vec<f32>>()
            };
            if layer.compressor.is_some() {
                trace.numbers(format!("{name}.compressed_kv"), &[c], entries(|cache| cache.compressor.as_ref()));
            }
            if let Some(IndexerTrace { scores, blocks }) = picked {
                let keys = entries(|cache| cache.indexer.as_ref());
                trace.numbers(format!("{name}.indexer.keys"), &[config.index_head_dim], keys);
                trace.numbers(format!("{name}.indexer.scores"), &[], scores);
                trace.choices(format!("{name}.indexer.topk"), blocks);
            }
            trace.numbers(format!("{name}.attn_out"), &[config.hidden_size], y.to_vec());
        }
    }

    /// Feeds all rows to a compressor and finishes the entries that come out.
    fn compress(
        &self,
        compressor: &Compressor,
        width: usize,
        segments: &mut [Segment<'_>],
        ws: &mut Workspace,
        mut cache_of: impl FnMut(&mut KvCache) -> Option<&mut CompressorCache>,
    ) {
        let (wkv, wgate) = (self.matrix(compressor.wkv), self.matrix(compressor.wgate));
        let (ape, series) = (self.vector(compressor.ape), wkv.outputs());
        let ratio = ape.len() / series;
        let kv = sized(&mut ws.series_kv, ws.rows.len() * series);
        wkv.forward(&ws.x, kv, &mut ws.unpacked);
        let gate = sized(&mut ws.series_gate, ws.rows.len() * series);
        wgate.forward(&ws.x, gate, &mut ws.unpacked);
        for ((row, kv), gate) in ws.rows.iter().zip(kv.chunks_exact(series)).zip(gate.chunks_exact_mut(series)) {
            for (gate, ape) in gate.iter_mut().zip(&ape[row.position % ratio * series..][..series]) {
                *gate += ape;
            }
            let cache = cache_of(segments[row.segment].cache).expect("a compressing layer has a compressor's cache");
            if let Some((block, entry)) = cache.push(kv, gate) {
                norm::rms_norm(entry, self.vector(compressor.norm), self.config.rms_norm_eps);
                ws.block_rotation.set(block * ratio, &ws.compressed_frequencies);
                ws.block_rotation.apply(entry, width);
            }
        }
    }

    /// Fills `ws.index_q` `[R, n, e]` and `ws.index_weight` `[R, n]`.
    fn index_queries(&self, indexer: &Indexer, ws: &mut Workspace) {
        let (n, e) = (self.config.index_n_heads, self.config.index_head_dim);
        let num_rows = ws.rows.len();
        let q = sized(&mut ws.index_q, num_rows * n * e);
        self.matrix(indexer.wq_b).forward(&ws.q_residual, q, &mut ws.unpacked);
        for (q, rotation) in q.chunks_exact_mut(n * e).zip(&ws.compressed_rotations) {
            rotation.apply(q, e);
        }
        let weight = sized(&mut ws.index_weight, num_rows * n);
        self.matrix(indexer.weights_proj).forward(&ws.x, weight, &mut ws.unpacked);
        let factor = 1.0 / ((e * n) as f32).sqrt();
        for w in weight {
            *w *= factor;
        }
    }

    /// From `ws.x` to `ws.y`: the routed experts, grouped by expert, then the shared one.
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
        let scores = sized(&mut ws.router, num_rows * num_experts);
        self.matrix(layer.gate).forward(&ws.x, scores, &mut ws.unpacked);
        if let Some((trace, op)) = layer.op("router.logits", &mut trace) {
            trace.numbers(op, &[num_experts], scores.to_vec());
        }
        router::score(scores);
        let weight = sized(&mut ws.expert_weight, num_rows * k);
        ws.pairs.clear();
        // As many layers as `out` has room for: all of the model's, or multi-token prediction alone.
        let num_layers = out.expert_idx.len() / (num_rows * k).max(1);
        for (r, row) in ws.rows.iter().enumerate() {
            let scores = &scores[r * num_experts..][..num_experts];
            let chosen = &mut out.expert_idx[(r * num_layers + layer_idx % num_layers) * k..][..k];
            match layer.gate_bias {
                Some(bias) => router::choose(scores, self.vector(bias), chosen),
                None => {
                    for (slot, &expert) in chosen.iter_mut().zip(self.hash_experts(layer_idx, row.token)) {
                        *slot = expert as u16;
                    }
                }
            }
            router::weights(scores, chosen, config.routed_scaling_factor, &mut weight[r * k..][..k]);
            ws.pairs.extend(chosen.iter().zip((r * k) as u32..).map(|(&expert, pair)| (expert, pair)));
        }
        ws.pairs.sort_unstable();

        let gathered = sized(&mut ws.gathered, num_rows * k * d);
        ws.slot.resize(num_rows * k, 0);
        for (slot, (&(_, pair), x)) in ws.pairs.iter().zip(gathered.chunks_exact_mut(d)).enumerate() {
            ws.slot[pair as usize] = slot as u32;
            x.copy_from_slice(&ws.x[pair as usize / k * d..][..d]);
        }
        let limit = config.swiglu_limit;
        let down = sized(&mut ws.down, num_rows * k * d);
        let mut from = 0;
        for run in ws.pairs.chunk_by(|a, b| a.0 == b.0) {
            let expert = &layer.experts[usize::from(run[0].0)];
            let range = from * d..(from + run.len()) * d;
            self.expert(
                expert,
                &gathered[range.clone()],
                &mut down[range],
                limit,
                &mut ws.gate,
                &mut ws.up,
                &mut ws.unpacked,
            );
            from += run.len();
        }
        let y = sized(&mut ws.y, num_rows * d);
        self.expert(&layer.shared, &ws.x, y, limit, &mut ws.gate, &mut ws.up, &mut ws.unpacked);
        if let Some((trace, op)) = layer.op("shared_out", &mut trace) {
            trace.numbers(op, &[d], y.to_vec());
        }
        for (r, y) in y.chunks_exact_mut(d).enumerate() {
            combine(y, &weight[r * k..][..k], &ws.slot[r * k..][..k], down);
        }

        if let Some(trace) = trace {
            // In the order of ascending experts, in which every implementation can tell them.
            ws.pairs.sort_unstable_by_key(|&(expert, pair)| (pair / k as u32, expert));
            let ordered: Vec<f32> = ws.pairs.iter().map(|&(_, pair)| weight[pair as usize]).collect();
            let experts = ws.pairs.chunks_exact(k).map(|row| row.iter().map(|&(expert, _)| expert.into()).collect());
            trace.choices(format!("{}.router.experts", layer.name), experts);
            trace.numbers(format!("{}.router.weights", layer.name), &[k], ordered);
            trace.numbers(format!("{}.ffn_out", layer.name), &[d], y.to_vec());
        }
    }

    fn expert(
        &self,
        expert: &Expert,
        x: &[f32],
        y: &mut [f32],
        limit: f32,
        gate: &mut Vec<f32>,
        up: &mut Vec<f32>,
        unpacked: &mut Vec<f32>,
    ) {
        let (w1, w3) = (self.matrix(expert.w1), self.matrix(expert.w3));
        let len = x.len() / w1.inputs() * w1.outputs();
        let (gate, up) = (sized(gate, len), sized(up, len));
        w1.forward(x, gate, unpacked);
        w3.forward(x, up, unpacked);
        activation::swiglu(gate, up, limit);
        self.matrix(expert.w2).forward(gate, y, unpacked);
    }

    /// Logits of the rows that were asked for.
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
        ws.gathered.clear();
        let mut from = 0;
        for segment in segments {
            let len = segment.tokens.len();
            let wanted = if segment.all_logits { from..from + len } else { from + len - 1..from + len };
            ws.gathered.extend_from_slice(&ws.streams[wanted.start * n * d..wanted.end * n * d]);
            from += len;
        }
        let num_rows = ws.gathered.len() / (n * d);
        let z = sized(&mut ws.mixes, num_rows * n);
        self.matrix(collapse.gate).forward(&ws.gathered, z, &mut ws.unpacked);
        let x = sized(&mut ws.x, num_rows * d);
        let (scale, base) = (self.vector(collapse.scale)[0], self.vector(collapse.base));
        for ((z, v), x) in z.chunks_exact_mut(n).zip(ws.gathered.chunks_exact(n * d)).zip(x.chunks_exact_mut(d)) {
            hc::scale_by_inverse_rms(z, v, config.rms_norm_eps);
            hc::head_gates(z, scale, base, config.hc_eps);
            hc::collapse(v, z, x);
        }
        let collapsed = trace.is_some().then(|| x.to_vec());
        norm::rms_norm(x, self.vector(collapse.norm), config.rms_norm_eps);
        let logits = sized(&mut out.logits, num_rows * config.vocab_size);
        self.matrix(self.head).forward(x, logits, &mut ws.unpacked);
        if let (Some(trace), Some(collapsed)) = (trace, collapsed) {
            trace.numbers(format!("{prefix}head_collapsed"), &[d], collapsed);
            trace.numbers(format!("{prefix}final_norm"), &[d], x.to_vec());
            trace.numbers(format!("{prefix}logits"), &[config.vocab_size], logits.to_vec());
        }
    }
}

impl Layer {
    /// The trace, if one is kept, and the full name of an op of this layer.
    fn op<'t>(&self, name: &str, trace: &'t mut Option<&mut Trace>) -> Option<(&'t mut Trace, String)> {
        trace.as_deref_mut().map(|trace| (trace, format!("{}.{name}", self.name)))
    }
}

/// What an indexer gave, row after row.
#[derive(Default)]
struct IndexerTrace {
    scores: Vec<f32>,
    blocks: Vec<Vec<u32>>,
}

/// The rotations of a layer's kind: compressed layers have their own base and YaRN for everything.
fn rotations<'a>(layer: &Layer, window: &'a [Rotation], compressed: &'a [Rotation]) -> &'a [Rotation] {
    if layer.kind == LayerKind::Window { window } else { compressed }
}

/// Mixes `ws.y` back into the streams.
fn expand(config: &ModelConfig, ws: &mut Workspace) {
    let (d, n) = (config.hidden_size, config.hc_mult);
    let mixes = (2 + n) * n;
    let old = sized(&mut ws.old_streams, n * d);
    let rows = ws.streams.chunks_exact_mut(n * d).zip(ws.y.chunks_exact(d)).zip(ws.mixes.chunks_exact(mixes));
    for ((streams, y), mix) in rows {
        hc::expand(streams, y, &mix[n..2 * n], &mix[2 * n..], old);
    }
}

/// Adds a row's experts, in the order of its choices, to the shared expert's output in `y`.
fn combine(y: &mut [f32], weight: &[f32], slot: &[u32], down: &[f32]) {
    let d = y.len();
    for i in 0..d {
        let mut routed = 0.0;
        for (w, &slot) in weight.iter().zip(slot) {
            routed += w * down[slot as usize * d + i];
        }
        y[i] += routed;
    }
}
