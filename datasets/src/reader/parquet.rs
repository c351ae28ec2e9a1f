//! Parquet, row by row, as the JSON object that the same row would be in JSONL.

use std::fs::File;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Decimal128Type, Decimal256Type, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, Field};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use serde_json::{Map, Number, Value};

use crate::guard::catch_panic;

use super::{EXPECTED_ANSWER, EXPECTED_PROMPT, PromptError, RowPlace, Rows};

pub(super) fn read(path: &Path, rows: &mut Rows<'_>) -> Result<(), PromptError> {
    catch_panic(|| read_file(path, rows), |source| parquet_error(path, source))
}

fn read_file(path: &Path, rows: &mut Rows<'_>) -> Result<(), PromptError> {
    let file = File::open(path).map_err(|source| PromptError::Read { path: path.to_owned(), source })?;
    // A file's own Arrow schema only says which of Arrow's many forms of a string its writer held in memory.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options)
        .map_err(|source| parquet_error(path, source))?;

    let schema = builder.schema().clone();
    for field in schema.fields() {
        rows.see_column(field.name());
    }
    rows.check_columns()?;
    for (column, expected) in [(&rows.columns.prompt, EXPECTED_PROMPT), (&rows.columns.answer, EXPECTED_ANSWER)] {
        if let Some(field) = schema.fields().iter().find(|field| field.name() == column && !has_json_form(field)) {
            let found = field.data_type().to_string();
            return Err(PromptError::ColumnType { path: path.to_owned(), column: column.clone(), found, expected });
        }
    }
    let (read, unread): (Vec<_>, Vec<_>) =
        schema.fields().iter().enumerate().partition(|(_, field)| has_json_form(field));
    rows.set.unread_columns =
        unread.into_iter().map(|(_, field)| (field.name().clone(), field.data_type().to_string())).collect();

    let mask = ProjectionMask::roots(builder.parquet_schema(), read.into_iter().map(|(idx, _)| idx));
    for row_group in builder.metadata().row_groups() {
        for (leaf, column) in row_group.columns().iter().enumerate() {
            if mask.leaf_included(leaf)
                && !matches!(
                    column.compression(),
                    Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_)
                )
            {
                // `GZIP(GzipLevel(6))`: a reader knows the codec only.
                let found = column.compression().to_string();
                let found = found.split('(').next().unwrap_or_default().to_owned();
                let column = column.column_path().string();
                return Err(PromptError::Compression { path: path.to_owned(), column, found });
            }
        }
    }

    let reader = builder.with_projection(mask).build().map_err(|source| parquet_error(path, source))?;
    for batch in reader {
        let batch = batch.map_err(|error| parquet_error(path, error.into()))?;
        for row in 0..batch.num_rows() {
            rows.push(RowPlace::Row(rows.num_rows), fields_of(&batch, row), Value::to_string);
        }
    }
    Ok(())
}

/// A disk that fails under the Parquet reader is the disk's error, not the format's.
fn parquet_error(path: &Path, error: ParquetError) -> PromptError {
    let path = path.to_owned();
    match error {
        ParquetError::External(inner) => match inner.downcast::<std::io::Error>() {
            Ok(source) => PromptError::Read { path, source: *source },
            Err(inner) => PromptError::Parquet { path, source: ParquetError::External(inner) },
        },
        source => PromptError::Parquet { path, source },
    }
}

fn fields_of(batch: &RecordBatch, row: usize) -> Map<String, Value> {
    let columns = batch.columns().iter();
    batch.schema_ref().fields().iter().zip(columns).map(|(field, c)| (field.name().clone(), json_of(c, row))).collect()
}

/// The types that [`json_of`] knows.
fn has_json_form(field: &Field) -> bool {
    match field.data_type() {
        DataType::Null | DataType::Boolean | DataType::Utf8 => true,
        DataType::Decimal128(..) | DataType::Decimal256(..) => true,
        number if number.is_integer() || number.is_floating() => true,
        DataType::List(item) => has_json_form(item),
        DataType::Struct(fields) => fields.iter().all(|field| has_json_form(field)),
        DataType::Map(entries, _) => match entries.data_type() {
            DataType::Struct(key_value) => {
                key_value.len() == 2 && *key_value[0].data_type() == DataType::Utf8 && has_json_form(&key_value[1])
            }
            _ => false,
        },
        _ => false,
    }
}

/// One value as JSON.
fn json_of(column: &dyn Array, row: usize) -> Value {
    if column.is_null(row) {
        return Value::Null;
    }
    match column.data_type() {
        DataType::Boolean => column.as_boolean().value(row).into(),
        DataType::Utf8 => column.as_string::<i32>().value(row).into(),
        DataType::Int8 => column.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => column.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => column.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt8 => column.as_primitive::<UInt8Type>().value(row).into(),
        DataType::UInt16 => column.as_primitive::<UInt16Type>().value(row).into(),
        DataType::UInt32 => column.as_primitive::<UInt32Type>().value(row).into(),
        DataType::UInt64 => column.as_primitive::<UInt64Type>().value(row).into(),
        DataType::Float16 => short_float(column.as_primitive::<Float16Type>().value(row).to_f32()),
        DataType::Float32 => short_float(column.as_primitive::<Float32Type>().value(row)),
        DataType::Float64 => column.as_primitive::<Float64Type>().value(row).into(),
        DataType::Decimal128(..) => column.as_primitive::<Decimal128Type>().value_as_string(row).into(),
        DataType::Decimal256(..) => column.as_primitive::<Decimal256Type>().value_as_string(row).into(),
        DataType::List(_) => list_of(&column.as_list::<i32>().value(row)),
        DataType::Struct(fields) => {
            let columns = column.as_struct().columns().iter().map(|column| json_of(column, row));
            // A struct has all fields of its type, an object only those that were set.
            let set = fields.iter().zip(columns).filter(|(_, value)| !value.is_null());
            Value::Object(set.map(|(field, value)| (field.name().clone(), value)).collect())
        }
        DataType::Map(..) => {
            let entries = column.as_map().value(row);
            let keys = entries.column(0).as_string::<i32>();
            let values = entries.column(1);
            Value::Object((0..keys.len()).map(|i| (keys.value(i).to_owned(), json_of(values, i))).collect())
        }
        // `has_json_form` let no other type through.
        _ => Value::Null,
    }
}

fn list_of(items: &dyn Array) -> Value {
    (0..items.len()).map(|item| json_of(items, item)).collect()
}

/// A short float with its own digits: 0.1 stays 0.1, where a plain widening would give 0.10000000149011612.
fn short_float(value: f32) -> Value {
    value.to_string().parse().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number)
}
