//! References to items of stored responses, which clients send in place of the items: `{type: "item_reference", id}`.

use super::stored;
use crate::api::shared::fields::required_text;
use crate::events::Scope;
use crate::server::{ApiError, App};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Replaces the references in an input with the items. An item is searched in the `earlier` conversation and in the
/// response that its id names.
///
/// # Errors
/// 400 naming an item that is unknown to the caller, or referenced twice.
pub(super) async fn resolve(
    app: &App,
    scope: &Scope,
    earlier: &[Value],
    input: Vec<Value>,
) -> Result<Vec<Value>, ApiError> {
    let mut outputs: HashMap<String, Vec<Value>> = HashMap::new();
    // A second copy of an item would cost memory without a limit, and no client needs it.
    let mut resolved = HashSet::new();
    let mut items = Vec::with_capacity(input.len());
    for (index, item) in input.into_iter().enumerate() {
        if !is_reference(&item) {
            items.push(item);
            continue;
        }
        let at = format!("input[{index}]");
        let id = required_text(&item, "id", &at)?;
        let has_id = |other: &&Value| other["id"] == id.as_str();
        let mut found = earlier.iter().find(has_id).cloned();
        if found.is_none() {
            let response = response_of(&id);
            if !outputs.contains_key(&response) {
                outputs.insert(response.clone(), stored::output(app, scope, &response).await?);
            }
            let output = outputs.get(&response).map(Vec::as_slice).unwrap_or_default();
            found = output.iter().find(has_id).cloned();
            if found.is_none() && !output.is_empty() && is_part_of_other(&id) {
                continue;
            }
        }
        let invalid = |detail: String| ApiError::invalid(format!("{at}.id"), format!("`{at}.id`: {detail}"));
        items.push(found.ok_or_else(|| {
            invalid(format!(
                "unknown item '{id}'; responses are stored unless \"store\" is false, and deleted with the runs of the \
                 same day"
            ))
        })?);
        if !resolved.insert(id.clone()) {
            return Err(invalid(format!("the item '{id}' is referenced twice")));
        }
    }
    Ok(items)
}

/// Returns true for a streamed item whose text is in another item of the complete response, or was retracted: the
/// response has at most one item of reasoning and one message.
fn is_part_of_other(id: &str) -> bool {
    id.starts_with("msg_") || id.starts_with("rs_")
}

/// Returns true for a reference. The type may be absent, but a message has a role.
fn is_reference(item: &Value) -> bool {
    match item["type"].as_str() {
        Some(kind) => kind == "item_reference",
        None => item["role"].is_null() && item["id"].is_string(),
    }
}

/// Returns the id of the response that an item id names: `msg_RUN_INDEX` is an item of `resp_RUN`.
fn response_of(item: &str) -> String {
    format!("resp_{}", item.split('_').nth(1).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::{is_reference, response_of};
    use serde_json::json;

    #[test]
    fn references_are_recognized() {
        for (item, expected) in [
            (json!({"type": "item_reference", "id": "msg_1_0"}), true),
            (json!({"id": "msg_1_0"}), true),
            (json!({"id": "msg_1_0", "role": "user", "content": "a"}), false),
            (json!({"type": "message", "id": "msg_1_0", "role": "user", "content": "a"}), false),
            (json!({"content": "a"}), false),
        ] {
            assert_eq!(is_reference(&item), expected, "{item}");
        }
        assert_eq!([response_of("msg_1f_0"), response_of("x")], ["resp_1f", "resp_"]);
    }
}
