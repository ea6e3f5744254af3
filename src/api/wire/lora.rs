//! Which LoRA adapters hold, as llama-server has it: `[{"id": 0, "scale": 0.5}]`. An adapter that is not named does not
//! hold.

use super::fields::{Fields, integer, shown, wrong};
use crate::api::ApiError;
use crate::model::llama::{AdapterSet, Adapters, ScaledAdapter};
use serde_json::Value;

/// A request's `lora`.
pub(in crate::api) fn adapters(fields: Fields<'_>, known: &Adapters) -> Result<Option<AdapterSet>, ApiError> {
    fields.get("lora").map(|list| set(list, "lora", known)).transpose()
}

/// A list of adapters and scales; `name` is what errors call it.
pub(in crate::api) fn set(list: &Value, name: &str, known: &Adapters) -> Result<AdapterSet, ApiError> {
    const EXPECTED: &str = "a list of {\"id\": …, \"scale\": …}";
    let entries = list.as_array().ok_or_else(|| wrong(name, EXPECTED, list))?;
    let weighed = |(index, entry): (usize, &Value)| {
        let at = format!("{name}[{index}]");
        let object = entry.as_object().ok_or_else(|| wrong(&at, "an object {\"id\": …, \"scale\": …}", entry))?;
        let value = |key: &str| object.get(key).unwrap_or(&Value::Null);
        let id = integer(value("id")).and_then(|id| usize::try_from(id).ok());
        let id = id.filter(|&id| id < known.list().len()).ok_or_else(|| unknown(&at, value("id"), known))?;
        let scale = value("scale").as_f64().map(|scale| scale as f32).filter(|scale| scale.is_finite());
        let scale = scale.ok_or_else(|| wrong(&format!("{at}.scale"), "a number", value("scale")))?;
        Ok(ScaledAdapter { id, scale })
    };
    let set: Result<Vec<ScaledAdapter>, ApiError> = entries.iter().enumerate().map(weighed).collect();
    Ok(AdapterSet::new(set?))
}

fn unknown(at: &str, id: &Value, known: &Adapters) -> ApiError {
    let there_are = match known.list().len() {
        0 => "this server has no LoRA adapters; start it with --lora".to_owned(),
        count => format!("there are 0 to {}", count - 1),
    };
    ApiError::invalid(at, format!("{at}.id: there is no adapter {}; {there_are}", shown(id)))
}
