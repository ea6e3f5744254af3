//! The wire structs that serde parses in the fast pass, with the fields of the `/ingest` specification.

use super::raw;
use super::time::Timestamp;
use super::{Document, RequestExtras, RequestMeta};
use crate::events::{
    ActionRecord, ActionType, Event, EventType, LogLevel, Measurements, ModCall, ModLog, RawJson, TokenId,
};
use serde::Deserialize;

#[derive(Deserialize)]
pub struct DocumentWire {
    request: RequestWire,
    events: Option<Vec<EventWire>>,
    mod_calls: Option<Vec<ModCallWire>>,
    mod_logs: Option<Vec<ModLogWire>>,
    actions: Option<Vec<ActionWire>>,
}

#[derive(Deserialize)]
struct RequestWire {
    request_id: String,
    created_at: Option<Timestamp>,
    completed_at: Option<Timestamp>,
    model: Option<String>,
    user_api_key: Option<String>,
    max_tokens: Option<i32>,
    temperature: Option<f64>,
    mod_text: Option<String>,
    system_prompt: Option<String>,
    user_prompt: Option<String>,
    system_prompt_token_ids: Option<Vec<TokenId>>,
    user_prompt_token_ids: Option<Vec<TokenId>>,
    active_mod_name: Option<String>,
    final_text: Option<String>,
    final_token_ids: Option<Vec<TokenId>>,
    inference_stats: Option<RawJson>,
}

#[derive(Deserialize)]
pub struct EventWire {
    event_type: EventType,
    step: i32,
    sequence_order: i32,
    created_at: Option<Timestamp>,
    details: Option<RawJson>,
    prompt_length: Option<i32>,
    tokens_so_far_len: Option<i32>,
    max_steps: Option<i32>,
    input_text: Option<String>,
    top_tokens: Option<RawJson>,
    sampled_token: Option<TokenId>,
    token_text: Option<String>,
    added_tokens: Option<Vec<TokenId>>,
    added_token_count: Option<i32>,
    forced: Option<bool>,
}

#[derive(Deserialize)]
pub struct ModCallWire {
    event_sequence_order: i32,
    mod_name: String,
    event_type: EventType,
    step: i32,
    created_at: Option<Timestamp>,
    execution_time_ms: Option<f64>,
    exception_occurred: Option<bool>,
    exception_message: Option<String>,
    exception_traceback: Option<String>,
}

#[derive(Deserialize)]
pub struct ModLogWire {
    mod_call_sequence: i32,
    mod_name: String,
    log_message: String,
    log_level: Option<LogLevel>,
    created_at: Option<Timestamp>,
}

#[derive(Deserialize)]
pub struct ActionWire {
    mod_call_sequence: i32,
    action_type: ActionType,
    action_order: i32,
    created_at: Option<Timestamp>,
    details: Option<RawJson>,
    new_prompt: Option<String>,
    new_length: Option<i32>,
    adjusted_max_steps: Option<i32>,
    token_count: Option<i32>,
    tokens_preview: Option<String>,
    backtrack_steps: Option<i32>,
    backtrack_token_count: Option<i32>,
    logits_shape: Option<String>,
    temperature: Option<f64>,
    has_tool_calls: Option<bool>,
    tool_calls: Option<RawJson>,
    error_message: Option<String>,
}

/// A check that PostgreSQL can store a value: no NUL in text, no JSON that `jsonb` rejects.
pub trait Storable {
    fn is_storable(&self) -> bool;
}

fn texts(fields: &[&Option<String>]) -> bool {
    fields.iter().all(|field| field.as_ref().is_none_or(|text| !text.as_bytes().contains(&0)))
}

fn raws(fields: &[&Option<RawJson>]) -> bool {
    fields.iter().all(|field| field.as_ref().is_none_or(|raw| raw::find_problem(raw.get()).is_none()))
}

fn name(text: &str) -> bool {
    !text.is_empty() && !text.as_bytes().contains(&0)
}

impl Storable for DocumentWire {
    fn is_storable(&self) -> bool {
        fn all<T: Storable>(list: Option<&Vec<T>>) -> bool {
            list.is_none_or(|list| list.iter().all(Storable::is_storable))
        }
        let request = &self.request;
        name(&request.request_id)
            && request.request_id.len() <= super::MAX_REQUEST_ID_BYTES
            && texts(&[&request.model, &request.user_api_key, &request.mod_text])
            && texts(&[&request.system_prompt, &request.user_prompt, &request.active_mod_name, &request.final_text])
            && raws(&[&request.inference_stats])
            && all(self.events.as_ref())
            && all(self.mod_calls.as_ref())
            && all(self.mod_logs.as_ref())
            && all(self.actions.as_ref())
    }
}

impl Storable for EventWire {
    fn is_storable(&self) -> bool {
        texts(&[&self.input_text, &self.token_text]) && raws(&[&self.details, &self.top_tokens])
    }
}

impl Storable for ModCallWire {
    fn is_storable(&self) -> bool {
        name(&self.mod_name) && texts(&[&self.exception_message, &self.exception_traceback])
    }
}

impl Storable for ModLogWire {
    fn is_storable(&self) -> bool {
        name(&self.mod_name) && !self.log_message.as_bytes().contains(&0)
    }
}

impl Storable for ActionWire {
    fn is_storable(&self) -> bool {
        texts(&[&self.new_prompt, &self.tokens_preview, &self.logits_shape, &self.error_message])
            && raws(&[&self.details, &self.tool_calls])
    }
}

