//! `/api/v1/filters`: named filters of the run list.

use crate::server::extract::{Json, Path};
use crate::server::{ApiError, App, Caller, Problem};
use crate::store::filter::MAX_FILTER_CHARS;
use crate::store::{MAX_SAVED_FILTERS, SavedFilter};
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum length of a name in characters.
const MAX_NAME_CHARS: usize = 64;

/// A filter to save.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FilterRequest {
    /// A name of 1 to 64 characters. An earlier filter with this name is replaced.
    #[schema(min_length = 1, max_length = 64)]
    name: String,
    /// A filter of the run list, up to 4,000 characters.
    #[schema(min_length = 1, max_length = 4000)]
    q: String,
}

/// The saved filters of the caller's tenant.
#[derive(Debug, Serialize, ToSchema)]
pub struct FilterList {
    /// Sorted by name.
    filters: Vec<SavedFilter>,
}

/// Lists the saved filters of the run list. All API keys of a tenant share them.
#[utoipa::path(get, path = "/api/v1/filters", tag = "runs", responses((status = 200, body = FilterList)))]
pub async fn list(State(app): State<App>, caller: Caller) -> Result<axum::Json<FilterList>, ApiError> {
    Ok(axum::Json(FilterList { filters: app.store()?.saved_filters(caller.tenant.as_ref()).await? }))
}

/// Saves a filter of the run list under a name. A tenant can have 50 filters.
#[utoipa::path(post, path = "/api/v1/filters", tag = "runs", request_body = FilterRequest, responses(
    (status = 201, body = SavedFilter),
    (status = 400, body = Problem, description = "The name or the filter is invalid"),
    (status = 409, body = Problem, description = "The tenant has 50 filters")))]
pub async fn save(
    State(app): State<App>,
    caller: Caller,
    Json(request): Json<FilterRequest>,
) -> Result<(StatusCode, axum::Json<SavedFilter>), ApiError> {
    let name = parse("name", &request.name, MAX_NAME_CHARS)?;
    let q = parse("q", &request.q, MAX_FILTER_CHARS)?;
    let saved = app.store()?.save_filter(caller.tenant.as_ref(), name, q, app.now()).await?;
    let saved = saved.ok_or_else(|| {
        ApiError::conflict(format!("there are {MAX_SAVED_FILTERS} saved filters already; remove one of them first"))
    })?;
    Ok((StatusCode::CREATED, axum::Json(saved)))
}

/// Removes a saved filter.
#[utoipa::path(delete, path = "/api/v1/filters/{name}", tag = "runs",
    params(("name" = String, Path, description = "Name of the filter")), responses(
    (status = 204), (status = 404, body = Problem)))]
pub async fn remove(State(app): State<App>, caller: Caller, Path(name): Path<String>) -> Result<StatusCode, ApiError> {
    if app.store()?.remove_filter(caller.tenant.as_ref(), &name).await? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(ApiError::not_found("filter", name))
    }
}

/// Checks a text and removes the spaces around it.
fn parse<'a>(field: &str, text: &'a str, max_chars: usize) -> Result<&'a str, ApiError> {
    let text = text.trim();
    let chars = text.chars().count();
    if !(1..=max_chars).contains(&chars) || text.contains(char::is_control) {
        let detail = format!(
            "`{field}` must have 1 to {max_chars} characters without control characters, got {chars} characters"
        );
        return Err(ApiError::invalid(field, detail));
    }
    Ok(text)
}
