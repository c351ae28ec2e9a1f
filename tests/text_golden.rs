//! V4's text, held against the reference: what the tokenizer makes of texts, how conversations are written, how
//! completions are read.
//!
//! A folder is a case if it holds `chat.json` or `tokenizer_cases.json`. A conversation has up to two recordings:
//! `reference`, from the encoder that ships with the checkpoints, with its tokens, and `recipe`, from DeepSeek's later
//! renderer. Where both exist the reference counts, and `recipe_differs_from_reference` lists where they part.

use std::path::{Path, PathBuf};

use rollout::chat::{ChatError, ChatOptions, Message, ThinkingMode, ToolCall, Transcript, parse_completion, render};
use rollout::tokenizer::{TextStream, Tokenizer};
use serde_json::{Value, json};

use crate::program::root;

const VOCAB_SIZE: usize = 129_280;

/// The folders that hold `name`, with its content: under `FURLONG_GOLDEN_V4`, or here where that has none.
fn recorded(name: &str) -> Vec<(PathBuf, Value)> {
    let copies = root().join("tests/golden/v4");
    let golden = std::env::var_os("FURLONG_GOLDEN_V4").map_or_else(|| copies.clone(), PathBuf::from);
    let found = recorded_in(&golden, name);
    if found.is_empty() { recorded_in(&copies, name) } else { found }
}

fn recorded_in(golden: &Path, name: &str) -> Vec<(PathBuf, Value)> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(golden)
        .unwrap_or_else(|e| panic!("cannot list {}: {e}", golden.display()))
        .map(|entry| entry.expect("a folder can be listed").path().join(name))
        .filter(|path| path.is_file())
        .collect();
    paths.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (path.parent().expect("it lies in a folder").to_owned(), value)
    };
    paths.into_iter().map(read).collect()
}

/// The tokenizer of a case: in its folder, or where `scripts/fetch-v4-tokenizer` puts it.
fn tokenizer(case: &Path) -> Option<Tokenizer> {
    let places = [case.to_owned(), root().join("target/v4-tokenizer")];
    let Some(dir) = places.iter().find(|dir| dir.join("tokenizer.json").is_file()) else {
        eprintln!(
            "{}: tokens are not compared, V4's tokenizer is absent; scripts/fetch-v4-tokenizer gets it",
            case.display()
        );
        return None;
    };
    let tokenizer = Tokenizer::load(dir, VOCAB_SIZE).unwrap_or_else(|e| panic!("{e}"));
    let meta = std::fs::read(case.join("tokenizer.json.meta")).expect("the recording says which tokenizer it used");
    let meta: Value = serde_json::from_slice(&meta).expect("JSON");
    assert_eq!(Some(tokenizer.json().len() as u64), meta["bytes"].as_u64(), "{}: another tokenizer", dir.display());
    Some(tokenizer)
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no array `{key}`"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no string `{key}` in {value}"))
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    value.get("ids").map(|ids| serde_json::from_value(ids.clone()).expect("tokens"))
}

fn messages(case: &Value) -> Vec<Message> {
    Message::list_from_json(&case["messages"]).unwrap_or_else(|e| panic!("{}: {e}", case["name"]))
}

/// The recorded options; the recorder spells July's levels as a key of their own.
fn options(case: &Value) -> ChatOptions {
    let mut options = case["options"].as_object().expect("options").clone();
    if let Some(effort) = options.remove("july_effort") {
        options.extend([("reasoning_effort".to_owned(), effort), ("effort_levels".to_owned(), json!("july"))]);
    }
    serde_json::from_value(Value::Object(options)).unwrap_or_else(|e| panic!("{}: {e}", case["name"]))
}

