//! Calls a mod with the events of recorded runs and compares its actions with the recorded ones.
//!
//! The mod's actions do not change the events. After the first difference, a real run would continue with other events.

use crate::engine::recorded_parameter;
use crate::events::{ActionRecord, ActionType, Event, ModCall, PromptRecord, RequestedAction, RunId, TraceItem};
use crate::model::Model;
use crate::model::chat::answer::AnswerFormat;
use crate::model::llama::ModelOptions;
use crate::mods::{ModFactory, ModInstance, RecordedSequence, ReplayedReply, RunView};
use crate::trace::document::Document;
use anyhow::{Context, bail};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// The result of a dry run of a mod on a recorded run.
#[derive(Debug, Serialize)]
pub struct DryRunReport {
    run: String,
    /// Number of events with which the mod was called.
    calls: usize,
    /// True if the run used the mod.
    recorded: bool,
    /// Replies with an action, an error or output.
    events: Vec<ModReplyReport>,
    /// The first event with an action that differs from the recorded one.
    pub difference: Option<FirstDifference>,
}

/// The reply of the mod at an event.
#[derive(Debug, Clone, Default, Serialize)]
struct ModReplyReport {
    sequence_order: i32,
    step: i32,
    event: &'static str,
    action: Option<RequestedAction>,
    exception: Option<String>,
    logs: Vec<String>,
}

/// The first difference between the mod's actions and the recorded ones.
#[derive(Debug, Clone, Serialize)]
pub struct FirstDifference {
    sequence_order: i32,
    step: i32,
    event: &'static str,
    recorded: String,
    now: String,
}

impl DryRunReport {
    /// Prints the report as text.
    pub fn print(&self) {
        let known = if self.recorded { "" } else { "; the recorded run did not use the mod" };
        println!("{}: {} calls, {} with an effect{known}", self.run, self.calls, self.events.len());
        for reply in &self.events {
            println!("  step {:4}  {:11}  {}", reply.step, reply.event, reply.describe());
            for line in &reply.logs {
                println!("      {line}");
            }
        }
        match &self.difference {
            None => println!("  no difference from the recording"),
            Some(found) => {
                println!(
                    "  first difference at step {} ({}, event {}):",
                    found.step, found.event, found.sequence_order
                );
                println!("    recorded: {}", found.recorded);
                println!("    now:      {}", found.now);
            }
        }
    }
}

impl ModReplyReport {
    fn describe(&self) -> String {
        match (&self.exception, &self.action) {
            (Some(message), _) => format!("failed: {message}"),
            (None, Some(action)) => action.to_string(),
            (None, None) => "Noop".to_owned(),
        }
    }
}

/// Calls one worker of the mod with the events of all runs, one run after the other.
pub fn dry_run_all(
    path: &Path,
    factory: &dyn ModFactory,
    config: Option<&Value>,
    runs: &[(String, Document)],
) -> anyhow::Result<Vec<DryRunReport>> {
    let model = Model::load(path, &ModelOptions::default(), |_| true)?;
    runs.iter()
        .map(|(name, run)| replay_run(&model, factory, config, name, run).with_context(|| name.clone()))
        .collect()
}

