//! The wire structs that serde parses in the fast pass. They have the fields of the `/ingest` specification and those
//! that Quote and Thunder add to `request`.

mod action;

use super::integer::{Integer, integers};
use super::raw;
use super::run_details::{RunDetails, is_accepted_metadata};
use super::time::Timestamp;
use super::{Document, RequestExtras, RequestMeta};
use crate::events::{
    ActionType, Event, EventType, LogLevel, Measurements, ModCall, ModLog, ObjectsOnly, RawJson, optional_object,
};
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

/// A complete run of an engine. NUL characters in texts are replaced with U+FFFD.
#[derive(Deserialize, ToSchema)]
#[serde(remote = "Self")]
#[schema(as = IngestDocument)]
pub struct DocumentWire {
    request: RequestWire,
    /// In any order; `sequence_order` numbers them.
    events: Option<Vec<EventWire>>,
    mod_calls: Option<Vec<ModCallWire>>,
    mod_logs: Option<Vec<ModLogWire>>,
    actions: Option<Vec<ActionWire>>,
}

/// The request of a run.
#[derive(Deserialize, ToSchema)]
#[serde(remote = "Self")]
#[schema(as = IngestRequest)]
struct RequestWire {
    /// Unique id of the run.
    request_id: String,
    /// Start; default is the time of the upload.
    #[schema(value_type = Option<String>, format = DateTime)]
    created_at: Option<Timestamp>,
    /// End.
    #[schema(value_type = Option<String>, format = DateTime)]
    completed_at: Option<Timestamp>,
    /// Name of the model.
    model: Option<String>,
    /// Name of the user in the engine. An ingest key is replaced with its label.
    user_api_key: Option<String>,
    /// Maximum tokens of the answer.
    max_tokens: Option<Integer>,
    temperature: Option<f64>,
    /// Source or name of the mod.
    mod_text: Option<String>,
    /// Text of the first system message.
    system_prompt: Option<String>,
    /// Text of the first user message.
    user_prompt: Option<String>,
    system_prompt_token_ids: Option<Vec<Integer>>,
    user_prompt_token_ids: Option<Vec<Integer>>,
    /// Name of the mod that the request selected.
    active_mod_name: Option<String>,
    /// The answer that the client received.
    final_text: Option<String>,
    final_token_ids: Option<Vec<Integer>>,
    /// The engine's own statistics, in any form.
    #[schema(value_type = Option<Value>)]
    inference_stats: Option<RawJson>,
    /// Details of the run that Thunder recorded, in its exports.
    #[serde(default, deserialize_with = "optional_object")]
    thunder_run: Option<RunDetails>,
}

/// An event of a run.
#[derive(Deserialize, ToSchema)]
#[serde(remote = "Self")]
#[schema(as = IngestEvent)]
pub struct EventWire {
    event_type: EventType,
    /// 0 for `Prefilled`, then 1, 2, 3 …
    step: Integer,
    /// Position among all events, from 0.
    sequence_order: Integer,
    #[schema(value_type = Option<String>, format = DateTime)]
    created_at: Option<Timestamp>,
    /// The engine's own event, in any form.
    #[schema(value_type = Option<Value>)]
    details: Option<RawJson>,
    /// `Prefilled`: tokens of the prompt.
    prompt_length: Option<Integer>,
    /// `Prefilled`: tokens generated so far.
    tokens_so_far_len: Option<Integer>,
    /// `Prefilled`: maximum number of generated tokens.
    max_steps: Option<Integer>,
    /// `ForwardPass`: last part of the text so far.
    input_text: Option<String>,
    /// `ForwardPass`: the most probable next tokens, `[{token, prob}]`.
    #[schema(value_type = Option<Value>)]
    top_tokens: Option<RawJson>,
    /// `Sampled`: the token.
    sampled_token: Option<Integer>,
    /// `Sampled`: its text.
    token_text: Option<String>,
    /// `Added`: the appended tokens.
    added_tokens: Option<Vec<Integer>>,
    /// `Added`: their number.
    added_token_count: Option<Integer>,
    /// `Added`: true if a mod forced them.
    forced: Option<bool>,
}

