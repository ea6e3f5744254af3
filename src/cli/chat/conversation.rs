//! The messages and settings of a conversation, the request for its next answer, and its file format.

use crate::cli::replace_file::replace_file;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Version of the file format.
const VERSION: u32 = 1;

/// A conversation: messages, and the settings of its requests.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatTranscript {
    /// Name of the model.
    #[serde(default)]
    pub model: String,
    /// The system message.
    #[serde(default)]
    pub system: Option<String>,
    /// Mods in order, as requests name them: a name, or `{"name", "config"}`.
    #[serde(default)]
    pub mods: Vec<Value>,
    /// Tools in OpenAI's format.
    #[serde(default)]
    pub tools: Vec<Value>,
    /// Sampling parameters and other request fields.
    #[serde(default)]
    pub parameters: Map<String, Value>,
    /// All messages after the system message, in order.
    #[serde(default)]
    pub messages: Vec<ChatMessage>,
}

/// A message with its metadata.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// The message in OpenAI's format.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
    /// Ids of an answer's generated tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<i64>,
    /// Id of the run that generated the message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct ConversationFile {
    thunder_chat: u32,
    #[serde(flatten)]
    conversation: ChatTranscript,
}

impl ChatMessage {
    /// Creates a message.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        let fields = json!({ "role": role, "content": content.into() });
        Self { fields: fields.as_object().cloned().unwrap_or_default(), tokens: Vec::new(), run_id: None }
    }

    /// Returns the role of the author.
    pub fn role(&self) -> &str {
        self.fields.get("role").and_then(Value::as_str).unwrap_or_default()
    }
}

/// A tool call without a result.
#[derive(Debug, PartialEq, Eq)]
pub struct OpenCall {
    pub id: String,
    pub name: String,
    /// Arguments as JSON.
    pub arguments: String,
}

impl ChatTranscript {
    /// Returns the body of the request for the next answer.
    pub fn request(&self) -> Value {
        let mut body = self.parameters.clone();
        let system = self.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let messages = self.messages.iter().map(|message| Value::Object(message.fields.clone()));
        body.insert("messages".into(), system.chain(messages).collect());
        body.insert("stream".into(), true.into());
        // If the conversation outgrows the context, its oldest messages are evicted.
        body.entry("context_policy").or_insert_with(|| "evict".into());
        body.insert("stream_options".into(), json!({ "include_usage": true }));
        // Counts in every chunk, because a stopped answer has no final chunk.
        body.insert("timings_per_token".into(), true.into());
        if !self.mods.is_empty() {
            body.insert("mods".into(), self.mods.clone().into());
        }
        if self.tools.is_empty() {
            // Log-probabilities are requested for their token ids. They cannot be streamed together with tools.
            body.insert("logprobs".into(), true.into());
            body.insert("top_logprobs".into(), 0.into());
        } else {
            body.insert("tools".into(), self.tools.clone().into());
        }
        Value::Object(body)
    }

    /// Removes the last answer, so that it can be generated again. If it calls tools and some calls have no result, removes
    /// the results of the others, too. Returns false if nothing is removed: there is no answer, or an answer to the last
    /// message or tool results is missing.
    pub fn remove_answer(&mut self) -> bool {
        let Some(at) = self.messages.iter().rposition(|message| message.role() == "assistant") else { return false };
        let is_last = at + 1 == self.messages.len();
        let removed = at > 0 && (is_last || !self.open_calls().is_empty());
        if removed {
            self.messages.truncate(at);
        }
        removed
    }

    /// Removes the last message if it is one of the user, which has no answer. Returns true if it was removed.
    pub fn remove_question(&mut self) -> bool {
        self.messages.pop_if(|message| message.role() == "user").is_some()
    }

    /// Returns the tool calls in the last answer that have no result yet.
    pub fn open_calls(&self) -> Vec<OpenCall> {
        let Some(at) = self.messages.iter().rposition(|message| message.role() == "assistant") else {
            return Vec::new();
        };
        let answered =
            |id: &str| self.messages[at..].iter().any(|message| message.fields.get("tool_call_id") == Some(&id.into()));
        let calls = self.messages[at].fields.get("tool_calls").and_then(Value::as_array);
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        calls
            .into_iter()
            .flatten()
            .map(|call| OpenCall {
                id: text(&call["id"]),
                name: text(&call["function"]["name"]),
                arguments: text(&call["function"]["arguments"]),
            })
            .filter(|call| !answered(&call.id))
            .collect()
    }

