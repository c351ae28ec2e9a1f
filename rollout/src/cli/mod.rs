//! What the commands of `rollout` share.

pub mod score;

use std::io::{ErrorKind, Write};

use anyhow::Context;

/// Prints a line to stdout. A reader that has gone away (`| head`) is no error; a full disk is.
pub fn say(line: String) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write to stdout"),
        _ => Ok(()),
    }
}
