//! The conversation's loop: a message or a command in, an answer out.

use super::answer::{self, Answered};
use super::command::{self, Command};
use super::conversation::{Conversation, Message};
use super::input::{Input, Reader};
use super::keys::Keys;
use super::screen::Screen;
use super::state;
use crate::cli::place::Place;
use anyhow::{Context, bail};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A conversation that is going on.
pub struct Talk {
    place: Place,
    conversation: Conversation,
    reader: Reader,
    screen: Screen,
    attention: bool,
    /// Tokens that a conversation can have.
    context: u64,
    /// Tokens that it has.
    used: u64,
    /// Tokens that made room in the context so far.
    evicted: u64,
    /// Where the last answer can be replayed.
    replay: Option<String>,
    /// The slot with the conversation's KV state.
    slot: Option<u64>,
}

impl Talk {
    /// A conversation that begins, or goes on.
    pub fn new(place: Place, conversation: Conversation, reader: Reader, screen: Screen, attention: bool) -> Self {
        let (context, used, evicted) = (0, 0, 0);
        Self { place, conversation, reader, screen, attention, context, used, evicted, replay: None, slot: None }
    }

    /// Turns mods on.
    pub fn add_mods(&mut self, names: Vec<String>) {
        self.conversation.mods.extend(names.into_iter().map(Value::from));
    }

    /// Stops what runs in this process.
    pub async fn close(self) {
        self.place.close().await;
    }

