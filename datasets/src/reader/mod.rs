//! Prompts from files: JSONL and Parquet give the same prompts, and a bad row is a sentence that says where it is.

mod jsonl;
mod parquet;

use std::fmt;
use std::path::{Path, PathBuf};

use ::parquet::errors::ParquetError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Prompt;

/// Which columns of a data set hold what a [`Prompt`] needs; all others become its metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptColumns {
    /// The column with the text that the model is asked.
    pub prompt: String,
    /// The column with the reference answer, text or a number.
    pub answer: String,
}

impl Default for PromptColumns {
    fn default() -> Self {
        Self { prompt: "prompt".to_owned(), answer: "answer".to_owned() }
    }
}

/// The prompts of a file and what was left out of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptSet {
    /// The usable rows, in file order.
    pub prompts: Vec<Prompt>,
    /// The rows that were skipped and what is wrong with each; empty unless `skip_bad_rows` was set.
    pub skipped: Vec<(RowPlace, String)>,
    /// Parquet columns, each with its type, whose values have no form in JSON (times, bytes): no metadata holds them.
    pub unread_columns: Vec<(String, String)>,
}

/// Where a row stands, in the numbers of its format's own tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPlace {
    /// A line of a JSONL file, counted from 1, as editors do.
    Line(usize),
    /// A row of a Parquet file, counted from 0, as data frames do.
    Row(usize),
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}

/// Why a file gave no prompts.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The file's name does not say a format that we read.
    #[error("{}: prompts are read from `.jsonl` and `.parquet` files, and this name {found}; convert the file or rename it", path.display())]
    Extension {
        /// The file.
        path: PathBuf,
        /// What its name has instead.
        found: String,
    },
    /// The file could not be opened or read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is not Parquet, or is damaged.
    #[error("cannot read {} as Parquet", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What the Parquet reader said.
        #[source]
        source: ParquetError,
    },
    /// The file is compressed in a way that this build leaves out.
    #[error("{}: column `{column}` is compressed with {found}, expected Snappy, Zstandard or none; write the file anew with one of these", path.display())]
    Compression {
        /// The file.
        path: PathBuf,
        /// The first such column.
        column: String,
        /// The codec's name.
        found: String,
    },
    /// A column that is needed has a type that is never usable.
    #[error("{}: column `{column}` is of type {found}, expected {expected}; write the file anew or name another column", path.display())]
    ColumnType {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// Its Arrow type.
        found: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// No row has a column that is needed.
    #[error("{}: no row has a column `{column}`; {existing}; name the one you mean under `[prompts]`", path.display())]
    MissingColumn {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// The columns that exist, and the nearest.
        existing: String,
    },
    /// A row is not usable, and bad rows are not skipped.
    #[error("{}: {place}: {reason}; fix the row or set `prompts.skip_bad_rows = true`", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The row.
        place: RowPlace,
        /// What was found and what was expected.
        reason: String,
    },
    /// The file has no rows at all.
    #[error("{}: the file has no rows, expected one prompt a row; fill it or name another file", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Bad rows are skipped, and all of them are bad.
    #[error("{}: none of the {num_rows} rows is usable; {place}: {reason}", path.display())]
    NoUsableRow {
        /// The file.
        path: PathBuf,
        /// How many rows there are.
        num_rows: usize,
        /// The first of them.
        place: RowPlace,
        /// What is wrong with it.
        reason: String,
    },
}

/// Reads the prompts of a `.jsonl` or `.parquet` file; both formats give the same prompts for the same rows.
///
/// **Prompt and answer.** The prompt is text with something in it. The answer is text, or a number, which is taken as
/// its JSON text: from JSONL exactly as it is written there (`1.50` stays `1.50`, and thirty digits stay thirty).
///
/// **Metadata** is always an object: all other columns, each under its name. A column `metadata` that is an object, or
/// text that holds one, is not nested but becomes the metadata itself; where a column beside it has the name of one of
/// its keys, the column wins. A column that is null in a row is left out of that row. From Parquet, lists, structs and
/// string-keyed maps become arrays and objects, decimals become text, NaN and the infinities become null, and columns
/// with no JSON form are named in [`PromptSet::unread_columns`]. Numbers in it are 64-bit integers or doubles.
///
/// **Rows.** [`Prompt::row`] counts rows from 0; skipped rows keep their number, blank lines have none. With
/// `skip_bad_rows`, a row that is not usable is noted in [`PromptSet::skipped`] and passed over.
///
/// # Errors
/// One sentence that says where, what was found, what was expected and what to do: see [`PromptError`].
pub fn read_prompts(path: &Path, columns: &PromptColumns, skip_bad_rows: bool) -> Result<PromptSet, PromptError> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    let mut rows = Rows::new(path, columns);
    match extension.as_deref() {
        Some("jsonl") => jsonl::read(path, &mut rows)?,
        Some("parquet") => parquet::read(path, &mut rows)?,
        other => {
            let found = other.map_or_else(|| "has no extension".to_owned(), |other| format!("ends in `.{other}`"));
            return Err(PromptError::Extension { path: path.to_owned(), found });
        }
    }
    rows.finish(skip_bad_rows)
}

const EXPECTED_PROMPT: &str = "text";
const EXPECTED_ANSWER: &str = "text or a number";

/// The name of the column whose object becomes the metadata itself.
const METADATA: &str = "metadata";

