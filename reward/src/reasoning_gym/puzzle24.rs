//! puzzle24: an expression of four numbers that comes to 24.

use num_bigint::BigInt;

use super::expression::{self, Stop};
use super::task::{Row, Score};

/// 1 for an expression that comes to 24 and writes out four integers within the puzzle's range, else 0.01.
///
/// That they are the given numbers is not asked, and 24.5 is cut to 24: the package's rule. An expression whose
/// evaluation is cut short is unscorable.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Some(answer) = answer else { return Some(0.01) };
    let value = match expression::evaluate(answer).and_then(|value| value.to_int()) {
        Ok(value) => value,
        Err(Stop::Malformed) => return Some(0.01),
        Err(Stop::Beyond) => return None,
    };
    let (smallest, largest) = range(row)?;
    let used = expression::written_integers(answer);
    let is_right = value == BigInt::from(24)
        && used.len() == 4
        && used.iter().all(|number| (&smallest..=&largest).contains(&number));
    Some(if is_right { 1.0 } else { 0.01 })
}

/// The range that the data set's numbers were drawn from if the row says it, else the package's own, 1 to 10.
fn range(row: Row<'_>) -> Option<(BigInt, BigInt)> {
    match row.metadata.pointer("/difficulty/value") {
        Some(range) => Some((range.get(0)?.as_i64()?.into(), range.get(1)?.as_i64()?.into())),
        None => Some((1.into(), 10.into())),
    }
}
