//! What can be wrong with a reward before the first rollout.

/// Why a rule cannot score a data set.
#[derive(Debug, thiserror::Error)]
pub enum RewardError {
    /// A prompt lacks something that the rule reads, or holds something else in its place.
    #[error(
        "prompt row {row}: `{field}` holds {found}, but the reward `{rule}` expects {expected}; \
         correct the row, or set the recipe's `reward.type` to the rule that fits this data set"
    )]
    Prompt {
        /// `Prompt::row`.
        row: usize,
        /// The field's path, from the prompt.
        field: String,
        /// What stands there.
        found: String,
        /// The rule's name, with the task where it has several.
        rule: String,
        /// What should stand there.
        expected: String,
    },

    /// The data set is empty, so nothing can be said about how the rule fits it.
    #[error("the reward `{rule}` found 0 prompts, expected at least 1; check the recipe's prompt file")]
    NoPrompts {
        /// The rule's name.
        rule: &'static str,
    },

    /// The start-up test: the reference answer is not right by the rule.
    #[error(
        "prompt row {row}: the reward `{rule}` gives {score} ({verdict}) to the row's own reference answer {answer}, \
         expected full marks; correct the row's answer, or the reward's setting of what text is the answer"
    )]
    ReferenceNotRight {
        /// `Prompt::row`.
        row: usize,
        /// The rule's name.
        rule: &'static str,
        /// The score that it got.
        score: f64,
        /// The verdict, in words.
        verdict: &'static str,
        /// The reference answer, shortened.
        answer: String,
    },

    /// The start-up test: an answer that cannot be right does as well as the reference.
    #[error(
        "prompt row {row}: the reward `{rule}` gives {score} to the text {text}, as much as to the reference answer \
         {answer}, expected less; a reward that everything satisfies teaches nothing, so choose another rule or data set"
    )]
    WrongNotWorse {
        /// `Prompt::row`.
        row: usize,
        /// The rule's name.
        rule: &'static str,
        /// The score that the wrong text got.
        score: f64,
        /// The wrong text.
        text: String,
        /// The reference answer, shortened.
        answer: String,
    },
}

/// `text` in quotes on one line, cut after 60 characters, so that an error stays one sentence.
pub(crate) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(60).collect();
    if cut.len() < text.len() { format!("{:?}...", cut) } else { format!("{cut:?}") }
}
