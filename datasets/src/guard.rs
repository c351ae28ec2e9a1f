//! A fence around the Parquet reader.

use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::errors::ParquetError;

/// Runs `read`, and makes an error of a panic in it.
///
/// The reader of parquet 60 trusts what a file says of itself: of all flips of one byte in a small file, one in three
/// hundred made it panic. A damaged file is outside input, which gives an error. What `read` was filling is in an unknown
/// state after a panic; callers drop it.
pub(crate) fn catch_panic<T, E>(
    read: impl FnOnce() -> Result<T, E>,
    error: impl FnOnce(ParquetError) -> E,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("its reader gave up");
        Err(error(ParquetError::General(format!("the file is damaged: {text}"))))
    })
}
