//! The `/ingest` document: parsing, with JSON paths in every error, and serialization.
//!
//! Only this module reads and writes documents. A whole run is one [`Document`]; single [`TraceItem`]s are lines of
//! streams and fixtures. Parsing is strict about types and links, but lenient otherwise: unknown fields are
//! ignored, `null` counts as absent, absent arrays as empty. `details`, `top_tokens` and `tool_calls` are kept byte for
//! byte, except for NUL characters, which PostgreSQL cannot store: U+FFFD replaces them.

mod integer;
mod locate;
mod raw;
mod run_details;
mod time;
mod wire;
mod write;

pub(crate) use raw::replace_nul;
pub use run_details::RunDetails;
pub use wire::DocumentWire;
pub use write::{Numbering, item_to_json};

use crate::events::{
    ActionRecord, Event, ModCall, ModLog, RawJson, RunStatus, Surface, TokenId, TraceItem, is_reserved_request_id,
};
use chrono::{DateTime, Utc};
use locate::ObjectKind;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use wire::Storable;

/// Maximum length of a request id; PostgreSQL cannot index much longer texts.
const MAX_REQUEST_ID_BYTES: usize = 1024;

/// A whole run in the format of `/ingest`.
#[derive(Debug, Clone)]
pub struct Document {
    /// The request.
    pub request: RequestMeta,
    /// Events, sorted: `events[i].sequence_order == i` for any order in the payload.
    pub events: Vec<Event>,
    /// Mod calls in the payload's order; `mod_call_sequence` is an index into this list.
    pub mod_calls: Vec<ModCall>,
    /// Log lines in the payload's order.
    pub mod_logs: Vec<ModLog>,
    /// Actions in the payload's order.
    pub actions: Vec<ActionRecord>,
}

/// The document's `request` object.
#[derive(Debug, Clone, Default)]
pub struct RequestMeta {
    /// Id, unique among all runs; never empty.
    pub request_id: String,
    /// Arrival time of the request. If it is `None`, the time of ingestion is used.
    pub created_at: Option<DateTime<Utc>>,
    /// End time.
    pub completed_at: Option<DateTime<Utc>>,
    /// The model's name.
    pub model: Option<String>,
    /// The engine's identification of the user.
    pub user_api_key: Option<String>,
    /// Maximum number of generated tokens.
    pub max_tokens: Option<i32>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Code or name of the mod in use.
    pub mod_text: Option<String>,
    /// Surface of the run; `None` for another engine. The sender sets it, not the document.
    pub surface: Option<Surface>,
    /// Fields that are not in the specification.
    pub extras: RequestExtras,
}

/// Fields of `request` that Quote and Thunder send in addition to the specified ones.
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
    /// The answer that the client received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_text: Option<String>,
    /// Tokens of `final_text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_token_ids: Option<Vec<TokenId>>,
    /// The engine's own statistics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inference_stats: Option<RawJson>,
    /// Details of the run that Thunder recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thunder_run: Option<RunDetails>,
    /// Number of NUL characters in the payload that were replaced with U+FFFD. It is stored with the run but not
    /// written to documents.
    #[serde(skip_serializing_if = "is_zero")]
    pub replaced_nul: u32,
    /// True if actions have the specified fields next to their `details`, which then do not have Quote's form; see
    /// [`Fold::set_has_specified_actions`](super::fold::Fold::set_has_specified_actions). It is stored with the run but not
    /// written to documents.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub specified_actions: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl RequestExtras {
    /// Returns the status under which the run is stored.
    #[must_use]
    pub fn status(&self) -> RunStatus {
        match self.thunder_run.as_ref().and_then(|details| details.status) {
            // The document has the data up to its export.
            Some(RunStatus::Running) => RunStatus::Interrupted,
            status => status.unwrap_or(RunStatus::Done),
        }
    }

    /// Returns true if there is nothing to store.
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
            thunder_run,
            replaced_nul,
            specified_actions,
        } = self;
        let texts = [system_prompt, user_prompt, active_mod_name, final_text];
        let tokens = [system_prompt_token_ids, user_prompt_token_ids, final_token_ids];
        *replaced_nul == 0
            && !specified_actions
            && inference_stats.is_none()
            && thunder_run.is_none()
            && texts.iter().all(|text| text.is_none())
            && tokens.iter().all(|tokens| tokens.is_none())
    }
}

/// An error in a document, with its location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: expected {expected}, got {found}")]
pub struct DocumentError {
    /// JSON path of the value, e.g. `$.events[3].sampled_token`.
    pub path: String,
    /// The expected value.
    pub expected: String,
    /// The found value, shortened.
    pub found: String,
}

impl Document {
    /// Parses and validates a payload.
    ///
    /// # Errors
    /// The first error: invalid JSON, a field of the wrong type, a value out of range, or a broken link.
    pub fn parse(payload: &[u8]) -> Result<Self, DocumentError> {
        let (wire, replaced_nul) = parse_replacing_nul::<wire::DocumentWire>(payload, ObjectKind::Document)?;
        let mut document = Self::from(wire);
        document.request.extras.replaced_nul = replaced_nul;
        document.check_request_id()?;
        document.check_order()?;
        document.check_links()?;
        document.check_cached_tokens()?;
        document.events.sort_unstable_by_key(|event| event.sequence_order);
        Ok(document)
    }

