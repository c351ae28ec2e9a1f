//! How many responses a second the rules score: `cargo run --release -p reward --example calls_per_second [TASK ...]`.
//!
//! Walks the recorded answers of each task (`tests/golden/rewards/reasoning_gym`), right and wrong alike, on one thread.

use std::path::Path;
use std::time::{Duration, Instant};

use datasets::Prompt;
use reward::RewardFn;
use reward::reasoning_gym::{ReasoningGym, ReasoningGymConfig};
use serde_json::Value;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut tasks: Vec<String> = std::env::args().skip(1).collect();
    if tasks.is_empty() {
        tasks = ["spell_backward", "chain_sum", "countdown"].map(String::from).to_vec();
    }
    let rule = ReasoningGym::new(ReasoningGymConfig::default());
    for task in tasks {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/rewards/reasoning_gym");
        let text = std::fs::read_to_string(folder.join(format!("{task}.jsonl")))?;
        let mut calls: Vec<(Prompt, Vec<String>)> = Vec::new();
        for (row, line) in text.lines().enumerate() {
            let problem: Value = serde_json::from_str(line)?;
            let text_of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let candidates = problem["candidates"].as_array().cloned().unwrap_or_default();
            let answers = candidates.iter().filter_map(|c| c["answer"].as_str()).map(String::from).collect();
            let (text, answer) = (text_of(&problem["question"]), text_of(&problem["answer"]));
            calls.push((Prompt { row, text, answer, metadata: problem["metadata"].clone() }, answers));
        }
        let (start, mut num_calls, mut sum) = (Instant::now(), 0u64, 0.0);
        while start.elapsed() < Duration::from_secs(1) {
            for (prompt, answers) in &calls {
                for answer in answers {
                    sum += rule.score(prompt, answer).score;
                    num_calls += 1;
                }
            }
        }
        let per_second = num_calls as f64 / start.elapsed().as_secs_f64();
        println!("{task:24} {per_second:12.0} calls/s, mean score {:.3}", sum / num_calls as f64);
    }
    Ok(())
}
