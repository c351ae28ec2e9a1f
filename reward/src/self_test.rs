//! The start-up test: a rule that does not know its own reference answers would train on noise.

use datasets::{Prompt, Verdict};

use crate::error::shown;
use crate::{RewardError, RewardFn};

/// Prompts that the test looks at: enough to meet several tasks of a mixed set, too few to be felt.
const NUM_PROMPTS: usize = 32;

/// No task has this for an answer, and it holds no digit, bracket or operator that could earn marks by accident.
const WRONG: &str = "~ no answer ~";

/// Scores the reference answer and an obviously wrong one for the first prompts.
///
/// # Errors
/// The first prompt whose reference answer does not get full marks, or whose wrong answer gets as much.
pub fn self_test(rule: &dyn RewardFn, prompts: &[Prompt]) -> Result<(), RewardError> {
    if prompts.is_empty() {
        return Err(RewardError::NoPrompts { rule: rule.name() });
    }
    for prompt in prompts.iter().take(NUM_PROMPTS) {
        let (row, answer) = (prompt.row, shown(&prompt.answer));
        let right = rule.score(prompt, &rule.reference_response(prompt));
        if right.verdict != Verdict::Right {
            let verdict = if right.verdict == Verdict::Wrong { "wrong" } else { "unscorable" };
            return Err(RewardError::ReferenceNotRight { row, rule: rule.name(), score: right.score, verdict, answer });
        }
        let wrong = rule.score(prompt, WRONG);
        if wrong.verdict == Verdict::Right || wrong.score >= right.score {
            let text = shown(WRONG);
            return Err(RewardError::WrongNotWorse { row, rule: rule.name(), score: wrong.score, text, answer });
        }
    }
    Ok(())
}
