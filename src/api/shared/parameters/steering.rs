//! Control vectors of a request: `"steering": [{"name": "calm", "scale": 1.5, "layers": [10, 20]}]`.

use crate::api::shared::fields::{abbreviate, integer, invalid_value};
use crate::model::llama::{ControlVectorList, ScaledVector};
use crate::server::ApiError;
use serde_json::Value;

/// Maximum control vectors of a run.
const MAX_VECTORS: usize = 64;

/// Maximum absolute value of a scale.
const MAX_SCALE: f32 = 1000.0;

/// Fields of a control vector.
const KNOWN_FIELDS: [&str; 4] = ["name", "scale", "layers", "fingerprint"];

/// Parses the field `steering`.
pub(crate) fn parse_steering(value: &Value, known: &ControlVectorList) -> Result<Vec<ScaledVector>, ApiError> {
    const EXPECTED: &str = "a list of {\"name\": …, \"scale\": …, \"layers\": [first, last]}";
    let list = value.as_array().ok_or_else(|| invalid_value("steering", EXPECTED, value))?;
    if list.len() > MAX_VECTORS {
        let detail = format!("`steering` must have at most {MAX_VECTORS} control vectors, got {}", list.len());
        return Err(ApiError::invalid("steering", detail));
    }
    list.iter().enumerate().map(|(index, entry)| parse_vector(entry, &format!("steering[{index}]"), known)).collect()
}

/// Parses a control vector at the path `at`.
fn parse_vector(entry: &Value, at: &str, known: &ControlVectorList) -> Result<ScaledVector, ApiError> {
    let object = entry.as_object().ok_or_else(|| invalid_value(at, "an object {\"name\": …, \"scale\": …}", entry))?;
    if let Some(name) = object.keys().find(|name| !KNOWN_FIELDS.contains(&name.as_str())) {
        let detail = format!("`{at}`: unknown field '{name}'; known fields: {}", KNOWN_FIELDS.join(", "));
        return Err(ApiError::invalid(format!("{at}.{name}"), detail));
    }
    let value = |field: &str| object.get(field).filter(|value| !value.is_null());
    let invalid = |field: &str, expected: &str| {
        invalid_value(&format!("{at}.{field}"), expected, object.get(field).unwrap_or(&Value::Null))
    };
    let name = value("name").and_then(Value::as_str).ok_or_else(|| invalid("name", "the name of a control vector"))?;
    let id = known.as_slice().iter().position(|vector| *vector.name == *name);
    let id = id.ok_or_else(|| unknown_vector(at, name, known))?;
    let scale = value("scale").map_or(Some(1.0), |scale| scale.as_f64().map(|scale| scale as f32));
    let scale = scale
        .filter(|scale| scale.abs() <= MAX_SCALE)
        .ok_or_else(|| invalid("scale", &format!("a number between -{MAX_SCALE} and {MAX_SCALE}")))?;
    let layers = match value("layers") {
        None => known.default_layers(),
        Some(layers) => parse_layers(layers, known.layers()).ok_or_else(|| {
            let last = known.layers().saturating_sub(1);
            invalid("layers", &format!("[first, last] with 0 <= first <= last <= {last}"))
        })?,
    };
    let vector = known.scaled(id, scale, layers).ok_or_else(|| unknown_vector(at, name, known))?;
    check_fingerprint(&vector, value("fingerprint"), &format!("{at}.fingerprint"))?;
    Ok(vector)
}

fn parse_layers(layers: &Value, count: u32) -> Option<[u32; 2]> {
    let [first, last] = layers.as_array()?.as_slice() else { return None };
    let layer = |value| integer(value).and_then(|layer| u32::try_from(layer).ok());
    let (first, last) = (layer(first)?, layer(last)?);
    (first <= last && last < count).then_some([first, last])
}

/// Checks that the vector has the directions of the recorded one.
fn check_fingerprint(vector: &ScaledVector, expected: Option<&Value>, at: &str) -> Result<(), ApiError> {
    let Some(expected) = expected else { return Ok(()) };
    let actual = format!("{:032x}", vector.fingerprint);
    if expected.as_str() == Some(actual.as_str()) {
        return Ok(());
    }
    let detail = format!(
        "the control vector '{}' differs from the expected one: its fingerprint is {actual}, expected {}",
        vector.name,
        abbreviate(expected)
    );
    Err(ApiError::conflict(detail).at(at))
}

fn unknown_vector(at: &str, name: &str, known: &ControlVectorList) -> ApiError {
    let name = abbreviate(&name.into());
    let names: Vec<&str> = known.as_slice().iter().map(|vector| &*vector.name).collect();
    let detail = if names.is_empty() {
        format!("`{at}.name` is {name}, but the model has no control vectors; start the server with --control-vector")
    } else {
        format!("`{at}.name` must be the name of a control vector, got {name}; known names: {}", names.join(", "))
    };
    ApiError::invalid(format!("{at}.name"), detail)
}
