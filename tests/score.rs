//! `rollout score` and `rollout diff`: the numbers against recorded logits, and the commands as a person runs them.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use insta::assert_snapshot;
use rollout::model::Model;
use rollout::score::{Divergence, ScoreError, score};
use serde_json::Value;

use crate::golden::cases;
use crate::program::root;

/// Log-probability of `next` under logits, in f64.
fn logprob(logits: &[f32], next: u32) -> f64 {
    let top = f64::from(logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x)));
    let total: f64 = logits.iter().map(|x| (f64::from(*x) - top).exp()).sum();
    f64::from(logits[next as usize]) - top - total.ln()
}

#[test]
fn golden_v4_scores_are_those_of_the_recorded_logits() {
    for case in cases() {
        let model = Model::load(&case.dir, &case.config).unwrap_or_else(|e| panic!("{e}"));
        let mut largest = 0.0f64;
        for recorded in case.files("run_") {
            let (_, logits) = recorded.f32("logits").expect("every run records logits");
            let vocab = case.config.vocab_size;
            let mut rows = logits.chunks_exact(vocab);
            for tokens in recorded.input_ids() {
                let scores = score(&model, &tokens).expect("scores");
                assert_eq!(scores.logprobs.len(), tokens.len() - 1);
                for (got, next) in scores.logprobs.iter().zip(&tokens[1..]) {
                    let want = logprob(rows.next().expect("a row a token"), *next);
                    largest = largest.max((f64::from(*got) - want).abs());
                }
                rows.next(); // what the last token predicts
            }
        }
        println!("{}: largest difference of a log-probability {largest:.2e}", case.name);
        assert!(largest < 2e-4, "{}: {largest}", case.name);
    }
}

#[test]
fn a_model_is_no_distance_from_itself_and_some_from_another() {
    let cases = cases();
    let case = &cases[0];
    let model = Model::load(&case.dir, &case.config).unwrap_or_else(|e| panic!("{e}"));
    let mut nudged = case.weights.clone();
    let head = nudged.get_mut("head.weight").expect("the head");
    *head = rollout::model::HostTensor::f32(&head.shape.clone(), head.as_f32().iter().map(|x| x * 1.01).collect());
    let other = Model::new(&case.config, 1, &rollout::model::to_engine_format(&case.config, nudged));
    let tokens: Vec<u32> = (0..100).map(|i| i * 7 % case.config.vocab_size as u32).collect();
    let same = Divergence::measure(&model, &model, &tokens).expect("measures");
    assert_eq!((same.num_tokens, same.sum_abs_diff, same.sum_kl, same.num_same_greedy), (99, 0.0, 0.0, 99));
    let apart = Divergence::measure(&model, &other, &tokens).expect("measures");
    assert!(apart.sum_kl > 1e-5 && apart.max_kl <= apart.sum_kl, "{apart:?}");
    assert_eq!(apart.num_same_greedy, 99, "a scale moves no maximum");
    let own = score(&model, &tokens).expect("scores");
    let sum: f64 = own.logprobs.iter().map(|p| f64::from(*p)).sum();
    assert!((sum - apart.sum_logprobs[0]).abs() < 1e-3, "{sum} {apart:?}");
    let tokens = vec![0, case.config.vocab_size as u32];
    let vocab_size = case.config.vocab_size;
    assert_eq!(score(&model, &tokens), Err(ScoreError::Vocabulary { token: tokens[1], position: 1, vocab_size }));
}

