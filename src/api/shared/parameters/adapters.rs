//! Adapters of a request: LoRA adapters in llama-server's format, `"lora": [{"id": 0, "scale": 0.5}]`, and control vectors
//! in `steering`. Adapters that a list does not name are not applied.

use super::steering::parse_steering;
use crate::api::shared::fields::{Fields, abbreviate, integer, invalid_value};
use crate::model::llama::{AdapterSet, Adapters, ScaledAdapter};
use crate::server::ApiError;
use serde_json::Value;

/// Expected value of a list of adapters, for errors.
pub(crate) const ADAPTER_LIST: &str = "a list of {\"id\": …, \"scale\": …}";

/// Parses a request's fields `lora` and `steering`; `default` applies in place of an absent field.
pub(crate) fn requested_adapters(
    fields: Fields<'_>,
    known: &Adapters,
    default: AdapterSet,
) -> Result<AdapterSet, ApiError> {
    let mut set = default;
    if let Some(value) = fields.get("lora") {
        let list = value.as_array().ok_or_else(|| invalid_value("lora", ADAPTER_LIST, value))?;
        set = set.with_loras_of(&parse_loras(list, "lora", known)?);
    }
    if let Some(value) = fields.get("steering") {
        set = set.with_steering(parse_steering(value, known.control_vectors())?);
    }
    Ok(set)
}

/// Parses a list of LoRA adapters and scales. `name` is the list's name in errors.
pub(crate) fn parse_loras(list: &[Value], name: &str, known: &Adapters) -> Result<AdapterSet, ApiError> {
    let parse_entry = |(index, entry): (usize, &Value)| {
        let at = format!("{name}[{index}]");
        let object =
            entry.as_object().ok_or_else(|| invalid_value(&at, "an object {\"id\": …, \"scale\": …}", entry))?;
        let value = |key: &str| object.get(key).unwrap_or(&Value::Null);
        let id = integer(value("id")).and_then(|id| usize::try_from(id).ok());
        let id = id.filter(|&id| id < known.loras().len()).ok_or_else(|| unknown_adapter(&at, value("id"), known))?;
        let scale = value("scale").as_f64().map(|scale| scale as f32).filter(|scale| scale.is_finite());
        let scale = scale.ok_or_else(|| invalid_value(&format!("{at}.scale"), "a number", value("scale")))?;
        Ok(ScaledAdapter { id, scale })
    };
    let set: Result<Vec<ScaledAdapter>, ApiError> = list.iter().enumerate().map(parse_entry).collect();
    Ok(AdapterSet::new(set?))
}

fn unknown_adapter(at: &str, id: &Value, known: &Adapters) -> ApiError {
    let id = abbreviate(id);
    let detail = match known.loras().len() {
        0 => format!("`{at}.id` names the adapter {id}, but the server has no LoRA adapters; start it with --lora"),
        count => format!("`{at}.id` must be the id of an adapter, from 0 to {}, got {id}", count - 1),
    };
    ApiError::invalid(at, detail)
}
