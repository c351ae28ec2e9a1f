//! mini_sudoku: lines of digits, each in its cell.

use super::python;
use super::task::{Row, Score};

/// 1 for the reference but for blanks at the ends of lines; else 0.9 times the share of cells that are right. What is
/// longer than the reference loses by its length.
///
/// Of each line only the digits 1 to 9 are read; lines that hold too few or too many are passed over.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let solution = row.grid("solution")?;
    let Some(answer) = answer.filter(|answer| !answer.is_empty()) else { return Some(0.0) };
    let board_size = solution.first()?.len();
    let is_reference = answer.split('\n').map(python::strip_end).eq(row.answer.split('\n').map(python::strip_end));
    let mut score = 1.0;
    if !is_reference {
        let digits = |line: &str| -> Vec<i64> {
            line.bytes().filter(|byte| (b'1'..=b'9').contains(byte)).map(|byte| i64::from(byte - b'0')).collect()
        };
        let lines = answer.split('\n').map(digits).filter(|digits| digits.len() == board_size);
        let num_right: usize = lines
            .zip(&solution)
            .map(|(digits, expected)| digits.iter().zip(expected).filter(|(digit, expected)| digit == expected).count())
            .sum();
        score = num_right as f64 / (board_size * board_size) as f64 * 0.9;
    }
    let (num_chars, num_expected) = (python::len(answer), python::len(row.answer));
    if num_chars > num_expected {
        score *= num_expected as f64 / num_chars as f64;
    }
    Some(score)
}
