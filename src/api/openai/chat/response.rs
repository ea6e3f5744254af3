//! JSON of chat completions and their chunks.

use crate::api::openai::response::{self, FINGERPRINT, NO_LOGPROB};
use crate::api::shared::chat::{ChatStream, MeasuredTokens, ToolCallRef};
use crate::api::shared::generation;
use crate::api::shared::generation::ProbabilityFormatter;
use serde_json::{Map, Value, json};

/// Returns the response object with these choices.
pub(super) fn object(chat: &ChatStream, choices: Value, chunk: bool) -> Map<String, Value> {
    let kind = if chunk { "chat.completion.chunk" } else { "chat.completion" };
    let mut object = Map::new();
    object.insert("id".into(), format!("chatcmpl-{}", chat.run()).into());
    object.insert("object".into(), kind.into());
    object.insert("created".into(), chat.created.into());
    object.insert("model".into(), chat.model.clone().into());
    object.insert("system_fingerprint".into(), FINGERPRINT.into());
    object.insert("choices".into(), choices);
    object
}

/// Returns the token counts.
pub(super) fn usage(chat: &ChatStream) -> Value {
    let mut usage = response::usage(chat.usage());
    usage["completion_tokens_details"] = json!({ "reasoning_tokens": chat.reasoning_tokens() });
    usage
}

/// Returns the ids of the runs and the path of their replay.
pub(super) fn thunder(chat: &ChatStream) -> Value {
    let run = chat.run();
    let mut thunder = json!({ "run_id": run, "replay": format!("/runs/{run}"), "id_slot": chat.slot(0) });
    if chat.len() > 1 {
        thunder["run_ids"] = chat.runs().map(|run| json!(run)).collect();
    }
    thunder
}

/// Returns the complete response.
pub(super) fn completion(chat: &ChatStream, tokens: &[MeasuredTokens]) -> Value {
    let choices: Vec<Value> = tokens
        .iter()
        .enumerate()
        .map(|(index, tokens)| {
            json!({ "index": index, "message": message(chat, index), "logprobs": logprobs(chat, tokens),
                    "finish_reason": chat.reason(index) })
        })
        .collect();
    let mut object = object(chat, choices.into(), false);
    object.insert("usage".into(), usage(chat));
    add_final_fields(chat, &mut object);
    object.insert("thunder".into(), thunder(chat));
    Value::Object(object)
}

fn message(chat: &ChatStream, answer: usize) -> Value {
    let parsed = chat.message(answer);
    let calls = chat.calls(answer);
    let mut message = json!({ "role": "assistant", "content": parsed.content });
    if !parsed.reasoning.is_empty() {
        message["reasoning_content"] = parsed.reasoning.clone().into();
    }
    if !calls.is_empty() {
        if parsed.content.is_empty() {
            message["content"] = Value::Null;
        }
        let call = |call: &ToolCallRef<'_>| {
            json!({ "id": call.id, "type": "function",
                    "function": { "name": call.name, "arguments": call.arguments } })
        };
        message["tool_calls"] = calls.iter().map(call).collect();
    }
    message
}

/// Adds the fields that only the last object of an answer has.
pub(super) fn add_final_fields(chat: &ChatStream, object: &mut Map<String, Value>) {
    let Some(finish) = chat.finish(0) else { return };
    object.insert("timings".into(), generation::timings(finish));
    let Some(verbose) = &chat.options.verbose else { return };
    let verbose = response::verbose(finish, &chat.model, chat.slot(0), &verbose.prompt, &verbose.settings);
    object.insert("__verbose".into(), verbose);
}

/// Returns the log-probabilities of these tokens if the client requested them.
pub(super) fn logprobs(chat: &ChatStream, tokens: &MeasuredTokens) -> Value {
    let Some(top) = chat.options.logprobs.filter(|_| !tokens.is_empty()) else { return Value::Null };
    let formatter = ProbabilityFormatter {
        vocabulary: &chat.vocabulary,
        top,
        after_sampler: chat.options.after_sampler,
        no_logprob: NO_LOGPROB,
    };
    let content: Vec<Value> = tokens.iter().map(|(measure, others)| formatter.drawn_token(measure, others)).collect();
    json!({ "content": content, "refusal": null })
}

/// Removes the last `retracted_tokens` collected tokens, then appends new ones.
pub(super) fn update_tokens(collected: &mut MeasuredTokens, tokens: MeasuredTokens, retracted_tokens: usize) {
    collected.truncate(collected.len().saturating_sub(retracted_tokens));
    collected.extend(tokens);
}