impl From<DocumentWire> for Document {
    fn from(wire: DocumentWire) -> Self {
        fn list<W, T: From<W>>(list: Option<Vec<W>>) -> Vec<T> {
            list.unwrap_or_default().into_iter().map(T::from).collect()
        }
        let request = wire.request;
        Self {
            request: RequestMeta {
                request_id: request.request_id,
                created_at: request.created_at.map(|time| time.0),
                completed_at: request.completed_at.map(|time| time.0),
                model: request.model,
                user_api_key: request.user_api_key,
                max_tokens: request.max_tokens,
                temperature: request.temperature,
                mod_text: request.mod_text,
                surface: None,
                extras: RequestExtras {
                    system_prompt: request.system_prompt,
                    user_prompt: request.user_prompt,
                    system_prompt_token_ids: request.system_prompt_token_ids,
                    user_prompt_token_ids: request.user_prompt_token_ids,
                    active_mod_name: request.active_mod_name,
                    final_text: request.final_text,
                    final_token_ids: request.final_token_ids,
                    inference_stats: request.inference_stats,
                    replaced_nul: 0,
                },
            },
            events: list(wire.events),
            mod_calls: list(wire.mod_calls),
            mod_logs: list(wire.mod_logs),
            actions: list(wire.actions),
        }
    }
}

impl From<EventWire> for Event {
    fn from(wire: EventWire) -> Self {
        let measured =
            wire.details.as_ref().map(Measurements::from_details).filter(|measured| !measured.is_empty()).map(Box::new);
        Self {
            event_type: wire.event_type,
            step: wire.step,
            sequence_order: wire.sequence_order,
            created_at: wire.created_at.map(|time| time.0),
            details: wire.details,
            prompt_length: wire.prompt_length,
            tokens_so_far_len: wire.tokens_so_far_len,
            max_steps: wire.max_steps,
            input_text: wire.input_text,
            top_tokens: wire.top_tokens,
            sampled_token: wire.sampled_token,
            token_text: wire.token_text,
            added_tokens: wire.added_tokens,
            added_token_count: wire.added_token_count,
            forced: wire.forced,
            measured,
        }
    }
}

impl From<ModCallWire> for ModCall {
    fn from(wire: ModCallWire) -> Self {
        Self {
            event_sequence_order: wire.event_sequence_order,
            mod_name: wire.mod_name,
            event_type: wire.event_type,
            step: wire.step,
            created_at: wire.created_at.map(|time| time.0),
            execution_time_ms: wire.execution_time_ms,
            exception_occurred: wire.exception_occurred.unwrap_or(false),
            exception_message: wire.exception_message,
            exception_traceback: wire.exception_traceback,
        }
    }
}

impl From<ModLogWire> for ModLog {
    fn from(wire: ModLogWire) -> Self {
        Self {
            mod_call_sequence: wire.mod_call_sequence,
            mod_name: wire.mod_name,
            log_message: wire.log_message,
            log_level: wire.log_level.unwrap_or_default(),
            created_at: wire.created_at.map(|time| time.0),
        }
    }
}

/// Fields of an action that Quote nests in `details`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Nested {
    tokens_as_text: Vec<String>,
    token_count: Option<i32>,
    backtrack_steps: Option<i32>,
    adjusted_max_steps: Option<i32>,
    logits_shape: Option<RawJson>,
    tool_calls: Option<RawJson>,
}

impl From<ActionWire> for ActionRecord {
    fn from(wire: ActionWire) -> Self {
        /// Number of tokens in a preview.
        const PREVIEW: usize = 10;
        let nested: Nested = match &wire.details {
            Some(details) => serde_json::from_str(details.get()).unwrap_or_default(),
            None => Nested::default(),
        };
        let forces = matches!(wire.action_type, ActionType::ForceTokens | ActionType::ForceOutput);
        let count_of = |applies: bool| nested.token_count.filter(|_| applies);
        let text_of = |applies: bool, max: usize| {
            let texts = &nested.tokens_as_text;
            (applies && !texts.is_empty()).then(|| texts[..max.min(texts.len())].concat())
        };
        let backtracks = wire.action_type == ActionType::Backtrack;
        let prefills = wire.action_type == ActionType::AdjustedPrefill;
        let tool_calls = wire.tool_calls.or(nested.tool_calls);
        Self {
            mod_call_sequence: wire.mod_call_sequence,
            action_type: wire.action_type,
            action_order: wire.action_order,
            created_at: wire.created_at.map(|time| time.0),
            new_prompt: wire.new_prompt.or_else(|| text_of(prefills, usize::MAX)),
            new_length: wire.new_length.or_else(|| count_of(prefills)),
            adjusted_max_steps: wire.adjusted_max_steps.or(nested.adjusted_max_steps),
            token_count: wire.token_count.or_else(|| count_of(forces)),
            tokens_preview: wire.tokens_preview.or_else(|| text_of(forces, PREVIEW)),
            backtrack_steps: wire.backtrack_steps.or(nested.backtrack_steps),
            backtrack_token_count: wire.backtrack_token_count.or_else(|| count_of(backtracks)),
            logits_shape: wire.logits_shape.or_else(|| nested.logits_shape.map(|shape| shape.get().to_owned())),
            temperature: wire.temperature,
            has_tool_calls: wire.has_tool_calls.or(tool_calls.as_ref().map(|_| true)),
            tool_calls,
            error_message: wire.error_message,
            details: wire.details,
        }
    }
}
