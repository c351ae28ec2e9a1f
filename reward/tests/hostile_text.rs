//! No text makes a rule panic, and none makes it work without end.

use datasets::{Prompt, Verdict};
use proptest::prelude::*;
use reward::reasoning_gym::ReasoningGym;
use serde_json::json;

use crate::prompt;

/// One prompt of each task that has a checker of its own, and one of the default.
fn prompts() -> Vec<Prompt> {
    vec![
        prompt("12", json!({"source_dataset": "gcd"})),
        prompt("-7", json!({"source_dataset": "chain_sum"})),
        prompt("drow", json!({"source_dataset": "spell_backward"})),
        prompt("a, b", json!({"source_dataset": "word_sorting", "sorted_words": ["a", "b"]})),
        prompt("['1.0', '2.0']", json!({"source_dataset": "number_sorting", "direction": "ascending"})),
        prompt("7.353", json!({"source_dataset": "decimal_arithmetic", "decimal_places": 3})),
        prompt("14.074", json!({"source_dataset": "decimal_chain_sum"})),
        prompt(
            "1/2",
            json!({"source_dataset": "fraction_simplification", "numerator": 2, "denominator": 4,
                   "simplified_numerator": 1, "simplified_denominator": 2}),
        ),
        prompt("2 × 2 × 3", json!({"source_dataset": "prime_factorization"})),
        prompt("14", json!({"source_dataset": "calendar_arithmetic", "task": "count_days"})),
        prompt("Sunday", json!({"source_dataset": "calendar_arithmetic", "task": "weekday_of_date"})),
        prompt("0x1", json!({"source_dataset": "bitwise_arithmetic", "problem": "(0x3 >> 0x1)"})),
        prompt("1 2\n2 1", json!({"source_dataset": "mini_sudoku", "solution": [[1, 2], [2, 1]]})),
        prompt("3*4", json!({"source_dataset": "countdown", "numbers": [3, 4], "target": 12})),
        prompt("4*(9 - 5) + 8", json!({"source_dataset": "puzzle24"})),
    ]
}

fn score_all(text: &str) {
    for prompt in prompts() {
        let reward = ReasoningGym::score_answer(&prompt, Some(text));
        assert!(reward.score.is_finite(), "{prompt:?} gave {reward:?}");
        assert!(reward.verdict != Verdict::Unscorable || reward.score == 0.0, "{prompt:?} gave {reward:?}");
    }
}

proptest! {
    #[test]
    fn any_text_gets_a_reward(text in any::<String>()) {
        score_all(&text);
    }

    #[test]
    fn expression_like_text_gets_a_reward(text in r"[-+*/%&|^~!=<>() 0-9a-fxEe_.,×٣\[\]{}$\\frac'\x22\n\t\x00\x1c]{0,60}") {
        score_all(&text);
    }

    #[test]
    fn arithmetic_gets_a_reward(text in r"(-?\(?[0-9]{1,3}\)?(\*\*|//|<<|>>|\+|-|\*|/|%|!){1}){1,12}[0-9]{1,3}") {
        score_all(&text);
    }
}

#[test]
fn a_megabyte_of_anything_ends() {
    let units = [
        "9",
        "(",
        "-",
        "!",
        "1/3+",
        "9**9**",
        "((1))",
        "× 2",
        "[1,",
        "'",
        ", a",
        "1 2\n",
        "1_",
        "\u{0}",
        "\\frac{",
        "٣",
        "\u{1f600}",
        "0xf",
        "# \n",
        "1<<9",
        "NaN,",
        "\u{1c}",
        "İ",
        "<answer>",
    ];
    for unit in units {
        score_all(&unit.repeat((1 << 20) / unit.len()));
    }
}

#[test]
fn towers_and_giants_end_at_once() {
    let texts = [
        "36**29**95",
        "9**9**9**9",
        "-9**9**9",
        "(1/3)**99999",
        "10**-99999999999",
        "1<<99999999999",
        "9999999!",
        "3!!",
        "99!!!",
        "1e999999999",
        "1e-999999999",
        "-1e999999999999999999",
        "1e99999999999999999999999999",
        "0**0**0**0",
        "2**(1/3)",
        "(2**60000)*(2**60000)*(3**40000)",
        "(-8)**(1/3)",
        "1/0",
        "0/0",
        "1**(1/0)",
        "1%0",
        "1//0",
        "0.5**1e300",
        "9e300*9e300",
    ];
    for text in texts {
        score_all(text);
    }
}
