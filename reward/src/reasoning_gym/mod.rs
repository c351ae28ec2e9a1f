//! The checkers of the package reasoning-gym 0.1.25 (Apache-2.0), task by task, without Python.
//!
//! The verdicts are the package's own, its quirks included, so that a curve here can be laid beside one from there:
//! `tests/golden/rewards/reasoning_gym` holds what it gave to thousands of answers. Each file names the quirks of its
//! task. Where the package raises an error or does not come back, ours says unscorable.

mod task;

// One task a file; those with the package's default checker share `reference_in_text`.
mod bitwise_arithmetic;
mod calendar_arithmetic;
mod countdown;
mod decimal_arithmetic;
mod decimal_chain_sum;
mod decimal_value;
mod fraction_simplification;
mod mini_sudoku;
mod number_sorting;
mod prime_factorization;
mod puzzle24;
mod reference_in_text;
mod spell_backward;
mod word_sorting;

// What the package's checkers lean on.
mod expression;
mod python;

use std::collections::BTreeMap;

use datasets::{Prompt, Reward, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::shown;
use crate::{RewardError, RewardFn};
use task::{Row, Task};

/// Less than this below 1 is full marks: the package adds up shares that need not come to 1 exactly.
const FULL_MARKS_SLACK: f64 = 1e-9;

/// What part of a response is the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerText {
    /// The whole response, as it is. Checkers that compare texts take a blank for a mistake.
    #[default]
    Response,
    /// The whole response, without white space at its ends.
    Trimmed,
    /// What stands between the last `<answer>` and its `</answer>`, without white space at its ends, as the package's
    /// own prompts ask for it. A response without the tags gives no answer.
    AnswerTag,
}

/// The settings of `type = "reasoning_gym"`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReasoningGymConfig {
    /// What part of a response is the answer: `response` (as it is), `trimmed`, or `answer_tag`.
    pub answer_text: AnswerText,
}

/// The rule `reasoning_gym`: each prompt's `metadata.source_dataset` names the task whose checker scores it.
#[derive(Clone, Debug)]
pub struct ReasoningGym {
    config: ReasoningGymConfig,
}

impl ReasoningGym {
    /// The rule with these settings.
    pub fn new(config: ReasoningGymConfig) -> Self {
        Self { config }
    }

    /// The names of the tasks that are known, sorted.
    pub fn tasks() -> impl Iterator<Item = &'static str> {
        task::TASKS.iter().map(|task| task.name)
    }

    /// What the package's `score_answer` gives to `answer` for this prompt; `None` stands for no answer.
    ///
    /// The verdict is `Right` from `1 - 1e-9` up. A single part bears the task's name.
    pub fn score_answer(prompt: &Prompt, answer: Option<&str>) -> Reward {
        let metadata = metadata(prompt);
        let task = metadata.get("source_dataset").and_then(Value::as_str).and_then(task::find);
        let row = Row { answer: &prompt.answer, metadata };
        match task.and_then(|task| Some((task, (task.score)(row, answer)?))) {
            Some((task, score)) => {
                let is_right = score >= 1.0 - FULL_MARKS_SLACK;
                let verdict = if is_right { Verdict::Right } else { Verdict::Wrong };
                Reward { verdict, score, parts: BTreeMap::from([(task.name.to_owned(), score)]) }
            }
            None => Reward { verdict: Verdict::Unscorable, score: 0.0, parts: BTreeMap::new() },
        }
    }
}

impl RewardFn for ReasoningGym {
    fn name(&self) -> &'static str {
        "reasoning_gym"
    }

    fn check(&self, prompt: &Prompt) -> Result<(), RewardError> {
        let metadata = metadata(prompt);
        let source_dataset = metadata.get("source_dataset");
        let Some(task) = source_dataset.and_then(Value::as_str).and_then(task::find) else {
            let names: Vec<&str> = Self::tasks().collect();
            let expected = format!("one of {}", names.join(", "));
            return Err(misfit(prompt, None, "metadata.source_dataset", source_dataset, expected));
        };
        for (field, shape) in task.metadata {
            let value = metadata.get(*field);
            if !value.is_some_and(|value| shape.fits(value)) {
                let field = format!("metadata.{field}");
                return Err(misfit(prompt, Some(task), &field, value, shape.expected()));
            }
        }
        let answer = Value::String(prompt.answer.clone());
        if !task.answer.fits(&answer) {
            return Err(misfit(prompt, Some(task), "answer", Some(&answer), task.answer.expected()));
        }
        Ok(())
    }

    fn score(&self, prompt: &Prompt, response_text: &str) -> Reward {
        let answer = match self.config.answer_text {
            AnswerText::Response => Some(response_text),
            AnswerText::Trimmed => Some(python::strip(response_text)),
            AnswerText::AnswerTag => last_answer_tag(response_text),
        };
        Self::score_answer(prompt, answer)
    }

    fn reference_response(&self, prompt: &Prompt) -> String {
        match self.config.answer_text {
            AnswerText::Response | AnswerText::Trimmed => prompt.answer.clone(),
            AnswerText::AnswerTag => format!("<answer>{}</answer>", prompt.answer),
        }
    }
}

/// The package's metadata: the prompt's, or the object under its key `metadata` where a reader kept the row's columns.
fn metadata(prompt: &Prompt) -> &Value {
    match prompt.metadata.get("metadata") {
        Some(nested) if prompt.metadata.get("source_dataset").is_none() => nested,
        _ => &prompt.metadata,
    }
}

/// The content of the last `<answer>`; pairs are taken from the front, each tag with the nearest end after it.
fn last_answer_tag(text: &str) -> Option<&str> {
    let (mut rest, mut last) = (text, None);
    while let Some((_, after)) = rest.split_once("<answer>")
        && let Some((content, after)) = after.split_once("</answer>")
    {
        (rest, last) = (after, Some(content));
    }
    last.map(python::strip)
}

fn misfit(prompt: &Prompt, task: Option<&Task>, field: &str, found: Option<&Value>, expected: String) -> RewardError {
    let found = match found {
        None => "nothing".to_owned(),
        Some(Value::String(text)) => shown(text),
        Some(other) => shown(&other.to_string()),
    };
    let rule = task.map_or("reasoning_gym".to_owned(), |task| format!("reasoning_gym, task {}", task.name));
    RewardError::Prompt { row: prompt.row, field: field.to_owned(), found, rule, expected }
}
