//! The train stage: a rollout batch becomes one optimizer update or several.

use datasets::Sample;
use rollout::model::ModelConfig;

use crate::cli::Failure;
use crate::loss::{Aggregation, LossStats, Normaliser, policy_backward};
use crate::pack::{Microbatch, pack};
use crate::parallel::in_order;
use crate::policy::{Gradients, Policy, Replay, to_vec_f32};
use crate::recipe::{LossConfig, Recipe};
use crate::setup::Run;
use crate::tracking::{Metrics, Stage};

/// What a train stage did.
#[derive(Debug, Default)]
pub struct UpdateReport {
    /// `train/...`
    pub metrics: Metrics,
    /// The trainer's log-probability of each trained token, before the first update, per sample.
    pub trainer_logprobs: Vec<Vec<f32>>,
    /// Tokens that went through the policy with gradients, padding left out.
    pub num_tokens: usize,
}

/// Trains on `samples` in `train.updates_per_step` equal parts; `None` when the run was stopped between two
/// microbatches: the policy then stands at its last whole update.
///
/// # Errors
/// When the gradient is not finite.
///
/// Sources: the ratio's old log-probabilities are the trainer's own before the first update (PPO, arXiv:1707.06347);
/// with one update per batch they are those of the very forward pass that is differentiated.
pub fn train_on(run: &mut Run<'_>, samples: &[Sample]) -> Result<Option<UpdateReport>, Failure> {
    let recipe = run.recipe;
    let num_updates = recipe.train.updates_per_step;
    let replay = Replay { experts: recipe.train.replay_experts, indexer: recipe.train.replay_indexer };
    let parts: Vec<Vec<Microbatch>> =
        samples.chunks(samples.len() / num_updates).map(|part| pack(part, &recipe.pack)).collect();
    let total: usize = parts.iter().map(Vec::len).sum();
    let mut report = UpdateReport { trainer_logprobs: vec![Vec::new(); samples.len()], ..UpdateReport::default() };
    let temperature = recipe.rollout.temperature;
    let mtp_loss_weight = recipe.train.mtp_loss_weight;
    let mut old: Vec<Vec<Vec<f32>>> = Vec::new();
    for part in parts.iter().filter(|_| num_updates > 1) {
        let mut logprobs = Vec::new();
        let forward = |policy: &mut Policy, m: usize| {
            tch::no_grad(|| to_vec_f32(&policy.token_logprobs(&part[m], replay, temperature).0))
        };
        if !in_order(&mut run.workers, part.len(), &run.stop, forward, |_, part| logprobs.push(part)) {
            return Ok(None);
        }
        old.push(logprobs);
    }
    let mut stats = LossStats::default();
    let (mut grad_norm, mut lr, mut done, mut first_kl) = (0.0, 0.0, 0, None);
    for (u, part) in parts.iter().enumerate() {
        let normaliser = Normaliser::new(part, aggregation(recipe));
        let mut update = LossStats::default();
        let mut gradients = Gradients::default();
        let before = |m: usize| old.get(u).map(|old| old[m].as_slice());
        let first_sample = u * (samples.len() / num_updates);
        let backward = |policy: &mut Policy, m: usize| {
            policy_backward(
                policy,
                &part[m],
                before(m),
                &normaliser,
                &recipe.loss,
                replay,
                temperature,
                mtp_loss_weight,
            )
        };
        let whole = in_order(&mut run.workers, part.len(), &run.stop, backward, |m, (gradient, stats, logprobs)| {
            gradients.add(gradient);
            update.add(&stats);
            collect(&part[m], before(m).unwrap_or(&logprobs), first_sample, &mut report.trainer_logprobs);
            report.num_tokens += part[m].num_tokens();
            done += 1;
            run.console.stage(Stage::Train, done, total, report.num_tokens);
        });
        if !whole {
            return Ok(None);
        }
        let step = run.optimizer.step(&mut run.policy, &gradients)?;
        grad_norm += step.grad_norm / num_updates as f64;
        lr = step.learning_rate;
        first_kl.get_or_insert(update.per_token(update.kl_sum));
        stats.add(&update);
    }
    if recipe.train.router_bias_update_speed > 0.0 {
        let loads = expert_loads(samples, run.policy.config());
        run.policy.update_router_bias(&loads, recipe.train.router_bias_update_speed);
    }
    let mut put = |name: &str, value: f64| {
        report.metrics.insert(format!("train/{name}"), value);
    };
    put("loss", stats.loss / num_updates as f64);
    if mtp_loss_weight > 0.0 {
        put("mtp_loss", stats.mtp_loss / num_updates as f64);
    }
    put("pg_clipfrac", stats.per_token(stats.clipped));
    put("ppo_kl", stats.per_token(stats.kl_sum));
    put("ppo_kl_first_update", first_kl.unwrap_or(0.0));
    put("entropy", stats.per_token(stats.entropy_sum));
    put("log_probs", stats.per_token(stats.logprob_sum));
    put("train_rollout_logprob_abs_diff", stats.per_token(stats.mismatch_sum));
    put("train_rollout_logprob_abs_diff_max", stats.mismatch_max);
    put("grad_norm", grad_norm);
    put("lr", lr);
    put("num_loss_tokens", stats.num_tokens as f64);
    put("step", run.optimizer.num_steps() as f64);
    Ok(Some(report))
}

/// Tokens that the rollouts sent to each expert, layer after layer: `[layers, E]`.
fn expert_loads(samples: &[Sample], config: &ModelConfig) -> Vec<u64> {
    let (num_layers, k) = (config.num_hidden_layers, config.num_experts_per_tok);
    let mut loads = vec![0; num_layers * config.n_routed_experts];
    for routing in samples.iter().filter_map(|sample| sample.routing.as_ref()) {
        for token in routing.expert_idx.chunks_exact(num_layers * k) {
            for (layer, experts) in token.chunks_exact(k).enumerate() {
                for &expert in experts {
                    loads[layer * config.n_routed_experts + usize::from(expert)] += 1;
                }
            }
        }
    }
    loads
}

fn aggregation(recipe: &Recipe) -> Aggregation {
    let LossConfig::PpoClip(loss) = &recipe.loss;
    loss.aggregation
}

/// Takes each sample's trained log-probabilities out of a microbatch.
fn collect(mb: &Microbatch, logprobs: &[f32], first_sample: usize, into: &mut [Vec<f32>]) {
    for segment in &mb.segments {
        let from = segment.row * mb.row_len + segment.start;
        let trained = (from..from + segment.len).filter(|&at| mb.loss_mask[at]);
        into[first_sample + segment.sample_idx] = trained.map(|at| logprobs[at]).collect();
    }
}
