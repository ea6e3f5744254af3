//! The `/ingest` document: parsing with JSON paths in every error, and writing.
//!
//! The one place that knows the spelling of the wire: a whole run as one [`Document`], and single [`Item`]s as the
//! lines of streams and fixtures. Parsing is strict about types and links and lenient about everything else: unknown
//! fields are ignored, `null` counts as absent, absent arrays as empty. `details`, `top_tokens` and `tool_calls` stay
//! byte for byte as they were given.

mod locate;
mod raw;
mod time;
mod wire;
mod write;

pub use write::{Numbering, item_to_json};

use crate::events::{Action, Event, Item, ModCall, ModLog};
use chrono::{DateTime, Utc};
use locate::Shape;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use wire::Storable;

/// Longest request id; PostgreSQL cannot index texts much longer.
const MOST_REQUEST_ID_BYTES: usize = 1024;

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
    pub fn parse(payload: &[u8]) -> Result<Self, DocumentError> {
        let mut document: Self = read::<wire::DocumentWire>(payload, Shape::Document)?.into();
        document.check_order()?;
        document.check_links()?;
        document.events.sort_unstable_by_key(|event| event.sequence_order);
        Ok(document)
    }

    /// The document as JSON, in the shape that [`Document::parse`] takes.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        write::document(self)
    }

    /// SHA-256 over a canonical form: equal for payloads that differ only in white space, in the order of our keys or
    /// of the events, in unknown fields, or in how they spell times, numbers and texts; different for everything else.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let json = self.write();
        let mut canonical = Vec::with_capacity(json.len() * 2);
        raw::canonical(&String::from_utf8_lossy(&json), &mut canonical);
        Sha256::digest(&canonical).into()
    }

    /// The run as one list: each event, then for each of its mod calls the call, its logs, its actions. Calls are numbered
    /// in this order, which is the document's own unless it lists calls before those of earlier events.
    #[must_use]
    pub fn items(&self) -> Vec<Item> {
        let mut calls_of = vec![Vec::new(); self.events.len()];
        for (index, call) in self.mod_calls.iter().enumerate() {
            if let Some(calls) = calls_of.get_mut(call.event_sequence_order as usize) {
                calls.push(index);
            }
        }
        let mut logs_of = vec![Vec::new(); self.mod_calls.len()];
        for (index, log) in self.mod_logs.iter().enumerate() {
            if let Some(logs) = logs_of.get_mut(log.mod_call_sequence as usize) {
                logs.push(index);
            }
        }
        let mut actions_of = vec![Vec::new(); self.mod_calls.len()];
        for (index, action) in self.actions.iter().enumerate() {
            if let Some(actions) = actions_of.get_mut(action.mod_call_sequence as usize) {
                actions.push(index);
            }
        }
        let total = self.events.len() + self.mod_calls.len() + self.mod_logs.len() + self.actions.len();
        let mut items = Vec::with_capacity(total);
        let mut number = 0;
        for (event, calls) in self.events.iter().zip(&calls_of) {
            items.push(Item::Event(event.clone()));
            for &call in calls {
                items.push(Item::ModCall(self.mod_calls[call].clone()));
                items.extend(
                    logs_of[call]
                        .iter()
                        .map(|&log| Item::ModLog(ModLog { mod_call_sequence: number, ..self.mod_logs[log].clone() })),
                );
                items.extend(
                    actions_of[call].iter().map(|&action| {
                        Item::Action(Action { mod_call_sequence: number, ..self.actions[action].clone() })
                    }),
                );
                number += 1;
            }
        }
        items
    }

    /// `sequence_order` is 0, 1, 2 … over all events, in whatever order they stand.
    fn check_order(&self) -> Result<(), DocumentError> {
        let count = self.events.len();
        let mut holders = vec![None; count];
        for (index, event) in self.events.iter().enumerate() {
            let order = event.sequence_order;
            let expected = match usize::try_from(order).ok().and_then(|order| holders.get_mut(order)) {
                None if count == 1 => "0, since there is one event".to_owned(),
                None => format!("0 to {}, each once, since there are {count} events", count - 1),
                Some(Some(other)) => format!("a number of its own; $.events[{other}] has it already"),
                Some(holder) => {
                    *holder = Some(index);
                    continue;
                }
            };
            return Err(DocumentError {
                path: format!("$.events[{index}].sequence_order"),
                expected,
                found: order.to_string(),
            });
        }
        Ok(())
    }

    /// Calls name an event that is there, logs and actions a call.
    fn check_links(&self) -> Result<(), DocumentError> {
        let check = |list: &str, field: &str, target: &str, count: usize, links: &mut dyn Iterator<Item = i32>| {
            let broken = links.enumerate().find(|(_, link)| usize::try_from(*link).map_or(true, |link| link >= count));
            broken.map_or(Ok(()), |(index, link)| {
                Err(DocumentError {
                    path: format!("$.{list}[{index}].{field}"),
                    expected: match count {
                        0 => format!("{target}, but there are none"),
                        _ => format!("{target}, 0 to {}", count - 1),
                    },
                    found: link.to_string(),
                })
            })
        };
        let (events, calls) = (self.events.len(), self.mod_calls.len());
        let event = "the sequence_order of one of the events";
        let call = "an index into mod_calls";
        let mut links = self.mod_calls.iter().map(|call| call.event_sequence_order);
        check("mod_calls", "event_sequence_order", event, events, &mut links)?;
        let mut links = self.mod_logs.iter().map(|log| log.mod_call_sequence);
        check("mod_logs", "mod_call_sequence", call, calls, &mut links)?;
        let mut links = self.actions.iter().map(|action| action.mod_call_sequence);
        check("actions", "mod_call_sequence", call, calls, &mut links)
    }
}

