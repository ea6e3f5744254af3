//! Redaction of responses: replaces the parts that differ between two runs of a test.

use super::SseReader;
use regex::Regex;
use reqwest::Response;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// Returns status, content type and body, redacted. The body is JSON, a list of server-sent events, a list of JSON
/// lines, or text.
pub async fn redacted(response: Response) -> Value {
    let status = response.status().as_u16();
    let header = response.headers().get("content-type");
    let content_type = header.map(|value| value.to_str().unwrap().to_owned());
    let mut body = if content_type.as_deref() == Some("text/event-stream") {
        SseReader::new(response).await.rest().await.into_iter().map(|event| event_json(&event)).collect()
    } else if content_type.as_deref() == Some("application/x-ndjson") {
        response.text().await.unwrap().lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect()
    } else {
        let text = response.text().await.unwrap();
        serde_json::from_str(&text).unwrap_or(Value::String(text))
    };
    redact("", &mut body);
    json!({"status": status, "content_type": content_type, "body": body})
}

fn event_json(event: &super::SseEvent) -> Value {
    let data = serde_json::from_str(&event.data).unwrap_or_else(|_| Value::String(event.data.clone()));
    if event.name.is_empty() { json!({"data": data}) } else { json!({"event": event.name, "data": data}) }
}

/// Replaces ids, times, addresses, folders, and lists of mods and models, which grow with the tests.
pub fn redact_text(text: &str) -> String {
    static PATTERNS: LazyLock<[(Regex, &str); 6]> = LazyLock::new(|| {
        [
            // Not within the hexadecimal digits of a checksum.
            (r"(^|[^0-9a-f])[0-9a-f]{8}-?[0-9a-f]{4}-?7[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}(_\d+)?", "$1[id]"),
            (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*Z", "[time]"),
            (r"127\.0\.0\.1:\d+", "[address]"),
            (r"/[\w./-]*thunder-it-\d+/\d+", "[folder]"),
            (r"known mods: [\w, -]+", "known mods: [mods]"),
            (r"known models: [\w, -]+", "known models: [models]"),
        ]
        .map(|(pattern, replacement)| (Regex::new(pattern).unwrap(), replacement))
    });
    let mut text = text.replace(env!("CARGO_MANIFEST_DIR"), "[root]");
    for (pattern, replacement) in &*PATTERNS {
        text = pattern.replace_all(&text, *replacement).into_owned();
    }
    text
}

/// Replaces ids, times, measurements and all values that depend on the cache or the release, at any depth.
fn redact(key: &str, value: &mut Value) {
    let is_measured =
        key.ends_with("_ms") || key.ends_with("_duration") || key.ends_with("_per_second") || key.contains("cache");
    let by_key = match key {
        "created" | "created_at" | "completed_at" => Some("[time]"),
        "system_fingerprint" | "version" | "release" => Some("[release]"),
        "id_slot" => Some("[slot]"),
        "digest" if *value != "" => Some("[digest]"),
        "prompt_n" | "seed" => Some("[number]"),
        _ if is_measured && !value.is_object() && !value.is_boolean() => Some("[number]"),
        _ => None,
    };
    match value {
        Value::Null => {}
        _ if by_key.is_some() => *value = by_key.into(),
        Value::Number(number) if number.is_f64() => *value = "[number]".into(),
        Value::String(text) => *text = redact_text(text),
        Value::Array(items) => items.iter_mut().for_each(|item| redact(key, item)),
        Value::Object(fields) => {
            // Anthropic counts cached tokens separately.
            if fields.contains_key("cache_read_input_tokens") {
                fields.insert("input_tokens".to_owned(), "[number]".into());
            }
            fields.iter_mut().for_each(|(key, value)| redact(key, value));
        }
        Value::Bool(_) | Value::Number(_) => {}
    }
}