    /// Serializes the document to JSON that [`Document::parse`] accepts.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        write::document(self)
    }

    /// Returns the SHA-256 of a canonical form. Payloads with the same content have the same fingerprint: it does not
    /// depend on white space, on the order of events and of known fields, on unknown, `null` or default fields, or on
    /// the notation of times, numbers and strings.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let json = self.write();
        let mut canonical = Vec::with_capacity(json.len() * 2);
        raw::canonical(&String::from_utf8_lossy(&json), &mut canonical);
        Sha256::digest(&canonical).into()
    }

    /// Returns the run as one list: each event, then each of its mod calls with its logs and actions. Calls are
    /// numbered in this order. It differs from the document's order if the document lists a call before the calls of
    /// earlier events. The actions of a call are sorted by their `action_order`.
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
        for actions in &mut actions_of {
            actions.sort_by_key(|&index| self.actions[index].action_order);
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

    /// Checks that the run can be found by its request id.
    fn check_request_id(&self) -> Result<(), DocumentError> {
        let request_id = &self.request.request_id;
        (!is_reserved_request_id(request_id)).then_some(()).ok_or_else(|| DocumentError {
            path: "$.request.request_id".into(),
            expected: "another id, because the API has a route of this name".into(),
            found: format!("{request_id:?}"),
        })
    }

    /// Checks that the events have the sequence orders 0, 1, 2 …, in any order.
    fn check_order(&self) -> Result<(), DocumentError> {
        let count = self.events.len();
        let mut holders = vec![None; count];
        for (index, event) in self.events.iter().enumerate() {
            let order = event.sequence_order;
            let expected = match usize::try_from(order).ok().and_then(|order| holders.get_mut(order)) {
                None if count == 1 => "0, since there is one event".to_owned(),
                None => format!("0 to {}, each once, since there are {count} events", count - 1),
                Some(Some(other)) => format!("a unique number; $.events[{other}] has the same"),
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

    /// Checks that no more tokens of the prompt were cached than it has.
    fn check_cached_tokens(&self) -> Result<(), DocumentError> {
        let usage = self.request.extras.thunder_run.as_ref().and_then(RunDetails::usage);
        usage.filter(|usage| usage.cached_tokens > usage.prompt_tokens).map_or(Ok(()), |usage| {
            Err(DocumentError {
                path: "$.request.thunder_run.cached_tokens".into(),
                expected: format!("at most `prompt_tokens`, which is {}", usage.prompt_tokens),
                found: usage.cached_tokens.to_string(),
            })
        })
    }

    /// Checks that calls refer to existing events, and logs and actions to existing calls.
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
        let event = "the `sequence_order` of one of the events";
        let call = "an index into `mod_calls`";
        let mut links = self.mod_calls.iter().map(|call| call.event_sequence_order);
        check("mod_calls", "event_sequence_order", event, events, &mut links)?;
        let mut links = self.mod_logs.iter().map(|log| log.mod_call_sequence);
        check("mod_logs", "mod_call_sequence", call, calls, &mut links)?;
        let mut links = self.actions.iter().map(|action| action.mod_call_sequence);
        check("actions", "mod_call_sequence", call, calls, &mut links)
    }
}

/// Parses the output of [`item_to_json`].
///
/// # Errors
/// Same as [`Document::parse`].
pub fn item_from_json(line: &[u8]) -> Result<TraceItem, DocumentError> {
    #[derive(Deserialize)]
    struct ItemKind<'a> {
        #[serde(borrow)]
        kind: Cow<'a, str>,
    }
    let found = serde_json::from_slice::<ItemKind<'_>>(line);
    match found.as_ref().map(|found| found.kind.as_ref()) {
        Ok("event") => Ok(TraceItem::Event(parse_item::<wire::EventWire>(line, ObjectKind::Event)?.into())),
        Ok("mod_call") => Ok(TraceItem::ModCall(parse_item::<wire::ModCallWire>(line, ObjectKind::ModCall)?.into())),
        Ok("mod_log") => Ok(TraceItem::ModLog(parse_item::<wire::ModLogWire>(line, ObjectKind::ModLog)?.into())),
        Ok("action") => Ok(TraceItem::Action(parse_item::<wire::ActionWire>(line, ObjectKind::Action)?.into())),
        kind => Err(DocumentError {
            path: "$.kind".into(),
            expected: "\"event\", \"mod_call\", \"mod_log\" or \"action\"".into(),
            found: kind.map_or_else(ToString::to_string, |kind| format!("{kind:?}")),
        }),
    }
}

fn parse_item<W: for<'a> Deserialize<'a> + Storable>(payload: &[u8], shape: ObjectKind) -> Result<W, DocumentError> {
    parse_replacing_nul(payload, shape).map(|(wire, _)| wire)
}

/// Parses a payload in the fast pass. Returns the result with the number of NUL characters that were replaced. The slow
/// pass finds the path of an error.
fn parse_replacing_nul<W: for<'a> Deserialize<'a> + Storable>(
    payload: &[u8],
    shape: ObjectKind,
) -> Result<(W, u32), DocumentError> {
    let text = std::str::from_utf8(payload).map_err(|error| DocumentError {
        path: "$".into(),
        expected: "UTF-8 text".into(),
        found: format!("an invalid byte at offset {}", error.valid_up_to()),
    })?;
    // Some editors and PowerShell prepend a byte order mark, which is not part of the JSON.
    let mut text = Cow::Borrowed(text.strip_prefix('\u{feff}').unwrap_or(text));
    let mut parsed = serde_json::from_str::<W>(&text);
    let mut replaced = 0;
    if parsed.as_ref().is_ok_and(|wire| !wire.is_storable()) {
        let (without, count) = replace_nul(&text, r"\ufffd");
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
