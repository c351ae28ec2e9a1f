//! The crate's tests: golden verdicts of the package, hostile text, and what a person reads when data does not fit.

mod golden_rewards;
mod hostile_text;
mod load_time;
mod reasoning_gym_rules;
mod shipped_data;

use datasets::Prompt;
use serde_json::Value;

fn prompt(answer: &str, metadata: Value) -> Prompt {
    Prompt { row: 7, text: "A question.".to_owned(), answer: answer.to_owned(), metadata }
}
