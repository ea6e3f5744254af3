//! One answer of the model: request, display while it streams, and conversion to a message.

use super::conversation::{ChatMessage, ChatTranscript};
use super::keys::KeyListener;
use super::screen::Screen;
use crate::cli::client::{Server, error_message, run_id_of};
use crate::cli::events::Events;
use anyhow::bail;
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use tokio::signal::unix::Signal;

/// A finished answer and its metadata.
#[derive(Debug, Default)]
pub struct ChatAnswer {
    /// The answer's message; `None` if the answer was stopped before its first text.
    pub message: Option<ChatMessage>,
    /// The finish reason; `None` if the user stopped the answer or the connection was lost.
    pub finish_reason: Option<String>,
    /// The error that interrupted the answer.
    pub interrupted: Option<String>,
    /// Token counts, in OpenAI's format.
    pub usage: Value,
    /// Durations, in llama-server's format.
    pub timings: Value,
    /// Id of the slot that generated it.
    pub slot: Option<u64>,
}

/// The parts of a streamed answer that are not shown on the screen.
#[derive(Default)]
struct StreamedAnswer {
    answer: ChatAnswer,
    /// Each token with its number of characters in the answer.
    tokens: Vec<(i64, usize)>,
    calls: BTreeMap<u64, Map<String, Value>>,
}

/// Requests the next answer and shows it. Esc and `interrupts` stop it. Sets `run_id` as soon as the id of its run is known,
/// also for an answer that fails.
pub async fn request_answer(
    server: &Server,
    conversation: &ChatTranscript,
    parameters: &Value,
    screen: &mut Screen,
    keys: &KeyListener,
    interrupts: &mut Signal,
    run_id: &mut Option<String>,
) -> anyhow::Result<ChatAnswer> {
    let mut body = conversation.request();
    for (name, value) in parameters.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    let mut streamed = StreamedAnswer::default();
    let pending = server.send(server.request(Method::POST, "/v1/chat/completions").json(&body));
    let response = tokio::select! {
        response = pending => response?,
        _ = interrupts.recv() => return Ok(streamed.answer),
        () = keys.escape() => return Ok(streamed.answer),
    };
    *run_id = run_id_of(&response);
    let mut events = Events::new(response);
    let outcome = loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = interrupts.recv() => break Ok(()),
            () = keys.escape() => break Ok(()),
        };
        match event {
            Ok(None) => break Ok(()),
            Ok(Some(chunk)) => match streamed.apply_chunk(&chunk, screen) {
                Ok(()) => {}
                Err(error) => break Err(error),
            },
            // The text received so far is kept, as for an answer that the user stops.
            Err(error) if !screen.text().is_empty() => {
                streamed.answer.interrupted = Some(error.to_string());
                break Ok(());
            }
            Err(error) => break Err(error),
        }
    };
    screen.end()?;
    outcome?;
    Ok(streamed.finish(screen, run_id.clone()))
}

