use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, MapBuilder, StringBuilder};
use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, DictionaryArray, Float32Array, Float64Array,
    Int64Array, LargeStringArray, RecordBatch, StringArray, StructArray, UInt8Array,
};
use arrow_schema::{DataType, Field};
use datasets::{Prompt, PromptColumns, PromptError, PromptSet, RowPlace, read_prompts};
use parquet::arrow::ArrowWriter;
use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use crate::sentence;

fn write(name: &str, content: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    (dir, path)
}

fn write_parquet(columns: Vec<(&str, ArrayRef)>) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.parquet");
    // All nullable: what is null in one row is what most tests are about.
    let columns = columns.into_iter().map(|(name, column)| (name, column, true));
    let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    (dir, path)
}

fn strings(values: &[Option<&str>]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

fn read(path: &Path, skip_bad_rows: bool) -> Result<PromptSet, PromptError> {
    read_prompts(path, &PromptColumns::default(), skip_bad_rows)
}

fn prompt(row: usize, text: &str, answer: &str, metadata: serde_json::Value) -> Prompt {
    Prompt { row, text: text.to_owned(), answer: answer.to_owned(), metadata }
}

#[track_caller]
fn check_jsonl(content: impl AsRef<[u8]>, want: &[Prompt]) {
    let (_dir, path) = write("p.jsonl", content);
    let set = read(&path, false).unwrap();
    assert_eq!(set.prompts, want);
    assert_eq!((set.skipped, set.unread_columns), (vec![], vec![]));
}

#[track_caller]
fn check_error(name: &str, content: impl AsRef<[u8]>, skip_bad_rows: bool, want: &str) {
    let (dir, path) = write(name, content);
    assert_eq!(sentence(&read(&path, skip_bad_rows).unwrap_err(), dir.path()), want);
}

/// The sentence for a file whose first row is good and whose second is `line`.
#[track_caller]
fn check_bad_row(line: impl AsRef<[u8]>, want: &str) {
    let content = [b"{\"prompt\": \"1+1\", \"answer\": 2}\n", line.as_ref()].concat();
    let advice = "fix the row or set `prompts.skip_bad_rows = true`";
    check_error("p.jsonl", &content, false, &format!("DIR/p.jsonl: line 2: {want}; {advice}"));

    let (_dir, path) = write("p.jsonl", &content);
    let set = read(&path, true).unwrap();
    assert_eq!(set.prompts, [prompt(0, "1+1", "2", json!({}))]);
    assert_eq!(set.skipped, [(RowPlace::Line(2), want.to_owned())]);
}

#[track_caller]
fn check_parquet_error(columns: Vec<(&str, ArrayRef)>, want: &str) {
    let (dir, path) = write_parquet(columns);
    assert_eq!(sentence(&read(&path, false).unwrap_err(), dir.path()), want);
}

// What is read.

#[test]
fn other_columns_become_metadata() {
    check_jsonl(
        r#"{"id": 7, "prompt": "1+1?", "answer": "2", "tags": ["sum"], "level": null}"#,
        &[prompt(0, "1+1?", "2", json!({"id": 7, "tags": ["sum"]}))],
    );
}

#[test]
fn a_metadata_object_is_the_metadata_and_columns_beside_it_win() {
    let want = [prompt(0, "q", "a", json!({"source_dataset": "sums", "id": 1, "none": null}))];
    check_jsonl(
        r#"{"prompt": "q", "answer": "a", "id": 1, "metadata": {"source_dataset": "sums", "id": 0, "none": null}}"#,
        &want,
    );
    check_jsonl(
        r#"{"prompt": "q", "answer": "a", "id": 1, "metadata": "{\"source_dataset\": \"sums\", \"none\": null}"}"#,
        &want,
    );
}

#[test]
fn a_metadata_column_that_is_no_object_is_a_column() {
    check_jsonl(
        r#"{"prompt": "q", "answer": "a", "metadata": "from a book"}"#,
        &[prompt(0, "q", "a", json!({"metadata": "from a book"}))],
    );
}

#[test]
fn a_number_is_an_answer_as_it_is_written() {
    for number in ["3", "-0", "1.50", "1e3", "123456789012345678901234567890.10"] {
        check_jsonl(
            format!("{{\"prompt\": \"q\", \"answ\\u0065r\": {number} , \"x\": 1}}"),
            &[prompt(0, "q", number, json!({"x": 1}))],
        );
    }
}

#[test]
fn blank_lines_windows_line_ends_and_a_byte_order_mark_are_no_rows() {
    check_jsonl(
        "\u{feff}\r\n{\"prompt\": \"q\", \"answer\": \"\"}\r\n \t\r\n\n  {\"prompt\": \"r\", \"answer\": \"ä\"}",
        &[prompt(0, "q", "", json!({})), prompt(1, "r", "ä", json!({}))],
    );
}

#[test]
fn named_columns_are_read_and_the_extension_may_be_upper_case() {
    let (_dir, path) = write("p.JSONL", r#"{"question": "q", "solution": "s", "answer": "long"}"#);
    let columns = PromptColumns { prompt: "question".to_owned(), answer: "solution".to_owned() };
    let set = read_prompts(&path, &columns, false).unwrap();
    assert_eq!(set.prompts, [prompt(0, "q", "s", json!({"answer": "long"}))]);
}

#[test]
fn skipped_rows_keep_their_number() {
    let (_dir, path) =
        write("p.jsonl", "[]\n\n{\"prompt\": \"q\", \"answer\": 1}\n{}\n{\"prompt\": \"r\", \"answer\": 2}");
    let set = read(&path, true).unwrap();
    assert_eq!(set.prompts, [prompt(1, "q", "1", json!({})), prompt(3, "r", "2", json!({}))]);
    let places: Vec<String> = set.skipped.iter().map(|(place, _)| place.to_string()).collect();
    assert_eq!(places, ["line 1", "line 4"]);
}

#[test]
fn both_formats_give_the_same_prompts() {
    let (_dir, jsonl) = write(
        "p.jsonl",
        r#"{"prompt": "1+1?", "answer": 2, "id": 18446744073709551615, "easy": true, "rate": 0.1, "half": 0.25, "kind": "sum", "level": 3, "tags": ["a", "b"], "extra": {"style": "rule"}, "seen": {"x": 1}, "metadata": {"source": "s", "depth": {"n": 1}}}
{"prompt": "ä?", "answer": -3, "id": 0, "easy": false, "rate": 1e300, "kind": "sum", "tags": [], "extra": {"style": "rule", "n": 5}}
"#,
    );
    let mut tags = ListBuilder::new(StringBuilder::new());
    tags.append_value([Some("a"), Some("b")]);
    tags.append_value::<[Option<&str>; 0], _>([]);
    let mut seen = MapBuilder::new(None, StringBuilder::new(), arrow_array::builder::Int64Builder::new());
    seen.keys().append_value("x");
    seen.values().append_value(1);
    seen.append(true).unwrap();
    seen.append(false).unwrap();
    let field = |name: &str, data_type| Arc::new(Field::new(name, data_type, true));
    let extra = StructArray::from(vec![
        (field("style", DataType::Utf8), strings(&[Some("rule"), Some("rule")])),
        (field("n", DataType::Int64), Arc::new(Int64Array::from(vec![None, Some(5)])) as ArrayRef),
    ]);
    let (_dir, parquet) = write_parquet(vec![
        ("prompt", Arc::new(LargeStringArray::from(vec!["1+1?", "ä?"]))),
        ("answer", Arc::new(Int64Array::from(vec![2, -3]))),
        ("id", Arc::new(arrow_array::UInt64Array::from(vec![u64::MAX, 0]))),
        ("easy", Arc::new(BooleanArray::from(vec![true, false]))),
        ("rate", Arc::new(Float64Array::from(vec![0.1, 1e300]))),
        ("half", Arc::new(Float32Array::from(vec![Some(0.25), None]))),
        ("kind", Arc::new(DictionaryArray::<Int32Type>::from_iter(["sum", "sum"]))),
        ("level", Arc::new(UInt8Array::from(vec![Some(3), None]))),
        ("tags", Arc::new(tags.finish())),
        ("extra", Arc::new(extra)),
        ("seen", Arc::new(seen.finish())),
        ("metadata", strings(&[Some(r#"{"source": "s", "depth": {"n": 1}}"#), None])),
    ]);
    let (jsonl, parquet) = (read(&jsonl, false).unwrap(), read(&parquet, false).unwrap());
    assert_eq!(jsonl, parquet);
    assert_eq!(parquet.prompts.len(), 2);
    // Equality of objects passes over order; the text does not.
    assert_eq!(jsonl.prompts[0].metadata.to_string(), parquet.prompts[0].metadata.to_string());
}

#[test]
fn short_floats_and_decimals_keep_their_digits() {
    let decimals = Decimal128Array::from(vec![1250, -5]).with_precision_and_scale(20, 2).unwrap();
    let (_dir, path) = write_parquet(vec![
        ("prompt", strings(&[Some("q"), Some("r")])),
        ("answer", Arc::new(Float32Array::from(vec![0.1, 3.0]))),
        ("price", Arc::new(decimals)),
        ("ratio", Arc::new(Float64Array::from(vec![f64::NAN, 0.5]))),
    ]);
    let want = [
        prompt(0, "q", "0.1", json!({"price": "12.50"})),
        prompt(1, "r", "3.0", json!({"price": "-0.05", "ratio": 0.5})),
    ];
    assert_eq!(read(&path, false).unwrap().prompts, want);
}

#[test]
fn columns_without_a_json_form_are_named() {
    let (_dir, path) = write_parquet(vec![
        ("day", Arc::new(Date32Array::from(vec![1]))),
        ("prompt", strings(&[Some("q")])),
        ("image", Arc::new(BinaryArray::from(vec![b"png".as_slice()]))),
        ("answer", strings(&[Some("a")])),
        ("id", Arc::new(Int64Array::from(vec![4]))),
    ]);
    let set = read(&path, false).unwrap();
    assert_eq!(set.prompts, [prompt(0, "q", "a", json!({"id": 4}))]);
    assert_eq!(set.unread_columns, [("day".into(), "Date32".into()), ("image".into(), "Binary".into())]);
}

// What is refused, and in which words.

#[test]
fn other_formats() {
    let want = |name, found| {
        format!(
            "DIR/{name}: prompts are read from `.jsonl` and `.parquet` files, and this name {found}; \
             convert the file or rename it"
        )
    };
    check_error("p.csv", "", false, &want("p.csv", "ends in `.csv`"));
    check_error("p.json", "[]", false, &want("p.json", "ends in `.json`"));
    check_error("prompts", "", false, &want("prompts", "has no extension"));
}

#[test]
fn files_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["p.jsonl", "p.parquet"] {
        let error = read(&dir.path().join(name), false).unwrap_err();
        let want = format!("cannot read DIR/{name}: No such file or directory (os error 2)");
        assert_eq!(sentence(&error, dir.path()), want);
    }
    let folder = dir.path().join("folder.jsonl");
    fs::create_dir(&folder).unwrap();
    let error = read(&folder, false).unwrap_err();
    assert_eq!(sentence(&error, dir.path()), "cannot read DIR/folder.jsonl: Is a directory (os error 21)");
}

#[test]
fn files_that_are_not_parquet() {
    let want = "cannot read DIR/p.parquet as Parquet: \
                Parquet error: Invalid Parquet file. Corrupt footer";
    check_error("p.parquet", "{\"prompt\": 1}", false, want);
    let want = "cannot read DIR/p.parquet as Parquet: EOF: Parquet file too small. Size is 0 but need 8";
    check_error("p.parquet", "", false, want);
}

#[test]
fn values_of_the_wrong_kind() {
    let rows = [
        (r#"{"prompt": "q", "answer": null}"#, "column `answer` holds null, expected text or a number"),
        (r#"{"prompt": "q", "answer": true}"#, "column `answer` holds a boolean, expected text or a number"),
        (r#"{"prompt": "q", "answer": ["2"]}"#, "column `answer` holds a list, expected text or a number"),
        (r#"{"prompt": "q", "answer": {}}"#, "column `answer` holds an object, expected text or a number"),
        (r#"{"prompt": "q"}"#, "column `answer` is missing, expected text or a number"),
        (r#"{"answer": "a"}"#, "column `prompt` is missing, expected text"),
        (r#"{"prompt": 3, "answer": "a"}"#, "column `prompt` holds a number, expected text"),
        (r#"{"prompt": "", "answer": "a"}"#, "column `prompt` is empty, expected text"),
        (r#"{"prompt": " \n", "answer": "a"}"#, "column `prompt` is empty, expected text"),
        (r#"["q", "a"]"#, "the line holds a list, expected an object"),
        (r#""q""#, "the line holds text, expected an object"),
    ];
    for (row, want) in rows {
        check_bad_row(row, want);
    }
}

#[test]
fn broken_json_says_the_line_and_the_column() {
    let rows = [
        (r#"{"prompt": "q", "answer" "a"}"#, "broken JSON at column 26: expected `:`"),
        // Columns count characters, not bytes.
        (r#"{"prompt": "äöü", "answer" "a"}"#, "broken JSON at column 28: expected `:`"),
        (r#"  {'prompt': 1}"#, "broken JSON at column 4: key must be a string"),
        (r#"{"prompt": "q""#, "broken JSON at column 14: EOF while parsing an object"),
        (r#"{"prompt": "q", "answer": 1} {}"#, "broken JSON at column 30: trailing characters"),
        (r#"{"prompt": "q", "answer": 1e999}"#, "broken JSON at column 31: number out of range"),
        ("what?", "broken JSON at column 1: expected value"),
    ];
    for (row, want) in rows {
        check_bad_row(row, want);
    }
    check_bad_row("[".repeat(100_000), "broken JSON at column 128: recursion limit exceeded");
}

#[test]
fn a_line_that_is_not_utf8() {
    let line = b"{\"prompt\": \"caf\xe9\", \"answer\": 1}";
    check_bad_row(line, "the line holds the byte 0xe9, expected UTF-8");
}

#[test]
fn files_without_prompts() {
    let want = "DIR/p.jsonl: the file has no rows, expected one prompt a row; fill it or name another file";
    check_error("p.jsonl", "", false, want);
    check_error("p.jsonl", "\n \n", true, want);
    let want = "DIR/p.parquet: the file has no rows, expected one prompt a row; fill it or name another file";
    check_parquet_error(vec![("prompt", strings(&[])), ("answer", strings(&[]))], want);
}

#[test]
fn files_without_a_usable_row() {
    let content = "\n{\"prompt\": \"\", \"answer\": 1}\n{\"prompt\": \"q\", \"answer\": null}\n";
    let want = "DIR/p.jsonl: none of the 2 rows is usable; line 2: column `prompt` is empty, expected text";
    check_error("p.jsonl", content, true, want);
    let want = "DIR/p.jsonl: none of the 1 rows is usable; line 1: broken JSON at column 1: expected value";
    check_error("p.jsonl", "x", true, want);
}

#[test]
fn a_column_that_no_row_has() {
    let content = "{\"prompt\": \"q\", \"anwser\": 1}\n{\"prompt\": \"q\", \"Anwser\": 1, \"id\": 1}\n";
    let want = "DIR/p.jsonl: no row has a column `answer`; \
                the columns are `prompt`, `anwser`, `Anwser`, `id`, and the nearest is `Anwser`; \
                name the one you mean under `[prompts]`";
    check_error("p.jsonl", content, false, want);
    check_error("p.jsonl", content, true, want);
    let want = "DIR/p.jsonl: no row has a column `prompt`; the columns are `question`, `solution`; \
                name the one you mean under `[prompts]`";
    check_error("p.jsonl", "{\"question\": \"q\", \"solution\": 1}", false, want);
    let want = "DIR/p.parquet: no row has a column `answer`; the only column is `prompt`; \
                name the one you mean under `[prompts]`";
    check_parquet_error(vec![("prompt", strings(&[Some("q")]))], want);

    let fields: Vec<String> = (0..22).map(|i| format!("\"c{i}\": {i}")).collect();
    let names: Vec<String> = (0..20).map(|i| format!("`c{i}`")).collect();
    let want = format!(
        "DIR/p.jsonl: no row has a column `prompt`; the columns are {}, 2 more; name the one you mean under `[prompts]`",
        names.join(", ")
    );
    check_error("p.jsonl", format!("{{{}}}", fields.join(", ")), false, &want);
}

#[test]
fn bad_rows_of_parquet() {
    let columns = || vec![("prompt", strings(&[Some("q"), Some("r")])), ("answer", strings(&[Some("a"), None]))];
    let want = "DIR/p.parquet: row 1: column `answer` holds null, expected text or a number; \
                fix the row or set `prompts.skip_bad_rows = true`";
    check_parquet_error(columns(), want);
    let (_dir, path) = write_parquet(columns());
    let set = read(&path, true).unwrap();
    assert_eq!(set.prompts, [prompt(0, "q", "a", json!({}))]);
    let want = "column `answer` holds null, expected text or a number";
    assert_eq!(set.skipped, [(RowPlace::Row(1), want.to_owned())]);
}

#[test]
fn a_needed_column_of_an_impossible_type() {
    let columns = vec![("prompt", strings(&[Some("q")])), ("answer", Arc::new(Date32Array::from(vec![1])) as ArrayRef)];
    let want = "DIR/p.parquet: column `answer` is of type Date32, expected text or a number; \
                write the file anew or name another column";
    check_parquet_error(columns, want);
}

#[test]
fn a_compression_that_this_build_leaves_out() {
    // One row, `prompt` and `answer`, by pyarrow 26 with compression="gzip".
    let (dir, path) = write("p.parquet", include_bytes!("gzip.parquet"));
    let want = "DIR/p.parquet: column `prompt` is compressed with GZIP, expected Snappy, Zstandard or none; \
                write the file anew with one of these";
    assert_eq!(sentence(&read(&path, false).unwrap_err(), dir.path()), want);
}

#[test]
fn columns_come_from_a_recipe() {
    let columns: PromptColumns = serde_json::from_value(json!({"prompt": "question"})).unwrap();
    assert_eq!(columns, PromptColumns { prompt: "question".to_owned(), ..PromptColumns::default() });
    assert!(serde_json::from_value::<PromptColumns>(json!({"promt": "question"})).is_err());
}

/// Lines that are nearly right find more than noise does.
fn nearly_jsonl() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..8),
        prop_oneof![
            Just("{\"prompt\": \"q\""),
            Just(", \"answer\": "),
            Just("1"),
            Just("\"ä\""),
            Just("null"),
            Just("}"),
            Just("\n"),
            Just("\r\n"),
            Just(", \"metadata\": "),
            Just("{\"a\": [1e5]}"),
            Just("\"{}\""),
            Just("\u{feff}"),
            Just("\\ud800"),
            Just("-"),
            Just("\"$serde_json::private::RawValue\": \"1\""),
        ]
        .prop_map(|text| text.as_bytes().to_vec()),
    ];
    proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_bytes_give_prompts_or_a_sentence(content in nearly_jsonl()) {
        let (_dir, path) = write("p.jsonl", &content);
        let (strict, skipping) = (read(&path, false), read(&path, true));
        match (strict, skipping) {
            (Ok(strict), Ok(skipping)) => prop_assert_eq!(strict, skipping),
            (Err(error), Ok(skipping)) => {
                prop_assert!(!skipping.skipped.is_empty() && !skipping.prompts.is_empty(), "{}", error);
            }
            (Err(_), Err(_)) => {}
            (Ok(_), Err(error)) => prop_assert!(false, "skipping made it worse: {}", error),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_survives(texts in proptest::collection::vec((".*[^\\s].*", ".*", any::<f64>()), 1..8)) {
        let lines: Vec<String> = texts.iter()
            .map(|(prompt, answer, x)| json!({"prompt": prompt, "answer": answer, "x": x}).to_string())
            .collect();
        let (_dir, jsonl) = write("p.jsonl", lines.join("\n"));
        let text = |column: fn(&(String, String, f64)) -> &str| -> ArrayRef {
            Arc::new(StringArray::from_iter_values(texts.iter().map(column)))
        };
        let (_dir, parquet) = write_parquet(vec![
            ("prompt", text(|row| &row.0)),
            ("answer", text(|row| &row.1)),
            ("x", Arc::new(Float64Array::from_iter_values(texts.iter().map(|row| row.2)))),
        ]);
        let (jsonl, parquet) = (read(&jsonl, false).unwrap(), read(&parquet, false).unwrap());
        for ((jsonl, parquet), (prompt, answer, _)) in jsonl.prompts.iter().zip(&parquet.prompts).zip(&texts) {
            prop_assert_eq!((&jsonl.text, &jsonl.answer), (prompt, answer));
            prop_assert_eq!((&parquet.text, &parquet.answer), (prompt, answer));
        }
        prop_assert_eq!((jsonl.prompts.len(), parquet.prompts.len()), (texts.len(), texts.len()));
    }
}
