//! Serialization of whole documents, and of single items as lines of JSON. `None` fields are omitted.

use super::RequestMeta;
use super::{Document, time};
use crate::events::{ActionRecord, Event, EventType, ModCall, ModLog, TraceItem};
use chrono::{DateTime, Utc};
use serde::ser::{Serialize, SerializeMap, Serializer};

/// Counters that number the items of one run in JSON: calls, logs and actions each count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Numbering {
    /// Mod calls so far.
    pub mod_calls: u32,
    /// Log lines so far.
    pub mod_logs: u32,
    /// Actions so far.
    pub actions: u32,
}

impl Numbering {
    /// Counts an item without writing it.
    pub fn skip(&mut self, item: &TraceItem) {
        self.next(item);
    }

    /// Returns the number of this item among those of its kind, and advances the counter.
    fn next(&mut self, item: &TraceItem) -> u32 {
        let counter = match item {
            TraceItem::ModCall(_) => &mut self.mod_calls,
            TraceItem::ModLog(_) => &mut self.mod_logs,
            TraceItem::Action(_) => &mut self.actions,
            TraceItem::Event(_) | TraceItem::Attention(_) => return 0,
        };
        *counter += 1;
        *counter - 1
    }
}

/// Serializes the item as one line of JSON without a newline, with `kind` first and absent fields omitted; `None` for
/// attention, which has no JSON form. `numbering` counts the items before it and is advanced.
pub fn item_to_json(item: &TraceItem, numbering: &mut Numbering) -> Option<String> {
    let index = numbering.next(item);
    Some(match item {
        TraceItem::Event(event) => tagged(r#"{"kind":"event""#.to_owned(), &JsonView(event)),
        TraceItem::ModCall(call) => tagged(format!(r#"{{"kind":"mod_call","index":{index}"#), &JsonView(call)),
        TraceItem::ModLog(log) => tagged(format!(r#"{{"kind":"mod_log","index":{index}"#), &JsonView(log)),
        TraceItem::Action(action) => tagged(format!(r#"{{"kind":"action","index":{index}"#), &JsonView(action)),
        TraceItem::Attention(_) => return None,
    })
}

/// Serializes the whole document.
pub fn document(document: &Document) -> Vec<u8> {
    let mut json = Vec::new();
    serialize(&mut json, &JsonView(document));
    json
}

/// Serializes the object, which is never empty, with the fields of `head` first.
fn tagged(head: String, object: &impl Serialize) -> String {
    let mut line = head.into_bytes();
    let brace = line.len();
    serialize(&mut line, object);
    line[brace] = b',';
    // Raw JSON of another engine may span lines. Inside strings, line ends are escaped, so these are white space.
    line.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
    String::from_utf8(line).expect("serde_json writes UTF-8")
}

fn serialize(json: &mut Vec<u8>, object: &impl Serialize) {
    serde_json::to_writer(json, object).expect("keys are strings, and writing to memory does not fail");
}

/// A value whose fields are written with the names of the document.
struct JsonView<'a, T: ?Sized>(&'a T);

/// A writer of the fields of a JSON object.
struct Fields<S: Serializer>(S::SerializeMap);

impl<S: Serializer> Fields<S> {
    fn new(serializer: S) -> Result<Self, S::Error> {
        serializer.serialize_map(None).map(Self)
    }

    fn write_field(&mut self, name: &'static str, value: &(impl Serialize + ?Sized)) -> Result<(), S::Error> {
        self.0.serialize_entry(name, value)
    }

    fn write_optional<T: Serialize>(&mut self, name: &'static str, value: Option<&T>) -> Result<(), S::Error> {
        value.map_or(Ok(()), |value| self.write_field(name, value))
    }

    fn time(&mut self, name: &'static str, value: Option<&DateTime<Utc>>) -> Result<(), S::Error> {
        value.map_or(Ok(()), |value| self.write_field(name, &time::write(value)))
    }

    fn list<'a, T>(&mut self, name: &'static str, list: &'a [T]) -> Result<(), S::Error>
    where
        JsonView<'a, T>: Serialize,
    {
        self.write_field(name, &list.iter().map(JsonView).collect::<Vec<_>>())
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        self.0.end()
    }
}

impl Serialize for JsonView<'_, Document> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = Fields::<S>::new(serializer)?;
        out.write_field("request", &JsonView(&self.0.request))?;
        out.list("events", &self.0.events)?;
        out.list("mod_calls", &self.0.mod_calls)?;
        out.list("mod_logs", &self.0.mod_logs)?;
        out.list("actions", &self.0.actions)?;
        out.end()
    }
}

impl Serialize for JsonView<'_, RequestMeta> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = Fields::<S>::new(serializer)?;
        out.write_field("request_id", &self.0.request_id)?;
        out.time("created_at", self.0.created_at.as_ref())?;
        out.time("completed_at", self.0.completed_at.as_ref())?;
        out.write_optional("model", self.0.model.as_ref())?;
        out.write_optional("user_api_key", self.0.user_api_key.as_ref())?;
        out.write_optional("max_tokens", self.0.max_tokens.as_ref())?;
        out.write_optional("temperature", self.0.temperature.as_ref())?;
        out.write_optional("mod_text", self.0.mod_text.as_ref())?;
        let extras = &self.0.extras;
        out.write_optional("system_prompt", extras.system_prompt.as_ref())?;
        out.write_optional("user_prompt", extras.user_prompt.as_ref())?;
        out.write_optional("system_prompt_token_ids", extras.system_prompt_token_ids.as_ref())?;
        out.write_optional("user_prompt_token_ids", extras.user_prompt_token_ids.as_ref())?;
        out.write_optional("active_mod_name", extras.active_mod_name.as_ref())?;
        out.write_optional("final_text", extras.final_text.as_ref())?;
        out.write_optional("final_token_ids", extras.final_token_ids.as_ref())?;
        out.write_optional("inference_stats", extras.inference_stats.as_ref())?;
        out.write_optional("thunder_run", extras.thunder_run.as_ref())?;
        out.end()
    }
}

impl Serialize for JsonView<'_, Event> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let event = self.0;
        let mut out = Fields::<S>::new(serializer)?;
        out.write_field("event_type", event.event_type.as_str())?;
        out.write_field("step", &event.step)?;
        out.write_field("sequence_order", &event.sequence_order)?;
        out.time("created_at", event.created_at.as_ref())?;
        match (&event.details, &event.measured) {
            (Some(details), _) => out.write_field("details", details)?,
            (None, measured) => out.write_optional("details", measured.as_ref())?,
        }
        out.write_optional("prompt_length", event.prompt_length.as_ref())?;
        out.write_optional("tokens_so_far_len", event.tokens_so_far_len.as_ref())?;
        out.write_optional("max_steps", event.max_steps.as_ref())?;
        out.write_optional("input_text", event.input_text.as_ref())?;
        match (&event.top_tokens, &event.measured) {
            (Some(top), _) => out.write_field("top_tokens", top)?,
            (None, Some(measured)) if event.event_type == EventType::ForwardPass && !measured.model.is_empty() => {
                out.write_field("top_tokens", &measured.model)?;
            }
            _ => {}
        }
        out.write_optional("sampled_token", event.sampled_token.as_ref())?;
        out.write_optional("token_text", event.token_text.as_ref())?;
        out.write_optional("added_tokens", event.added_tokens.as_ref())?;
        out.write_optional("added_token_count", event.added_token_count.as_ref())?;
        out.write_optional("forced", event.forced.as_ref())?;
        out.end()
    }
}

