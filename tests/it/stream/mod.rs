//! The streaming protocol: `WS /generate` and `POST /v1/generate`, with a real client on the real program.

mod client;
mod contract;
mod control;
mod examples;
mod hostile;
mod limits;
mod rest;
mod resume;

pub use client::Client;
use serde_json::{Value, json};

/// Returns a run that does not end by itself and whose messages soon fill every buffer: a client that stops reading
/// pauses it.
pub fn endless() -> Value {
    json!({"type": "config", "prompt": "Once upon a time",
           "parameters": {"max_tokens": 3900, "temperature": 1.0, "seed": 7, "ignore_eos": true},
           "options": {"include_token_ids": true}})
}

/// Returns the text of a client that applies every message.
fn followed(messages: &[Value]) -> String {
    let mut text = String::new();
    for message in messages {
        match message["type"].as_str() {
            Some("token") => text.push_str(message["token"].as_str().unwrap()),
            Some("backtrack") => {
                let gone = message["removed_text"].as_str().unwrap();
                assert!(text.ends_with(gone), "{text:?} does not end with {gone:?}");
                assert_eq!(gone.chars().count(), message["removed_characters"].as_u64().unwrap() as usize);
                text.truncate(text.len() - gone.len());
            }
            _ => {}
        }
    }
    text
}

pub fn with_type<'m>(messages: &'m [Value], kind: &'m str) -> impl Iterator<Item = &'m Value> {
    messages.iter().filter(move |message| message["type"] == kind)
}
