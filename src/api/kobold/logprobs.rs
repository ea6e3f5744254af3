//! Log-probabilities of the tokens of an answer, as `KoboldCPP` writes them.

use super::error::KoboldError;
use super::generate::genkey;
use super::genkeys::Genkeys;
use crate::api::generation::{ProbabilityFormatter, SentTokens};
use crate::model::Vocabulary;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

/// Maximum alternatives of each token, and how the logarithm of 0 is written.
const MAX_ALTERNATIVES: usize = 10;
const NO_LOGPROB: f32 = f32::MIN;

/// Returns the log-probabilities of the newest generation that `genkey` names and that has ended, without one those of the newest
/// without a name. They are null unless its request had `"logprobs": true`.
#[utoipa::path(post, path = "/api/extra/last_logprobs", tag = "KoboldCPP",
    request_body(content = Value, content_type = "application/json", description = "`{genkey?}`"),
    responses((status = 200, description = "`{logprobs: {content, tokens, token_ids, token_logprobs, top_logprobs, text_offset}}`, \
                                            lists with an entry for each token")))]
pub(super) async fn last(
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, KoboldError> {
    Ok(Json(json!({ "logprobs": genkeys.logprobs(&genkey(&body?)?) })))
}

/// Writes the tokens of an answer.
pub(super) fn of(told: &SentTokens, vocabulary: &Vocabulary) -> Value {
    let probabilities =
        ProbabilityFormatter { vocabulary, top: MAX_ALTERNATIVES, after_sampler: false, no_logprob: NO_LOGPROB };
    let content: Vec<Value> =
        told.tokens.iter().map(|(measure, others)| with_token_id(probabilities.drawn_token(measure, others))).collect();
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

/// Names the id as `KoboldCPP` does, beside llama-server's name for it.
fn with_token_id(mut entry: Value) -> Value {
    entry["token_id"] = entry["id"].clone();
    entry
}
