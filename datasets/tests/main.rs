//! The crate's one test binary.

mod order;
mod reader;
mod trajectory;

use std::error::Error;
use std::path::Path;

/// An error as `main` prints it, with the chain of its sources; the test's own folder reads `DIR`.
fn sentence(error: &dyn Error, dir: &Path) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text.replace(&dir.display().to_string(), "DIR")
}
