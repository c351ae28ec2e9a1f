//! calendar_arithmetic: a day of the week, a number of days, or yes or no, by the row's `metadata.task`.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};

use super::python;
use super::task::{Row, Score};

const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The kinds of question that the package asks.
pub(super) const KINDS: [&str; 7] = [
    "weekday_offset",
    "weekday_of_date",
    "weekday_of_date_from_first_date",
    "recurring_event_day",
    "count_days",
    "count_business_days",
    "is_leap_year",
];

/// By the kind of question; 0 for a kind that the package does not know.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Some(answer) = answer.filter(|answer| !answer.is_empty()) else { return Some(0.0) };
    match row.text("task")? {
        "weekday_offset" | "weekday_of_date" | "weekday_of_date_from_first_date" => Some(weekday(row, answer)),
        "recurring_event_day" | "count_days" | "count_business_days" => number(row, answer),
        "is_leap_year" => {
            let is_right = python::strip(answer).to_lowercase() == row.answer.to_lowercase();
            Some(if is_right { 1.0 } else { 0.0 })
        }
        _ => Some(0.0),
    }
}

/// 1 for the day, 0.1 for another day, 0.05 for a day that is not spelt with one capital in front.
fn weekday(row: Row<'_>, answer: &str) -> f64 {
    let answer = python::strip(answer);
    if answer == row.answer {
        return 1.0;
    }
    if WEEKDAYS.contains(&answer) {
        return 0.1;
    }
    if WEEKDAYS.into_iter().any(|day| is_titled(answer, day)) { 0.05 } else { 0.0 }
}

/// Whether `str.title()` of a single word gives `day`.
fn is_titled(word: &str, day: &str) -> bool {
    let mut chars = word.chars();
    let Some(first) = chars.next() else { return false };
    first.to_uppercase().chain(chars.flat_map(char::to_lowercase)).eq(day.chars())
}

/// `exp(-5 |answer - reference| / reference)`, so 1 for the number and quickly less; 0 for what is no integer.
///
/// Where the package's arithmetic overflows it raises: unscorable.
fn number(row: Row<'_>, answer: &str) -> Score {
    let pair = python::int(python::strip(answer)).zip(python::int(python::strip(row.answer)));
    let Some((value, reference)) = pair else { return Some(0.0) };
    if reference.is_zero() {
        return Some(if value.is_zero() { 1.0 } else { 0.0 });
    }
    let difference: BigInt = (value - &reference).abs();
    let relative_error = BigRational::new(difference, reference).to_f64().filter(|error| error.is_finite())?;
    Some((-5.0 * relative_error).exp()).filter(|score| score.is_finite())
}
