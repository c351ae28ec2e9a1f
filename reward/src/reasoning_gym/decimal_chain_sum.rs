//! decimal_chain_sum: the value counts, to the last digit.

use super::python::{self, Decimal};
use super::task::{Row, Score};

/// 1 for a number of the reference's value, else 0.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let value = answer.map(python::strip).and_then(Decimal::parse);
    let is_right = value.zip(Decimal::parse(row.answer)).is_some_and(|(value, reference)| value.equals(&reference));
    Some(if is_right { 1.0 } else { 0.0 })
}
