//! What the JSON of both routes has in common.

use crate::events::{FinishReason, Usage};
use serde_json::{Value, json};

/// Which server answered; clients of llama-server look for the b of its builds.
pub(super) const FINGERPRINT: &str = concat!("b0-thunder-", env!("CARGO_PKG_VERSION"));

/// The finish reason as OpenAI has it.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Stop | FinishReason::Cancelled | FinishReason::Error => "stop",
    }
}

/// Token counts.
pub(super) fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}
