//! The field `attention`: the attention that a run records.

use crate::api::shared::fields::{Fields, integer, invalid_value};
use crate::events::StoredHeads;
use crate::server::ApiError;
use serde_json::Value;

const EXPECTED: &str = "true, false, {\"heads\": \"all\"} or {\"heads\": [[layer, head], …]}";
/// Maximum heads in a list.
const MAX_LISTED: usize = 4096;

/// Parses the field: true if attention is recorded, and the heads whose rows are stored.
pub(crate) fn recorded_attention(fields: Fields<'_>) -> Result<(bool, StoredHeads), ApiError> {
    let Some(value) = fields.get("attention") else { return Ok((false, StoredHeads::None)) };
    match value {
        Value::Bool(recorded) => Ok((*recorded, StoredHeads::None)),
        Value::Object(object) if object.len() == 1 && object.contains_key("heads") => {
            Ok((true, stored_heads(&object["heads"], "attention.heads")?))
        }
        other => Err(invalid_value("attention", EXPECTED, other)),
    }
}

/// Parses a selection of heads, as in requests and recordings; `null` selects none.
pub(crate) fn stored_heads(value: &Value, field: &str) -> Result<StoredHeads, ApiError> {
    let invalid = || invalid_value(field, "\"all\" or a list of 1 to 4096 pairs [layer, head]", value);
    let list = match value {
        Value::Null => return Ok(StoredHeads::None),
        Value::String(all) if all == "all" => return Ok(StoredHeads::All),
        Value::Array(list) if (1..=MAX_LISTED).contains(&list.len()) => list,
        _ => return Err(invalid()),
    };
    let number = |value: &Value| integer(value).and_then(|number| u16::try_from(number).ok());
    let pair = |value: &Value| match value.as_array().map(Vec::as_slice) {
        Some([layer, head]) => Some((number(layer)?, number(head)?)),
        _ => None,
    };
    let mut heads = list.iter().map(pair).collect::<Option<Vec<_>>>().ok_or_else(invalid)?;
    heads.sort_unstable();
    heads.dedup();
    Ok(StoredHeads::Listed(heads.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parsed(value: &Value) -> Result<(bool, StoredHeads), String> {
        let body = json!({ "attention": value });
        recorded_attention(Fields::new(&body).unwrap()).map_err(|error| error.problem().detail)
    }

    #[test]
    fn attention_is_a_flag_or_a_selection_of_heads() {
        assert_eq!(parsed(&json!(null)), Ok((false, StoredHeads::None)));
        assert_eq!(parsed(&json!(true)), Ok((true, StoredHeads::None)));
        assert_eq!(parsed(&json!({"heads": "all"})), Ok((true, StoredHeads::All)));
        let listed = StoredHeads::Listed([(0, 3), (2, 1)].into());
        assert_eq!(parsed(&json!({"heads": [[2, 1], [0, 3], [2, 1.0]]})), Ok((true, listed.clone())));
        assert_eq!(stored_heads(&json!(listed), "x").unwrap(), listed, "a recorded selection is read again");
        for wrong in
            [json!("all"), json!({"heads": []}), json!({"heads": [[1]]}), json!({"heads": [[1, -1]]}), json!({})]
        {
            let error = parsed(&wrong).unwrap_err();
            assert!(error.contains("[layer, head]"), "{wrong}: {error}");
        }
    }
}
