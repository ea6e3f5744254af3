//! JSON that chat completions and completions share.

use crate::api::shared::generation;
use crate::events::{Finish, FinishReason, Usage};
use serde_json::{Value, json};

/// Fingerprint of the server. Clients of llama-server look for the `b` of its build numbers.
pub(super) const FINGERPRINT: &str = concat!("b0-thunder-", env!("CARGO_PKG_VERSION"));

/// OpenAI's value for a token without a probability.
pub(super) const NO_LOGPROB: f32 = -9999.0;

/// Returns OpenAI's name of a finish reason.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Stop | FinishReason::Cancelled | FinishReason::Error => "stop",
    }
}

/// Returns the token counts.
pub(super) fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}

/// Returns llama-server's `__verbose` object of an answer.
pub(super) fn verbose(finish: &Finish, model: &str, slot: Option<u32>, prompt: &str, settings: &Value) -> Value {
    let (kind, word) = match finish.reason {
        FinishReason::Length => ("limit", ""),
        _ => finish.stop_string.as_deref().map_or(("eos", ""), |word| ("word", word)),
    };
    let usage = finish.usage;
    // The last token of an answer is not decoded. The end-of-turn token is an exception but is not counted.
    let absent = u32::from(kind != "eos" && usage.completion_tokens > 0) + generation::shifted_tokens(finish);
    json!({
        "index": 0,
        "content": finish.text,
        "tokens": [],
        "id_slot": slot,
        "stop": true,
        "model": model,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": (usage.prompt_tokens + usage.completion_tokens).saturating_sub(absent),
        "generation_settings": settings,
        "prompt": prompt,
        "has_new_line": finish.text.contains('\n'),
        "truncated": finish.truncated,
        "stop_type": kind,
        "stopping_word": word,
        "timings": generation::timings(finish),
    })
}