/// A call of a mod.
#[derive(Deserialize, ToSchema)]
#[serde(remote = "Self")]
#[schema(as = IngestModCall)]
pub struct ModCallWire {
    /// `sequence_order` of the event that the mod received.
    event_sequence_order: Integer,
    /// Name of the mod; not empty.
    mod_name: String,
    event_type: EventType,
    step: Integer,
    #[schema(value_type = Option<String>, format = DateTime)]
    created_at: Option<Timestamp>,
    execution_time_ms: Option<f64>,
    exception_occurred: Option<bool>,
    exception_message: Option<String>,
    exception_traceback: Option<String>,
}

/// A line that a mod logged.
#[derive(Deserialize, ToSchema)]
#[serde(remote = "Self")]
#[schema(as = IngestModLog)]
pub struct ModLogWire {
    /// Index of the call in `mod_calls`.
    mod_call_sequence: Integer,
    /// Name of the mod; not empty.
    mod_name: String,
    log_message: String,
    /// Default is `INFO`.
    log_level: Option<LogLevel>,
    #[schema(value_type = Option<String>, format = DateTime)]
    created_at: Option<Timestamp>,
}

/// An action of a mod.
#[derive(Deserialize, ToSchema)]
#[serde(remote = "Self")]
#[schema(as = IngestAction)]
pub struct ActionWire {
    /// Index of the call in `mod_calls`.
    mod_call_sequence: Integer,
    action_type: ActionType,
    /// Position among the actions of the call, from 0; they apply in this order.
    action_order: Integer,
    #[schema(value_type = Option<String>, format = DateTime)]
    created_at: Option<Timestamp>,
    /// The engine's own action, in any form.
    #[schema(value_type = Option<Value>)]
    details: Option<RawJson>,
    /// `AdjustedPrefill`: the new prompt.
    new_prompt: Option<String>,
    /// `AdjustedPrefill`: number of its tokens.
    new_length: Option<Integer>,
    /// `AdjustedPrefill`: the new maximum of generated tokens.
    adjusted_max_steps: Option<Integer>,
    /// `ForceTokens` and `ForceOutput`: number of forced tokens.
    token_count: Option<Integer>,
    /// Text of the tokens that the action inserts, possibly shortened.
    tokens_preview: Option<String>,
    /// `Backtrack`: number of removed tokens.
    backtrack_steps: Option<Integer>,
    /// `Backtrack`: number of tokens that replace them.
    backtrack_token_count: Option<Integer>,
    /// `AdjustedLogits`: dimensions of the logits.
    logits_shape: Option<String>,
    /// `AdjustedLogits`: temperature of this step.
    temperature: Option<f64>,
    has_tool_calls: Option<bool>,
    /// `ToolCalls`: the calls.
    #[schema(value_type = Option<Value>)]
    tool_calls: Option<RawJson>,
    /// `EmitError`: the message.
    error_message: Option<String>,
}

/// Implements `Deserialize` by the derived functions, for objects only.
macro_rules! deserialize_objects {
    ($($wire:ty),*) => {$(
        impl<'de> Deserialize<'de> for $wire {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <$wire>::deserialize(ObjectsOnly(deserializer))
            }
        }
    )*};
}

deserialize_objects!(DocumentWire, RequestWire, EventWire, ModCallWire, ModLogWire, ActionWire);

/// A check that PostgreSQL can store a value: no NUL in text, no JSON that `jsonb` rejects.
pub trait Storable {
    fn is_storable(&self) -> bool;
}

fn are_storable_texts(fields: &[&Option<String>]) -> bool {
    fields.iter().all(|field| field.as_ref().is_none_or(|text| !text.as_bytes().contains(&0)))
}

fn are_storable_json(fields: &[&Option<RawJson>]) -> bool {
    fields.iter().all(|field| field.as_ref().is_none_or(|raw| raw::find_problem(raw.get()).is_none()))
}

fn is_storable_name(text: &str) -> bool {
    !text.is_empty() && !text.as_bytes().contains(&0)
}

