//! Tokens to text, one at a time: what a reader sees while a response is being generated.

use super::{Tokenizer, TokenizerError};

/// Turns tokens into text as they come, and never shows half a character: a token may end within one, so its bytes wait
/// until the character is whole. What it gives, put together, is what [`Tokenizer::decode`] says of all tokens at once.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    waiting: Vec<u8>,
}

impl TextStream {
    /// The text that `token` of `tokenizer` completes; often its own, empty while a character is unfinished.
    ///
    /// # Errors
    /// When the tokenizer does not write tokens as bytes.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String, TokenizerError> {
        if !tokenizer.is_hidden(token) {
            self.waiting.extend(tokenizer.token_bytes(token)?);
        }
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.waiting) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.waiting.clear();
                    return Ok(text);
                }
                Err(error) => {
                    let (whole, rest) = self.waiting.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(whole).expect("checked just now"));
                    let Some(broken) = error.error_len() else {
                        self.waiting = rest.to_vec();
                        return Ok(text);
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.waiting = rest[broken..].to_vec();
                }
            }
        }
    }

    /// What is left when no token follows: empty, or U+FFFD for a character that was never finished.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.waiting).into_owned()
    }
}
