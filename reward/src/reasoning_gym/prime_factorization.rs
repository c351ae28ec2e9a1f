//! prime_factorization: factors between multiplication signs, in any order.

use num_bigint::BigInt;
use num_traits::{One, Signed, Zero};

use super::python;
use super::task::{Row, Score};

/// 1 for the reference's factors, 0.5 for others of the same product, else 0.01; 0 without an answer.
///
/// The package raises on a text whose parts are not all integers: unscorable.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let Some(answer) = answer else { return Some(0.0) };
    let (mut expected, mut factors) = (factors(row.answer)?, factors(answer)?);
    expected.sort_unstable();
    factors.sort_unstable();
    if factors == expected {
        return Some(1.0);
    }
    let product: BigInt = expected.iter().product();
    Some(if is_product(&factors, &product) { 0.5 } else { 0.01 })
}

/// The integers between multiplication signs; `None` if a part is none.
pub(super) fn factors(text: &str) -> Option<Vec<BigInt>> {
    text.split('×').map(python::strip).filter(|factor| !factor.is_empty()).map(python::int).collect()
}

/// Whether the factors multiply to `product`. The partial product only grows where no factor is zero, so the first
/// that is too large ends it, however many factors follow.
fn is_product(factors: &[BigInt], product: &BigInt) -> bool {
    if factors.iter().any(Zero::is_zero) {
        return product.is_zero();
    }
    let mut partial = BigInt::one();
    for factor in factors {
        partial *= factor;
        if partial.magnitude() > product.magnitude() {
            return false;
        }
    }
    partial == *product && partial.is_negative() == product.is_negative()
}
