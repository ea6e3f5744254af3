//! Tool calls in OpenAI's shape, whatever shape a mod gave them.

use serde_json::{Value, json};

/// A list of `{id, type, function: {name, arguments}}` with `arguments` as JSON text. `run` makes ids unique.
///
/// Takes one call or a list, as they are, under `tool_calls`, or as bare `{name, arguments}`.
pub(super) fn normalised(payload: &Value, run: &str) -> Vec<Value> {
    let payload = payload.get("tool_calls").unwrap_or(payload);
    let calls = payload.as_array().map_or(std::slice::from_ref(payload), Vec::as_slice);
    calls.iter().enumerate().map(|(index, call)| one(call, index, run)).collect()
}

fn one(call: &Value, index: usize, run: &str) -> Value {
    let function = call.get("function").filter(|function| function.is_object()).unwrap_or(call);
    let arguments = match function.get("arguments").or_else(|| function.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    let id = match call.get("id").and_then(Value::as_str) {
        Some(id) if !id.is_empty() => id.to_owned(),
        _ => format!("call_{}_{index}", run.replace('-', "")),
    };
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

/// The deltas that stream these calls: of each call first its name, then its arguments.
pub(super) fn deltas(calls: &[Value]) -> impl Iterator<Item = Value> {
    calls.iter().enumerate().flat_map(|(index, call)| {
        let function = &call["function"];
        [
            json!({ "tool_calls": [{ "index": index, "id": call["id"], "type": "function",
                                     "function": { "name": function["name"], "arguments": "" } }] }),
            json!({ "tool_calls": [{ "index": index, "function": { "arguments": function["arguments"] } }] }),
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::{deltas, normalised};
    use serde_json::json;

    #[test]
    fn every_shape_becomes_openais() {
        let expected = json!([{ "id": "call_r_0", "type": "function",
                                "function": { "name": "f", "arguments": "{\"a\":1}" } }]);
        let expected = expected.as_array().unwrap();
        for payload in [
            json!({"name": "f", "arguments": {"a": 1}}),
            json!([{"function": {"name": "f", "arguments": "{\"a\":1}"}}]),
            json!({"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}),
        ] {
            assert_eq!(&normalised(&payload, "r"), expected);
        }
        let kept = json!({"id": "mine", "function": {"name": "f"}});
        assert_eq!(normalised(&kept, "r")[0]["id"], "mine");
    }

    #[test]
    fn a_streamed_call_is_its_name_then_its_arguments() {
        let calls = normalised(&json!({"name": "f", "arguments": {}}), "r");
        let deltas: Vec<_> = deltas(&calls).collect();
        assert_eq!(deltas[0]["tool_calls"][0]["function"]["name"], "f");
        assert_eq!(deltas[1], json!({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}));
    }
}
