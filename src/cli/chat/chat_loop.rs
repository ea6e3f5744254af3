//! The main loop of `thunder chat`: reads messages and commands, shows answers.

use super::answer::{self, ChatAnswer};
use super::command::{self, ChatCommand};
use super::conversation::{ChatMessage, ChatTranscript, OpenCall};
use super::input::{Input, InputReader};
use super::keys::KeyListener;
use super::screen::Screen;
use super::state;
use super::tools;
use crate::cli::output;
use crate::cli::printer::escape_control_characters;
use crate::cli::run_target::{ReplayAddress, RunTarget};
use anyhow::bail;
use futures::FutureExt as _;
use reqwest::Method;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A running conversation.
pub struct ChatLoop {
    target: RunTarget,
    conversation: ChatTranscript,
    reader: InputReader,
    screen: Screen,
    attention: bool,
    /// Context size in tokens.
    context: u64,
    /// Tokens of the conversation.
    used: u64,
    /// Tokens evicted from the context so far.
    evicted: u64,
    /// Address of the replay of the last answer.
    replay: Option<ReplayAddress>,
    /// Id of the slot with the conversation's KV state.
    slot: Option<u64>,
}

impl ChatLoop {
    /// Creates the loop for a new or restored conversation.
    pub fn new(
        target: RunTarget,
        conversation: ChatTranscript,
        reader: InputReader,
        screen: Screen,
        attention: bool,
    ) -> Self {
        let (context, used, evicted) = (0, 0, 0);
        Self { target, conversation, reader, screen, attention, context, used, evicted, replay: None, slot: None }
    }

    /// Enables mods.
    pub fn add_mods(&mut self, names: Vec<String>) {
        self.conversation.mods.extend(names.into_iter().map(Value::from));
    }

    /// Stops the local engine, if there is one.
    pub async fn close(self) {
        self.target.close().await;
    }

