//! The input items of a stored response.

use super::response::InputItemsResponse;
use super::stored;
use crate::api::shared::error::OpenAiError;
use crate::api::shared::fields::invalid_value;
use crate::events::Scope;
use crate::server::extract::{Path, Query};
use crate::server::{ApiError, App};
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;

/// Maximum items per page, as in OpenAI's API.
const MAX_LIMIT: usize = 100;
const DEFAULT_LIMIT: usize = 20;

/// Query parameters of the item list.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ListInputItemsParams {
    /// Maximum number of items, 1 to 100; default 20.
    limit: Option<usize>,
    /// Sort order: `desc` (newest first, the default) or `asc`.
    order: Option<String>,
    /// Id of the item after which the page starts.
    after: Option<String>,
}

/// Lists the input items of a stored response, including the earlier conversation.
#[utoipa::path(get, path = "/v1/responses/{response_id}/input_items", tag = "openai",
    params(("response_id" = String, Path, description = "Id of the response"), ListInputItemsParams),
    responses((status = 200, body = InputItemsResponse),
              (status = 404, description = "No stored response has this id")))]
pub(super) async fn input_items(
    State(app): State<App>,
    scope: Scope,
    id: Result<Path<String>, ApiError>,
    page: Result<Query<ListInputItemsParams>, ApiError>,
) -> Result<Json<InputItemsResponse>, OpenAiError> {
    let (Path(id), Query(page)) = (id?, page?);
    let response = stored::get(&app, &scope, &id).await?;
    let items = stored::conversation(&app, &scope, &id).await?;
    Ok(Json(page.select(&response, items)?))
}

impl ListInputItemsParams {
    fn select(&self, response: &Value, mut items: Vec<Value>) -> Result<InputItemsResponse, ApiError> {
        let input_count = items.len().saturating_sub(response["output"].as_array().map_or(0, Vec::len));
        items.truncate(input_count);
        let run = response["id"].as_str().unwrap_or_default().trim_start_matches("resp_");
        for (index, item) in items.iter_mut().enumerate() {
            add_missing_fields(item, &format!("{run}_input_{index}"));
        }
        match self.order.as_deref() {
            None | Some("desc") => items.reverse(),
            Some("asc") => {}
            Some(other) => return Err(invalid_value("order", "\"asc\" or \"desc\"", &other.into())),
        }
        if let Some(after) = &self.after {
            let at = items.iter().position(|item| item["id"] == after.as_str());
            let at = at.ok_or_else(|| ApiError::invalid("after", format!("`after`: no item has the id '{after}'")))?;
            items.drain(..=at);
        }
        let limit = self.limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_LIMIT).contains(&limit) {
            return Err(invalid_value("limit", &format!("an integer between 1 and {MAX_LIMIT}"), &limit.into()));
        }
        let has_more = items.len() > limit;
        items.truncate(limit);
        let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
        let (first_id, last_id) = (id(items.first()), id(items.last()));
        Ok(InputItemsResponse { object: "list", first_id, last_id, has_more, data: items })
    }
}

/// Adds the fields that clients may omit and OpenAI's API returns. Clients choose the fields of an item, so it has no
/// type.
fn add_missing_fields(item: &mut Value, id: &str) {
    let kind = if item["role"] == "assistant" { "output_text" } else { "input_text" };
    if let Some(text) = item["content"].as_str() {
        item["content"] = json!([{ "type": kind, "text": text }]);
    }
    if let Value::Object(fields) = item {
        fields.entry("type").or_insert_with(|| "message".into());
        fields.entry("id").or_insert_with(|| format!("msg_{id}").into());
        fields.entry("status").or_insert_with(|| "completed".into());
    }
}
