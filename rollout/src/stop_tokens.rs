//! Which tokens end a response, as a checkpoint's `generation_config.json` says.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Why the tokens that end a response are not known.
#[derive(Debug, thiserror::Error)]
pub enum StopTokensError {
    /// The file is there and cannot be read.
    #[error("cannot read {}: {message}; correct the file, or remove it to stop at config.json's `eos_token_id`", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the reader said.
        message: String,
    },
    /// The key is malformed.
    #[error("{}: `eos_token_id` is {found}, expected a token below {vocab_size}, a list of such tokens, or null; correct it", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What the key holds.
        found: Value,
        /// `vocab_size` of the model.
        vocab_size: usize,
    },
}

/// The tokens that end a response of the model in `dir`: `eos_token_id` of its `generation_config.json`, which Hugging Face
/// writes as a token, a list of tokens or null; `eos_tokens`, which are config.json's, where the file or the key is missing
/// or null or an empty list.
///
/// # Errors
/// When the file or the key is malformed.
pub fn load_stop_tokens(dir: &Path, eos_tokens: &[u32], vocab_size: usize) -> Result<Vec<u32>, StopTokensError> {
    let path = dir.join("generation_config.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(eos_tokens.to_vec()),
        Err(error) => return Err(StopTokensError::Read { path, message: error.to_string() }),
    };
    let config: Value = match serde_json::from_str(&text) {
        Ok(config) => config,
        Err(error) => return Err(StopTokensError::Read { path, message: error.to_string() }),
    };
    let found = config.get("eos_token_id").cloned().unwrap_or(Value::Null);
    let tokens = match &found {
        Value::Null => Vec::new(),
        Value::Array(tokens) => tokens.clone(),
        token => vec![token.clone()],
    };
    let token = |value: Value| value.as_u64().filter(|&token| token < vocab_size as u64).map(|token| token as u32);
    match tokens.into_iter().map(token).collect::<Option<Vec<u32>>>() {
        Some(tokens) if tokens.is_empty() => Ok(eos_tokens.to_vec()),
        Some(tokens) => Ok(tokens),
        None => Err(StopTokensError::Malformed { path, found, vocab_size }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(generation_config: &str) -> Result<Vec<u32>, String> {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("generation_config.json"), generation_config).expect("writes");
        let said = |error: StopTokensError| error.to_string().replace(&*folder.path().to_string_lossy(), "model");
        load_stop_tokens(folder.path(), &[1], 10).map_err(said)
    }

    #[test]
    fn a_token_a_list_and_nothing() {
        assert_eq!(load(r#"{"eos_token_id": 7}"#), Ok(vec![7]));
        assert_eq!(load(r#"{"eos_token_id": [7, 3]}"#), Ok(vec![7, 3]));
        for nothing in [r#"{"eos_token_id": null}"#, r#"{"eos_token_id": []}"#, "{}"] {
            assert_eq!(load(nothing), Ok(vec![1]), "{nothing}");
        }
        let empty = tempfile::tempdir().expect("a folder");
        assert_eq!(load_stop_tokens(empty.path(), &[1], 10).expect("no file"), [1]);
    }

    #[test]
    fn other_things_are_refused_in_a_sentence() {
        for found in ["\"1\"", "-1", "10", "1.5", "[1,null]", "true", "{}"] {
            let want = format!(
                "model/generation_config.json: `eos_token_id` is {found}, expected a token below 10, a list of such \
                 tokens, or null; correct it"
            );
            assert_eq!(load(&format!("{{\"eos_token_id\": {found}}}")), Err(want));
        }
        let broken = load("{").expect_err("refused");
        assert!(broken.starts_with("cannot read model/generation_config.json: EOF"), "{broken}");
    }
}
