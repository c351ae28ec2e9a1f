//! The mixture of experts of a layer (SPEC section 7): a router, routed experts and one shared expert. Shapes: T
//! positions, D model width, E experts, K experts per token, I expert width, P token-expert pairs, padding left out.

use rollout::model::ModelConfig;
use tch::{Device, Kind, Tensor};

use super::parameters::{Loader, PolicyError};
use super::tracer::Tracer;

/// One layer's experts.
pub(super) struct Experts {
    gate_ed: Tensor,
    select: Select,
    /// Of the routed experts, `[E, I, D]`, `[E, D, I]`, `[E, I, D]`.
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    shared_w1: Tensor,
    shared_w2: Tensor,
    shared_w3: Tensor,
    num_experts: usize,
    top_k: usize,
    route_scale: f64,
    limit: f64,
}

/// How a layer chooses experts.
enum Select {
    /// By the router's scores plus a bias that is not trained by gradients, `[E]`.
    Score(Tensor),
    /// By token id, `[vocab, K]`.
    Hash(Vec<i64>),
}

/// The experts of each position, `[T, K]`, row-major; -1 at padding.
pub(super) type Chosen = Vec<i64>;

impl Experts {
    /// `block` is `layers.i` or `mtp.0`.
    pub fn load(
        loader: &mut Loader<'_>,
        block: &str,
        is_hashed: bool,
        config: &ModelConfig,
    ) -> Result<Self, PolicyError> {
        let prefix = format!("{block}.ffn");
        let (d, e, i) = (config.hidden_size, config.n_routed_experts, config.moe_intermediate_size);
        let select = if is_hashed {
            let shape = [config.vocab_size, config.num_experts_per_tok];
            Select::Hash(loader.table(&format!("{prefix}.gate.tid2eid"), &shape)?)
        } else {
            Select::Score(loader.frozen(&format!("{prefix}.gate.bias"), &[e])?)
        };
        let routed = format!("{prefix}.experts");
        let shared = format!("{prefix}.shared_experts");
        Ok(Self {
            gate_ed: loader.trained(&format!("{prefix}.gate.weight"), &[e, d])?,
            select,
            w1: loader.experts(&routed, "w1", e, [i, d])?,
            w2: loader.experts(&routed, "w2", e, [d, i])?,
            w3: loader.experts(&routed, "w3", e, [i, d])?,
            shared_w1: loader.trained(&format!("{shared}.w1.weight"), &[i, d])?,
            shared_w2: loader.trained(&format!("{shared}.w2.weight"), &[d, i])?,
            shared_w3: loader.trained(&format!("{shared}.w3.weight"), &[i, d])?,
            num_experts: e,
            top_k: config.num_experts_per_tok,
            route_scale: f64::from(config.routed_scaling_factor),
            limit: f64::from(config.swiglu_limit),
        })
    }

    /// `[T, D]` to `[T, D]`. The experts are the `recorded` ones if given, else chosen here. `token_ids` and
    /// `segment_ids` (negative at padding) are `[T]`.
    pub fn forward(
        &self,
        h_td: &Tensor,
        token_ids: &[i64],
        segment_ids: &[i32],
        recorded: Option<&[i64]>,
        tracer: &mut Tracer<'_>,
    ) -> Tensor {
        let logits_te = h_td.linear(&self.gate_ed, None::<&Tensor>);
        tracer.rows("router.logits", &logits_te);
        let score_te = logits_te.softplus().sqrt();
        let chosen = match (recorded, &self.select) {
            (Some(recorded), _) => recorded.to_vec(),
            (None, Select::Hash(table)) => hash_choice(table, self.top_k, token_ids, segment_ids),
            (None, Select::Score(bias)) => {
                score_choice(&super::to_vec_f32(&score_te), &super::to_vec_f32(bias), self.top_k, segment_ids)
            }
        };
        let dispatch = Dispatch::new(&chosen, self.top_k, self.num_experts, h_td.device());
        let weight_tk = self.weights(&score_te, &dispatch);
        tracer.experts(&chosen, &weight_tk);
        let routed = self.routed(h_td, &weight_tk, &dispatch);
        let gate = h_td.linear(&self.shared_w1, None::<&Tensor>);
        let up = h_td.linear(&self.shared_w3, None::<&Tensor>);
        let shared = self.swiglu(&gate, &up).linear(&self.shared_w2, None::<&Tensor>);
        tracer.rows("shared_out", &shared);
        let y_td = routed + shared;
        tracer.rows("ffn_out", &y_td);
        y_td
    }

    /// How much each chosen expert counts, `[T, K]`.
    fn weights(&self, score_te: &Tensor, dispatch: &Dispatch) -> Tensor {
        let score_tk = score_te.gather(1, &dispatch.expert_tk, false);
        let sum_t1 = score_tk.sum_dim_intlist(1, true, None::<Kind>) + 1e-20;
        score_tk / sum_t1 * self.route_scale
    }

