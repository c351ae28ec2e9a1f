//! The verdicts that the package itself gave, as recorded in `tests/golden/rewards/reasoning_gym`.

use std::path::PathBuf;
use std::time::Instant;

use datasets::{Prompt, Verdict};
use reward::reasoning_gym::ReasoningGym;
use reward::{RewardConfig, self_test};
use serde::Deserialize;
use serde_json::Value;

/// Recorded scores are rounded to 6 digits.
const TOLERANCE: f64 = 0.6e-6;

/// Disagreements that a failing run lists per task.
const NUM_SHOWN: usize = 5;

#[derive(Deserialize)]
struct Problem {
    task: String,
    index: usize,
    question: String,
    answer: String,
    metadata: Value,
    candidates: Vec<Candidate>,
}

#[derive(Deserialize)]
struct Candidate {
    kind: String,
    /// `null`: no answer was given.
    answer: Option<String>,
    /// `null`: the package's checker raised.
    score: Option<f64>,
}

fn golden_folder() -> PathBuf {
    let root = std::env::var_os("FURLONG_GOLDEN_REWARDS").map(PathBuf::from);
    let root = root.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/rewards")));
    root.join("reasoning_gym")
}

fn problems(path: &std::path::Path) -> Vec<Problem> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines()
        .enumerate()
        .map(|(row, line)| serde_json::from_str(line).unwrap_or_else(|e| panic!("{}:{row}: {e}", path.display())))
        .collect()
}

#[test]
fn golden_rewards_reasoning_gym() {
    let folder = golden_folder();
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = files.map(|entry| entry.expect("a folder entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    assert!(!paths.is_empty(), "{} holds no *.jsonl", folder.display());

    let mut disagreements = Vec::new();
    let (mut num_all, mut num_agreed) = (0, 0);
    for path in &paths {
        let (mut num_candidates, mut found) = (0, Vec::new());
        let problems = problems(path);
        let start = Instant::now();
        for problem in problems {
            let Problem { task, index, question, answer, metadata, candidates } = problem;
            if !ReasoningGym::tasks().any(|known| known == task) {
                num_candidates += candidates.len();
                found.push(format!("{task}: not a task that the reward knows"));
                break;
            }
            let prompt = Prompt { row: index, text: question, answer, metadata };
            for candidate in candidates {
                num_candidates += 1;
                let reward = ReasoningGym::score_answer(&prompt, candidate.answer.as_deref());
                let agrees = match candidate.score {
                    None => reward.verdict == Verdict::Unscorable && reward.score == 0.0,
                    Some(score) => {
                        let verdict = if score >= 1.0 - 1e-9 { Verdict::Right } else { Verdict::Wrong };
                        reward.verdict == verdict && (reward.score - score).abs() <= TOLERANCE
                    }
                };
                if !agrees {
                    found.push(format!(
                        "{task} {index} {}: {:?} got {} ({:?}), recorded {:?}",
                        candidate.kind, candidate.answer, reward.score, reward.verdict, candidate.score
                    ));
                }
            }
        }
        let (name, micros) = (path.file_stem().unwrap_or_default().display(), start.elapsed().as_micros());
        println!("{name:24} {:5} of {num_candidates:5} agree, {micros} us", num_candidates.saturating_sub(found.len()));
        num_all += num_candidates;
        num_agreed += num_candidates.saturating_sub(found.len());
        disagreements.extend(found.into_iter().take(NUM_SHOWN));
    }
    println!("{num_agreed} of {num_all} agree");
    assert!(disagreements.is_empty(), "the first disagreements:\n{}", disagreements.join("\n"));
}

#[test]
fn golden_rewards_problems_pass_the_checks_at_load_time() {
    let folder = golden_folder();
    for task in ReasoningGym::tasks() {
        let path = folder.join(format!("{task}.jsonl"));
        if !path.exists() {
            continue; // Another folder, set from outside, need not hold every task.
        }
        let prompts: Vec<Prompt> = problems(&path)
            .into_iter()
            .map(|p| Prompt { row: p.index, text: p.question, answer: p.answer, metadata: p.metadata })
            .collect();
        let rule = RewardConfig::default().build(&prompts).unwrap_or_else(|error| panic!("{task}: {error}"));
        self_test(rule.as_ref(), &prompts).unwrap_or_else(|error| panic!("{task}: {error}"));
    }
}
