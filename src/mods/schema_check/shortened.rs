//! Values and lists in errors, cut after a number of characters: clients choose their sizes.

use serde_json::Value;

/// Maximum characters of a value in an error.
const MAX_VALUE_CHARS: usize = 40;
/// Maximum characters of the expected values in an error.
const MAX_EXPECTED_CHARS: usize = 1000;

/// Returns the beginning of a value as JSON.
pub fn excerpt(value: &Value) -> String {
    beginning(value, MAX_VALUE_CHARS)
}

/// Returns the beginning of a value that a schema expects.
pub fn expected_value(value: &Value) -> String {
    beginning(value, MAX_EXPECTED_CHARS)
}

/// Returns the first characters of a value as JSON, without reading the others.
fn beginning(value: &Value, max_chars: usize) -> String {
    let mut json = String::new();
    write_beginning(value, max_chars, &mut json);
    cut(json, max_chars)
}

fn write_beginning(value: &Value, max_chars: usize, json: &mut String) {
    let is_full = |json: &String| json.len() > 4 * max_chars;
    match value {
        Value::String(text) => write_text(text, max_chars, json),
        Value::Array(items) => {
            json.push('[');
            for (index, item) in items.iter().enumerate() {
                if is_full(json) {
                    break;
                }
                json.push_str(if index == 0 { "" } else { "," });
                write_beginning(item, max_chars, json);
            }
            json.push(']');
        }
        Value::Object(members) => {
            json.push('{');
            for (index, (name, member)) in members.iter().enumerate() {
                if is_full(json) {
                    break;
                }
                json.push_str(if index == 0 { "" } else { "," });
                write_text(name, max_chars, json);
                json.push(':');
                write_beginning(member, max_chars, json);
            }
            json.push('}');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => json.push_str(&value.to_string()),
    }
}

fn write_text(text: &str, max_chars: usize, json: &mut String) {
    json.push_str(&Value::from(text.chars().take(max_chars).collect::<String>()).to_string());
}

/// Joins the beginnings of texts up to [`MAX_EXPECTED_CHARS`] characters.
pub fn limited<T: AsRef<str>>(texts: impl IntoIterator<Item = T>, separator: &str) -> String {
    let mut joined = String::new();
    for text in texts {
        joined.push_str(if joined.is_empty() { "" } else { separator });
        joined.extend(text.as_ref().chars().take(MAX_EXPECTED_CHARS + 1));
        if joined.len() > 4 * MAX_EXPECTED_CHARS {
            break;
        }
    }
    cut(joined, MAX_EXPECTED_CHARS)
}

/// Cuts a text after a number of characters.
fn cut(mut text: String, max_chars: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(max_chars) {
        text.truncate(end);
        text.push('…');
    }
    text
}
