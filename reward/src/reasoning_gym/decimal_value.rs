//! chain_sum and products: the value counts, so sign, leading zeros, trailing decimals and commas are free.

use super::python::Decimal;
use super::reference_in_text::share;
use super::task::{Row, Score};

/// 1 for a number of the reference's value; else, as by default, the reference's share of a text that contains it.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Some(answer) = answer.filter(|answer| !answer.is_empty()) else { return Some(0.0) };
    let (answer, reference) = (answer.replace(',', ""), row.answer.replace(',', ""));
    if let (Some(value), Some(reference)) = (Decimal::parse(&answer), Decimal::parse(&reference))
        && value.equals(&reference)
    {
        return Some(1.0);
    }
    if reference.is_empty() {
        // The share of nothing in what may be nothing: the package divides by zero here, or gives 0.
        return if answer.is_empty() { None } else { Some(0.0) };
    }
    Some(if answer.contains(&reference) { share(&reference, &answer) } else { 0.0 })
}
