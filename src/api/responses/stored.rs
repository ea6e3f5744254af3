//! Responses stored in the database so that later requests can continue them. They are deleted with the runs of the
//! same day.

use super::response::ResponseObject;
use crate::events::{RunId, Scope, Tenant};
use crate::server::{ApiError, App, ErrorCode};
use crate::store::NewResponse;
use serde_json::Value;
use std::time::Duration;
use tokio::time::timeout;

/// Maximum wait for the database before a response is sent without being stored.
const STORE_TIMEOUT: Duration = Duration::from_secs(3);

/// A response to be stored, with the items that precede its output.
pub(super) struct ResponseRecord {
    pub(super) app: App,
    pub(super) run: RunId,
    /// Items of the earlier conversation, and the request's input.
    pub(super) items: Vec<Value>,
    pub(super) owner: Option<Tenant>,
}

impl ResponseRecord {
    /// Stores the response and returns it. If the database fails, the returned `store` field is false.
    pub(super) async fn save(self, mut response: ResponseObject) -> ResponseObject {
        let Self { app, run, mut items, owner } = self;
        let value = serde_json::to_value(&response).unwrap_or_default();
        items.extend(value["output"].as_array().into_iter().flatten().map(without_logprobs));
        let stored = NewResponse { id: response.id.clone(), run_id: run, owner, response: value, items };
        let failure = match app.store() {
            Ok(store) => match timeout(STORE_TIMEOUT, store.save_response(&stored, app.now())).await {
                Ok(Ok(())) => return response,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("the database timed out after {STORE_TIMEOUT:?}"),
            },
            Err(_) => "the database is not ready".to_owned(),
        };
        tracing::warn!(run.id = %run, error = %failure, "response not stored");
        response.echo.store = false.into();
        response
    }
}

/// Returns a copy of an output item without log-probabilities, which no later request needs.
fn without_logprobs(item: &Value) -> Value {
    let mut item = item.clone();
    for part in item["content"].as_array_mut().into_iter().flatten() {
        if let Some(logprobs) = part.get_mut("logprobs") {
            *logprobs = Value::Array(Vec::new());
        }
    }
    item
}

/// Returns the items of the conversation that ends with a response.
///
/// # Errors
/// 400 with the pointer `previous_response_id`.
pub(super) async fn conversation(app: &App, scope: &Scope, id: &str) -> Result<Vec<Value>, ApiError> {
    const FIELD: &str = "previous_response_id";
    app.store()?.response_items(scope, id).await?.ok_or_else(|| {
        let detail = format!(
            "`{FIELD}`: unknown response '{id}'; responses are stored unless \"store\" is false, and deleted with \
             the runs of the same day"
        );
        ApiError::invalid(FIELD, detail).code(ErrorCode::PreviousResponseNotFound)
    })
}

/// Returns the output items of a stored response; none if it is not stored.
pub(super) async fn output(app: &App, scope: &Scope, id: &str) -> Result<Vec<Value>, ApiError> {
    let response = app.store()?.response(scope, id).await?;
    Ok(response.and_then(|mut response| response["output"].as_array_mut().map(std::mem::take)).unwrap_or_default())
}

/// Returns a stored response.
///
/// # Errors
/// 404 if it is not stored.
pub(super) async fn get(app: &App, scope: &Scope, id: &str) -> Result<Value, ApiError> {
    app.store()?.response(scope, id).await?.ok_or_else(|| ApiError::not_found("response", id))
}

/// Deletes a stored response. Responses that continue it keep its items.
///
/// # Errors
/// 404 if it is not stored.
pub(super) async fn delete(app: &App, scope: &Scope, id: &str) -> Result<(), ApiError> {
    let found = app.store()?.delete_response(scope, id).await?;
    if found { Ok(()) } else { Err(ApiError::not_found("response", id)) }
}
