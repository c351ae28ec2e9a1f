//! Behaviour of single tasks beyond the recorded answers; the scores are what the package gives, or said otherwise.

use datasets::{FinishReason, Group, IndexerChoices, Reward, Rollout, RoutingChoices, Verdict};
use reward::reasoning_gym::{AnswerText, ReasoningGym, ReasoningGymConfig};
use reward::{RewardFn, score_groups};
use serde_json::{Value, json};
use std::sync::Arc;

use crate::prompt;

#[track_caller]
fn check(reference: &str, metadata: Value, answers: &[(&str, f64)]) {
    let prompt = prompt(reference, metadata);
    for (answer, want) in answers {
        let Reward { score, verdict, .. } = ReasoningGym::score_answer(&prompt, Some(answer));
        assert!((score - want).abs() < 1e-12, "{answer:?} got {score}, wanted {want}");
        assert_eq!(verdict == Verdict::Right, *want >= 1.0 - 1e-9, "{answer:?}");
        assert_ne!(verdict, Verdict::Unscorable, "{answer:?}");
    }
}

#[track_caller]
fn check_unscorable(reference: &str, metadata: Value, answers: &[&str]) {
    let prompt = prompt(reference, metadata);
    for answer in answers {
        assert_eq!(ReasoningGym::score_answer(&prompt, Some(answer)).verdict, Verdict::Unscorable, "{answer:?}");
    }
}

#[test]
fn spell_backward_loses_a_fifth_for_text_that_follows_unless_the_shares_miss_1() {
    let metadata = || json!({"source_dataset": "spell_backward"});
    check(
        "nus",
        metadata(),
        &[("nus", 1.0), ("NUS", 1.0), ("nus.", 0.8), ("nux", 2.0 / 3.0), (" nus", 0.0), ("", 0.0)],
    );
    // Nine shares of 1/9 come to a hair above 1.
    check("ylgnimeet", metadata(), &[("ylgnimeet and more", 1.0)]);
    check("éa", metadata(), &[("ÉA", 1.0), ("éb", 0.5)]);
}

#[test]
fn chain_sum_goes_by_value() {
    let answers = [
        ("-7", 1.0),
        (" -07.0\n", 1.0),
        ("-7e0", 1.0),
        ("-0,7", 1.0),
        ("7", 0.0),
        ("-7.", 1.0),
        ("-٧", 1.0),
        ("_-7", 1.0),
    ];
    check("-7", json!({"source_dataset": "chain_sum"}), &answers);
    let answers = [("NaN", 0.0), ("inf", 0.0), ("-7 ", 1.0), ("x -7", 0.5), ("-7e99999999999999999999", 2.0 / 23.0)];
    check("-7", json!({"source_dataset": "chain_sum"}), &answers);
}

