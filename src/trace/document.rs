//! The `/ingest` document: parsing with JSON paths in every error, and writing.
//!
//! The one place that knows the spelling of the wire: a whole run as one [`Document`], and single [`Item`]s as the
//! lines of streams and fixtures. Parsing is strict about types and links and lenient about everything else: unknown
//! fields are ignored, `null` counts as absent, absent arrays as empty. `details`, `top_tokens` and `tool_calls` stay
//! byte for byte as they were given.

use crate::events::{Action, Event, Item, ModCall, ModLog};
use chrono::{DateTime, Utc};

/// A whole run, as `/ingest` takes it.
#[derive(Debug, Clone)]
pub struct Document {
    /// Who asked for what, when.
    pub request: RequestMeta,
    /// In order: `events[i].sequence_order == i`, whatever order the payload had.
    pub events: Vec<Event>,
    /// In the payload's order; `mod_call_sequence` is an index into this list.
    pub mod_calls: Vec<ModCall>,
    /// In the payload's order.
    pub mod_logs: Vec<ModLog>,
    /// In the payload's order.
    pub actions: Vec<Action>,
}

/// The document's `request` object.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestMeta {
    /// Unique among all runs; never empty.
    pub request_id: String,
    /// When the request came; `None` means "when it was ingested".
    pub created_at: Option<DateTime<Utc>>,
    /// When it was complete.
    pub completed_at: Option<DateTime<Utc>>,
    /// The model's name.
    pub model: Option<String>,
    /// Whatever the engine identifies its user by.
    pub user_api_key: Option<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<i32>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Code or name of the mod in use.
    pub mod_text: Option<String>,
}

/// What is wrong with a document, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: expected {expected}, found {found}")]
pub struct DocumentError {
    /// JSON path of the value, e.g. `$.events[3].sampled_token`.
    pub path: String,
    /// What would have been right.
    pub expected: String,
    /// What was there, shortened.
    pub found: String,
}

impl Document {
    /// Parses and checks a payload.
    ///
    /// # Errors
    /// The first thing that is wrong: not JSON, a field of the wrong type, a value out of range, a broken link.
    pub fn parse(_payload: &[u8]) -> Result<Self, DocumentError> {
        todo!()
    }

    /// The document as JSON, in the shape that [`Document::parse`] takes.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        todo!()
    }

    /// SHA-256 over a canonical form: equal for payloads that differ only in white space, in the order of our keys, in
    /// unknown fields or in how they spell a time, different for everything else.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        todo!()
    }

    /// The run as one list: each event, then for each of its mod calls the call, its logs, its actions.
    #[must_use]
    pub fn items(&self) -> Vec<Item> {
        todo!()
    }
}

/// Numbers the items of one run as their JSON form wants it: calls, logs and actions each count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Numbering {
    /// Mod calls so far.
    pub mod_calls: u32,
    /// Log lines so far.
    pub mod_logs: u32,
    /// Actions so far.
    pub actions: u32,
}

/// The item as one line of JSON without its newline, `kind` first, absent fields left out; `None` for attention, which
/// does not travel as JSON. `numbering` is that of the items before it, and is moved on.
pub fn item_to_json(_item: &Item, _numbering: &mut Numbering) -> Option<String> {
    todo!()
}

/// Reads what [`item_to_json`] wrote.
///
/// # Errors
/// As [`Document::parse`].
pub fn item_from_json(_line: &[u8]) -> Result<Item, DocumentError> {
    todo!()
}
