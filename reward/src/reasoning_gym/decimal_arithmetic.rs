//! decimal_arithmetic: the value counts, to one unit in the last decimal place of the problem.

use num_bigint::BigInt;
use num_traits::Signed;
use serde_json::Value;

use super::python::Decimal;
use super::task::{Row, Score};

/// The package takes the difference to so many significant digits, so a difference just above one unit rounds to it.
const PRECISION: i64 = 12;

/// Places beyond those of the problem within which a difference still matters.
const NUM_GUARD_PLACES: i64 = 64;

/// 1 within `10^-places` of the reference, else 0.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let places = num_places(row)?;
    let is_right = answer.and_then(Decimal::parse).zip(Decimal::parse(row.answer)).is_some_and(|pair| match pair {
        (Decimal::Finite(value), Decimal::Finite(reference)) => {
            let scaled = value.scaled(places + NUM_GUARD_PLACES).zip(reference.scaled(places + NUM_GUARD_PLACES));
            // One unit and half a unit of its last digit: half to even brings the end of that range down to it.
            let limit = (BigInt::from(10).pow(PRECISION as u32) + 5)
                * BigInt::from(10).pow((NUM_GUARD_PLACES - PRECISION) as u32);
            scaled.is_some_and(|(value, reference)| (value - reference).abs() <= limit)
        }
        _ => false,
    });
    Some(if is_right { 1.0 } else { 0.0 })
}

/// The most decimal places of the data set's problems if the row says it, else this problem's; 3 is the package's own.
fn num_places(row: Row<'_>) -> Option<i64> {
    let of_all = row.metadata.pointer("/difficulty/decimal_places/1");
    let places = of_all.or_else(|| row.metadata.get("decimal_places")).map_or(Some(3), Value::as_i64)?;
    (0..=100).contains(&places).then_some(places)
}
