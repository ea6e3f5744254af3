//! Log-probabilities of an answer's tokens in `KoboldCPP`'s format.

use super::error::KoboldError;
use super::generate::parse_genkey;
use super::genkeys::Genkeys;
use crate::api::shared::generation::{ProbabilityFormatter, SentTokens};
use crate::events::Scope;
use crate::model::Vocabulary;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

/// Maximum alternatives per token.
const MAX_ALTERNATIVES: usize = 10;
const NO_LOGPROB: f32 = f32::MIN;

/// Returns the log-probabilities of the newest ended generation with this `genkey`, or without a key if it is absent.
/// They are null unless the request had `"logprobs": true`.
#[utoipa::path(post, path = "/api/extra/last_logprobs", tag = "KoboldCPP",
    request_body(content = Value, content_type = "application/json", description = "`{genkey?}`"),
    responses((status = 200, description = "`{logprobs: {content, tokens, token_ids, token_logprobs, top_logprobs, text_offset}}`, \
                                            lists with one entry per token")))]
pub(super) async fn last_logprobs(
    scope: Scope,
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, KoboldError> {
    Ok(Json(json!({ "logprobs": genkeys.logprobs(&scope, &parse_genkey(&body?)?) })))
}

/// Returns the log-probabilities of the answer's tokens.
pub(super) fn to_json(sent: &SentTokens, vocabulary: &Vocabulary) -> Value {
    let probabilities =
        ProbabilityFormatter { vocabulary, top: MAX_ALTERNATIVES, after_sampler: false, no_logprob: NO_LOGPROB };
    let content: Vec<Value> =
        sent.tokens.iter().map(|(measure, others)| with_token_id(probabilities.drawn_token(measure, others))).collect();
    let column = |name: &str| content.iter().map(|entry| entry[name].clone()).collect::<Value>();
    let top = content.iter().map(|entry| {
        let others = entry["top_logprobs"].as_array().into_iter().flatten();
        others
            .filter_map(|other| Some((other["token"].as_str()?.to_owned(), other["logprob"].clone())))
            .collect::<Map<_, _>>()
    });
    let top: Value = top.map(Value::Object).collect();
    let offsets = content.iter().scan(0, |offset, entry| {
        let own = *offset;
        *offset += entry["token"].as_str().unwrap_or_default().chars().count();
        Some(own)
    });
    let offsets: Value = offsets.collect::<Vec<_>>().into();
    json!({ "tokens": column("token"), "token_ids": column("token_id"), "token_logprobs": column("logprob"),
            "top_logprobs": top, "text_offset": offsets, "content": content })
}

/// Adds the id under `KoboldCPP`'s name next to llama-server's.
fn with_token_id(mut entry: Value) -> Value {
    entry["token_id"] = entry["id"].clone();
    entry
}
