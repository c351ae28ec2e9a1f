//! What a conversation consists of, in the form of OpenAI's chat API with V4's additions.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::ChatError;

/// One message. As JSON: OpenAI's form, where `role` picks the variant; unknown keys are errors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case", deny_unknown_fields)]
pub enum Message {
    /// What the model is told before anybody speaks.
    System {
        /// Its text.
        #[serde(default, deserialize_with = "text_of")]
        content: String,
        /// The tools that the model may call. With tools in any message the template keeps all reasoning.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
        tools: Vec<Tool>,
        /// A JSON schema that answers must follow.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        response_format: Option<Value>,
    },
    /// A user's turn with the powers of the system; DeepSeek uses it internally. It must have text.
    Developer {
        /// Its text.
        #[serde(default, deserialize_with = "text_of")]
        content: String,
        /// As in [`Message::System`].
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
        tools: Vec<Tool>,
        /// As in [`Message::System`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        response_format: Option<Value>,
    },
    /// What a user says. It joins the turn of tool results or of a user right before it.
    User {
        /// Its text.
        #[serde(default, deserialize_with = "text_of")]
        content: String,
        /// A quick instruction: what is asked about this message, instead of an answer to it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        task: Option<Task>,
    },
    /// What the model said.
    Assistant {
        /// The answer.
        #[serde(default, deserialize_with = "text_of")]
        content: String,
        /// What stood between `<think>` and `</think>`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<String>,
        /// The tools it called.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall>,
        /// A quick instruction about the conversation up to here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        task: Option<Task>,
        /// No end of sentence after it: generation goes on from its last word.
        #[serde(default, rename = "wo_eos", skip_serializing_if = "std::ops::Not::not")]
        unfinished: bool,
    },
    /// What a called tool gave back.
    Tool {
        /// The [`ToolCall::id`] that it answers; results are put into the order of the calls.
        #[serde(default)]
        tool_call_id: String,
        /// The result.
        #[serde(default, deserialize_with = "text_of")]
        content: String,
    },
    /// Facts of the moment, such as the date, right before the last user message.
    LatestReminder {
        /// Its text.
        #[serde(default, deserialize_with = "text_of")]
        content: String,
    },
}

impl Message {
    /// A system message without tools.
    pub fn system(content: impl Into<String>) -> Self {
        Self::System { content: content.into(), tools: Vec::new(), response_format: None }
    }

    /// A system message that declares tools.
    pub fn system_with_tools(content: impl Into<String>, tools: Vec<Tool>) -> Self {
        Self::System { content: content.into(), tools, response_format: None }
    }

    /// A user message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::User { content: content.into(), task: None }
    }

    /// The result of the call `tool_call_id`.
    pub fn tool(tool_call_id: impl Into<String>, content: impl Into<String>) -> Self {
        Self::Tool { tool_call_id: tool_call_id.into(), content: content.into() }
    }

    /// Its role, as JSON says it.
    pub fn role(&self) -> &'static str {
        match self {
            Self::System { .. } => "system",
            Self::Developer { .. } => "developer",
            Self::User { .. } => "user",
            Self::Assistant { .. } => "assistant",
            Self::Tool { .. } => "tool",
            Self::LatestReminder { .. } => "latest_reminder",
        }
    }

    /// Reads a JSON array of messages.
    ///
    /// # Errors
    /// When it is no array, or an element is no message: which one, and why.
    pub fn list_from_json(value: &Value) -> Result<Vec<Self>, ChatError> {
        let Value::Array(messages) = value else { return Err(ChatError::NotAList { found: kind_of(value) }) };
        let read = |(index, message)| {
            Self::deserialize(message)
                .map_err(|error: serde_json::Error| ChatError::Message { index, reason: error.to_string() })
        };
        messages.iter().enumerate().map(read).collect()
    }
}

/// A quick instruction: one control token asks the model for a short verdict instead of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Whether to search or to answer.
    Action,
    /// Search queries.
    Query,
    /// Whether authoritative sources are needed.
    Authority,
    /// The domain of the question.
    Domain,
    /// A title for the conversation.
    Title,
    /// Whether a URL must be read.
    ReadUrl,
}

/// A tool that the model may call: OpenAI's `{"type": "function", "function": {"name", "description", "parameters"}}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ToolForm", into = "ToolForm")]
pub struct Tool {
    function: Map<String, Value>,
}

impl Tool {
    /// A function with a JSON schema for its arguments.
    pub fn new(name: &str, description: &str, parameters: Value) -> Self {
        let members = [("name", name.into()), ("description", description.into()), ("parameters", parameters)];
        Self { function: members.map(|(key, value)| (key.to_owned(), value)).into_iter().collect() }
    }

    /// What it is called by.
    pub fn name(&self) -> &str {
        self.function.get("name").and_then(Value::as_str).unwrap_or_default()
    }

    /// The object that the model reads: its keys as they came, in their order.
    pub fn function(&self) -> &Map<String, Value> {
        &self.function
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolForm {
    #[serde(default)]
    r#type: FunctionType,
    function: Map<String, Value>,
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FunctionType {
    #[default]
    Function,
}

impl TryFrom<ToolForm> for Tool {
    type Error = String;

    fn try_from(form: ToolForm) -> Result<Self, String> {
        match form.function.get("name") {
            Some(Value::String(_)) => Ok(Self { function: form.function }),
            Some(other) => Err(format!("the `name` of a tool's `function` is {}, expected a string", kind_of(other))),
            None => Err("a tool's `function` has no `name`, expected a string".into()),
        }
    }
}

impl From<Tool> for ToolForm {
    fn from(tool: Tool) -> Self {
        Self { r#type: FunctionType::Function, function: tool.function }
    }
}

/// One call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ToolCallForm", into = "ToolCallForm")]
pub struct ToolCall {
    /// What its result refers to; the model does not see it.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// Its arguments: the text of a JSON object. Other text reaches the model as one string named `arguments`.
    pub arguments: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolCallForm {
    #[serde(default)]
    id: String,
    #[serde(default)]
    r#type: FunctionType,
    function: CalledFunction,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CalledFunction {
    name: String,
    arguments: String,
}

impl From<ToolCallForm> for ToolCall {
    fn from(form: ToolCallForm) -> Self {
        Self { id: form.id, name: form.function.name, arguments: form.function.arguments }
    }
}

impl From<ToolCall> for ToolCallForm {
    fn from(call: ToolCall) -> Self {
        let function = CalledFunction { name: call.name, arguments: call.arguments };
        Self { id: call.id, r#type: FunctionType::Function, function }
    }
}

/// A content: text, nothing, or parts of which V4 reads the text and notes the others, joined by blank lines.
fn text_of<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let part_text = |part: &Value| match (part.get("type").and_then(Value::as_str), part.get("text")) {
        (Some("text"), Some(Value::String(text))) => Ok(text.clone()),
        (Some("text") | None, _) => Err(serde::de::Error::custom(format!(
            "a part of `content` is {part}, expected an object with `type` and, if that is \"text\", a string `text`"
        ))),
        (Some(kind), _) => Ok(format!("[Unsupported {kind}]")),
    };
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text),
        Value::Array(parts) => Ok(parts.iter().map(part_text).collect::<Result<Vec<_>, _>>()?.join("\n\n")),
        other => Err(serde::de::Error::custom(format!(
            "`content` is {}, expected a string, null or an array of parts",
            kind_of(&other)
        ))),
    }
}

/// Null as nothing given.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