/// Both formats hand their rows to this, one after the other; it makes the prompts and remembers what was wrong.
struct Rows<'a> {
    path: &'a Path,
    columns: &'a PromptColumns,
    num_rows: usize,
    set: PromptSet,
    /// The names of all columns seen, in the order of their first appearance; the values are unused.
    seen: Map<String, Value>,
}

impl<'a> Rows<'a> {
    fn new(path: &'a Path, columns: &'a PromptColumns) -> Self {
        Self { path, columns, num_rows: 0, set: PromptSet::default(), seen: Map::new() }
    }

    fn see_column(&mut self, name: &str) {
        if !self.seen.contains_key(name) {
            self.seen.insert(name.to_owned(), Value::Null);
        }
    }

    /// Takes a row that could be read. `number_text` is asked for the text of an answer that is a number.
    fn push(&mut self, place: RowPlace, mut fields: Map<String, Value>, number_text: impl FnOnce(&Value) -> String) {
        for name in fields.keys() {
            self.see_column(name);
        }
        let text = match fields.get(&self.columns.prompt) {
            Some(Value::String(text)) if text.trim().is_empty() => {
                return self.push_bad(place, format!("column `{}` is empty, expected text", self.columns.prompt));
            }
            Some(Value::String(text)) => text.clone(),
            other => return self.push_bad(place, wrong_value(&self.columns.prompt, other, EXPECTED_PROMPT)),
        };
        let answer = match fields.get(&self.columns.answer) {
            Some(Value::String(text)) => text.clone(),
            Some(number @ Value::Number(_)) => number_text(number),
            other => return self.push_bad(place, wrong_value(&self.columns.answer, other, EXPECTED_ANSWER)),
        };
        fields.shift_remove(&self.columns.prompt);
        fields.shift_remove(&self.columns.answer);
        self.set.prompts.push(Prompt { row: self.num_rows, text, answer, metadata: metadata(fields) });
        self.num_rows += 1;
    }

    /// Takes a row that is not usable.
    fn push_bad(&mut self, place: RowPlace, reason: String) {
        self.set.skipped.push((place, reason));
        self.num_rows += 1;
    }

    /// Fails if a column that is needed was never seen, which says more than the first row's complaint.
    fn check_columns(&self) -> Result<(), PromptError> {
        for column in [&self.columns.prompt, &self.columns.answer] {
            if !self.seen.contains_key(column) {
                let existing = existing_columns(column, self.seen.keys().map(String::as_str));
                return Err(PromptError::MissingColumn {
                    path: self.path.to_owned(),
                    column: column.clone(),
                    existing,
                });
            }
        }
        Ok(())
    }

    fn finish(self, skip_bad_rows: bool) -> Result<PromptSet, PromptError> {
        let path = self.path.to_owned();
        if self.num_rows == 0 {
            return Err(PromptError::Empty { path });
        }
        // Where no row was even an object, the rows' own complaints say more.
        if !self.seen.is_empty() {
            self.check_columns()?;
        }
        if let Some((place, reason)) = self.set.skipped.first().cloned() {
            if !skip_bad_rows {
                return Err(PromptError::Row { path, place, reason });
            }
            if self.set.prompts.is_empty() {
                return Err(PromptError::NoUsableRow { path, num_rows: self.num_rows, place, reason });
            }
        }
        Ok(self.set)
    }
}

/// What is wrong with a value, or with its absence.
fn wrong_value(column: &str, value: Option<&Value>, expected: &str) -> String {
    match value {
        None => format!("column `{column}` is missing, expected {expected}"),
        Some(value) => format!("column `{column}` holds {}, expected {expected}", kind_of(value)),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The columns beside prompt and answer as one object.
fn metadata(mut fields: Map<String, Value>) -> Value {
    let inner = match fields.get(METADATA) {
        Some(Value::Object(inner)) => Some(inner.clone()),
        // Tools that know no nested columns write the object as text.
        Some(Value::String(text)) => serde_json::from_str::<Map<String, Value>>(text).ok(),
        _ => None,
    };
    if inner.is_some() {
        fields.shift_remove(METADATA);
    }
    let mut metadata = inner.unwrap_or_default();
    metadata.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
    Value::Object(metadata)
}

/// Which columns there are, for a person who named another.
fn existing_columns<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> String {
    /// More than this fills the screen and hides the sentence.
    const MAX_NAMES: usize = 20;
    let names: Vec<&str> = names.collect();
    let similarity = |name: &str| strsim::normalized_damerau_levenshtein(&name.to_lowercase(), &wanted.to_lowercase());
    let nearest = names.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    let mut listed: Vec<String> = names.iter().take(MAX_NAMES).map(|name| format!("`{name}`")).collect();
    if names.len() > MAX_NAMES {
        listed.push(format!("{} more", names.len() - MAX_NAMES));
    }
    match nearest {
        None => "there are no columns".to_owned(),
        Some(nearest) if names.len() == 1 => format!("the only column is `{nearest}`"),
        // Beyond half of the letters, nearness is chance: `question` for `answer` would help nobody.
        Some(nearest) if similarity(nearest) > 0.5 => {
            format!("the columns are {}, and the nearest is `{nearest}`", listed.join(", "))
        }
        Some(_) => format!("the columns are {}", listed.join(", ")),
    }
}
