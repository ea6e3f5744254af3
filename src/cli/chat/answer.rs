//! One answer: asked for, shown while it comes, and kept.

use super::conversation::{Conversation, Message};
use super::keys::Keys;
use super::screen::Screen;
use crate::cli::client::{Server, words};
use crate::cli::events::Events;
use anyhow::bail;
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use tokio::signal::unix::Signal;

/// What is known of an answer when it is over.
#[derive(Debug, Default)]
pub struct Answered {
    /// The answer, unless there was none.
    pub message: Option<Message>,
    /// Its run.
    pub run_id: Option<String>,
    /// Why it ended; `None` when the person stopped it, or it was broken off.
    pub finish_reason: Option<String>,
    /// What broke it off.
    pub broken_off: Option<String>,
    /// Token counts, in OpenAI's shape.
    pub usage: Value,
    /// Where the time went, as llama-server tells it.
    pub timings: Value,
    /// The slot that it was generated in.
    pub slot: Option<u64>,
}

/// The pieces of an answer that do not go to the screen.
#[derive(Default)]
struct Pieces {
    answered: Answered,
    /// Each token with the characters of the answer it brought.
    tokens: Vec<(i64, usize)>,
    calls: BTreeMap<u64, Map<String, Value>>,
}

/// Asks for the next answer and shows it. Esc and `interrupts` stop it.
pub async fn ask(
    server: &Server,
    conversation: &Conversation,
    further: &Value,
    screen: &mut Screen,
    keys: &Keys,
    interrupts: &mut Signal,
) -> anyhow::Result<Answered> {
    let mut body = conversation.request();
    for (name, value) in further.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    let mut pieces = Pieces::default();
    let sent = server.send(server.request(Method::POST, "/v1/chat/completions").json(&body));
    let response = tokio::select! {
        response = sent => response?,
        _ = interrupts.recv() => return Ok(pieces.answered),
        () = keys.escape() => return Ok(pieces.answered),
    };
    let run_id = response.headers().get("x-thunder-run-id").and_then(|id| id.to_str().ok());
    pieces.answered.run_id = run_id.map(str::to_owned);
    let mut events = Events::of(response);
    let outcome = loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = interrupts.recv() => break Ok(()),
            () = keys.escape() => break Ok(()),
        };
        match event {
            Ok(None) => break Ok(()),
            Ok(Some(chunk)) => match pieces.take(&chunk, screen) {
                Ok(()) => {}
                Err(error) => break Err(error),
            },
            // What was said until then stays, as where the person stops it.
            Err(error) if !screen.text().is_empty() => {
                pieces.answered.broken_off = Some(error.to_string());
                break Ok(());
            }
            Err(error) => break Err(error),
        }
    };
    screen.end()?;
    outcome?;
    Ok(pieces.done(screen))
}

impl Pieces {
    fn take(&mut self, chunk: &Value, screen: &mut Screen) -> anyhow::Result<()> {
        if chunk.get("error").is_some() {
            bail!("{}", words(&chunk.to_string()).unwrap_or_else(|| "the run failed".into()));
        }
        let void = |what: &str| chunk.pointer(&format!("/thunder/retract/{what}")).and_then(Value::as_u64);
        if let Some(chars) = void("chars").filter(|&chars| chars > 0) {
            screen.retract(chars as usize)?;
            self.retract(chars as usize);
        }
        // What began as a call was none: its text follows.
        for _ in 0..void("tool_calls").unwrap_or(0) {
            self.calls.pop_last();
        }
        self.answered.slot = chunk.pointer("/thunder/id_slot").and_then(Value::as_u64).or(self.answered.slot);
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
            self.call(call);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.answered.finish_reason = Some(reason.to_owned());
        }
        for (name, value) in [("usage", &mut self.answered.usage), ("timings", &mut self.answered.timings)] {
            if chunk[name].is_object() {
                *value = chunk[name].clone();
            }
        }
        Ok(())
    }

    fn retract(&mut self, chars: usize) {
        let mut left = chars;
        while left > 0 {
            let Some((_, brought)) = self.tokens.pop() else { return };
            left = left.saturating_sub(brought);
        }
    }

    /// Puts the pieces of a tool call together: the name comes once, the arguments bit by bit.
    fn call(&mut self, delta: &Value) {
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

    fn done(self, screen: &Screen) -> Answered {
        let mut answered = self.answered;
        if screen.text().is_empty() && screen.thinking().is_empty() && self.calls.is_empty() {
            return answered;
        }
        let mut message = Message::new("assistant", screen.text());
        if !screen.thinking().is_empty() {
            message.sent.insert("reasoning_content".into(), screen.thinking().into());
        }
        if !self.calls.is_empty() {
            message.sent.insert("tool_calls".into(), self.calls.into_values().map(Value::Object).collect());
        }
        message.tokens = self.tokens.into_iter().map(|(id, _)| id).collect();
        message.run_id.clone_from(&answered.run_id);
        answered.message = Some(message);
        answered
    }
}
