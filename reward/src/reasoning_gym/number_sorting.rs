//! number_sorting: a list in brackets, sorted, each value within 1 of the true one.

use super::python;
use super::task::{Row, Score};

/// 1 for a sorted list of the right length whose values are at most 1 off, else 0.
///
/// The tolerance is the package's. So is what NaN does: it is no further than 1 from anything, and in order anywhere.
pub(super) fn score(row: Row<'_>, answer: Option<&str>) -> Score {
    let expected = numbers(row.answer)?;
    let is_ascending = row.text("direction")? == "ascending";
    let Some(values) = answer.and_then(numbers).filter(|values| values.len() == expected.len()) else {
        return Some(0.0);
    };
    let is_sorted = values.windows(2).all(|pair| !(if is_ascending { pair[1] < pair[0] } else { pair[0] < pair[1] }));
    let is_off = |(value, expected): (&f64, &f64)| (value - expected).abs() > 1.0;
    let is_right = is_sorted && !values.iter().zip(&expected).any(is_off);
    Some(if is_right { 1.0 } else { 0.0 })
}

/// A JSON list of numbers or of strings that hold numbers; single quotes do as double ones. `None` for anything else,
/// nested lists included: the package finds no number in them.
pub(super) fn numbers(text: &str) -> Option<Vec<f64>> {
    let text = text.replace('\'', "\"");
    let mut rest = skip(skip(&text).strip_prefix('[')?);
    let mut values = Vec::new();
    if let Some(after) = rest.strip_prefix(']') {
        return skip(after).is_empty().then_some(values);
    }
    loop {
        let (value, after) = element(rest)?;
        values.push(value);
        rest = skip(after);
        match rest.as_bytes().first()? {
            b',' => rest = skip(&rest[1..]),
            b']' => return skip(&rest[1..]).is_empty().then_some(values),
            _ => return None,
        }
    }
}

/// JSON's white space.
fn skip(text: &str) -> &str {
    text.trim_start_matches([' ', '\t', '\n', '\r'])
}

/// One element's value and the text after it.
fn element(text: &str) -> Option<(f64, &str)> {
    if let Some(quoted) = text.strip_prefix('"') {
        let (content, after) = string(quoted)?;
        return Some((python::float(&content)?, after));
    }
    // Python's JSON has three more names than the standard.
    const NAMES: [(&str, f64); 5] = [
        ("true", 1.0),
        ("false", 0.0),
        ("NaN", f64::NAN),
        ("Infinity", f64::INFINITY),
        ("-Infinity", f64::NEG_INFINITY),
    ];
    if let Some((name, value)) = NAMES.into_iter().find(|(name, _)| text.starts_with(name)) {
        return Some((value, &text[name.len()..]));
    }
    let num_bytes = number_len(text.as_bytes())?;
    Some((text[..num_bytes].parse().ok()?, &text[num_bytes..]))
}

/// Bytes of the JSON number at the front.
fn number_len(bytes: &[u8]) -> Option<usize> {
    let digits_from = |at: usize| bytes[at.min(bytes.len())..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut at = usize::from(bytes.first() == Some(&b'-'));
    at += match bytes.get(at)? {
        b'0' => 1,
        b'1'..=b'9' => digits_from(at),
        _ => return None,
    };
    if bytes.get(at) == Some(&b'.') && digits_from(at + 1) > 0 {
        at += 1 + digits_from(at + 1);
    }
    if matches!(bytes.get(at), Some(b'e' | b'E')) {
        let num_sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
        if digits_from(at + 1 + num_sign) > 0 {
            at += 1 + num_sign + digits_from(at + 1 + num_sign);
        }
    }
    Some(at)
}

/// A JSON string's content, from after its opening quote, and the text after its closing one. An escape for half a
/// surrogate pair fails here; Python reads it, and then finds no number in it.
fn string(text: &str) -> Option<(String, &str)> {
    let mut content = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((content, &text[at + 1..])),
            '\\' => content.push(match chars.next()?.1 {
                c @ ('"' | '\\' | '/') => c,
                'b' => '\x08',
                'f' => '\x0c',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    let code =
                        text.get(at + 2..at + 6).filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
                    chars.nth(3)?;
                    char::from_u32(u32::from_str_radix(code, 16).ok()?)?
                }
                _ => return None,
            }),
            '\0'..='\x1f' => return None,
            _ => content.push(c),
        }
    }
    None
}
