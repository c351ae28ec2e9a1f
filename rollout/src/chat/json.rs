//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it: what V4 read in training.
//!
//! It differs from serde_json in what no value can carry: a space after `,` and `:`, exponents of floats, and integers of
//! any size, so it works on the JSON text.

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// `text` in Python's form; `None` if it is no JSON, or nested deeper than serde_json reads (128).
pub(super) fn python_json(text: &str) -> Option<String> {
    serde_json::from_str::<serde_json::Value>(text).ok()?;
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    write(text, &mut out)?;
    Some(out)
}

/// The members of the object `text`, each value as its JSON text; `None` if `text` is something else. Of a key that
/// occurs twice, the last value counts, at the place of the first.
pub(super) fn members(text: &str) -> Option<Vec<(String, &str)>> {
    let Members(found) = serde_json::from_str(text).ok()?;
    let mut members: Vec<(String, &str)> = Vec::with_capacity(found.len());
    let mut place_of = std::collections::HashMap::new();
    for (key, value) in found {
        let place = *place_of.entry(key.clone()).or_insert(members.len());
        match members.get_mut(place) {
            Some(member) => member.1 = value.get(),
            None => members.push((key, value.get())),
        }
    }
    Some(members)
}

struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> serde::Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

fn write(text: &str, out: &mut String) -> Option<()> {
    let text = text.trim_ascii();
    match text.bytes().next()? {
        b'{' => {
            out.push('{');
            for (i, (key, value)) in members(text)?.into_iter().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                out.push_str(&quoted(&key));
                out.push_str(": ");
                write(value, out)?;
            }
            out.push('}');
        }
        b'[' => {
            out.push('[');
            for (i, value) in serde_json::from_str::<Vec<&RawValue>>(text).ok()?.into_iter().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                write(value.get(), out)?;
            }
            out.push(']');
        }
        b'"' => out.push_str(&quoted(&serde_json::from_str::<String>(text).ok()?)),
        b't' | b'f' | b'n' => out.push_str(text),
        _ if text == "-0" => out.push('0'),
        _ if text.contains(['.', 'e', 'E']) => out.push_str(&python_float(text.parse().ok()?)),
        _ => out.push_str(text),
    }
    Some(())
}

/// `text` as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a string is JSON")
}

/// Python's `repr` of a finite float: the shortest digits that read back, an exponent below 1e-4 and from 1e16 on.
fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').expect("Rust writes an exponent");
    let exponent: i32 = exponent.parse().expect("Rust writes a number");
    if x == 0.0 || (-4..16).contains(&exponent) {
        format!("{x:?}")
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: &str) {
        assert_eq!(python_json(text).as_deref(), Some(want));
    }

    // Each `want` is what Python 3.11 writes.
    #[test]
    fn numbers_are_pythons() {
        check("[1.0,-0,-0.0,1e5,0.0001]", "[1.0, 0, -0.0, 100000.0, 0.0001]");
        check("[0.00001,1.25e-7,1e15,1e16,1.5e300]", "[1e-05, 1.25e-07, 1000000000000000.0, 1e+16, 1.5e+300]");
        check("[123456789012345678901234567890, 0.1]", "[123456789012345678901234567890, 0.1]");
        check("[9007199254740993.0, 5e-324]", "[9007199254740992.0, 5e-324]");
    }

    #[test]
    fn separators_and_strings_are_pythons() {
        check(" {\"b\" :[ ],\"a\":{ } ,\n\"c\":[true,null]} ", r#"{"b": [], "a": {}, "c": [true, null]}"#);
        check(r#""\u00e9\u0001\u007f\/\ud83d\ude00\n""#, "\"é\\u0001\u{7f}/😀\\n\"");
    }

    #[test]
    fn a_repeated_key_keeps_its_place_and_takes_the_last_value() {
        check(r#"{"a":1,"b":2,"a":{"x":1,"x":3}}"#, r#"{"a": {"x": 3}, "b": 2}"#);
    }

    #[test]
    fn other_text_is_no_json() {
        for text in ["", "{", "nul", "[1,]", "1 2", "{\"a\"}", &"[".repeat(1 << 20)] {
            assert_eq!(python_json(text), None, "{:.20}", text);
        }
        assert_eq!(members("[1]"), None);
    }
}
