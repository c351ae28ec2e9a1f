//! spell_backward: the share of letters that stand in their places, whatever the case.

use super::task::{Row, Score};

/// 1 for the reference; else `1 / len` for each letter in its place, and 0.2 less where all are but something follows.
///
/// The package adds up the `1 / len` and asks whether that is exactly 1. For some lengths, 9 for one, the sum of doubles
/// is a hair beside 1 and the loss of 0.2 does not come; adding in the same order reproduces it.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Some(answer) = answer else { return Some(0.0) };
    let (answer, reference) = (answer.to_lowercase(), row.answer.to_lowercase());
    if answer == reference {
        return Some(1.0);
    }
    let share = 1.0 / reference.chars().count() as f64;
    let mut score = 0.0;
    for (letter, expected) in answer.chars().zip(reference.chars()) {
        if letter == expected {
            score += share;
        }
    }
    Some(if score == 1.0 { score - 0.2 } else { score })
}
