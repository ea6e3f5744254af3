//! `POST /api/v1/generate`, which the attention API and `KoboldCPP`'s API share. A body with a `prompt` and without
//! `input_ids` belongs to `KoboldCPP`'s API.

use crate::api::attention::request::GenerateAttention;
use crate::api::attention::rest::{self as attention, GenerateAttentionResponse};
use crate::api::kobold::{self, Genkeys};
use crate::api::shared::attention::error::{AttentionError, AttentionErrorMessage};
use crate::api::shared::attention::has_input_ids;
use crate::api::shared::generation::RunClient;
use crate::server::{Access, ApiError, Protocol};
use axum::Extension;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the route.
pub(super) fn protocol(genkeys: Genkeys) -> Protocol {
    let routes = OpenApiRouter::new().routes(routes!(generate)).layer(Extension(genkeys));
    Protocol::new(AttentionError::render, &[]).routes(Access::Run, routes)
}

/// Generates from `input_ids`; with `return_attention` each token has its attention. A body with a `prompt` and without
/// `input_ids` uses `KoboldCPP`'s format. The body may be `MessagePack` with `Content-Type: application/msgpack`, and
/// the response is `MessagePack` with `Accept: application/msgpack`.
#[utoipa::path(post, path = "/api/v1/generate", tag = "attention",
    request_body(content((GenerateAttention = "application/json"), (GenerateAttention = "application/msgpack"))),
    responses((status = 200, content((GenerateAttentionResponse = "application/json"), (GenerateAttentionResponse = "application/msgpack"))),
              (status = 400, body = AttentionErrorMessage, description = "A field is invalid; the message names it. \
                  `NO_MODEL`: the model is not loaded, and requests do not load it"),
              (status = 503, body = AttentionErrorMessage, description = "`NO_MODEL` or `UNAVAILABLE`"),
              (status = 507, body = AttentionErrorMessage, description = "`OOM`")))]
async fn generate(client: RunClient, genkeys: Extension<Genkeys>, body: Result<Bytes, BytesRejection>) -> Response {
    let body = match body.map_err(ApiError::from).and_then(|body| attention::read_body(&client.headers, &body)) {
        Ok(body) => body,
        Err(error) => return AttentionError::render(error),
    };
    if !has_input_ids(&body) && body.get("prompt").is_some() {
        return kobold::generate(&client, &genkeys, &body).await;
    }
    attention::generate(&client, &body).await
}
