//! What the commands of `rollout` share.

pub mod score;

use std::io::{ErrorKind, Write};

use anyhow::Context;

/// Prints a line to stdout. Where the reader has gone away (`| head`) there is nothing left to do, and the program ends
/// as if all had been read; a full disk is an error.
pub fn say(line: String) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        done => done.context("cannot write to stdout"),
    }
}