    /// Adds the result of a tool call.
    pub fn answer_call(&mut self, id: &str, name: &str, result: String) {
        let mut message = ChatMessage::new("tool", result);
        message.fields.insert("tool_call_id".into(), id.into());
        message.fields.insert("name".into(), name.into());
        self.messages.push(message);
    }

    /// Writes the conversation to a file. If the file is new, only its owner can read it.
    pub fn save(&self, path: &Path) -> anyhow::Result<()> {
        let saved = ConversationFile { thunder_chat: VERSION, conversation: self.clone() };
        let text = serde_json::to_string_pretty(&saved)?;
        replace_file(path, text.as_bytes())
    }

    /// Reads a file written by [`ChatTranscript::save`].
    pub fn restore(path: &Path) -> anyhow::Result<Self> {
        let path_text = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path_text}"))?;
        let saved: ConversationFile =
            serde_json::from_str(&text).with_context(|| format!("{path_text} is not a saved conversation"))?;
        if saved.thunder_chat != VERSION {
            bail!(
                "{path_text} has version {} of the file format; this release reads version {VERSION}",
                saved.thunder_chat
            );
        }
        if let Some(index) = saved.conversation.messages.iter().position(|message| message.role().is_empty()) {
            bail!("{path_text}: messages[{index}] has no role");
        }
        Ok(saved.conversation)
    }
}

#[cfg(test)]
mod tests {
    use super::{ChatMessage, ChatTranscript, OpenCall};
    use serde_json::json;

    fn conversation() -> ChatTranscript {
        let mut conversation =
            ChatTranscript { model: "demo".into(), system: Some("Be short.".into()), ..ChatTranscript::default() };
        conversation.parameters.insert("temperature".into(), json!(0.5));
        conversation.messages = vec![ChatMessage::new("user", "Hello"), ChatMessage::new("assistant", "Hi")];
        conversation.messages[1].tokens = vec![1, 2];
        conversation
    }

    #[test]
    fn request_contains_all_settings() {
        let body = conversation().request();
        assert_eq!(body["messages"][0], json!({"role": "system", "content": "Be short."}));
        assert_eq!(body["messages"][2], json!({"role": "assistant", "content": "Hi"}));
        assert_eq!(body["temperature"], 0.5);
        assert!(body.get("tools").is_none() && body.get("mods").is_none());
    }

    #[test]
    fn restore_returns_the_saved_conversation() {
        let path = std::env::temp_dir().join(format!("thunder-chat-{}.json", std::process::id()));
        conversation().save(&path).unwrap();
        assert_eq!(ChatTranscript::restore(&path).unwrap(), conversation());
        std::fs::write(&path, r#"{"thunder_chat": 9}"#).unwrap();
        assert!(ChatTranscript::restore(&path).unwrap_err().to_string().contains("version 9"));
        std::fs::write(&path, "[]").unwrap();
        assert!(ChatTranscript::restore(&path).unwrap_err().to_string().contains("not a saved conversation"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn remove_answer_keeps_complete_tool_results() {
        let mut conversation = conversation();
        conversation.messages.push(ChatMessage::new("user", "Weather?"));
        assert!(!conversation.remove_answer());
        let mut call = ChatMessage::new("assistant", "");
        let calls = json!([{"id": "a", "function": {"name": "weather", "arguments": "{}"}},
                           {"id": "b", "function": {"name": "now", "arguments": "{}"}}]);
        call.fields.insert("tool_calls".into(), calls);
        conversation.messages.push(call.clone());
        let call = OpenCall { id: "a".into(), name: "weather".into(), arguments: "{}".into() };
        assert_eq!(conversation.open_calls()[0], call);
        conversation.answer_call("a", "weather", "sunny".into());
        let mut partly_answered = conversation.clone();
        assert!(partly_answered.remove_answer());
        assert_eq!(partly_answered.messages.len(), 3, "the calls are requested again");
        conversation.answer_call("b", "now", "noon".into());
        assert!(conversation.open_calls().is_empty());
        assert!(!conversation.clone().remove_answer(), "the results wait for an answer");
        conversation.messages.push(ChatMessage::new("assistant", "It is sunny."));
        assert!(conversation.remove_answer());
        assert_eq!(conversation.messages.len(), 6);
        assert_eq!(conversation.messages[5].fields["content"], "noon");
    }
}
