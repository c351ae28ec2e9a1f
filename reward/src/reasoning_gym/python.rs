//! What the package's checkers get from Python: `str.strip`, `int`, `float` and `Decimal`, on text that may be hostile.
//!
//! CPython 3.11 is the reference. All of it is linear in the text, but for `int`, which Python itself stops at 4300
//! digits.

use std::borrow::Cow;
use std::cmp::Ordering;

use num_bigint::BigInt;

/// `sys.set_int_max_str_digits`: more digits than these and `int` raises.
pub(super) const MAX_INT_DIGITS: usize = 4300;

/// The zeros of Unicode's decimal digits (category Nd, Unicode 14); each is followed by its nine brothers.
const DIGIT_ZEROS: [u32; 66] = [
    0x0030, 0x0660, 0x06F0, 0x07C0, 0x0966, 0x09E6, 0x0A66, 0x0AE6, 0x0B66, 0x0BE6, 0x0C66, 0x0CE6, 0x0D66, 0x0DE6,
    0x0E50, 0x0ED0, 0x0F20, 0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90, 0x1B50, 0x1BB0, 0x1C40,
    0x1C50, 0xA620, 0xA8D0, 0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0, 0xFF10, 0x104A0, 0x10D30, 0x11066, 0x110F0,
    0x11136, 0x111D0, 0x112F0, 0x11450, 0x114D0, 0x11650, 0x116C0, 0x11730, 0x118E0, 0x11950, 0x11C50, 0x11D50,
    0x11DA0, 0x16A60, 0x16AC0, 0x16B50, 0x1D7CE, 0x1D7D8, 0x1D7E2, 0x1D7EC, 0x1D7F6, 0x1E140, 0x1E2F0, 0x1E950,
    0x1FBF0,
];

/// `str.isspace` for one character: Unicode's white space and the four ASCII separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `str.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.rstrip()`.
pub(super) fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// `len(text)`: characters, not bytes.
pub(super) fn len(text: &str) -> usize {
    text.chars().count()
}

/// The value of a decimal digit of any script; `\d` of a Python pattern matches just these.
pub(super) fn digit(c: char) -> Option<u8> {
    let code = u32::from(c);
    let zero = DIGIT_ZEROS[..DIGIT_ZEROS.partition_point(|&zero| zero <= code)].last()?;
    u8::try_from(code - zero).ok().filter(|&value| value < 10)
}

/// Digits of any script as ASCII and other white space as blanks, as `int` and `float` do before they read; what is
/// left of the rest no number can hold. Then the strip that C's `isspace` gives, which spares `\x1c` to `\x1f`.
fn numeric_text(text: &str) -> Cow<'_, str> {
    let is_c_space = |c: char| matches!(c, '\t'..='\r' | ' ');
    if text.is_ascii() {
        return Cow::Borrowed(text.trim_matches(is_c_space));
    }
    let ascii = |c: char| match digit(c) {
        Some(value) => char::from(b'0' + value),
        None if !c.is_ascii() && is_space(c) => ' ',
        None if c.is_ascii() => c,
        None => '?',
    };
    let ascii: String = text.chars().map(ascii).collect();
    Cow::Owned(ascii.trim_matches(is_c_space).to_owned())
}

/// `text` without its sign, and whether the sign is a minus.
fn split_sign(text: &str) -> (bool, &str) {
    match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    }
}

/// Digits of `radix` with single underscores between them; `None` if `text` holds anything else or nothing.
fn plain_digits(text: &str, radix: u32) -> Option<Cow<'_, str>> {
    let mut before_is_digit = false;
    for c in text.chars() {
        let is_digit = c.is_digit(radix);
        let is_between = c == '_' && before_is_digit;
        if !is_digit && !is_between {
            return None;
        }
        before_is_digit = is_digit;
    }
    if !before_is_digit {
        return None;
    }
    Some(if text.contains('_') { Cow::Owned(text.replace('_', "")) } else { Cow::Borrowed(text) })
}

/// The digits' value. Radix 10 is quadratic, so it has Python's bound; the others are linear and have none.
fn int_of_digits(digits: &str, radix: u32, negative: bool) -> Option<BigInt> {
    if radix == 10 && digits.len() > MAX_INT_DIGITS {
        return None;
    }
    let value = BigInt::parse_bytes(digits.as_bytes(), radix)?;
    Some(if negative { -value } else { value })
}

/// `int(text)`; `None` where it raises `ValueError`.
pub(super) fn int(text: &str) -> Option<BigInt> {
    let text = numeric_text(text);
    let (negative, digits) = split_sign(&text);
    int_of_digits(&plain_digits(digits, 10)?, 10, negative)
}

/// `int(text, 0)`: the prefix `0x`, `0o` or `0b` names the radix; without one, only zeros may start with a zero.
pub(super) fn int_any_radix(text: &str) -> Option<BigInt> {
    let text = numeric_text(text);
    let (negative, unsigned) = split_sign(&text);
    let radix = match unsigned.as_bytes() {
        [b'0', b'x' | b'X', ..] => 16,
        [b'0', b'o' | b'O', ..] => 8,
        [b'0', b'b' | b'B', ..] => 2,
        _ => 10,
    };
    if radix == 10 {
        let digits = plain_digits(unsigned, 10)?;
        let is_octal_by_mistake = digits.starts_with('0') && digits.bytes().any(|digit| digit != b'0');
        return if is_octal_by_mistake { None } else { int_of_digits(&digits, 10, negative) };
    }
    let rest = &unsigned[2..];
    int_of_digits(&plain_digits(rest.strip_prefix('_').unwrap_or(rest), radix)?, radix, negative)
}

