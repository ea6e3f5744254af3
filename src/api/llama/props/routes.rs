//! The routes of `/props`.

use super::response::{PropsResponse, describe};
use crate::api::llama::request::ModelParams;
use crate::api::llama::response::SuccessResponse;
use crate::api::shared::error::LlamaError;
use crate::server::extract::Query;
use crate::server::models::ModelView;
use crate::server::{ApiError, App, Caller};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(in crate::api::llama) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(show, change))
}

/// Returns the server's properties: request defaults, slots, model and chat template. `?model=` selects a model.
#[utoipa::path(get, path = "/props", tag = "llama-server",
    responses((status = 200, body = PropsResponse), (status = 503, description = "The model is loading")))]
async fn show(State(app): State<App>, params: Result<Query<ModelParams>, ApiError>) -> Result<Response, LlamaError> {
    let Query(params) = params?;
    app.check_ready()?;
    Ok(match app.models().view(params.model.as_deref())? {
        ModelView::Loaded(loaded) => Json(describe(&app, &loaded).await?).into_response(),
        ModelView::Sleeping(sleeping) => Json(&sleeping.props).into_response(),
    })
}

/// Accepts changes but ignores them, like llama-server; requires `--props`.
#[utoipa::path(post, path = "/props", tag = "llama-server",
    responses((status = 200, body = SuccessResponse),
              (status = 403, description = "The API key lacks the right to change properties"),
              (status = 501, description = "The server was started without --props")))]
async fn change(State(app): State<App>, caller: Caller) -> Result<Json<SuccessResponse>, LlamaError> {
    caller.require_props()?;
    if !app.config().server.routes.props {
        return Err(ApiError::not_supported("POST /props is disabled; start the server with --props").into());
    }
    Ok(Json(SuccessResponse::default()))
}