    fn routed(&self, h_td: &Tensor, weight_tk: &Tensor, dispatch: &Dispatch) -> Tensor {
        // Into expert order, one matrix product per expert on its slice, and back. Splits and unbinds rather than
        // slices: their gradient is one concatenation.
        let x_pd = Tensor::embedding(h_td, &dispatch.token_of_pair, -1, false, false);
        let weight_p1 = Tensor::embedding(&weight_tk.view([-1, 1]), &dispatch.pair, -1, false, false);
        let per_expert = |x: &Tensor, w: &Tensor| -> Vec<Tensor> {
            let slices = x.split_with_sizes(&dispatch.counts, 0);
            let products = slices.iter().zip(w.unbind(0)).filter(|(x, _)| x.size()[0] > 0);
            products.map(|(x, w)| x.mm(&w.transpose(0, 1))).collect()
        };
        let gate = Tensor::cat(&per_expert(&x_pd, &self.w1), 0);
        let up = Tensor::cat(&per_expert(&x_pd, &self.w3), 0);
        // Weighted before w2 (as the release does), where it is narrower.
        let a_pi = self.swiglu(&gate, &up) * weight_p1;
        let mut y_pd = per_expert(&a_pi, &self.w2);
        // One row of zeros, which is where padding reads.
        y_pd.push(Tensor::zeros([1, h_td.size()[1]], (Kind::Float, h_td.device())));
        let y = Tensor::embedding(&Tensor::cat(&y_pd, 0), &dispatch.inverse_tk, -1, false, false);
        y.view([-1, self.top_k as i64, h_td.size()[1]]).sum_dim_intlist(1, false, None::<Kind>)
    }

    /// `silu(min(gate, limit)) * clamp(up, -limit, limit)`; what is clamped gets no gradient.
    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Tensor {
        gate.clamp_max(self.limit).silu() * up.clamp(-self.limit, self.limit)
    }
}

/// The `K` experts with the highest score plus bias, highest first; of equals the lower expert wins.
fn score_choice(score_te: &[f32], bias_e: &[f32], top_k: usize, segment_ids: &[i32]) -> Chosen {
    let mut chosen = vec![-1; segment_ids.len() * top_k];
    let mut biased = vec![0.0; bias_e.len()];
    for ((score_e, chosen_k), segment) in
        score_te.chunks_exact(bias_e.len()).zip(chosen.chunks_exact_mut(top_k)).zip(segment_ids)
    {
        if *segment < 0 {
            continue;
        }
        for e in 0..bias_e.len() {
            biased[e] = score_e[e] + bias_e[e];
        }
        for slot in 0..top_k {
            let mut best: Option<usize> = None;
            for e in 0..biased.len() {
                let taken = chosen_k[..slot].contains(&(e as i64));
                if !taken && best.is_none_or(|b| biased[e] > biased[b]) {
                    best = Some(e);
                }
            }
            chosen_k[slot] = best.expect("there are at least K experts") as i64;
        }
    }
    chosen
}

/// The experts that the layer's table gives each token.
fn hash_choice(table: &[i64], top_k: usize, token_ids: &[i64], segment_ids: &[i32]) -> Chosen {
    let mut chosen = vec![-1; segment_ids.len() * top_k];
    for (t, chosen_k) in chosen.chunks_exact_mut(top_k).enumerate() {
        if segment_ids[t] >= 0 {
            chosen_k.copy_from_slice(&table[token_ids[t] as usize * top_k..][..top_k]);
        }
    }
    chosen
}

/// Token-expert pairs in expert order (stable), and the way back.
struct Dispatch {
    /// `[T, K]`, 0 at padding.
    expert_tk: Tensor,
    /// Pairs of each expert, `[E]`.
    counts: Vec<i64>,
    /// `[P]`: which pair, `t * K + k`, stands at each place.
    pair: Tensor,
    /// `[P]`: its token.
    token_of_pair: Tensor,
    /// `[T * K]`: the place of each pair; `P` at padding.
    inverse_tk: Tensor,
}

impl Dispatch {
    fn new(chosen: &[i64], top_k: usize, num_experts: usize, device: Device) -> Self {
        let mut counts = vec![0i64; num_experts];
        for &e in chosen {
            if e >= 0 {
                counts[e as usize] += 1;
            }
        }
        let mut next = vec![0i64; num_experts];
        for e in 1..num_experts {
            next[e] = next[e - 1] + counts[e - 1];
        }
        let num_pairs: i64 = counts.iter().sum();
        let mut pair = vec![0i64; num_pairs as usize];
        let mut inverse = vec![num_pairs; chosen.len()];
        for (at, &e) in chosen.iter().enumerate() {
            if e >= 0 {
                let place = &mut next[e as usize];
                pair[*place as usize] = at as i64;
                inverse[at] = *place;
                *place += 1;
            }
        }
        let token_of_pair: Vec<i64> = pair.iter().map(|p| p / top_k as i64).collect();
        let expert: Vec<i64> = chosen.iter().map(|&e| e.max(0)).collect();
        let tensor = |v: &[i64]| Tensor::from_slice(v).to_device(device);
        Self {
            expert_tk: tensor(&expert).view_([-1, top_k as i64]),
            counts,
            pair: tensor(&pair),
            token_of_pair: tensor(&token_of_pair),
            inverse_tk: tensor(&inverse),
        }
    }
}
