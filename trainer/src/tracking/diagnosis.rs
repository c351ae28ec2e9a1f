//! Why nothing is being learned: what the first steps show of it, each as one sentence with the key to change.

use super::Metrics;

/// Steps during which a run explains itself.
const FIRST_STEPS: usize = 5;

/// The likely reasons that `metrics` of an early step show; none later, and none when all is well.
pub fn why_nothing_is_learned(step: usize, metrics: &Metrics) -> Vec<String> {
    let value = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
    let percent = |name: &str| format!("{:.0} %", 100.0 * value(name));
    let mut sentences = Vec::new();
    if step > FIRST_STEPS {
        return sentences;
    }
    if value("rollout/unscorable_ratio") > 0.5 {
        sentences.push(format!(
            "{} of the responses could not be scored; does `reward.type` fit the prompts' answers?",
            percent("rollout/unscorable_ratio")
        ));
    }
    if value("rollout/truncated_ratio") > 0.5 {
        sentences.push(format!(
            "{} of the responses were cut off before they ended; raise `rollout.max_response_tokens`",
            percent("rollout/truncated_ratio")
        ));
    }
    if value("rollout/zero_std/ratio") > 0.9 {
        sentences.push(format!(
            "in {} of the groups all rewards are equal and give no signal; choose prompts that are sometimes solved, or \
             raise `group_size`",
            percent("rollout/zero_std/ratio")
        ));
    }
    if value("train/num_loss_tokens") == 0.0 {
        sentences.push("no token is trained on: every response is masked".into());
    } else if value("train/grad_norm") == 0.0 {
        sentences.push("the gradient is zero: no rollout differs from its group in reward".into());
    }
    if value("train/train_rollout_logprob_abs_diff") > 0.03 {
        sentences.push(format!(
            "the trainer's log-probabilities differ from the engine's by {:.3} on average; set `train.replay_experts` and \
             `train.replay_indexer` to true",
            value("train/train_rollout_logprob_abs_diff")
        ));
    }
    sentences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Metrics {
        Metrics::from([("train/num_loss_tokens".into(), 100.0), ("train/grad_norm".into(), 1.0)])
    }

    #[track_caller]
    fn check(name: &str, value: f64, key: &str) {
        let mut metrics = healthy();
        metrics.insert(name.into(), value);
        let sentences = why_nothing_is_learned(1, &metrics);
        assert!(sentences.len() == 1 && sentences[0].contains(key), "{sentences:?}");
        assert_eq!(why_nothing_is_learned(FIRST_STEPS + 1, &metrics), Vec::<String>::new());
    }

    #[test]
    fn a_healthy_step_says_nothing() {
        assert_eq!(why_nothing_is_learned(1, &healthy()), Vec::<String>::new());
    }

    #[test]
    fn each_cause_is_named_with_its_key() {
        check("rollout/unscorable_ratio", 0.9, "reward.type");
        check("rollout/truncated_ratio", 1.0, "rollout.max_response_tokens");
        check("rollout/zero_std/ratio", 1.0, "group_size");
        check("train/num_loss_tokens", 0.0, "masked");
        check("train/grad_norm", 0.0, "gradient is zero");
        check("train/train_rollout_logprob_abs_diff", 0.2, "train.replay_experts");
    }
}
