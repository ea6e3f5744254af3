//! Responses that are kept, so that a later one can go on from them: in the database, as long as the runs of their day.

use crate::api::{ApiError, App, Caller};
use crate::events::RunId;
use crate::store::NewResponse;
use serde_json::Value;
use std::time::Duration;
use tokio::time::timeout;

/// How long an answer waits for the database.
const PATIENCE: Duration = Duration::from_secs(3);

/// Keeps one response, behind the items that it answers.
pub(super) struct Keeper {
    pub(super) app: App,
    pub(super) run: RunId,
    /// What it went on from, and its input.
    pub(super) items: Vec<Value>,
    pub(super) owner: Option<String>,
}

/// Whoever asks, as far as responses are concerned: others do not see theirs.
pub(super) fn owner(caller: Option<&Caller>) -> Option<String> {
    caller.map(|caller| caller.label.clone())
}

impl Keeper {
    /// The response as it is to be sent: where the database did not take it, it says that it is not stored.
    pub(super) async fn keep(self, mut response: Value) -> Value {
        let Self { app, run, mut items, owner } = self;
        items.extend(response["output"].as_array().into_iter().flatten().cloned());
        let id = response["id"].as_str().unwrap_or_default().to_owned();
        let kept = NewResponse { id, run_id: run, owner, response: response.clone(), items };
        let failure = match app.store() {
            Ok(store) => match timeout(PATIENCE, store.keep_response(&kept, app.now())).await {
                Ok(Ok(())) => return response,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("the database did not answer within {PATIENCE:?}"),
            },
            Err(_) => "the database is not ready".to_owned(),
        };
        tracing::warn!(run.id = %run, error = %failure, "the response is not kept");
        response["store"] = false.into();
        response
    }
}

/// The conversation that a response ended.
///
/// # Errors
/// 400 naming `previous_response_id`.
pub(super) async fn conversation(app: &App, id: &str, owner: Option<&str>) -> Result<Vec<Value>, ApiError> {
    const FIELD: &str = "previous_response_id";
    app.store()?.response_items(id, owner).await?.ok_or_else(|| {
        let detail = format!(
            "{FIELD}: there is no response '{id}'; it is kept unless \"store\" is false, as long as the runs of its day"
        );
        ApiError::invalid(FIELD, detail).code("previous_response_not_found")
    })
}

/// A response.
///
/// # Errors
/// 404.
pub(super) async fn get(app: &App, id: &str, owner: Option<&str>) -> Result<Value, ApiError> {
    app.store()?.response(id, owner).await?.ok_or_else(|| ApiError::not_found("response", id))
}

/// Forgets a response. Those that go on from it keep its items.
///
/// # Errors
/// 404.
pub(super) async fn delete(app: &App, id: &str, owner: Option<&str>) -> Result<(), ApiError> {
    let found = app.store()?.forget_response(id, owner).await?;
    if found { Ok(()) } else { Err(ApiError::not_found("response", id)) }
}