/// Reads what [`item_to_json`] wrote.
///
/// # Errors
/// As [`Document::parse`].
pub fn item_from_json(line: &[u8]) -> Result<Item, DocumentError> {
    #[derive(Deserialize)]
    struct Kind<'a> {
        #[serde(borrow)]
        kind: std::borrow::Cow<'a, str>,
    }
    let found = serde_json::from_slice::<Kind<'_>>(line);
    match found.as_ref().map(|found| found.kind.as_ref()) {
        Ok("event") => Ok(Item::Event(read::<wire::EventWire>(line, Shape::Event)?.into())),
        Ok("mod_call") => Ok(Item::ModCall(read::<wire::ModCallWire>(line, Shape::ModCall)?.into())),
        Ok("mod_log") => Ok(Item::ModLog(read::<wire::ModLogWire>(line, Shape::ModLog)?.into())),
        Ok("action") => Ok(Item::Action(read::<wire::ActionWire>(line, Shape::Action)?.into())),
        kind => Err(DocumentError {
            path: "$.kind".into(),
            expected: "\"event\", \"mod_call\", \"mod_log\" or \"action\"".into(),
            found: kind.map_or_else(ToString::to_string, |kind| format!("{kind:?}")),
        }),
    }
}

/// The fast pass; whatever it does not take goes through the slow one, which knows the path.
fn read<'a, W: Deserialize<'a> + Storable>(payload: &'a [u8], shape: Shape) -> Result<W, DocumentError> {
    let text = std::str::from_utf8(payload).map_err(|error| DocumentError {
        path: "$".into(),
        expected: "UTF-8 text".into(),
        found: format!("an invalid byte at offset {}", error.valid_up_to()),
    })?;
    // Some editors and PowerShell put a byte order mark in front, which is not part of the JSON.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match serde_json::from_str::<W>(text) {
        Ok(wire) if wire.storable() => Ok(wire),
        Ok(_) => Err(locate::problem(text, shape, "a value that cannot be stored")),
        Err(error) => Err(locate::problem(text, shape, &error.to_string())),
    }
}

#[cfg(test)]
mod tests;
