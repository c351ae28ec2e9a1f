//! One JSON object a line.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::Value;
use serde_json::value::RawValue;

use super::{PromptError, RowPlace, Rows, kind_of};

pub(super) fn read(path: &Path, rows: &mut Rows<'_>) -> Result<(), PromptError> {
    let cannot_read = |source| PromptError::Read { path: path.to_owned(), source };
    let mut file = BufReader::new(File::open(path).map_err(cannot_read)?);
    let mut bytes = Vec::new();
    for line_number in 1.. {
        bytes.clear();
        if file.read_until(b'\n', &mut bytes).map_err(cannot_read)? == 0 {
            break;
        }
        let mut line = bytes.as_slice();
        if line_number == 1 {
            // Windows editors begin UTF-8 files with a byte-order mark.
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        read_line(line.trim_ascii_end(), RowPlace::Line(line_number), rows);
    }
    Ok(())
}

fn read_line(line: &[u8], place: RowPlace, rows: &mut Rows<'_>) {
    if line.is_empty() {
        return;
    }
    let line = match std::str::from_utf8(line) {
        Ok(line) => line,
        Err(error) => {
            let byte = line[error.valid_up_to()];
            return rows.push_bad(place, format!("the line holds the byte 0x{byte:02x}, expected UTF-8"));
        }
    };
    match serde_json::from_str(line) {
        Ok(Value::Object(fields)) => {
            let answer_column = &rows.columns.answer;
            rows.push(place, fields, |number| raw_text(line, answer_column).unwrap_or_else(|| number.to_string()))
        }
        Ok(other) => rows.push_bad(place, format!("the line holds {}, expected an object", kind_of(&other))),
        Err(error) => {
            // The error's column counts bytes; people count characters. Its text ends in a position that we say ourselves.
            let column = line.get(..error.column().saturating_sub(1)).map_or(0, |before| before.chars().count()) + 1;
            let text = error.to_string();
            let found = text.rsplit_once(" at line ").map_or(text.as_str(), |(found, _)| found);
            rows.push_bad(place, format!("broken JSON at column {column}: {found}"));
        }
    }
}

/// A number as it is written: parsing it would cost the digits of long integers and the zeros of `1.50`.
fn raw_text(line: &str, column: &str) -> Option<String> {
    let fields: HashMap<String, &RawValue> = serde_json::from_str(line).ok()?;
    fields.get(column).map(|raw| raw.get().to_owned())
}
