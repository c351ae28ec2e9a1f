//! Text to tokens and back, by a Hugging Face `tokenizer.json`.

use std::path::{Path, PathBuf};

/// Why a tokenizer could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is missing or not a tokenizer.
    #[error("cannot read the tokenizer {}: {message}; copy it from the folder of the model's release", path.display())]
    Load {
        /// Which file.
        path: PathBuf,
        /// What the reader said.
        message: String,
    },
    /// The tokenizer knows more tokens than the model.
    #[error("{}: token {token} lies outside the model's vocabulary of {vocab_size}; the two do not belong together; take both from one folder", path.display())]
    Vocabulary {
        /// Which file.
        path: PathBuf,
        /// Its largest token.
        token: u32,
        /// `vocab_size` of the model.
        vocab_size: usize,
    },
    /// The library could not encode or decode.
    #[error("the tokenizer failed on {what}: {message}")]
    Process {
        /// What it worked on.
        what: String,
        /// What it said.
        message: String,
    },
}

/// A tokenizer of one model.
#[derive(Debug)]
pub struct Tokenizer {
    json: Vec<u8>,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads `tokenizer.json` in `dir` and checks that a model with `vocab_size` tokens can use it.
    ///
    /// # Errors
    /// When the file is missing or damaged, or names tokens that the model lacks.
    pub fn load(dir: &Path, vocab_size: usize) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        let refuse = |message: String| TokenizerError::Load { path: path.clone(), message };
        let json = std::fs::read(&path).map_err(|e| refuse(e.to_string()))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&json).map_err(|e| refuse(e.to_string()))?;
        // Settings for batches of an encoder, which some files carry: they would cut or lengthen every prompt.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| refuse(e.to_string()))?;
        match inner.get_vocab(true).into_values().max() {
            Some(token) if token as usize >= vocab_size => Err(TokenizerError::Vocabulary { path, token, vocab_size }),
            _ => Ok(Self { json, inner }),
        }
    }

    /// The file it was read from, byte for byte.
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    /// The tokens of `text`; special tokens are recognised where they are spelled out, none is added.
    ///
    /// # Errors
    /// When the library fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode(text, false).map_err(|e| TokenizerError::Process {
            what: format!("a text of {} bytes", text.len()),
            message: e.to_string(),
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `tokens`, special tokens left out; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When the library fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.inner
            .decode(tokens, true)
            .map_err(|e| TokenizerError::Process { what: format!("{} tokens", tokens.len()), message: e.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_for_batches_do_not_touch_a_prompt() {
        let folder = tempfile::tempdir().expect("a folder");
        let json = r#"{"version": "1.0", "added_tokens": [],
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "a"},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}}"#;
        std::fs::write(folder.path().join("tokenizer.json"), json).expect("writes");
        let tokenizer = Tokenizer::load(folder.path(), 3).expect("loads");
        assert_eq!(tokenizer.encode("cab").expect("encodes"), [2, 0, 1]);
        assert_eq!(tokenizer.json(), json.as_bytes());
    }
}