fn rollout(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rollout-under-test"))
        .args(args)
        .current_dir(root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    // A program that stops at a bad line reads no further.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    child.wait_with_output().expect("ends")
}

const MODEL: &str = "recipes/quickstart_base";

#[test]
fn lines_keep_their_order_and_fields() {
    let input: String = (0..150).map(|id| format!("{{\"id\": {id}, \"text\": \"{id} + {id} = \"}}\n")).collect();
    let output = rollout(&["score", MODEL], &input);
    assert!(output.status.success());
    let lines = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 150);
    for (id, line) in lines.iter().enumerate() {
        assert_eq!(line["id"], id);
        let (tokens, logprobs) = (line["tokens"].as_array().unwrap(), line["logprobs"].as_array().unwrap());
        assert_eq!(tokens.len(), logprobs.len());
        let sum: f64 = logprobs.iter().filter_map(Value::as_f64).sum();
        assert!((sum - line["sum_logprob"].as_f64().unwrap()).abs() < 1e-4);
        assert!(logprobs[0].is_null() && logprobs[1..].iter().all(Value::is_f64));
    }
    // A prompt's tokens are context: the completion's log-probabilities are those it has within the whole text.
    let whole = &lines[3];
    let output = rollout(&["score", MODEL], "{\"prompt\": \"3 + \", \"completion\": \"3 = \"}\n");
    let parts: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(parts["tokens"], whole["tokens"]);
    let scored: Vec<&Value> = parts["logprobs"].as_array().unwrap().iter().skip_while(|p| p.is_null()).collect();
    let tail = whole["logprobs"].as_array().unwrap();
    assert_eq!(scored, tail[tail.len() - scored.len()..].iter().collect::<Vec<_>>());
}

#[test]
fn what_cannot_be_scored_is_said_in_one_sentence() {
    let said = |args: &[&str], input: &str| {
        let output = rollout(args, input);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).expect("text")
    };
    assert_snapshot!(said(&["score", MODEL], "{\"text\": 3}"), @"error: stdin:1: `text` is 3, expected a text");
    assert_snapshot!(said(&["score", MODEL], "\n{}"), @"error: stdin:2: expected `text`, or `tokens`, or `prompt` and `completion`");
    assert_snapshot!(said(&["score", MODEL], "[1]"), @"error: stdin:1: not a JSON object (invalid type: sequence, expected a map at line 1 column 0); expected one with `text` or `tokens` on each line");
    assert_snapshot!(said(&["score", MODEL], "{\"tokens\": [1, 272]}"), @"error: stdin:1: token 272 at position 1 is outside the model's vocabulary of 272");
    assert_snapshot!(said(&["score", MODEL, "--no-bos"], "{\"text\": \"a\"}"), @"error: stdin:1: 1 tokens, expected at least 2: a token is scored by what stands before it");
    assert_snapshot!(said(&["score", MODEL, "-i", "nowhere.jsonl"], ""), @"error: cannot read nowhere.jsonl: No such file or directory (os error 2)");
    assert_snapshot!(said(&["score", MODEL], ""), @"error: stdin: no line, expected texts to score");
    let others = ["convert", MODEL, "never", "--to", "bf16", "--others", "f32"];
    assert_snapshot!(said(&others, ""), @"error: --others says what stands beside mxfp4; give --to mxfp4, or leave it out");
    let long = format!("{{\"text\": \"{}\"}}", "a".repeat(33 << 20));
    assert_snapshot!(said(&["score", MODEL], &long), @"error: stdin:1: a line of more than 33554432 bytes; cut the text up");
    assert_snapshot!(said(&["diff", MODEL, MODEL], ""), @"error: stdin: no line, expected texts to compare on");
    // What stands before a bad line is not lost.
    let output = rollout(&["score", MODEL], "{\"text\": \"a\"}\nnonsense\n");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1);
}

#[test]
fn the_cost_of_four_bits_is_one_command() {
    let output =
        rollout(&["diff", MODEL, MODEL, "--a-as", "bf16", "--b-as", "mxfp4"], "{\"text\": \"12 + 30 = 42\"}\n");
    assert!(output.status.success());
    let said = String::from_utf8(output.stdout).expect("text");
    let row = |name: &str| {
        let line = said.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {said}"));
        line.split_whitespace().filter_map(|word| word.parse::<f64>().ok()).next_back().expect("a number")
    };
    assert!(row("KL(A || B)") > 0.0 && row("KL(A || B)") < 1.0, "{said}");
    assert!(row("perplexity of A") > 1.0 && row("perplexity of B") > 1.0, "{said}");
}
