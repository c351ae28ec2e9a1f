//! fraction_simplification: `a/b` or LaTeX's `\frac{a}{b}`, in lowest terms.

use num_bigint::BigInt;

use super::python;
use super::task::{Row, Score};

/// 1 for the simplified fraction, 0.1 if it shares a term with the given one, 0.05 for another fraction, else 0.01.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let simplified = (row.integer("simplified_numerator")?, row.integer("simplified_denominator")?);
    let given = (row.integer("numerator")?, row.integer("denominator")?);
    let Some(fraction) = answer.and_then(fraction) else { return Some(0.01) };
    Some(if fraction == simplified {
        1.0
    } else if fraction.0 == given.0 || fraction.1 == given.1 {
        0.1
    } else {
        0.05
    })
}

/// Numerator and denominator; dollar signs around them are free, and so is text after LaTeX's closing brace.
fn fraction(text: &str) -> Option<(BigInt, BigInt)> {
    let text = python::strip(python::strip(text).trim_matches('$'));
    if let Some((numerator, denominator)) = latex_fraction(text) {
        return Some((python::int(numerator)?, python::int(denominator)?));
    }
    let (numerator, denominator) = text.split_once('/')?;
    Some((python::int(python::strip(numerator))?, python::int(python::strip(denominator))?))
}

/// The two digit strings of `\frac{..}{..}` or `\dfrac{..}{..}`, in any case, at the front of `text`.
fn latex_fraction(text: &str) -> Option<(&str, &str)> {
    let command = text.strip_prefix('\\')?;
    let name_len = ["frac", "dfrac"].into_iter().map(str::len).find(|&len| {
        command.get(..len).is_some_and(|name| name.eq_ignore_ascii_case("frac") || name.eq_ignore_ascii_case("dfrac"))
    })?;
    let (numerator, rest) = braced_digits(&command[name_len..])?;
    let (denominator, _) = braced_digits(rest)?;
    Some((numerator, denominator))
}

/// The digits between the braces at the front of `text`, and what follows them.
fn braced_digits(text: &str) -> Option<(&str, &str)> {
    let inner = text.trim_start_matches(python::is_space).strip_prefix('{')?.trim_start_matches(python::is_space);
    let end = inner.find(|c| python::digit(c).is_none()).filter(|&end| end > 0)?;
    let rest = inner[end..].trim_start_matches(python::is_space).strip_prefix('}')?;
    Some((&inner[..end], rest))
}
