//! word_sorting: a comma-separated list, each word in its place.

use super::python;
use super::task::{Row, Score};

/// 1 for the sorted list; else the share of words in their places, and at least 0.2 if the words are all there.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Some(answer) = answer.filter(|answer| !answer.is_empty()) else { return Some(0.0) };
    let sorted_words = row.texts("sorted_words")?;
    let mut words: Vec<&str> = answer.split(',').map(python::strip).collect();
    if words == sorted_words {
        return Some(1.0);
    }
    let num_placed = words.iter().zip(&sorted_words).filter(|(word, expected)| word == expected).count();
    let share = num_placed as f64 / sorted_words.len() as f64;
    if words.len() != sorted_words.len() {
        return Some(share);
    }
    let mut expected = sorted_words;
    words.sort_unstable();
    expected.sort_unstable();
    Some(if words == expected { share.max(0.2) } else { share })
}
