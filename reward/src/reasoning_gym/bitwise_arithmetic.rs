//! bitwise_arithmetic: an integer in any radix that Python writes, with the value of the row's problem.

use super::expression::{self, Value};
use super::python;
use super::task::{Row, Score};

/// 1 for the problem's value, else 0.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Ok(Value::Exact(expected)) = expression::evaluate(row.text("problem")?) else { return None };
    let value = answer.and_then(python::int_any_radix);
    let is_right = value.is_some_and(|value| expected.is_integer() && value == *expected.numer());
    Some(if is_right { 1.0 } else { 0.0 })
}