impl Storable for DocumentWire {
    fn is_storable(&self) -> bool {
        fn all<T: Storable>(list: Option<&Vec<T>>) -> bool {
            list.is_none_or(|list| list.iter().all(Storable::is_storable))
        }
        let request = &self.request;
        is_storable_name(&request.request_id)
            && request.request_id.len() <= super::MAX_REQUEST_ID_BYTES
            && are_storable_texts(&[&request.model, &request.user_api_key, &request.mod_text])
            && are_storable_texts(&[
                &request.system_prompt,
                &request.user_prompt,
                &request.active_mod_name,
                &request.final_text,
            ])
            && are_storable_json(&[&request.inference_stats])
            && request.thunder_run.as_ref().is_none_or(Storable::is_storable)
            && all(self.events.as_ref())
            && all(self.mod_calls.as_ref())
            && all(self.mod_logs.as_ref())
            && all(self.actions.as_ref())
    }
}

impl Storable for RunDetails {
    fn is_storable(&self) -> bool {
        are_storable_texts(&[&self.message, &self.prompt_preview])
            && self.metadata.as_ref().is_none_or(is_accepted_metadata)
            && self.metadata.iter().flatten().all(|(key, value)| !key.contains('\0') && !value.contains('\0'))
    }
}

impl Storable for EventWire {
    fn is_storable(&self) -> bool {
        are_storable_texts(&[&self.input_text, &self.token_text])
            && are_storable_json(&[&self.details, &self.top_tokens])
    }
}

impl Storable for ModCallWire {
    fn is_storable(&self) -> bool {
        is_storable_name(&self.mod_name) && are_storable_texts(&[&self.exception_message, &self.exception_traceback])
    }
}

impl Storable for ModLogWire {
    fn is_storable(&self) -> bool {
        is_storable_name(&self.mod_name) && !self.log_message.as_bytes().contains(&0)
    }
}

impl Storable for ActionWire {
    fn is_storable(&self) -> bool {
        are_storable_texts(&[&self.new_prompt, &self.tokens_preview, &self.logits_shape, &self.error_message])
            && are_storable_json(&[&self.details, &self.tool_calls])
    }
}

impl From<DocumentWire> for Document {
    fn from(wire: DocumentWire) -> Self {
        fn list<W, T: From<W>>(list: Option<Vec<W>>) -> Vec<T> {
            list.unwrap_or_default().into_iter().map(T::from).collect()
        }
        let specified_actions = wire.has_specified_actions();
        let request = wire.request;
        Self {
            request: RequestMeta {
                request_id: request.request_id,
                created_at: request.created_at.map(|time| time.0),
                completed_at: request.completed_at.map(|time| time.0),
                model: request.model,
                user_api_key: request.user_api_key,
                max_tokens: request.max_tokens.map(i32::from),
                temperature: request.temperature,
                mod_text: request.mod_text,
                surface: None,
                extras: RequestExtras {
                    system_prompt: request.system_prompt,
                    user_prompt: request.user_prompt,
                    system_prompt_token_ids: request.system_prompt_token_ids.map(integers),
                    user_prompt_token_ids: request.user_prompt_token_ids.map(integers),
                    active_mod_name: request.active_mod_name,
                    final_text: request.final_text,
                    final_token_ids: request.final_token_ids.map(integers),
                    inference_stats: request.inference_stats,
                    thunder_run: request.thunder_run,
                    replaced_nul: 0,
                    specified_actions,
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
            step: wire.step.into(),
            sequence_order: wire.sequence_order.into(),
            created_at: wire.created_at.map(|time| time.0),
            details: wire.details,
            prompt_length: wire.prompt_length.map(i32::from),
            tokens_so_far_len: wire.tokens_so_far_len.map(i32::from),
            max_steps: wire.max_steps.map(i32::from),
            input_text: wire.input_text,
            top_tokens: wire.top_tokens,
            sampled_token: wire.sampled_token.map(i32::from),
            token_text: wire.token_text,
            added_tokens: wire.added_tokens.map(integers),
            added_token_count: wire.added_token_count.map(i32::from),
            forced: wire.forced,
            measured,
        }
    }
}

impl From<ModCallWire> for ModCall {
    fn from(wire: ModCallWire) -> Self {
        Self {
            event_sequence_order: wire.event_sequence_order.into(),
            mod_name: wire.mod_name,
            event_type: wire.event_type,
            step: wire.step.into(),
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
            mod_call_sequence: wire.mod_call_sequence.into(),
            mod_name: wire.mod_name,
            log_message: wire.log_message,
            log_level: wire.log_level.unwrap_or_default(),
            created_at: wire.created_at.map(|time| time.0),
        }
    }
}