#[test]
fn countdown_reads_what_the_parser_reads() {
    let metadata = || json!({"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 24});
    let answers = [
        ("2*3*4", 1.0),
        ("2 * 3 \t* 4 # done", 1.0),
        ("(2*3\n*4)", 1.0),
        ("2*3*4\n\n", 1.0),
        ("2*3\n*4", 0.01),
        ("24", 0.05),
        ("2*3*4 == 24", 0.05),
        ("2*3*4 = 24", 0.01),
        ("2**3*(4 - 1)", 0.05),
        ("2^3^4", 0.05),
        ("4!*(3 - 2)", 1.0),
        ("4! ^ 3 & 2", 0.05),
        ("4 !", 0.01),
        ("1/0", 0.01),
        ("0/0", 0.05),
        ("1/(1/0)", 0.05),
        ("007", 0.01),
        ("2*3*4.0", 0.05),
        ("2*3x4", 0.01),
        ("2×3×4", 0.01),
        ("2(3)(4)", 0.01),
        ("1,", 0.01),
        ("", 0.01),
        ("-2**2", 0.05),
        ("10**400", 0.05),
        ("1e5", 0.05),
        ("1e", 0.01),
    ];
    check("2*3*4", metadata(), &answers);
    let deep = |depth: usize| format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
    check("2*3*4", metadata(), &[(&deep(199), 0.05), (&deep(200), 0.01)]);
    let sum = |num_terms: usize| vec!["1"; num_terms].join("+");
    check("2*3*4", metadata(), &[(&sum(2987), 0.05), (&sum(2988), 0.01)]);
    // Python parses all of it before it evaluates any.
    check("2*3*4", metadata(), &[("9**9**9**9 is the answer", 0.01), ("(9**9**9**9", 0.01), ("1e999 1", 0.01)]);
    check_unscorable("2*3*4", metadata(), &["36**29**95", "2**99999999", "1<<10**20", "99999!", "2**(1/2)"]);
}

#[test]
fn puzzle24_cuts_to_an_integer_and_does_not_ask_which_four() {
    let answers = [("7*7/(1+1)", 1.0), ("1*1*1*24", 0.01), ("6*4*1*1", 1.0), ("6*4", 0.01), ("(6*4*1 == 1)", 0.01)];
    check("4*(9 - 5) + 8", json!({"source_dataset": "puzzle24", "numbers": [9, 5, 4, 8]}), &answers);
    check_unscorable("4*6", json!({"source_dataset": "puzzle24"}), &["9**9**9**9"]);
}

#[test]
fn number_sorting_reads_json_with_either_quote() {
    let metadata = json!({"source_dataset": "number_sorting", "direction": "descending"});
    let answers = [
        ("['3.0', '-1']", 1.0),
        ("[3, -1.0]", 1.0),
        ("[3.9, -1.9]", 1.0),
        ("[4.1, -1]", 0.0),
        ("[-1, 3]", 0.0),
        ("[NaN, \"nan\"]", 1.0),
        ("[3, -1,]", 0.0),
        ("[03, -1]", 0.0),
        ("[3, [-1]]", 0.0),
        ("[\"\\u0033\", -1]", 1.0),
        ("[3, -Infinity]", 0.0),
        ("[3, null]", 0.0),
        ("3, -1", 0.0),
    ];
    check("['3.0', '-1.0']", metadata, &answers);
}

#[test]
fn bitwise_arithmetic_reads_any_radix() {
    let answers =
        [("0x1f", 1.0), ("31", 1.0), ("0b1_1111", 1.0), (" 0X1F\n", 1.0), ("031", 0.0), ("-31", 0.0), ("1f", 0.0)];
    check("0x1f", json!({"source_dataset": "bitwise_arithmetic", "problem": "((0x20 << 0x1) - 0x21)"}), &answers);
}

#[test]
fn decimal_arithmetic_allows_one_unit_of_the_last_place_to_twelve_digits() {
    let answers = [
        ("7.354", 1.0),
        ("7.355", 1.0),
        ("7.35500000000000001", 1.0),
        ("7.355000000000005", 1.0),
        ("7.355000000000006", 0.0),
        ("7.353000000000000000000", 1.0),
        ("7.3529", 0.0),
        ("1e999999999999999999", 0.0),
        ("1e-999999999999999999", 0.0),
    ];
    check("7.354", json!({"source_dataset": "decimal_arithmetic", "decimal_places": 3}), &answers);
}

#[test]
fn calendar_arithmetic_raises_where_doubles_end() {
    let metadata = || json!({"source_dataset": "calendar_arithmetic", "task": "count_days"});
    check(
        "10",
        metadata(),
        &[("10", 1.0), (" +0_1_0", 1.0), ("1__0", 0.0), ("9", (-0.5f64).exp()), (&"9".repeat(308), 0.0)],
    );
    check("10", metadata(), &[(&"9".repeat(4301), 0.0)]);
    check_unscorable("10", metadata(), &[&"9".repeat(4300)]);
    let metadata = json!({"source_dataset": "calendar_arithmetic", "task": "weekday_offset"});
    check("Sunday", metadata, &[("Sunday", 1.0), ("Monday", 0.1), ("SUNDAY ", 0.05), ("sun", 0.0), ("Sunday.", 0.0)]);
}

#[test]
fn no_answer_is_not_an_empty_one() {
    let prompt = prompt("2 × 3", json!({"source_dataset": "prime_factorization"}));
    assert_eq!(ReasoningGym::score_answer(&prompt, None).score, 0.0);
    assert_eq!(ReasoningGym::score_answer(&prompt, Some("")).score, 0.01);
    assert_eq!(ReasoningGym::score_answer(&prompt, Some("2 x 3")).verdict, Verdict::Unscorable);
}

#[test]
fn the_answer_is_the_response_as_the_settings_say() {
    let prompt = prompt("nus", json!({"source_dataset": "spell_backward"}));
    let score =
        |answer_text, response| ReasoningGym::new(ReasoningGymConfig { answer_text }).score(&prompt, response).score;
    assert_eq!(score(AnswerText::Response, " nus"), 0.0);
    assert_eq!(score(AnswerText::Trimmed, " nus\n"), 1.0);
    assert_eq!(score(AnswerText::AnswerTag, "<answer>sun</answer> or <answer> nus </answer> <answer>"), 1.0);
    assert_eq!(score(AnswerText::AnswerTag, "nus"), 0.0);
}

#[test]
fn every_rollout_of_a_group_is_scored_in_place() {
    let rollout = |rollout_id, text: &str| Rollout {
        rollout_id,
        response_tokens: vec![],
        response_text: text.to_owned(),
        rollout_logprobs: vec![],
        weight_versions: vec![],
        finish_reason: FinishReason::Stop,
        routing: Arc::new(RoutingChoices::default()),
        indexer: Arc::new(IndexerChoices::default()),
        reward: None,
    };
    let prompt = Arc::new(prompt("nus", json!({"source_dataset": "spell_backward"})));
    let rollouts = vec![rollout(0, "nus"), rollout(1, "sun")];
    let mut groups = vec![Group { group_id: 0, prompt, prompt_tokens: Arc::from([]), rollouts }];
    score_groups(&ReasoningGym::new(ReasoningGymConfig::default()), &mut groups);
    let rewards: Vec<_> = groups[0].rollouts.iter().filter_map(|rollout| rollout.reward.clone()).collect();
    assert_eq!(rewards.iter().map(|reward| reward.verdict).collect::<Vec<_>>(), [Verdict::Right, Verdict::Wrong]);
    assert_eq!(rewards[1].parts["spell_backward"], rewards[1].score);
}
