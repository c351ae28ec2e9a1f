//! countdown: an expression that uses the given numbers, each once, and comes to the target.

use num_bigint::BigInt;

use super::expression::{self, Stop};
use super::task::{Row, Score};

/// 1 for such an expression, 0.05 for another that has a value, 0.01 for what is no expression.
///
/// Close to the target is enough: within 1e-6 + 1e-5 |target|, the package's tolerance. The numbers used are those that
/// the text writes out, so any operator of the parser may join them. An expression whose evaluation is cut short is
/// unscorable; the package would not come back from it.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let (mut numbers, target) = (row.integers("numbers")?, row.number("target")?);
    let Some(answer) = answer else { return Some(0.01) };
    let value = match expression::evaluate(answer).and_then(|value| value.to_float()) {
        Ok(value) => value,
        Err(Stop::Malformed) => return Some(0.01),
        Err(Stop::Beyond) => return None,
    };
    let mut used: Vec<BigInt> = expression::written_integers(answer);
    used.sort_unstable();
    numbers.sort_unstable();
    let is_right = used == numbers && (value - target).abs() <= 1e-6 + 1e-5 * target.abs();
    Some(if is_right { 1.0 } else { 0.05 })
}