impl StreamedAnswer {
    fn apply_chunk(&mut self, chunk: &Value, screen: &mut Screen) -> anyhow::Result<()> {
        if chunk.get("error").is_some() {
            bail!("{}", error_message(&chunk.to_string()).unwrap_or_else(|| "the run failed".into()));
        }
        let retracted = |field: &str| chunk.pointer(&format!("/thunder/retract/{field}")).and_then(Value::as_u64);
        if let Some(chars) = retracted("chars").filter(|&chars| chars > 0) {
            screen.retract(chars as usize)?;
            self.retract(chars as usize);
        }
        // The server retracts a call if its text turned out not to be a tool call. The text follows as content.
        for _ in 0..retracted("tool_calls").unwrap_or(0) {
            self.calls.pop_last();
        }
        self.answer.slot = chunk.pointer("/thunder/id_slot").and_then(Value::as_u64).or(self.answer.slot);
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        if let Some(text) = delta["reasoning_content"].as_str() {
            screen.think(text)?;
        }
        if let Some(text) = delta["content"].as_str() {
            screen.append(text)?;
        }
        self.tokens.extend(choice["logprobs"]["content"].as_array().into_iter().flatten().filter_map(|entry| {
            Some((entry["id"].as_i64()?, entry["token"].as_str().map_or(0, |text| text.chars().count())))
        }));
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            self.append_call_delta(call);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.answer.finish_reason = Some(reason.to_owned());
        }
        for (name, value) in [("usage", &mut self.answer.usage), ("timings", &mut self.answer.timings)] {
            if chunk[name].is_object() {
                *value = chunk[name].clone();
            }
        }
        Ok(())
    }

    fn retract(&mut self, chars: usize) {
        let mut remaining = chars;
        while remaining > 0 {
            let Some((_, token_chars)) = self.tokens.pop() else { return };
            remaining = remaining.saturating_sub(token_chars);
        }
    }

    /// Appends a delta to its tool call. The name arrives once, the arguments in parts.
    fn append_call_delta(&mut self, delta: &Value) {
        let call = self.calls.entry(delta["index"].as_u64().unwrap_or(0)).or_default();
        if let Some(id) = delta["id"].as_str() {
            call.insert("id".into(), id.into());
            call.insert("type".into(), "function".into());
        }
        let function = call.entry("function").or_insert_with(|| json!({ "name": "", "arguments": "" }));
        for part in ["name", "arguments"] {
            if let (Some(Value::String(text)), Some(more)) = (function.get_mut(part), delta["function"][part].as_str())
            {
                text.push_str(more);
            }
        }
    }

    fn finish(mut self, screen: &Screen, run_id: Option<String>) -> ChatAnswer {
        let mut answer = self.answer;
        if answer.finish_reason.is_none() {
            // The arguments of a call that was stopped are incomplete, and the server would reject them.
            let is_json = |text: &str| serde_json::from_str::<Value>(text).is_ok();
            self.calls.retain(|_, call| call["function"]["arguments"].as_str().is_some_and(is_json));
        }
        let is_empty = screen.text().is_empty() && screen.thinking().is_empty() && self.calls.is_empty();
        if is_empty && answer.finish_reason.is_none() {
            return answer;
        }
        let mut message = ChatMessage::new("assistant", screen.text());
        if !screen.thinking().is_empty() {
            message.fields.insert("reasoning_content".into(), screen.thinking().into());
        }
        if !self.calls.is_empty() {
            message.fields.insert("tool_calls".into(), self.calls.into_values().map(Value::Object).collect());
        }
        message.tokens = self.tokens.into_iter().map(|(id, _)| id).collect();
        message.run_id = run_id;
        answer.message = Some(message);
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the calls in the message of an answer that ends after these deltas.
    fn calls(deltas: &[Value], finish_reason: Option<&str>) -> Option<Value> {
        let mut screen = Screen::new();
        let mut streamed = StreamedAnswer::default();
        for call in deltas {
            let chunk = json!({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": finish_reason}]});
            streamed.apply_chunk(&chunk, &mut screen).unwrap();
        }
        let message = streamed.finish(&screen, None).message?;
        Some(message.fields.get("tool_calls").cloned().unwrap_or_default())
    }

    #[test]
    fn stopped_answer_has_only_complete_calls() {
        let call = |index: u64, arguments: &str| json!({"index": index, "id": format!("call-{index}"), "function": {"name": "f", "arguments": arguments}});
        let stopped = calls(&[call(0, "{\"a\": 1}"), call(1, "{\"a\":")], None).unwrap();
        assert_eq!((stopped.as_array().unwrap().len(), &stopped[0]["id"]), (1, &json!("call-0")));
        assert_eq!(calls(&[call(0, "{\"a\":")], None), None);
        let complete =
            calls(&[call(0, "{\"a\":"), json!({"index": 0, "function": {"arguments": "1}"}})], None).unwrap();
        assert_eq!(complete[0]["function"]["arguments"], "{\"a\":1}");
        assert!(calls(&[call(0, "{\"a\":")], Some("length")).is_some(), "the server ended the answer");
    }
}
