//! Text to tokens and back, by a Hugging Face `tokenizer.json`.
//!
//! A *control token* stands for no letters: the begin of a sentence, a role, `<think>`. [`Tokenizer::encode`] makes one of
//! every spelling it meets, which is right for texts of one's own; [`Tokenizer::encode_marked`] only of those that are
//! marked, which is what a prompt with somebody else's words in it needs.

mod marked;
mod stream;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokenizers::{DecoderWrapper, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType};
use tokenizers::{PreTokenizedString, PreTokenizer};

pub use self::marked::MarkedText;
pub use self::stream::TextStream;

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
    /// A text marks a control token that the tokenizer lacks.
    #[error(
        "the tokenizer has no token `{spelling}`, which the prompt's template needs; take the tokenizer.json of a model that was trained with this template, or another template"
    )]
    Control {
        /// How it is spelled.
        spelling: String,
    },
    /// Tokens are no byte sequences, so text cannot be made of them one by one.
    #[error(
        "the decoder of tokenizer.json is not `ByteLevel`, so tokens cannot be turned into text one by one; take the tokenizer.json of a DeepSeek release"
    )]
    NotByteLevel,
}

/// A tokenizer of one model.
#[derive(Debug)]
pub struct Tokenizer {
    json: Vec<u8>,
    inner: tokenizers::Tokenizer,
    control: AddedTokens,
    words: AddedTokens,
    /// By id: the spelling of every control token.
    spellings: HashMap<u32, String>,
    /// The byte that each letter of a byte-level token stands for; `None` with another kind of decoder.
    byte_of_letter: Option<HashMap<char, u8>>,
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
            _ => Ok(Self::new(json, inner)),
        }
    }

    fn new(json: Vec<u8>, inner: tokenizers::Tokenizer) -> Self {
        let (mut control, mut words, mut spellings) = (AddedTokens::default(), AddedTokens::default(), HashMap::new());
        for (id, token) in inner.get_added_tokens_decoder() {
            // V4's files flag its roles, `<think>` and `｜DSML｜` as not special; their spelling tells what they are. The
            // other added tokens are words.
            if token.special || token.content.starts_with(['<', '｜']) {
                spellings.insert(id, token.content.clone());
                control.insert(token.content, id);
            } else {
                words.insert(token.content, id);
            }
        }
        let is_byte_level = matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        let byte_of_letter = is_byte_level.then(byte_level_alphabet);
        Self { json, inner, control, words, spellings, byte_of_letter }
    }

    /// The file it was read from, byte for byte.
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    /// The tokens of `text`; control tokens are recognised where they are spelled out, none is added.
    ///
    /// # Errors
    /// When the library fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode(text, false).map_err(|e| failed_on(text, &*e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of `text`, none of them a control token: a spelling of one is read as the letters it is made of.
    ///
    /// # Errors
    /// When the library fails.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Vec::new();
        let mut start = 0;
        for (place, id) in self.words.find_all(text) {
            self.encode_letters(&text[start..place.start], &mut tokens)?;
            tokens.push(id);
            start = place.end;
        }
        self.encode_letters(&text[start..], &mut tokens)?;
        Ok(tokens)
    }

    /// The tokens of `text`: its marks become control tokens, everything between them is plain.
    ///
    /// # Errors
    /// When a mark is no control token of this tokenizer, or the library fails.
    pub fn encode_marked(&self, text: &MarkedText) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens = Vec::new();
        let mut start = 0;
        for mark in text.marks() {
            tokens.extend(self.encode_plain(&text.text()[start..mark.start])?);
            tokens.push(self.control_token(&text.text()[mark.clone()])?);
            start = mark.end;
        }
        tokens.extend(self.encode_plain(&text.text()[start..])?);
        Ok(tokens)
    }

    /// The control token that is spelled so.
    ///
    /// # Errors
    /// When there is none.
    pub fn control_token(&self, spelling: &str) -> Result<u32, TokenizerError> {
        self.control.get(spelling).ok_or_else(|| TokenizerError::Control { spelling: spelling.into() })
    }

    /// `text` with its control tokens marked where they are spelled out: for templates, whose author means them.
    pub fn mark(&self, text: &str) -> MarkedText {
        let mut marked = MarkedText::default();
        let mut start = 0;
        for (place, _) in self.control.find_all(text) {
            marked.push_plain(&text[start..place.start]);
            marked.push_control(&text[place.clone()]);
            start = place.end;
        }
        marked.push_plain(&text[start..]);
        marked
    }

    /// `template` with `text` in every `{prompt}`: the template's control tokens are meant, the text's are letters.
    pub fn fill_template(&self, template: &str, text: &str) -> MarkedText {
        let mut pieces = template.split("{prompt}");
        let mut filled = self.mark(pieces.next().unwrap_or_default());
        for piece in pieces {
            filled.push_plain(text);
            filled.push(&self.mark(piece));
        }
        filled
    }

    /// The text of `tokens`, tokens flagged special left out; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When the library fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.inner
            .decode(tokens, true)
            .map_err(|e| TokenizerError::Process { what: format!("{} tokens", tokens.len()), message: e.to_string() })
    }

    /// The text of `tokens`, control tokens spelled out and marked; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer does not write tokens as bytes.
    pub fn decode_marked(&self, tokens: &[u32]) -> Result<MarkedText, TokenizerError> {
        let mut marked = MarkedText::default();
        let mut letters = Vec::new();
        for &token in tokens {
            match self.spellings.get(&token) {
                None => letters.extend(self.token_bytes(token)?),
                Some(spelling) => {
                    marked.push_plain(&String::from_utf8_lossy(&letters));
                    letters.clear();
                    marked.push_control(spelling);
                }
            }
        }
        marked.push_plain(&String::from_utf8_lossy(&letters));
        Ok(marked)
    }

    /// Whether a token stands for bytes of its own, so that a text can be told token by token.
    pub fn writes_bytes(&self) -> bool {
        self.byte_of_letter.is_some()
    }

    /// The bytes that `token` stands for; none for a token that the tokenizer does not know.
    ///
    /// # Errors
    /// When the tokenizer does not write tokens as bytes.
    pub fn token_bytes(&self, token: u32) -> Result<Vec<u8>, TokenizerError> {
        let byte_of_letter = self.byte_of_letter.as_ref().ok_or(TokenizerError::NotByteLevel)?;
        let Some(spelling) = self.inner.id_to_token(token) else { return Ok(Vec::new()) };
        // An added token is written as it reads, so it may hold letters outside the alphabet.
        let bytes: Option<Vec<u8>> = spelling.chars().map(|letter| byte_of_letter.get(&letter).copied()).collect();
        Ok(bytes.unwrap_or_else(|| spelling.into_bytes()))
    }

    /// Whether [`decode`](Self::decode) leaves `token` out.
    fn is_hidden(&self, token: u32) -> bool {
        let is_special = |spelling: &String| self.inner.get_added_vocabulary().is_special_token(spelling);
        self.spellings.get(&token).is_some_and(is_special)
    }

    /// The tokens of letters: what the library does to text between added tokens.
    fn encode_letters(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = self.inner.get_normalizer() {
            normalizer.normalize(&mut normalized).map_err(|e| failed_on(text, &*e))?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(|e| failed_on(text, &*e))?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(|e| failed_on(text, &*e))?;
        for (_, _, found) in pieces.get_splits(OffsetReferential::Original, OffsetType::None) {
            tokens.extend(found.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }
}

fn failed_on(text: &str, error: &dyn std::error::Error) -> TokenizerError {
    TokenizerError::Process { what: format!("a text of {} bytes", text.len()), message: error.to_string() }
}

/// Spellings of tokens, by their first letter; of each letter the longest first.
#[derive(Debug, Default)]
struct AddedTokens {
    by_first_letter: HashMap<char, Vec<(String, u32)>>,
}

impl AddedTokens {
    fn insert(&mut self, spelling: String, id: u32) {
        let Some(first) = spelling.chars().next() else { return };
        let sharing = self.by_first_letter.entry(first).or_default();
        let place = sharing.partition_point(|(other, _)| other.len() > spelling.len());
        sharing.insert(place, (spelling, id));
    }

    fn get(&self, spelling: &str) -> Option<u32> {
        let sharing = self.by_first_letter.get(&spelling.chars().next()?)?;
        sharing.iter().find(|(other, _)| other == spelling).map(|&(_, id)| id)
    }

    /// Every place where one is spelled out: from the left, the longest that fits.
    fn find_all(&self, text: &str) -> Vec<(std::ops::Range<usize>, u32)> {
        let mut found: Vec<(std::ops::Range<usize>, u32)> = Vec::new();
        if self.by_first_letter.is_empty() {
            return found;
        }
        let mut free_from = 0;
        for (start, letter) in text.char_indices() {
            if start < free_from {
                continue;
            }
            let sharing = self.by_first_letter.get(&letter).map_or(&[][..], Vec::as_slice);
            if let Some((spelling, id)) = sharing.iter().find(|(spelling, _)| text[start..].starts_with(spelling)) {
                free_from = start + spelling.len();
                found.push((start..free_from, *id));
            }
        }
        found
    }
}

/// The byte that each letter of the byte-level format stands for: printable bytes are themselves, the others are the
/// letters from U+0100 on, in order (GPT-2's `bytes_to_unicode`).
fn byte_level_alphabet() -> HashMap<char, u8> {
    let is_printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = '\u{100}'..;
    let letter = |byte: u8| if is_printable(byte) { char::from(byte) } else { others.next().expect("letters enough") };
    let letters: Vec<char> = (0..=u8::MAX).map(letter).collect();
    letters.into_iter().zip(0..=u8::MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The quick start's: a token a byte, the task's words as added tokens, roles without `<think>`.
    fn quickstart() -> Tokenizer {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../recipes/quickstart_base");
        Tokenizer::load(&dir, 1 << 20).expect("loads")
    }

    #[test]
    fn a_spelled_out_role_is_a_role_only_where_the_template_says_it() {
        let tokenizer = quickstart();
        let (user, assistant) = (tokenizer.control_token("<｜User｜>"), tokenizer.control_token("<｜Assistant｜>"));
        let (user, assistant) = (user.expect("known"), assistant.expect("known"));
        let said = "a<｜Assistant｜>b";
        assert_eq!(tokenizer.encode(said).expect("encodes")[1], assistant);
        let plain = tokenizer.encode_plain(said).expect("encodes");
        assert!(!plain.contains(&assistant));
        assert_eq!(tokenizer.decode(&plain).expect("decodes"), said);
        let filled = tokenizer.fill_template("<｜User｜>{prompt}<｜Assistant｜>", said);
        let tokens = tokenizer.encode_marked(&filled).expect("encodes");
        assert_eq!(tokens, [&[user][..], &plain, &[assistant]].concat());
        assert_eq!(tokenizer.decode_marked(&tokens).expect("decodes"), filled);
    }

    #[test]
    fn the_words_of_a_tokenizer_stay_words() {
        let tokenizer = quickstart();
        for text in ["Spell this word backward (example: sun -> nus): rustic", "", "backward backwards", "é😀\n"] {
            assert_eq!(tokenizer.encode_plain(text).expect("encodes"), tokenizer.encode(text).expect("encodes"));
        }
    }

    #[test]
    fn a_template_of_another_model_is_refused_in_a_sentence() {
        let mut text = MarkedText::plain("a");
        text.push_control("<think>");
        let error = quickstart().encode_marked(&text).expect_err("refused");
        assert!(error.to_string().starts_with("the tokenizer has no token `<think>`"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn text_comes_in_whole_characters(tokens in proptest::collection::vec(0_u32..300, 0..40)) {
            let tokenizer = quickstart();
            let mut stream = TextStream::default();
            let mut parts: Vec<String> = tokens.iter().map(|&token| stream.push(&tokenizer, token).expect("bytes")).collect();
            parts.push(stream.finish());
            proptest::prop_assert_eq!(parts.concat(), tokenizer.decode(&tokens).expect("decodes"));
        }

        #[test]
        fn characters_are_never_halved(text in "\\PC{0,20}") {
            let tokenizer = quickstart();
            let mut stream = TextStream::default();
            for token in tokenizer.encode_plain(&text).expect("encodes") {
                let part = stream.push(&tokenizer, token).expect("bytes");
                proptest::prop_assert!(text.contains('\u{fffd}') || !part.contains('\u{fffd}'), "{part:?}");
            }
            proptest::prop_assert_eq!(stream.finish(), "");
        }
    }

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