impl Serialize for JsonView<'_, ModCall> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let call = self.0;
        let mut out = Fields::<S>::new(serializer)?;
        out.write_field("event_sequence_order", &call.event_sequence_order)?;
        out.write_field("mod_name", &call.mod_name)?;
        out.write_field("event_type", call.event_type.as_str())?;
        out.write_field("step", &call.step)?;
        out.time("created_at", call.created_at.as_ref())?;
        out.write_optional("execution_time_ms", call.execution_time_ms.as_ref())?;
        out.write_field("exception_occurred", &call.exception_occurred)?;
        out.write_optional("exception_message", call.exception_message.as_ref())?;
        out.write_optional("exception_traceback", call.exception_traceback.as_ref())?;
        out.end()
    }
}

impl Serialize for JsonView<'_, ModLog> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let log = self.0;
        let mut out = Fields::<S>::new(serializer)?;
        out.write_field("mod_call_sequence", &log.mod_call_sequence)?;
        out.write_field("mod_name", &log.mod_name)?;
        out.write_field("log_message", &log.log_message)?;
        out.write_field("log_level", log.log_level.as_str())?;
        out.time("created_at", log.created_at.as_ref())?;
        out.end()
    }
}

impl Serialize for JsonView<'_, ActionRecord> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let action = self.0;
        let mut out = Fields::<S>::new(serializer)?;
        out.write_field("mod_call_sequence", &action.mod_call_sequence)?;
        out.write_field("action_type", action.action_type.as_str())?;
        out.write_field("action_order", &action.action_order)?;
        out.time("created_at", action.created_at.as_ref())?;
        out.write_optional("details", action.details.as_ref())?;
        out.write_optional("new_prompt", action.new_prompt.as_ref())?;
        out.write_optional("new_length", action.new_length.as_ref())?;
        out.write_optional("adjusted_max_steps", action.adjusted_max_steps.as_ref())?;
        out.write_optional("token_count", action.token_count.as_ref())?;
        out.write_optional("tokens_preview", action.tokens_preview.as_ref())?;
        out.write_optional("backtrack_steps", action.backtrack_steps.as_ref())?;
        out.write_optional("backtrack_token_count", action.backtrack_token_count.as_ref())?;
        out.write_optional("logits_shape", action.logits_shape.as_ref())?;
        out.write_optional("temperature", action.temperature.as_ref())?;
        out.write_optional("has_tool_calls", action.has_tool_calls.as_ref())?;
        out.write_optional("tool_calls", action.tool_calls.as_ref())?;
        out.write_optional("error_message", action.error_message.as_ref())?;
        out.end()
    }
}
