//! The JSON of chat completions and of their chunks.

use crate::api::chat::Talk;
use crate::api::generation::{self, Probabilities};
use crate::api::openai::shape::{self, FINGERPRINT, NO_LOGPROB};
use crate::events::{Alternative, TokenMeasurement};
use serde_json::{Map, Value, json};

pub(super) type Tokens = Vec<(TokenMeasurement, Vec<Alternative>)>;

/// The object with these choices.
pub(super) fn object(talk: &Talk, choices: Value, chunk: bool) -> Map<String, Value> {
    let kind = if chunk { "chat.completion.chunk" } else { "chat.completion" };
    let mut object = Map::new();
    object.insert("id".into(), format!("chatcmpl-{}", talk.run()).into());
    object.insert("object".into(), kind.into());
    object.insert("created".into(), talk.created.into());
    object.insert("model".into(), talk.model.clone().into());
    object.insert("system_fingerprint".into(), FINGERPRINT.into());
    object.insert("choices".into(), choices);
    object
}

/// Token counts.
pub(super) fn usage(talk: &Talk) -> Value {
    let mut usage = shape::usage(talk.usage());
    usage["completion_tokens_details"] = json!({ "reasoning_tokens": talk.reasoning_tokens() });
    usage
}

/// Where the runs can be looked at.
pub(super) fn thunder(talk: &Talk) -> Value {
    let run = talk.run();
    let mut thunder = json!({ "run_id": run, "replay": format!("/runs/{run}"), "id_slot": talk.slot(0) });
    if talk.len() > 1 {
        thunder["run_ids"] = talk.runs().map(|run| json!(run)).collect();
    }
    thunder
}

/// The whole answer.
pub(super) fn whole(talk: &Talk, tokens: &[Tokens]) -> Value {
    let choices: Vec<Value> = tokens
        .iter()
        .enumerate()
        .map(|(index, tokens)| {
            json!({ "index": index, "message": message(talk, index), "logprobs": logprobs(talk, tokens),
                    "finish_reason": talk.reason(index) })
        })
        .collect();
    let mut object = object(talk, choices.into(), false);
    object.insert("usage".into(), usage(talk));
    ending(talk, &mut object);
    object.insert("thunder".into(), thunder(talk));
    Value::Object(object)
}

fn message(talk: &Talk, answer: usize) -> Value {
    let said = talk.message(answer);
    let calls = talk.calls(answer);
    let mut message = json!({ "role": "assistant", "content": said.content });
    if !said.reasoning.is_empty() {
        message["reasoning_content"] = said.reasoning.clone().into();
    }
    if !calls.is_empty() {
        if said.content.is_empty() {
            message["content"] = Value::Null;
        }
        let call = |call: &crate::api::chat::CallOf<'_>| {
            json!({ "id": call.id, "type": "function",
                    "function": { "name": call.name, "arguments": call.arguments } })
        };
        message["tool_calls"] = calls.iter().map(call).collect();
    }
    message
}

/// What the last object of an answer has besides its choices.
pub(super) fn ending(talk: &Talk, object: &mut Map<String, Value>) {
    let Some(finish) = talk.finish(0) else { return };
    object.insert("timings".into(), generation::timings(finish));
    let Some(verbose) = &talk.wishes.verbose else { return };
    let verbose = shape::verbose(finish, &talk.model, talk.slot(0), &verbose.prompt, &verbose.settings);
    object.insert("__verbose".into(), verbose);
}

/// The log-probabilities of these tokens, where they were asked for.
pub(super) fn logprobs(talk: &Talk, tokens: &Tokens) -> Value {
    let Some(top) = talk.wishes.logprobs.filter(|_| !tokens.is_empty()) else { return Value::Null };
    let told = Probabilities {
        vocabulary: &talk.vocabulary,
        top,
        after_sampler: talk.wishes.after_sampler,
        no_logprob: NO_LOGPROB,
    };
    let content: Vec<Value> = tokens.iter().map(|(measure, others)| told.drawn(measure, others)).collect();
    json!({ "content": content, "refusal": null })
}

/// Adds tokens to what was collected, after taking back the last `taken_back`.
pub(super) fn collect(collected: &mut Tokens, tokens: Tokens, taken_back: usize) {
    collected.truncate(collected.len().saturating_sub(taken_back));
    collected.extend(tokens);
}
