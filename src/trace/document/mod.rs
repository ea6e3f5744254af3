//! The `/ingest` document: parsing with JSON paths in every error, and writing.
//!
//! The one place that knows the spelling of the wire: a whole run as one [`Document`], and single [`TraceItem`]s as the
//! lines of streams and fixtures. Parsing is strict about types and links and lenient about everything else: unknown
//! fields are ignored, `null` counts as absent, absent arrays as empty. `details`, `top_tokens` and `tool_calls` stay
//! byte for byte as they were given, except for NUL characters, which PostgreSQL cannot store: U+FFFD replaces them.

mod locate;
mod raw;
mod time;
mod wire;
mod write;

pub use write::{Numbering, item_to_json};

use crate::events::{ActionRecord, Event, ModCall, ModLog, RawJson, Surface, TokenId, TraceItem};
use chrono::{DateTime, Utc};
use locate::ObjectKind;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use wire::Storable;

/// Longest request id; PostgreSQL cannot index texts much longer.
const MAX_REQUEST_ID_BYTES: usize = 1024;

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
    pub actions: Vec<ActionRecord>,
}

/// The document's `request` object.
#[derive(Debug, Clone, Default)]
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
    /// Surface of the run, if it is not another engine's. It comes from the sender of a document, not from the document.
    pub surface: Option<Surface>,
    /// Fields that the specification does not name.
    pub extras: RequestExtras,
}

/// Fields of `request` that Quote sends in addition to those of the specification.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestExtras {
    /// Text of the first system message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// Text of the first user message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_prompt: Option<String>,
    /// Tokens of `system_prompt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt_token_ids: Option<Vec<TokenId>>,
    /// Tokens of `user_prompt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_prompt_token_ids: Option<Vec<TokenId>>,
    /// Name of the mod that the request selected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_mod_name: Option<String>,
    /// The answer as the client got it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_text: Option<String>,
    /// Tokens of `final_text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_token_ids: Option<Vec<TokenId>>,
    /// The engine's own statistics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inference_stats: Option<RawJson>,
    /// NUL characters of the payload that were replaced with U+FFFD. It is stored with the run and not written to
    /// documents.
    #[serde(skip_serializing_if = "is_zero")]
    pub replaced_nul: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl RequestExtras {
    /// Tells whether there is anything to store.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self {
            system_prompt,
            user_prompt,
            system_prompt_token_ids,
            user_prompt_token_ids,
            active_mod_name,
            final_text,
            final_token_ids,
            inference_stats,
            replaced_nul,
        } = self;
        let texts = [system_prompt, user_prompt, active_mod_name, final_text];
        let tokens = [system_prompt_token_ids, user_prompt_token_ids, final_token_ids];
        *replaced_nul == 0
            && inference_stats.is_none()
            && texts.iter().all(|text| text.is_none())
            && tokens.iter().all(|tokens| tokens.is_none())
    }
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
        let (wire, replaced_nul) = parse_replacing_nul::<wire::DocumentWire>(payload, ObjectKind::Document)?;
        let mut document = Self::from(wire);
        document.request.extras.replaced_nul = replaced_nul;
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
    pub fn items(&self) -> Vec<TraceItem> {
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
            items.push(TraceItem::Event(event.clone()));
            for &call in calls {
                items.push(TraceItem::ModCall(self.mod_calls[call].clone()));
                items.extend(
                    logs_of[call].iter().map(|&log| {
                        TraceItem::ModLog(ModLog { mod_call_sequence: number, ..self.mod_logs[log].clone() })
                    }),
                );
                items.extend(actions_of[call].iter().map(|&action| {
                    TraceItem::Action(ActionRecord { mod_call_sequence: number, ..self.actions[action].clone() })
                }));
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
pub fn item_from_json(line: &[u8]) -> Result<TraceItem, DocumentError> {
    #[derive(Deserialize)]
    struct ItemKind<'a> {
        #[serde(borrow)]
        kind: Cow<'a, str>,
    }
    let found = serde_json::from_slice::<ItemKind<'_>>(line);
    match found.as_ref().map(|found| found.kind.as_ref()) {
        Ok("event") => Ok(TraceItem::Event(read::<wire::EventWire>(line, ObjectKind::Event)?.into())),
        Ok("mod_call") => Ok(TraceItem::ModCall(read::<wire::ModCallWire>(line, ObjectKind::ModCall)?.into())),
        Ok("mod_log") => Ok(TraceItem::ModLog(read::<wire::ModLogWire>(line, ObjectKind::ModLog)?.into())),
        Ok("action") => Ok(TraceItem::Action(read::<wire::ActionWire>(line, ObjectKind::Action)?.into())),
        kind => Err(DocumentError {
            path: "$.kind".into(),
            expected: "\"event\", \"mod_call\", \"mod_log\" or \"action\"".into(),
            found: kind.map_or_else(ToString::to_string, |kind| format!("{kind:?}")),
        }),
    }
}

fn read<W: for<'a> Deserialize<'a> + Storable>(payload: &[u8], shape: ObjectKind) -> Result<W, DocumentError> {
    parse_replacing_nul(payload, shape).map(|(wire, _)| wire)
}

/// The fast pass, and the number of NUL characters it replaced. Documents that it does not accept go through the slow one, which
/// knows the path.
fn parse_replacing_nul<W: for<'a> Deserialize<'a> + Storable>(
    payload: &[u8],
    shape: ObjectKind,
) -> Result<(W, u32), DocumentError> {
    let text = std::str::from_utf8(payload).map_err(|error| DocumentError {
        path: "$".into(),
        expected: "UTF-8 text".into(),
        found: format!("an invalid byte at offset {}", error.valid_up_to()),
    })?;
    // Some editors and PowerShell put a byte order mark in front, which is not part of the JSON.
    let mut text = Cow::Borrowed(text.strip_prefix('\u{feff}').unwrap_or(text));
    let mut parsed = serde_json::from_str::<W>(&text);
    let mut replaced = 0;
    if parsed.as_ref().is_ok_and(|wire| !wire.is_storable()) {
        let (without, count) = raw::replace_nul(&text);
        (text, replaced) = (Cow::Owned(without), count);
        parsed = serde_json::from_str(&text);
    }
    match parsed {
        Ok(wire) if wire.is_storable() => Ok((wire, replaced)),
        Ok(_) => Err(locate::find_problem(&text, shape, "a value that cannot be stored")),
        Err(error) => Err(locate::find_problem(&text, shape, &error.to_string())),
    }
}

#[cfg(test)]
mod tests;
