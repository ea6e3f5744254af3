//! Names of Ollama's fields in errors.

use crate::api::shared::ClientNames;
use serde_json::{Map, Value};

/// Returns the client's names of the fields that are converted to those of a chat completion.
pub(super) fn client_names(body: &Value) -> ClientNames {
    let mut names = ClientNames::default();
    for (name, client_name) in
        [("response_format", "format"), ("enable_thinking", "think"), ("reasoning_effort", "think")]
    {
        if body.get(client_name).is_some() {
            names.add(name, client_name);
        }
    }
    for option in body["options"].as_object().into_iter().flat_map(Map::keys) {
        let name = match option.as_str() {
            "num_predict" => "max_tokens",
            "num_keep" => "n_keep",
            name => name,
        };
        // A field next to the options overrides the option of its name.
        if body.get(name).is_none() {
            names.add(name, format!("options.{option}"));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::ApiError;
    use serde_json::json;

    #[test]
    fn options_and_converted_fields_are_named() {
        let body = json!({"think": "low", "top_p": 5, "options": {"num_predict": 3, "top_k": "x", "top_p": 2}});
        for (name, expected) in [
            ("max_tokens", "options.num_predict"),
            ("top_k", "options.top_k"),
            ("top_p", "top_p"),
            ("reasoning_effort", "think"),
            ("response_format", "response_format"),
        ] {
            assert_eq!(client_names(&body).restore(ApiError::invalid(name, "")).pointer(), Some(expected));
        }
    }
}