#[test]
fn golden_v4_conversations_are_written_letter_for_letter() {
    for (dir, file) in recorded("chat.json") {
        let mut differs = Vec::new();
        for case in list(&file, "cases") {
            let name = text(case, "name");
            let written = render(&messages(case), &options(case)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let (reference, recipe) = (case["reference"].as_str(), case["recipe"].as_str());
            let want = reference.or(recipe).unwrap_or_else(|| panic!("{name}: nothing is recorded"));
            assert_eq!(written.text(), want, "{name}");
            if reference.is_some() && recipe.is_some_and(|recipe| recipe != want) {
                differs.push(json!(name));
            }
        }
        assert_eq!(differs, list(&file, "recipe_differs_from_reference"), "{}", dir.display());
        eprintln!("{}: {} conversations", dir.display(), list(&file, "cases").len());
    }
}

#[test]
fn golden_v4_conversations_are_encoded_token_for_token() {
    for (dir, file) in recorded("chat.json") {
        let Some(tokenizer) = tokenizer(&dir) else { continue };
        let mut compared = 0;
        for case in list(&file, "cases") {
            let Some(want) = ids(case) else { continue };
            let name = text(case, "name");
            let written = render(&messages(case), &options(case)).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(tokenizer.encode_marked(&written).expect("encodes"), want, "{name}");
            assert_eq!(tokenizer.encode(written.text()).expect("encodes"), want, "{name}, from its text");
            assert_eq!(tokenizer.decode_marked(&want).expect("decodes"), written, "{name}, back");
            compared += 1;
        }
        assert!(compared > 0, "{}: no case has tokens", dir.display());
        eprintln!("{}: {compared} conversations", dir.display());
    }
}

/// Every conversation with an answer in it, played as a rollout: the answer's tokens come from the engine, the rest is
/// appended. The tokens are the recorded ones, or the transcript says that the template rewrites.
#[test]
fn golden_v4_conversations_grow_turn_by_turn() {
    for (dir, file) in recorded("chat.json") {
        let Some(tokenizer) = tokenizer(&dir) else { continue };
        let (mut grown, mut rewritten) = (Vec::new(), Vec::new());
        for case in list(&file, "cases") {
            let Some(want) = ids(case) else { continue };
            let (options, name) = (options(case), text(case, "name"));
            let mut rest = with_our_call_ids(messages(case));
            let is_answer = |message: &Message| matches!(message, Message::Assistant { task: None, .. });
            let Some(first_answer) = rest.iter().position(is_answer) else { continue };
            let after = rest.split_off(first_answer);
            let mut transcript =
                Transcript::new(&tokenizer, options.clone(), rest).unwrap_or_else(|e| panic!("{name}: {e}"));
            let mut said = after.as_slice();
            let outcome = loop {
                let Some((answer, following)) = said.split_first() else { break Ok(()) };
                let before = render(transcript.messages(), &options).expect("renders");
                let whole = render(&[transcript.messages(), std::slice::from_ref(answer)].concat(), &options);
                let generated = whole.expect("renders").strip_prefix(&before).expect("an answer only adds");
                let generated = tokenizer.encode_marked(&generated).expect("encodes");
                let parsed = transcript.push_completion(&generated).expect("its turn");
                parsed.unwrap_or_else(|e| panic!("{name}: {e}"));
                let (next, later) = following.split_at(following.iter().position(is_answer).unwrap_or(following.len()));
                said = later;
                if next.is_empty() {
                    continue;
                }
                if let Err(error) = transcript.push_messages(next.to_vec()) {
                    break Err(error);
                }
            };
            match outcome {
                Ok(()) => {
                    assert_eq!(transcript.tokens(), want, "{name}");
                    grown.push(name);
                }
                Err(ChatError::Rewritten { .. }) => rewritten.push(name),
                Err(other) => panic!("{name}: {other}"),
            }
        }
        assert!(!grown.is_empty() && !rewritten.is_empty(), "grown: {grown:?}, rewritten: {rewritten:?}");
        eprintln!("{}: grown {grown:?}; rewritten by the template {rewritten:?}", dir.display());
    }
}

/// Calls and results with the ids that a transcript gives, in the order of the calls.
fn with_our_call_ids(mut messages: Vec<Message>) -> Vec<Message> {
    let mut renamed: Vec<String> = Vec::new();
    for message in &mut messages {
        match message {
            Message::Assistant { tool_calls, .. } => {
                for ToolCall { id, .. } in tool_calls {
                    renamed.push(std::mem::replace(id, format!("call_{}", renamed.len())));
                }
            }
            Message::Tool { tool_call_id, .. } => {
                let place = renamed.iter().rposition(|id| id == tool_call_id).expect("the result of a call");
                *tool_call_id = format!("call_{place}");
            }
            _ => {}
        }
    }
    messages
}

#[test]
fn golden_v4_completions_are_read() {
    for (dir, file) in recorded("chat.json") {
        for case in list(&file, "parses") {
            let mode: ThinkingMode = serde_json::from_value(case["mode"].clone()).expect("a mode");
            let parsed = parse_completion(text(case, "text"), mode);
            let Some(want) = case["message"].as_object() else {
                let error = parsed.expect_err(text(case, "text")).to_string();
                assert!(error.contains(", expected "), "{error}");
                continue;
            };
            let parsed = parsed.unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(json!(parsed.content), want["content"], "{case}");
            assert_eq!(json!(parsed.reasoning.unwrap_or_default()), want["reasoning_content"], "{case}");
            let calls: Vec<ToolCall> = serde_json::from_value(want["tool_calls"].clone()).expect("calls");
            assert_eq!(parsed.tool_calls, calls, "{case}");
        }
        eprintln!("{}: {} completions", dir.display(), list(&file, "parses").len());
    }
}

#[test]
fn golden_v4_texts_are_encoded_token_for_token() {
    for (dir, file) in recorded("tokenizer_cases.json") {
        let Some(tokenizer) = tokenizer(&dir) else { continue };
        let rows = file.as_array().expect("rows");
        for row in rows {
            let (read, want) = (text(row, "text"), ids(row).expect("tokens"));
            assert_eq!(tokenizer.encode(read).expect("encodes"), want, "{read:?}");
            // The recorder spells special tokens out, as `decode_marked` does.
            assert_eq!(tokenizer.decode_marked(&want).expect("decodes").text(), text(row, "decoded"), "{read:?}");
            assert_eq!(tokenizer.encode_marked(&tokenizer.mark(read)).expect("encodes"), want, "{read:?}, marked");
            let plain = tokenizer.encode_plain(read).expect("encodes");
            assert!(tokenizer.decode_marked(&plain).expect("decodes").marks().is_empty(), "{read:?}");
            assert_eq!(tokenizer.decode(&plain).expect("decodes"), read);
            let mut stream = TextStream::default();
            let mut parts: Vec<String> =
                want.iter().map(|&token| stream.push(&tokenizer, token).expect("bytes")).collect();
            parts.push(stream.finish());
            assert!(!parts.iter().any(|part| part.contains('\u{fffd}')), "{read:?} came as {parts:?}");
            assert_eq!(parts.concat(), tokenizer.decode(&want).expect("decodes"), "{read:?}");
        }
        eprintln!("{}: {} texts", dir.display(), rows.len());
    }
}

/// The ids that DeepSeek's model configuration and this format's description give.
#[test]
fn golden_v4_control_tokens_have_their_ids() {
    for (dir, _) in recorded("tokenizer_cases.json") {
        let Some(tokenizer) = tokenizer(&dir) else { continue };
        for (spelling, id) in [
            ("<｜begin▁of▁sentence｜>", 0),
            ("<｜end▁of▁sentence｜>", 1),
            ("<｜User｜>", 128_803),
            ("<｜Assistant｜>", 128_804),
            ("<think>", 128_821),
            ("</think>", 128_822),
            ("｜DSML｜", 128_825),
            ("<｜latest_reminder｜>", 128_828),
            ("<｜action｜>", 128_829),
            ("<｜query｜>", 128_830),
            ("<｜authority｜>", 128_831),
            ("<｜domain｜>", 128_832),
            ("<｜title｜>", 128_836),
            ("<｜read_url｜>", 128_845),
        ] {
            assert_eq!(tokenizer.control_token(spelling).expect("known"), id, "{spelling}");
        }
    }
}
