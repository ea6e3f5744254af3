//! `/api/extra/last_logprobs`: log-probabilities of an ended generation.

use super::error::KoboldError;
use super::generate::parse_genkey;
use super::genkeys::Genkeys;
use super::request::GenkeyRequest;
use super::response::LastLogprobsResponse;
use crate::events::Scope;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::{Extension, Json};

/// Returns the log-probabilities of the newest ended generation with this `genkey`. An absent `genkey` selects the
/// generations without a key. The result is null unless the request had `"logprobs": true`.
#[utoipa::path(post, path = "/api/extra/last_logprobs", tag = "KoboldCPP",
    request_body(content = GenkeyRequest, content_type = "application/json"),
    responses((status = 200, body = LastLogprobsResponse)))]
pub(super) async fn last_logprobs(
    scope: Scope,
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<LastLogprobsResponse>, KoboldError> {
    Ok(Json(LastLogprobsResponse { logprobs: genkeys.logprobs(&scope, &parse_genkey(&body?)?) }))
}

/// Returns the log-probabilities of the newest ended generation without a `genkey`, like `POST`.
#[utoipa::path(get, path = "/api/extra/last_logprobs", tag = "KoboldCPP",
    responses((status = 200, body = LastLogprobsResponse)))]
pub(super) async fn last_logprobs_without_key(scope: Scope, genkeys: Extension<Genkeys>) -> Json<LastLogprobsResponse> {
    Json(LastLogprobsResponse { logprobs: genkeys.logprobs(&scope, "") })
}