    /// Runs until the user ends the chat.
    pub async fn run(&mut self) -> anyhow::Result<ExitCode> {
        let mut interrupts = signal(SignalKind::interrupt())?;
        self.screen.resize(self.reader.size());
        self.read_model_info().await?;
        if self.reader.is_terminal() {
            let Self { context, conversation, screen, .. } = self;
            screen.note(&format!("{}, context of {context} tokens; /help lists the commands", conversation.model));
        }
        let (mut interrupted, mut failed) = (false, false);
        loop {
            let open_call = self.conversation.open_calls().into_iter().next();
            // On a terminal the line editor handles Ctrl-C.
            let piped = !self.reader.is_terminal();
            let input = tokio::select! {
                biased;
                _ = interrupts.recv(), if piped => return Ok(ExitCode::from(130)),
                input = self.read_input(open_call.as_ref()) => input?,
            };
            let text = match input {
                Input::End => break,
                Input::Interrupted if interrupted => break,
                Input::Interrupted => {
                    interrupted = true;
                    self.screen.note("press Ctrl-C again or Ctrl-D to quit; /help lists the commands");
                    continue;
                }
                Input::Unreadable => {
                    failed = true;
                    self.screen.note("thunder: the input is not UTF-8 and was ignored");
                    continue;
                }
                Input::Text(text) => text,
            };
            interrupted = false;
            let outcome = match command::parse(&text) {
                Some(Ok(ChatCommand::Quit)) => break,
                Some(Ok(command)) => self.execute(command, &mut interrupts).await,
                Some(Err(wrong)) => Err(anyhow::anyhow!(wrong)),
                None => self.send_message(text, open_call, &mut interrupts).await,
            };
            if let Err(error) = outcome {
                if output::is_closed(&error) {
                    return Ok(ExitCode::SUCCESS);
                }
                failed = true;
                self.screen.note(&format!("thunder: {error:#}"));
            }
        }
        // The exit code matters to scripts only; on a terminal, the errors were shown.
        Ok(if failed && !self.reader.is_terminal() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// Reads the next message, command or result of a tool call.
    async fn read_input(&mut self, open_call: Option<&OpenCall>) -> anyhow::Result<Input> {
        self.screen.resize(self.reader.size());
        let prompt = match open_call {
            Some(OpenCall { name, arguments, .. }) => {
                self.screen.note(&format!("the model calls {name} {arguments}"));
                format!("{}> ", escape_control_characters(name))
            }
            None => format!("{}/{}> ", self.used, self.context),
        };
        self.reader.read(prompt, open_call.is_none()).await
    }

    /// Adds a message of the user, or the result of a tool call, and requests an answer unless more results are missing.
    async fn send_message(
        &mut self,
        text: String,
        open_call: Option<OpenCall>,
        interrupts: &mut Signal,
    ) -> anyhow::Result<()> {
        match open_call {
            Some(OpenCall { id, name, .. }) => {
                self.conversation.answer_call(&id, &name, text);
                if !self.conversation.open_calls().is_empty() {
                    return Ok(());
                }
            }
            None if text.is_empty() => return Ok(()),
            None => {
                let text = text.strip_prefix("//").map_or(text.clone(), |rest| format!("/{rest}"));
                self.conversation.messages.push(ChatMessage::new("user", text));
            }
        }
        self.answer(interrupts).await
    }

    /// Reads the model's name and context size, and reports a change of the model.
    async fn read_model_info(&mut self) -> anyhow::Result<()> {
        let models = self.get("/v1/models").await?;
        let loaded = &models["data"][0];
        self.context = loaded["meta"]["n_ctx"].as_u64().unwrap_or(0);
        let model = loaded["id"].as_str().unwrap_or("?").to_owned();
        if !self.conversation.model.is_empty() && self.conversation.model != model {
            self.screen.note(&format!(
                "this conversation used the model {}; it continues with {model}",
                self.conversation.model
            ));
        }
        self.conversation.model = model;
        Ok(())
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let server = self.target.server();
        Ok(server.send(server.request(Method::GET, path)).await?.json().await?)
    }

    /// Requests an answer to the last message.
    async fn answer(&mut self, interrupts: &mut Signal) -> anyhow::Result<()> {
        self.screen.begin(!self.conversation.mods.is_empty());
        // A signal from before the request must not stop its answer.
        while interrupts.recv().now_or_never().is_some() {}
        let keys = KeyListener::listen(self.reader.is_terminal());
        let (parameters, mut run_id) = (json!({ "attention": self.attention }), None);
        let (server, conversation, screen) = (self.target.server(), &self.conversation, &mut self.screen);
        let result =
            answer::request_answer(server, conversation, &parameters, screen, &keys, interrupts, &mut run_id).await;
        self.reader.type_ahead(&keys.end());
        // An answer that was stopped or failed is a recorded run, too.
        let replay = self.target.record(run_id.as_deref()).await;
        let answer = match result {
            Ok(answer) => answer,
            Err(error) => {
                // The message may have caused the error.
                self.conversation.remove_question();
                return Err(error);
            }
        };
        self.replay = replay.as_ref().ok().cloned().flatten();
        self.report(&answer);
        let interrupted = answer.interrupted.clone();
        self.slot = answer.slot.or(self.slot);
        match answer.message {
            Some(message) => self.conversation.messages.push(message),
            // Some chat templates reject two messages of the user in a row.
            None if self.conversation.remove_question() => {
                self.screen.note("nothing was generated; the conversation is unchanged");
            }
            None => {}
        }
        if let Some(error) = interrupted {
            bail!("{error}; the text received so far stays in the conversation");
        }
        replay.map(drop)
    }

    fn report(&mut self, answer: &ChatAnswer) {
        let timings = &answer.timings;
        let count = |value: &Value, name: &str| value[name].as_u64();
        // The total can exceed the context if messages were evicted during the answer.
        let limit = if self.context == 0 { u64::MAX } else { self.context };
        let Some(total) = count(&answer.usage, "total_tokens").map(|total| total.min(limit)) else {
            let parts = ["cache_n", "prompt_n", "predicted_n"].map(|name| count(timings, name));
            if let [Some(cached), Some(prompt), Some(generated)] = parts {
                self.used = (cached + prompt + generated).min(limit);
                self.screen.note(&format!("stopped after {generated} tokens"));
            } else {
                self.screen.note("stopped");
            }
            return;
        };
        self.used = total;
        let evicted = count(timings, "evicted_n").unwrap_or(0);
        // Every answer reports the sum of the whole conversation.
        if evicted > std::mem::replace(&mut self.evicted, evicted) {
            self.screen.note(&format!("the context is full: {evicted} tokens of the oldest messages were evicted"));
        }
        let generated = count(&answer.usage, "completion_tokens").unwrap_or(0);
        let speed = timings["predicted_per_second"].as_f64().unwrap_or(0.0);
        let prompt = count(&answer.usage, "prompt_tokens").unwrap_or(0);
        let cached = count(timings, "cache_n").unwrap_or(0);
        let percent = (total * 100).checked_div(self.context).unwrap_or(0);
        let reason = answer.finish_reason.as_deref().unwrap_or("?");
        self.screen.note(&format!(
            "{generated} tokens, {speed:.1} tokens/s, ended by {reason}; {cached} of {prompt} prompt tokens cached; \
             context {total} of {} ({percent}%)",
            self.context
        ));
    }

    async fn execute(&mut self, command: ChatCommand, interrupts: &mut Signal) -> anyhow::Result<()> {
        match command {
            ChatCommand::Help => self.screen.note(command::HELP),
            ChatCommand::ShowSystem => {
                self.screen.note(self.conversation.system.as_deref().unwrap_or("no system message is set"));
            }
            ChatCommand::SetSystem(text) => self.conversation.system = Some(text),
            ChatCommand::RemoveSystem => self.conversation.system = None,
            ChatCommand::Mods => self.list_mods().await?,
            ChatCommand::ModOn(name, config) => self.mod_on(name, &config).await?,
            ChatCommand::ModOff(name) => self.mod_off(name.as_deref())?,
            ChatCommand::Tools => self.list_tools(),
            ChatCommand::ToolsFrom(path) => {
                self.conversation.tools = tools::read_tools(&path)?;
                self.list_tools();
            }
            ChatCommand::ToolsOff => self.conversation.tools.clear(),
            ChatCommand::Parameters => {
                self.screen.note(&serde_json::to_string_pretty(&self.conversation.parameters)?);
            }
            ChatCommand::ShowParameter(name) => {
                let value = self.conversation.parameters.get(&name);
                self.screen
                    .note(&value.map_or_else(|| format!("{name} is not set"), |value| format!("{name} = {value}")));
            }
            ChatCommand::RemoveParameter(name) => drop(self.conversation.parameters.remove(&name)),
            ChatCommand::SetParameter(name, value) => drop(self.conversation.parameters.insert(name, value)),
            ChatCommand::Regenerate => {
                let messages = self.conversation.messages.clone();
                let is_open = messages.last().is_some_and(|message| message.role() != "assistant");
                if !self.conversation.remove_answer() && !is_open {
                    bail!("there is no message to answer");
                }
                let kept = self.conversation.messages.len();
                let result = self.answer(interrupts).await;
                if self.conversation.messages.len() <= kept {
                    // Without a new answer, the conversation keeps the previous one.
                    self.conversation.messages = messages;
                }
                result?;
            }
            ChatCommand::Reset => {
                self.conversation.messages.clear();
                (self.slot, self.replay) = (None, None);
                (self.used, self.evicted) = (0, 0);
            }
            ChatCommand::Save(path) => {
                self.conversation.save(&path)?;
                self.screen.note(&format!("{}: {} messages", path.display(), self.conversation.messages.len()));
                self.save_state(&path).await;
            }
            ChatCommand::Restore(path) => {
                self.conversation = ChatTranscript::restore(&path)?;
                (self.used, self.evicted, self.replay) = (0, 0, None);
                let messages = self.conversation.messages.len();
                self.read_model_info().await?;
                self.screen.note(&format!("{}: {messages} messages", path.display()));
                self.restore_state(&path).await;
            }
            ChatCommand::Replay => match &self.replay {
                Some(replay) => self.screen.note(&format!("replay: {replay}")),
                None => bail!("there is no recorded answer yet"),
            },
            // Not reachable, because the loop ends before this command.
            ChatCommand::Quit => {}
        }
        Ok(())
    }

    /// Saves the KV state next to a saved conversation.
    async fn save_state(&self, path: &Path) {
        let Some(slot) = self.slot else { return state::remove(path) };
        match state::save(self.target.server(), slot, path).await {
            Ok(bytes) => self.screen.note(&format!("{}: {bytes} bytes of KV state", state::state_path(path).display())),
            Err(error) => {
                state::remove(path);
                self.screen.note(&format!("the conversation was saved without its KV state: {error:#}"));
            }
        }
    }

    /// Restores the KV state that was saved with a conversation.
    pub async fn restore_state(&mut self, path: &Path) {
        self.slot = None;
        if let Err(error) = state::restore(self.target.server(), path).await {
            self.screen.note(&format!(
                "the KV state was not restored, so the next answer processes the whole conversation: {error:#}"
            ));
        }
    }

    async fn list_mods(&self) -> anyhow::Result<()> {
        let known = self.get("/api/v1/mods").await?;
        for info in known["mods"].as_array().into_iter().flatten() {
            let name = info["name"].as_str().unwrap_or_default();
            let on = self.conversation.mods.iter().find(|entry| mod_name(entry) == name);
            let config =
                on.and_then(|entry| entry.get("config")).map(|config| format!(" {config}")).unwrap_or_default();
            let mark = if on.is_some() { "on " } else { "   " };
            let description = info["description"].as_str().unwrap_or_default();
            let example = &info["config"];
            let example = if on.is_none() && !example.is_null() { format!("  e.g. {example}") } else { String::new() };
            let description = description.lines().next().unwrap_or_default();
            self.screen.note(&format!("{mark}{name}{config}  {description}{example}"));
        }
        Ok(())
    }

    async fn mod_on(&mut self, name: String, config: &Value) -> anyhow::Result<()> {
        let known = self.get("/api/v1/mods").await?;
        let known: Vec<&str> =
            known["mods"].as_array().into_iter().flatten().filter_map(|m| m["name"].as_str()).collect();
        if !known.contains(&name.as_str()) {
            bail!("unknown mod '{name}'; known mods: {}", known.join(", "));
        }
        self.conversation.mods.retain(|entry| mod_name(entry) != name);
        let entry = if config.is_null() { Value::from(name) } else { json!({ "name": name, "config": config }) };
        self.conversation.mods.push(entry);
        Ok(())
    }

    fn mod_off(&mut self, name: Option<&str>) -> anyhow::Result<()> {
        let before = self.conversation.mods.len();
        self.conversation.mods.retain(|entry| name.is_some_and(|name| mod_name(entry) != name));
        if let Some(name) = name.filter(|_| self.conversation.mods.len() == before) {
            bail!("the mod '{name}' is not enabled");
        }
        Ok(())
    }

    fn list_tools(&self) {
        if self.conversation.tools.is_empty() {
            self.screen.note("the model has no tools");
        }
        for tool in &self.conversation.tools {
            let function = &tool["function"];
            let description = function["description"].as_str().unwrap_or_default();
            self.screen.note(&format!("{}  {description}", function["name"].as_str().unwrap_or_default()));
        }
    }
}

fn mod_name(entry: &Value) -> &str {
    entry.as_str().or_else(|| entry["name"].as_str()).unwrap_or_default()
}