fn replay_run(
    model: &Model,
    factory: &dyn ModFactory,
    config: Option<&Value>,
    name: &str,
    run: &Document,
) -> anyhow::Result<DryRunReport> {
    let first = run.events.first().and_then(|event| event.measured.as_ref());
    let prompt = first.and_then(|measured| measured.prompt.as_ref()).filter(|prompt| !prompt.tokens.is_empty());
    let prompt = prompt.context("its prompt is not recorded, because it comes from another engine")?;
    check_vocabulary(model, prompt, run)?;
    let parameters = prompt.parameters.clone().unwrap_or_default();
    let mod_name = factory.describe().name;
    let entry = parameters["mods"].as_array().into_iter().flatten().find(|entry| entry["name"] == mod_name.as_str());
    let config = config.or_else(|| entry.map(|entry| &entry["config"])).cloned().unwrap_or_default();
    let template = model.card().chat_template.as_deref().unwrap_or_default();
    let answer_format =
        AnswerFormat::from_recording(template, prompt.tools.as_ref(), recorded_parameter(&parameters, "answer_format"));
    let view = Arc::new(RunView {
        run_id: RunId::now(),
        request_id: run.request.request_id.clone(),
        model: run.request.model.clone().unwrap_or_default(),
        vocabulary: Arc::clone(model.vocabulary()),
        conversation: prompt.conversation.clone(),
        tools: prompt.tools.clone(),
        answer_format: Arc::new(answer_format),
        seed: parameters["sampling"]["seed"].as_u64().unwrap_or(0) as u32,
        parameters,
        grammars: Arc::clone(model.grammars()),
    });
    let instance = factory.start(&config, &view).map_err(|message| anyhow::anyhow!("mod '{mod_name}': {message}"))?;
    let recorded = run.mod_calls.iter().any(|call| call.mod_name == mod_name);
    let mut dry_run = DryRun {
        view,
        instance,
        mod_name,
        sequence: RecordedSequence::default(),
        caller: String::new(),
        pending: None,
        recorded: ModReplyReport::default(),
        report: DryRunReport { run: name.to_owned(), calls: 0, recorded, events: Vec::new(), difference: None },
    };
    for item in run.items() {
        match item {
            TraceItem::Event(event) => {
                dry_run.compare();
                dry_run.event(&event)?;
            }
            TraceItem::ModCall(call) => dry_run.recorded_call(&call),
            TraceItem::Action(action) => dry_run.recorded_action(&action),
            TraceItem::ModLog(_) | TraceItem::Attention(_) => {}
        }
    }
    dry_run.compare();
    dry_run.instance.finished();
    Ok(dry_run.report)
}

/// Returns an error for a run of another model, in which token ids stand for other tokens.
fn check_vocabulary(model: &Model, prompt: &PromptRecord, run: &Document) -> anyhow::Result<()> {
    let named = run.request.model.as_deref().unwrap_or("another model");
    let vocabulary = model.vocabulary();
    let has_tokens = prompt.tokens.iter().all(|&token| vocabulary.contains(token))
        && (prompt.texts.len() != prompt.tokens.len() || vocabulary.texts(&prompt.tokens) == prompt.texts);
    if !has_tokens {
        bail!(
            "the run used the model {named}, whose vocabulary differs from that of {}; set --model to the file of that model",
            model.name()
        );
    }
    Ok(())
}

struct DryRun {
    view: Arc<RunView>,
    instance: Box<dyn ModInstance>,
    mod_name: String,
    sequence: RecordedSequence,
    /// Name of the mod of the newest recorded call.
    caller: String,
    /// The mod's reply at the newest event.
    pending: Option<ModReplyReport>,
    /// The recorded reply at the newest event.
    recorded: ModReplyReport,
    report: DryRunReport,
}

impl DryRun {
    fn event(&mut self, event: &Event) -> anyhow::Result<()> {
        self.recorded = ModReplyReport::default();
        self.sequence.apply_event(event, &self.view.vocabulary).map_err(anyhow::Error::msg)?;
        let reply = self.sequence.deliver(event, self.instance.as_mut(), &self.view).map_err(anyhow::Error::msg)?;
        let Some(ReplayedReply { action, exception, logs }) = reply else { return Ok(()) };
        let (sequence_order, step) = (event.sequence_order, event.step);
        let reply = ModReplyReport { sequence_order, step, event: event.event_type.as_str(), action, exception, logs };
        self.report.calls += 1;
        if reply.action.is_some() || reply.exception.is_some() || !reply.logs.is_empty() {
            self.report.events.push(reply.clone());
        }
        self.pending = Some(reply);
        Ok(())
    }

    fn recorded_call(&mut self, call: &ModCall) {
        self.caller.clone_from(&call.mod_name);
        if call.mod_name == self.mod_name && call.exception_occurred {
            self.recorded.exception = Some(call.exception_message.clone().unwrap_or_default());
        }
    }

    /// Stores the recorded actions of the mod, and applies the recorded changes to the sequence.
    fn recorded_action(&mut self, action: &ActionRecord) {
        if action.action_type == ActionType::Noop {
            return;
        }
        if self.caller == self.mod_name {
            self.recorded.action = Some(RequestedAction::from(action));
        }
        self.sequence.apply_action(action);
    }

    /// Compares the mod's actions at the newest event with the recorded ones.
    fn compare(&mut self) {
        let Some(now) = self.pending.take() else { return };
        let same = now.action == self.recorded.action && now.exception.is_some() == self.recorded.exception.is_some();
        if !same && self.report.difference.is_none() {
            self.report.difference = Some(FirstDifference {
                sequence_order: now.sequence_order,
                step: now.step,
                event: now.event,
                recorded: self.recorded.describe(),
                now: now.describe(),
            });
        }
    }
}
