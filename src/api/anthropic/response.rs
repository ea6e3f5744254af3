//! A message, its content blocks and the events of its stream.

use crate::api::shared::chat::{ChatStream, ToolCallRef};
use crate::api::shared::generation::ThunderFields;
use crate::events::FinishReason;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// A message.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MessageResponse {
    /// `msg_` and the id of the run.
    id: String,
    /// Always `message`.
    r#type: &'static str,
    /// Always `assistant`.
    role: &'static str,
    /// Name of the model.
    model: String,
    content: Vec<ContentBlock>,
    /// `null` while the message is incomplete.
    stop_reason: Option<MessageStopReason>,
    /// The stop sequence that ended the message.
    stop_sequence: Option<String>,
    usage: MessageUsage,
    /// The run of the message.
    thunder: ThunderFields,
}

/// A part of a message.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ContentBlock {
    /// Reasoning.
    Thinking {
        /// Its text.
        thinking: String,
        /// Always empty.
        signature: &'static str,
    },
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// A tool call.
    ToolUse {
        /// Id of the call.
        id: String,
        /// Name of the tool.
        name: String,
        /// The arguments.
        #[schema(value_type = Object)]
        input: Map<String, Value>,
    },
}

/// The reason why a message ended.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum MessageStopReason {
    /// The model ended its turn.
    EndTurn,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// A stop sequence of the request occurred.
    StopSequence,
    /// The message ends with tool calls.
    ToolUse,
}

/// The token counts of a message.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MessageUsage {
    /// Prompt tokens that were not in the cache.
    input_tokens: u32,
    /// Prompt tokens from the cache.
    cache_read_input_tokens: u32,
    /// Always 0.
    cache_creation_input_tokens: u32,
    /// Tokens of the message.
    output_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<OutputTokenDetails>,
}

/// Details of the tokens of a message.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OutputTokenDetails {
    /// Tokens of the reasoning.
    thinking_tokens: u32,
}

/// The number of prompt tokens of a request.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CountTokensResponse {
    /// Tokens of the prompt.
    pub(super) input_tokens: usize,
}

/// An event of a message's stream.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum MessageEvent {
    /// The message without content.
    MessageStart {
        /// The message.
        message: Box<MessageResponse>,
    },
    /// A keep-alive.
    Ping,
    /// The start of a block.
    ContentBlockStart {
        /// Index of the block.
        index: usize,
        /// The block without content.
        content_block: ContentBlock,
    },
    /// An addition to a block.
    ContentBlockDelta {
        /// Index of the block.
        index: usize,
        /// The addition.
        delta: ContentDelta,
    },
    /// The end of a block.
    ContentBlockStop {
        /// Index of the block.
        index: usize,
    },
    /// The end of the content.
    MessageDelta {
        /// The stop reason.
        delta: MessageEnd,
        /// The token counts.
        usage: MessageUsage,
    },
    /// The end of the stream.
    MessageStop,
    /// A mod removed content that was already sent.
    ThunderRetract {
        /// Characters of the text to remove.
        chars: usize,
        /// Characters of the reasoning to remove.
        reasoning_chars: usize,
        /// Tool calls to remove.
        tool_calls: usize,
    },
}

/// An addition to a block.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "Anthropic's names")]
pub(super) enum ContentDelta {
    /// More reasoning.
    ThinkingDelta {
        /// The addition.
        thinking: String,
    },
    /// The end of the reasoning.
    SignatureDelta {
        /// Always empty.
        signature: &'static str,
    },
    /// More text.
    TextDelta {
        /// The addition.
        text: String,
    },
    /// More of a tool call's arguments.
    InputJsonDelta {
        /// The addition.
        partial_json: String,
    },
}

/// The end of a message.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MessageEnd {
    pub(super) stop_reason: MessageStopReason,
    /// The stop sequence that ended the message.
    pub(super) stop_sequence: Option<String>,
}

impl MessageResponse {
    /// Returns the complete message.
    pub(super) fn complete(chat: &ChatStream, stop_sequences: &[String]) -> Self {
        let parsed = chat.message(0);
        let mut content = Vec::new();
        if !parsed.reasoning.is_empty() {
            content.push(ContentBlock::Thinking { thinking: parsed.reasoning.clone(), signature: "" });
        }
        if !parsed.content.is_empty() {
            content.push(ContentBlock::Text { text: parsed.content.clone() });
        }
        content.extend(chat.calls(0).iter().map(tool_use));
        let MessageEnd { stop_reason, stop_sequence } = MessageEnd::new(chat, stop_sequences);
        Self {
            content,
            stop_reason: Some(stop_reason),
            stop_sequence,
            usage: MessageUsage::new(chat),
            ..Self::without_content(chat)
        }
    }

    /// Returns the message without content.
    pub(super) fn without_content(chat: &ChatStream) -> Self {
        let cached = chat.cached_tokens(0);
        Self {
            id: format!("msg_{}", chat.run().0.simple()),
            r#type: "message",
            role: "assistant",
            model: chat.model.clone(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: MessageUsage {
                input_tokens: (chat.options.prompt_tokens as u32).saturating_sub(cached),
                cache_read_input_tokens: cached,
                cache_creation_input_tokens: 0,
                output_tokens: 0,
                output_tokens_details: None,
            },
            thunder: ThunderFields::run(chat.run()),
        }
    }
}

fn tool_use(call: &ToolCallRef<'_>) -> ContentBlock {
    match serde_json::from_str::<Value>(call.arguments) {
        Ok(Value::Object(input)) => ContentBlock::ToolUse { id: call.id.to_owned(), name: call.name.to_owned(), input },
        // The answer was cut off inside the arguments, but a `tool_use` block requires an object.
        _ => ContentBlock::Text { text: format!("{} {}", call.name, call.arguments) },
    }
}

impl MessageEnd {
    /// Returns the end of a chat answer.
    pub(super) fn new(chat: &ChatStream, stop_sequences: &[String]) -> Self {
        let Some(finish) = chat.finish(0) else {
            return Self { stop_reason: MessageStopReason::EndTurn, stop_sequence: None };
        };
        let stop = finish.stop_string.as_ref().filter(|stop| stop_sequences.contains(stop));
        let (stop_reason, stop_sequence) = match (finish.reason, stop) {
            (FinishReason::Length, _) => (MessageStopReason::MaxTokens, None),
            (_, Some(stop)) => (MessageStopReason::StopSequence, Some(stop.clone())),
            _ if chat.reason(0) == FinishReason::ToolCalls => (MessageStopReason::ToolUse, None),
            _ => (MessageStopReason::EndTurn, None),
        };
        Self { stop_reason, stop_sequence }
    }
}

impl MessageUsage {
    /// Returns the token counts of a chat answer.
    pub(super) fn new(chat: &ChatStream) -> Self {
        let usage = chat.usage();
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            cache_read_input_tokens: usage.cached_tokens,
            cache_creation_input_tokens: 0,
            output_tokens: usage.completion_tokens,
            output_tokens_details: Some(OutputTokenDetails { thinking_tokens: chat.reasoning_tokens() }),
        }
    }
}
