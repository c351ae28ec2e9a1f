//! What is said before the first rollout, when a recipe or a data set does not fit.

use reward::reasoning_gym::{AnswerText, ReasoningGymConfig};
use reward::{RewardConfig, self_test};
use serde_json::{Value, json};

use crate::prompt;

#[track_caller]
fn check(answer: &str, metadata: Value, parts: &[&str]) {
    let error = RewardConfig::default().build(&[prompt(answer, metadata)]).err().expect("the row should not fit");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn an_unknown_task_is_named_with_the_known_ones() {
    let parts =
        ["row 7", "`metadata.source_dataset` holds \"sudoku\"", "base_conversion, ", "word_sorting", "`reward.type`"];
    check("1", json!({"source_dataset": "sudoku"}), &parts);
    check("1", json!({}), &["`metadata.source_dataset` holds nothing"]);
    check("1", Value::Null, &["`metadata.source_dataset` holds nothing"]);
}

#[test]
fn missing_metadata_and_a_broken_reference_are_named() {
    check(
        "3*4",
        json!({"source_dataset": "countdown", "target": 12}),
        &["task countdown", "`metadata.numbers` holds nothing", "integers"],
    );
    check(
        "3*4",
        json!({"source_dataset": "countdown", "numbers": [3, "4"], "target": 12}),
        &["holds \"[3,\\\"4\\\"]\""],
    );
    check("", json!({"source_dataset": "spell_backward"}), &["`answer` holds \"\"", "not empty"]);
    check("six", json!({"source_dataset": "chain_sum"}), &["`answer` holds \"six\"", "a number"]);
}

#[test]
fn no_prompts_are_an_error() {
    assert!(RewardConfig::default().build(&[]).is_err());
}

#[test]
fn metadata_may_stand_beside_other_columns() {
    let prompts = [prompt("nus", json!({"metadata": {"source_dataset": "spell_backward"}, "id": 3}))];
    let rule = RewardConfig::default().build(&prompts).expect("the row fits");
    self_test(rule.as_ref(), &prompts).expect("the rule knows its answer");
}

#[test]
fn the_start_up_test_tells_a_reference_that_is_not_right() {
    let prompts = [prompt("3*5", json!({"source_dataset": "countdown", "numbers": [3, 4], "target": 12}))];
    let rule = RewardConfig::default().build(&prompts).expect("the row fits");
    let message = self_test(rule.as_ref(), &prompts).expect_err("3*5 is not 12").to_string();
    assert!(
        message.contains("row 7") && message.contains("gives 0.05 (wrong)") && message.contains("\"3*5\""),
        "{message}"
    );
}

#[test]
fn the_start_up_test_holds_for_every_way_to_give_an_answer() {
    for answer_text in [AnswerText::Response, AnswerText::Trimmed, AnswerText::AnswerTag] {
        let config = RewardConfig::ReasoningGym(ReasoningGymConfig { answer_text });
        let prompts = [prompt("nus", json!({"source_dataset": "spell_backward"}))];
        let rule = config.build(&prompts).expect("the row fits");
        self_test(rule.as_ref(), &prompts).expect("the rule knows its answer");
    }
}

#[test]
fn a_recipe_table_picks_the_rule_and_refuses_unknown_keys() {
    let read = |value| serde_json::from_value::<RewardConfig>(value);
    assert_eq!(read(json!({"type": "reasoning_gym"})).expect("the defaults"), RewardConfig::default());
    let trimmed = read(json!({"type": "reasoning_gym", "answer_text": "trimmed"})).expect("a known value");
    assert_eq!(trimmed, RewardConfig::ReasoningGym(ReasoningGymConfig { answer_text: AnswerText::Trimmed }));
    assert_eq!(
        serde_json::to_value(&trimmed).expect("plain data"),
        json!({"type": "reasoning_gym", "answer_text": "trimmed"})
    );
    assert!(read(json!({"type": "reasoning_gym", "answer": "trimmed"})).is_err());
    assert!(read(json!({"type": "other"})).is_err());
}