    /// Talks until the person leaves.
    pub async fn run(&mut self) -> anyhow::Result<ExitCode> {
        let mut interrupts = signal(SignalKind::interrupt())?;
        self.screen.resize(self.reader.size());
        self.introduce().await?;
        if self.reader.is_terminal() {
            let Self { context, conversation, screen, .. } = self;
            screen.note(&format!("{}, {context} tokens of context; /help lists what can be said", conversation.model));
        }
        let (mut interrupted, mut failed) = (false, false);
        loop {
            self.screen.resize(self.reader.size());
            let open = self.conversation.open_calls().into_iter().next();
            let prompt = match &open {
                Some((_, name, arguments)) => {
                    self.screen.note(&format!("the model calls {name} {arguments}"));
                    format!("{name}> ")
                }
                None => format!("{}/{}> ", self.used, self.context),
            };
            // At a terminal Ctrl-C is a key of the line editor.
            let piped = !self.reader.is_terminal();
            let input = tokio::select! {
                input = self.reader.read(prompt, open.is_none()) => input?,
                _ = interrupts.recv(), if piped => return Ok(ExitCode::from(130)),
            };
            let text = match input {
                Input::End => break,
                Input::Interrupted if interrupted => break,
                Input::Interrupted => {
                    interrupted = true;
                    self.screen.note("Ctrl-C again or Ctrl-D leaves; /help lists what can be said");
                    continue;
                }
                Input::Unreadable => {
                    failed = true;
                    self.screen.note("thunder: what was entered is not UTF-8; it is left out");
                    continue;
                }
                Input::Text(text) => text,
            };
            interrupted = false;
            let outcome = match (open, command::parse(&text)) {
                (_, Some(Ok(Command::Quit))) => break,
                (_, Some(Ok(command))) => self.obey(command, &mut interrupts).await,
                (_, Some(Err(wrong))) => Err(anyhow::anyhow!(wrong)),
                (None, None) if text.is_empty() => Ok(()),
                (Some((id, name, _)), None) => {
                    self.conversation.answer_call(&id, &name, text);
                    if self.conversation.open_calls().is_empty() { self.answer(&mut interrupts).await } else { Ok(()) }
                }
                (None, None) => {
                    let text = text.strip_prefix("//").map_or(text.clone(), |rest| format!("/{rest}"));
                    self.conversation.messages.push(Message::new("user", text));
                    self.answer(&mut interrupts).await
                }
            };
            if let Err(error) = outcome {
                failed = true;
                self.screen.note(&format!("thunder: {error:#}"));
            }
        }
        // A script must notice; a person has.
        Ok(if failed && !self.reader.is_terminal() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// Learns which model it is, and says so where it is another than before.
    async fn introduce(&mut self) -> anyhow::Result<()> {
        let models = self.get("/v1/models").await?;
        let loaded = &models["data"][0];
        self.context = loaded["meta"]["n_ctx"].as_u64().unwrap_or(0);
        let model = loaded["id"].as_str().unwrap_or("?").to_owned();
        if !self.conversation.model.is_empty() && self.conversation.model != model {
            self.screen.note(&format!(
                "this conversation was held with {}, and goes on with {model}",
                self.conversation.model
            ));
        }
        self.conversation.model = model;
        Ok(())
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let server = self.place.server();
        Ok(server.send(server.request(Method::GET, path)).await?.json().await?)
    }

    /// Asks for an answer to what was said.
    async fn answer(&mut self, interrupts: &mut Signal) -> anyhow::Result<()> {
        self.screen.begin(!self.conversation.mods.is_empty());
        let keys = Keys::listen(self.reader.is_terminal());
        let further = json!({ "attention": self.attention });
        let server = self.place.server();
        let asked = answer::ask(server, &self.conversation, &further, &mut self.screen, &keys, interrupts).await;
        self.reader.type_ahead(&keys.end());
        let answered = match asked {
            Ok(answered) => answered,
            Err(error) => {
                // The message may be what was wrong; without it the next can be right.
                if self.conversation.messages.last().is_some_and(|message| message.role() == "user") {
                    self.conversation.messages.pop();
                }
                return Err(error);
            }
        };
        self.report(&answered);
        let broken_off = answered.broken_off.clone();
        self.slot = answered.slot.or(self.slot);
        let run_id = answered.run_id;
        if let Some(message) = answered.message {
            self.conversation.messages.push(message);
        }
        if let Some(error) = broken_off {
            bail!("{error}; what it said so far stays in the conversation");
        }
        self.replay = self.place.recorded(run_id.as_deref()).await?;
        Ok(())
    }

    fn report(&mut self, answered: &Answered) {
        let timings = &answered.timings;
        let count = |value: &Value, name: &str| value[name].as_u64();
        // What made room while the answer came was counted when it came.
        let limit = if self.context == 0 { u64::MAX } else { self.context };
        let Some(total) = count(&answered.usage, "total_tokens").map(|total| total.min(limit)) else {
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
        // Every answer counts what went before it, too.
        if evicted > std::mem::replace(&mut self.evicted, evicted) {
            self.screen.note(&format!("the context is full: {evicted} tokens of the oldest messages made room"));
        }
        let generated = count(&answered.usage, "completion_tokens").unwrap_or(0);
        let speed = timings["predicted_per_second"].as_f64().unwrap_or(0.0);
        let prompt = count(&answered.usage, "prompt_tokens").unwrap_or(0);
        let cached = count(timings, "cache_n").unwrap_or(0);
        let percent = (total * 100).checked_div(self.context).unwrap_or(0);
        let reason = answered.finish_reason.as_deref().unwrap_or("?");
        self.screen.note(&format!(
            "{generated} tokens, {speed:.1} a second, ended by {reason}; {cached} of {prompt} prompt tokens were cached; \
             context {total} of {} ({percent} %)",
            self.context
        ));
    }

    async fn obey(&mut self, command: Command, interrupts: &mut Signal) -> anyhow::Result<()> {
        match command {
            Command::Help => self.screen.note(command::HELP),
            Command::System(None) => {
                self.screen.note(self.conversation.system.as_deref().unwrap_or("the system says nothing"));
            }
            Command::System(Some(text)) => self.conversation.system = (text != "-").then_some(text),
            Command::Mods => self.list_mods().await?,
            Command::ModOn(name, config) => self.mod_on(name, &config).await?,
            Command::ModOff(name) => self.mod_off(name.as_deref())?,
            Command::Tools => self.list_tools(),
            Command::ToolsFrom(path) => {
                self.conversation.tools = tools(&path)?;
                self.list_tools();
            }
            Command::ToolsOff => self.conversation.tools.clear(),
            Command::Parameters => {
                self.screen.note(&serde_json::to_string_pretty(&self.conversation.parameters)?);
            }
            Command::Parameter(name, Some(Value::Null)) => {
                let value = self.conversation.parameters.get(&name);
                self.screen
                    .note(&value.map_or_else(|| format!("{name} is not set"), |value| format!("{name} = {value}")));
            }
            Command::Parameter(name, None) => drop(self.conversation.parameters.remove(&name)),
            Command::Parameter(name, Some(value)) => drop(self.conversation.parameters.insert(name, value)),
            Command::Regenerate => {
                let asked = self.conversation.messages.last().is_some_and(|message| message.role() != "assistant");
                if !self.conversation.remove_answer() && !asked {
                    bail!("there is no message to answer");
                }
                self.answer(interrupts).await?;
            }
            Command::Reset => {
                self.conversation.messages.clear();
                self.slot = None;
                (self.used, self.evicted) = (0, 0);
            }
            Command::Save(path) => {
                self.conversation.save(&path)?;
                self.screen.note(&format!("{}: {} messages", path.display(), self.conversation.messages.len()));
                self.save_state(&path).await;
            }
            Command::Restore(path) => {
                self.conversation = Conversation::restore(&path)?;
                (self.used, self.evicted) = (0, 0);
                let messages = self.conversation.messages.len();
                self.introduce().await?;
                self.screen.note(&format!("{}: {messages} messages", path.display()));
                self.restore_state(&path).await;
            }
            Command::Replay => match &self.replay {
                Some(replay) => self.screen.note(&format!("replay: {replay}")),
                None => bail!("there is no recorded answer yet"),
            },
            // The loop ends before this.
            Command::Quit => {}
        }
        Ok(())
    }

    /// Keeps the KV state beside a saved conversation.
    async fn save_state(&self, path: &Path) {
        let Some(slot) = self.slot else { return state::forget(path) };
        match state::save(self.place.server(), slot, path).await {
            Ok(bytes) => self.screen.note(&format!("{}: {bytes} bytes of KV state", state::beside(path).display())),
            Err(error) => {
                state::forget(path);
                self.screen.note(&format!("saved without its KV state: {error:#}"));
            }
        }
    }

    /// Puts back the KV state that was saved with a conversation.
    pub async fn restore_state(&mut self, path: &Path) {
        self.slot = None;
        if let Err(error) = state::restore(self.place.server(), path).await {
            self.screen.note(&format!("the next answer evaluates the whole conversation again: {error:#}"));
        }
    }

    async fn list_mods(&self) -> anyhow::Result<()> {
        let known = self.get("/api/v1/mods").await?;
        for described in known["mods"].as_array().into_iter().flatten() {
            let name = described["name"].as_str().unwrap_or_default();
            let on = self.conversation.mods.iter().find(|chosen| mod_name(chosen) == name);
            let config =
                on.and_then(|chosen| chosen.get("config")).map(|config| format!(" {config}")).unwrap_or_default();
            let mark = if on.is_some() { "on " } else { "   " };
            let description = described["description"].as_str().unwrap_or_default();
            let example = &described["config"];
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
            bail!("there is no mod '{name}'; known are {}", known.join(", "));
        }
        self.conversation.mods.retain(|chosen| mod_name(chosen) != name);
        let chosen = if config.is_null() { Value::from(name) } else { json!({ "name": name, "config": config }) };
        self.conversation.mods.push(chosen);
        Ok(())
    }

    fn mod_off(&mut self, name: Option<&str>) -> anyhow::Result<()> {
        let before = self.conversation.mods.len();
        self.conversation.mods.retain(|chosen| name.is_some_and(|name| mod_name(chosen) != name));
        if let Some(name) = name.filter(|_| self.conversation.mods.len() == before) {
            bail!("the mod '{name}' is not on");
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

fn mod_name(chosen: &Value) -> &str {
    chosen.as_str().or_else(|| chosen["name"].as_str()).unwrap_or_default()
}

/// Tools from a file: a list of definitions in OpenAI's shape, or of their functions alone.
pub fn tools(path: &Path) -> anyhow::Result<Vec<Value>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    let list: Value = serde_json::from_str(&text).with_context(|| format!("{shown} is not JSON"))?;
    let list = list.as_array().with_context(|| format!("{shown} must hold a list of tools"))?;
    list.iter()
        .enumerate()
        .map(|(index, tool)| {
            let tool = if tool.get("function").is_some() {
                tool.clone()
            } else {
                json!({ "type": "function", "function": tool })
            };
            if tool["function"]["name"].as_str().is_none_or(str::is_empty) {
                bail!("{shown}: tool {index} has no name; a tool is {{\"name\", \"description\", \"parameters\"}}");
            }
            Ok(tool)
        })
        .collect()
}
