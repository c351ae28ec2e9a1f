//! The data sets of the repository fit the rule, and keep what is held out apart from what is trained on.

use std::collections::HashSet;
use std::path::Path;

use datasets::Prompt;
use reward::{RewardConfig, self_test};
use serde_json::Value;

fn read(name: &str) -> Vec<Prompt> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../datasets/data").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let prompt = |(row, line): (usize, &str)| {
        let mut fields: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{name}:{row}: {error}"));
        let text_of = |value: &Value| value.as_str().map(str::to_owned).expect("a text");
        let (text, answer) = (text_of(&fields["prompt"]), text_of(&fields["answer"]));
        Prompt { row, text, answer, metadata: fields["metadata"].take() }
    };
    text.lines().enumerate().map(prompt).collect()
}

#[track_caller]
fn check(name: &str, num_train: usize, num_held_out: usize) {
    let (train, held_out) = (read(&format!("{name}.train.jsonl")), read(&format!("{name}.held_out.jsonl")));
    assert_eq!((train.len(), held_out.len()), (num_train, num_held_out));
    let texts: HashSet<&str> = train.iter().chain(&held_out).map(|prompt| prompt.text.as_str()).collect();
    assert_eq!(texts.len(), num_train + num_held_out, "a prompt occurs twice");
    for prompts in [&train, &held_out] {
        let rule = RewardConfig::default().build(prompts).unwrap_or_else(|error| panic!("{name}: {error}"));
        self_test(rule.as_ref(), prompts).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn spell_backward() {
    check("spell_backward", 8192, 512);
}

#[test]
fn chain_sum_easy() {
    check("chain_sum_easy", 4096, 256);
}
