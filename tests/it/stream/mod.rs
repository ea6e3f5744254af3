//! The streaming protocol: `WS /generate` and `POST /v1/generate`, with a real client on the real program.

mod client;
mod contract;
mod control;
mod examples;
mod invalid_input;
mod limits;
mod modify;
mod rest;
mod resume;

pub use client::Client;
use serde_json::{Value, json};

/// Returns the configuration of a run that lasts until it is stopped. Its messages soon fill every buffer, so that a
/// client that stops reading pauses it.
pub fn endless() -> Value {
    json!({"type": "config", "prompt": "Once upon a time",
           "parameters": {"max_tokens": 3900, "temperature": 1.0, "seed": 7, "ignore_eos": true},
           "options": {"include_token_ids": true}})
}

/// Returns the text that results from all tokens and backtracks.
fn assemble_text(messages: &[Value]) -> String {
    let mut text = String::new();
    for message in messages {
        match message["type"].as_str() {
            Some("token") => text.push_str(message["token"].as_str().unwrap()),
            Some("backtrack") => {
                let removed = message["removed_text"].as_str().unwrap();
                assert!(text.ends_with(removed), "{text:?} does not end with {removed:?}");
                assert_eq!(removed.chars().count(), message["removed_characters"].as_u64().unwrap() as usize);
                text.truncate(text.len() - removed.len());
            }
            _ => {}
        }
    }
    text
}

/// Returns the messages of a type.
pub fn with_type<'m>(messages: &'m [Value], kind: &'m str) -> impl Iterator<Item = &'m Value> {
    messages.iter().filter(move |message| message["type"] == kind)
}
