//! What a kept response answered, item by item.

use super::kept;
use crate::api::wire::fields::wrong;
use crate::api::{ApiError, App, Caller, OpenAiError};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;

/// Most items of a page, as with OpenAI.
const MOST: usize = 100;
const USUAL: usize = 20;

/// Which of the items.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Page {
    /// How many, 1 … 100; 20 when absent.
    limit: Option<usize>,
    /// `desc` begins with the newest, as when absent; `asc` with the oldest.
    order: Option<String>,
    /// The id of the item behind which the page begins.
    after: Option<String>,
}

/// What a kept response answered, the conversation before its input included.
#[utoipa::path(get, path = "/v1/responses/{response_id}/input_items", tag = "openai",
    params(("response_id" = String, Path, description = "As the response's `id` says"), Page),
    responses((status = 200, description = "`{object: \"list\", data, first_id, last_id, has_more}`"),
              (status = 404, description = "It is not kept")))]
pub(super) async fn input_items(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    Path(id): Path<String>,
    page: Result<Query<Page>, QueryRejection>,
) -> Result<Json<Value>, OpenAiError> {
    let Query(page) = page?;
    let owner = kept::owner(caller.as_deref());
    let response = kept::get(&app, &id, owner.as_deref()).await?;
    let items = kept::conversation(&app, &id, owner.as_deref()).await?;
    Ok(Json(page.of(&response, items)?))
}

impl Page {
    fn of(&self, response: &Value, mut items: Vec<Value>) -> Result<Value, ApiError> {
        let answered = items.len().saturating_sub(response["output"].as_array().map_or(0, Vec::len));
        items.truncate(answered);
        let run = response["id"].as_str().unwrap_or_default().trim_start_matches("resp_");
        for (index, item) in items.iter_mut().enumerate() {
            complete(item, &format!("{run}_input_{index}"));
        }
        match self.order.as_deref() {
            None | Some("desc") => items.reverse(),
            Some("asc") => {}
            Some(other) => return Err(wrong("order", "\"asc\" or \"desc\"", &other.into())),
        }
        if let Some(after) = &self.after {
            let at = items.iter().position(|item| item["id"] == after.as_str());
            let at = at.ok_or_else(|| ApiError::invalid("after", format!("after: there is no item '{after}'")))?;
            items.drain(..=at);
        }
        let limit = self.limit.unwrap_or(USUAL);
        if !(1..=MOST).contains(&limit) {
            return Err(wrong("limit", &format!("a whole number between 1 and {MOST}"), &limit.into()));
        }
        let more = items.len() > limit;
        items.truncate(limit);
        let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
        Ok(json!({ "object": "list", "first_id": id(items.first()), "last_id": id(items.last()), "has_more": more,
                   "data": items }))
    }
}

/// Gives an item what clients leave out and OpenAI puts in.
fn complete(item: &mut Value, id: &str) {
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
