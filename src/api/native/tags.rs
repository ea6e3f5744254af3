//! `/api/v1/runs/tags`: tags of runs.

use super::find_runs;
use crate::events::Scope;
use crate::server::extract::Json;
use crate::server::{ApiError, App, Problem};
use crate::store::{MAX_TAGS, TaggedRun};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum length of a tag in characters.
const MAX_TAG_CHARS: usize = 64;

/// Tags to add to runs and to remove from them.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TagChange {
    /// `run_id` or `request_id` of each run, 1 to 100.
    #[schema(min_items = 1, max_items = 100)]
    runs: Vec<String>,
    /// Tags to add, of 1 to 64 characters. A run can have 32 tags.
    #[serde(default)]
    #[schema(max_items = 32)]
    add: Vec<String>,
    /// Tags to remove; tags that a run does not have are ignored.
    #[serde(default)]
    #[schema(max_items = 32)]
    remove: Vec<String>,
}

/// The changed runs.
#[derive(Debug, Serialize, ToSchema)]
pub struct TagList {
    /// The runs with their tags, oldest first.
    runs: Vec<TaggedRun>,
}

/// Adds tags to runs and removes tags from them. All runs are changed, or none after an error. The filter `tag:TAG`
/// finds runs with a tag.
#[utoipa::path(post, path = "/api/v1/runs/tags", tag = "runs", request_body = TagChange, responses(
    (status = 200, body = TagList),
    (status = 400, body = Problem, description = "A tag is invalid, or a run would have more than 32"),
    (status = 404, body = Problem, description = "Unknown run")))]
pub async fn change(
    State(app): State<App>,
    scope: Scope,
    Json(change): Json<TagChange>,
) -> Result<axum::Json<TagList>, ApiError> {
    let (add, remove) = (parse_tags("add", &change.add)?, parse_tags("remove", &change.remove)?);
    let runs = find_runs(&app, &scope, &change.runs).await?;
    Ok(axum::Json(TagList { runs: app.store()?.change_tags(&scope, &runs, &add, &remove).await? }))
}

/// Checks tags, and removes duplicates and the spaces around them.
fn parse_tags(field: &str, tags: &[String]) -> Result<Vec<String>, ApiError> {
    if tags.len() > MAX_TAGS {
        let detail = format!("`{field}` must have at most {MAX_TAGS} tags, got {}", tags.len());
        return Err(ApiError::invalid(field, detail));
    }
    let mut parsed: Vec<String> = Vec::new();
    for tag in tags {
        let tag = tag.trim();
        if !(1..=MAX_TAG_CHARS).contains(&tag.chars().count()) || tag.contains(|c: char| c.is_control() || c == '"') {
            let detail = format!(
                "`{field}` must have tags of 1 to {MAX_TAG_CHARS} characters without control characters and quotation marks, got {:?}",
                tag.chars().take(MAX_TAG_CHARS).collect::<String>()
            );
            return Err(ApiError::invalid(field, detail));
        }
        if !parsed.iter().any(|other| other == tag) {
            parsed.push(tag.to_owned());
        }
    }
    Ok(parsed)
}
