//! `POST /api/v1/generate`, which the attention API and `KoboldCPP`'s API share: a body with a `prompt` and without
//! `input_ids` is for the latter.

use crate::api::attention::rest as attention;
use crate::api::kobold::{self, Genkeys};
use crate::api::shared::attention::AttentionError;
use crate::server::{Access, ApiError, App, Caller, Protocol};
use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the route.
pub(super) fn protocol(genkeys: Genkeys) -> Protocol {
    let routes = OpenApiRouter::new().routes(routes!(generate)).layer(Extension(genkeys));
    Protocol::new(AttentionError::render, &[]).routes(Access::Run, routes)
}

/// Generates from `input_ids`; with `return_attention` each token has its attention. A body with a `prompt` instead is
/// handled as by `KoboldCPP`. `Accept: application/msgpack` returns `MessagePack`; a body of that type is
/// accepted.
#[utoipa::path(post, path = "/api/v1/generate", tag = "attention",
    request_body(content = Value, content_type = "application/json",
        description = "`{input_ids, max_new_tokens?, temperature?, top_p?, top_k?, repetition_penalty?, stop_tokens?, banned_tokens?, \
                       return_attention?, attention_format?: per_layer | aggregated | sparse | viz, aggregation_mode?: mean | max | \
                       last_layer | weighted_layers, layer_weights?, attention_top_k?, attention_dtype?: float32 | float16, \
                       attention_encoding?: base64 | binary | array, logprobs?, top_logprobs?, num_samples?, suggest_pruning?, \
                       prune_below?, sentences?, request_id?, seed?, stop?, mods?, record?}`"),
    responses((status = 200, description = "`{generated_tokens, generated_text, finish_reason, attention_data?, pruning_suggestion?}`; \
                                            with `num_samples` above 1 `{samples: [those]}`"),
              (status = 400, description = "`{type: error, error, error_code, field?}`: `INVALID_TOKEN`, `INVALID_REQUEST`, \
                                            `CONTEXT_LENGTH_EXCEEDED`, `ATTENTION_UNAVAILABLE`, …"),
              (status = 503, description = "`NO_MODEL`"), (status = 507, description = "`OOM`")))]
async fn generate(
    State(app): State<App>,
    caller: Caller,
    genkeys: Extension<Genkeys>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let body = match body.map_err(ApiError::from).and_then(|body| attention::read_body(&headers, &body)) {
        Ok(body) => body,
        Err(error) => return AttentionError::render(error),
    };
    if body.get("input_ids").is_none() && body.get("prompt").is_some() {
        return kobold::generate(app, &genkeys, caller, &headers, &body).await;
    }
    attention::generate(app, caller, &headers, &body).await
}