/// `float(text)` of a string; `None` where it raises. `inf` and `nan` are values to it.
pub(super) fn float(text: &str) -> Option<f64> {
    let text = numeric_text(text);
    if !text.contains('_') {
        // Rust's float syntax is C's `strtod` without hexadecimals, as Python's.
        return text.parse().ok();
    }
    let bytes = text.as_bytes();
    let is_digit_at = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_digit);
    for (at, byte) in bytes.iter().enumerate() {
        if *byte == b'_' && !(is_digit_at(at.checked_sub(1)) && is_digit_at(Some(at + 1))) {
            return None;
        }
    }
    text.replace('_', "").parse().ok()
}

/// What `decimal.Decimal(text)` holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decimal {
    /// A finite number.
    Finite(FiniteDecimal),
    /// Infinity, with its sign.
    Infinite(bool),
    /// Equal to nothing, itself included; signalling ones make the comparison raise, which no checker survives either.
    NotANumber,
}

/// `(-1)^negative * digits * 10^exponent`, without zeros at either end of the digits. Zero has none and no sign.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FiniteDecimal {
    negative: bool,
    digits: String,
    exponent: i64,
}

/// The bounds of the largest decimal context, within which the constructor keeps every digit or raises.
const MAX_ADJUSTED_EXPONENT: i128 = 999_999_999_999_999_999;
const MIN_EXPONENT: i128 = -1_999_999_999_999_999_997;

impl Decimal {
    /// `Decimal(text)`; `None` where it raises. Underscores may stand anywhere.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text: String = strip(text)
            .chars()
            .filter(|&c| c != '_')
            .map(|c| match digit(c) {
                Some(value) => char::from(b'0' + value),
                None if c.is_ascii() => c,
                None => '?',
            })
            .collect();
        let (negative, unsigned) = split_sign(&text);
        if let Some(special) = special_decimal(unsigned, negative) {
            return Some(special);
        }
        let (coefficient, exponent) = match unsigned.find(['e', 'E']) {
            Some(at) => (&unsigned[..at], exponent_value(&unsigned[at + 1..])?),
            None => (unsigned, 0),
        };
        let (whole, fraction) = coefficient.split_once('.').unwrap_or((coefficient, ""));
        let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if !is_digits(whole) || !is_digits(fraction) || whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let all = [whole, fraction].concat();
        let significant = all.trim_start_matches('0');
        let exponent = exponent - fraction.len() as i128;
        let adjusted = exponent + (significant.len() as i128 - 1).max(0);
        if adjusted > MAX_ADJUSTED_EXPONENT || exponent < MIN_EXPONENT {
            return None;
        }
        let digits = significant.trim_end_matches('0');
        if digits.is_empty() {
            return Some(Self::Finite(FiniteDecimal::default()));
        }
        let exponent = i64::try_from(exponent + (significant.len() - digits.len()) as i128).ok()?;
        Some(Self::Finite(FiniteDecimal { negative, digits: digits.to_owned(), exponent }))
    }

    /// `==` between decimals: by value, whatever the zeros written.
    pub(super) fn equals(&self, other: &Self) -> bool {
        !matches!(self, Self::NotANumber) && self == other
    }
}

impl FiniteDecimal {
    /// The value times `10^places`, cut to an integer whose last digit is made odd where digits were lost, so that a
    /// comparison with anything of fewer places comes out as for the full value. `None` above `10^400`.
    pub(super) fn scaled(&self, places: i64) -> Option<BigInt> {
        let shift = self.exponent.saturating_add(places);
        let num_digits = self.digits.len() as i64;
        if shift.saturating_add(num_digits) > 400 {
            return None;
        }
        let (kept, is_cut) = match shift.cmp(&0) {
            Ordering::Less => (num_digits.saturating_add(shift).max(0) as usize, true),
            _ => (self.digits.len(), false),
        };
        let kept = &self.digits[..kept];
        let magnitude = if kept.is_empty() { BigInt::ZERO } else { BigInt::parse_bytes(kept.as_bytes(), 10)? };
        let magnitude = magnitude * BigInt::from(10).pow(shift.max(0) as u32);
        let magnitude = if is_cut && !self.digits.is_empty() { magnitude | BigInt::from(1) } else { magnitude };
        Some(if self.negative { -magnitude } else { magnitude })
    }
}

/// Infinity and the kinds of NaN, in any case; a NaN may carry digits.
fn special_decimal(unsigned: &str, negative: bool) -> Option<Decimal> {
    if unsigned.eq_ignore_ascii_case("inf") || unsigned.eq_ignore_ascii_case("infinity") {
        return Some(Decimal::Infinite(negative));
    }
    let name = unsigned.trim_end_matches(|c: char| c.is_ascii_digit());
    let is_nan = name.eq_ignore_ascii_case("nan") || name.eq_ignore_ascii_case("snan");
    is_nan.then_some(Decimal::NotANumber)
}

/// The number after the `e`, held where no bound of a decimal can be met any more.
fn exponent_value(text: &str) -> Option<i128> {
    let (negative, digits) = split_sign(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let far = i128::MAX / 4;
    let value = digits
        .bytes()
        .fold(0i128, |value, digit| value.saturating_mul(10).saturating_add(i128::from(digit - b'0')).min(far));
    Some(if negative { -value } else { value })
}
