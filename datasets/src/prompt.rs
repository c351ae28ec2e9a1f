//! One row of a data set: the question that the model is asked and what its answer is held against.

/// One question with its reference answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Position in the data set, counted from 0; the same row keeps its number whatever the order of training.
    pub row: usize,
    /// What the model reads, before any template.
    pub text: String,
    /// The reference answer that a reward compares with.
    pub answer: String,
    /// Everything else in the row, as JSON; a reward may need it (`metadata.source_dataset`, word lists, targets).
    pub metadata: serde_json::Value,
}
