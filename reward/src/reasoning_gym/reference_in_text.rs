//! The package's default checker: the reference itself is right; a text that holds it somewhere earns its share.
//!
//! `len(reference) / len(text)`, in characters, so padding costs and a longer number that contains the reference earns
//! something too. It is the package's rule, not advice.

use super::python;
use super::task::{Row, Score};

/// 1 for the reference, its share of a text that contains it, else 0.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Some(answer) = answer.filter(|answer| !answer.is_empty()) else { return Some(0.0) };
    if answer == row.answer {
        return Some(1.0);
    }
    Some(if answer.contains(row.answer) { share(row.answer, answer) } else { 0.0 })
}

/// The reference's share of the text's characters.
pub(super) fn share(reference: &str, text: &str) -> f64 {
    python::len(reference) as f64 / python::len(text) as f64
}
