//! What the commands of `rollout` share.

pub mod bench;
pub mod chat;
pub mod engine;
pub mod score;
pub mod serve;

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

/// What a prompt can be put into.
pub fn template(text: &str) -> Result<String, String> {
    if text.contains("{prompt}") { Ok(text.to_owned()) } else { Err("expected a text with `{prompt}` in it".into()) }
}

/// A number that the kernels can divide logits by.
pub fn temperature(text: &str) -> Result<f32, String> {
    let is_usable = |t: &f32| *t == 0.0 || (1e-3..=1e3).contains(t);
    text.parse().ok().filter(is_usable).ok_or_else(|| "expected 0 or a number from 0.001 to 1000".into())
}

/// `text` with its control characters spelled out, so that what a model says cannot drive a terminal.
pub fn without_control(text: &str) -> String {
    let is_harmless = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().map(|c| if is_harmless(c) { c.to_string() } else { c.escape_default().to_string() }).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_response_cannot_drive_the_terminal() {
        assert_eq!(super::without_control("é\n\tok\u{1b}[2J\r\u{9b}1m\u{7}"), "é\n\tok\\u{1b}[2J\\r\\u{9b}1m\\u{7}");
    }
}
