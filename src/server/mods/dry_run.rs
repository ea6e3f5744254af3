//! Calls a mod with the events of recorded runs and compares its actions with the recorded ones.
//!
//! The mod's actions do not change the events. After the first difference, a real run would continue with other events.

use crate::engine::{ModHealth, recorded_parameter};
use crate::events::{
    ActionRecord, ActionType, Event, LogLevel, ModCall, PromptRecord, RequestedAction, RunId, TraceItem,
};
use crate::model::chat::answer::AnswerFormat;
use crate::model::llama::NoHiddenStates;
use crate::model::{Model, Vocabulary};
use crate::mods::python::{last_location, line_in};
use crate::mods::{
    ModFactory, ModInstance, ModSource, PromptImage, RecordedSequence, ReplayLimits, ReplayedReply, RunView,
};
use crate::trace::document::Document;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::Instant;
use utoipa::ToSchema;

/// The result of a dry run of a mod on a recorded run.
#[derive(Debug, Serialize, ToSchema)]
pub struct DryRunReport {
    /// The run, as given.
    pub run: String,
    /// Number of events with which the mod was called.
    pub calls: usize,
    /// True if the run used the mod.
    pub recorded: bool,
    /// False if the time limit was reached before the end of the run.
    pub complete: bool,
    /// Events with an action, an error or output, in the recording or in the dry run.
    pub events: Vec<ModReplyReport>,
    /// The first event with an action that differs from the recorded one.
    pub difference: Option<FirstDifference>,
}

/// The reply of the mod at an event.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ModReplyReport {
    /// Number of the event.
    pub sequence_order: i32,
    /// Its step.
    pub step: i32,
    /// Its type.
    pub event: &'static str,
    /// The action; `null` for Noop and for a failed call.
    #[schema(value_type = Option<Object>)]
    pub action: Option<RequestedAction>,
    /// Message of a failed call.
    pub exception: Option<String>,
    /// The file of the package that failed, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Line of the source or of the file that failed, from 1, if known.
    pub line: Option<u32>,
    /// Lines that the mod printed and logged, each with its level.
    pub logs: Vec<String>,
    /// The recorded reply, as text.
    pub recorded: String,
    /// The mod's reply, as text.
    pub now: String,
    /// True if the two differ.
    pub differs: bool,
}

/// The first difference between the mod's actions and the recorded ones.
#[derive(Debug, Serialize, ToSchema)]
pub struct FirstDifference {
    /// Number of the event.
    pub sequence_order: i32,
    /// Its step.
    pub step: i32,
    /// Its type.
    pub event: &'static str,
    /// The recorded reply, as text.
    pub recorded: String,
    /// The mod's reply, as text.
    pub now: String,
}

impl From<&ModReplyReport> for FirstDifference {
    fn from(reply: &ModReplyReport) -> Self {
        Self {
            sequence_order: reply.sequence_order,
            step: reply.step,
            event: reply.event,
            recorded: reply.recorded.clone(),
            now: reply.now.clone(),
        }
    }
}

impl ModReplyReport {
    /// Returns true if the mod returned an action or failed at the event.
    #[must_use]
    pub const fn has_effect(&self) -> bool {
        self.action.is_some() || self.exception.is_some()
    }
}

/// Options of a dry run.
#[derive(Debug, Clone, Copy)]
pub struct DryRunOptions<'a> {
    /// The run, as the caller named it.
    pub run: &'a str,
    /// Configuration of the mod; `None` for the recorded one.
    pub config: Option<&'a Value>,
    /// Limits of the engine.
    pub limits: ReplayLimits,
    /// Time at which the dry run ends early; `None` for never.
    pub deadline: Option<Instant>,
}

/// Calls a mod with the events of a recorded run.
///
/// # Errors
/// The run cannot be replayed with this model, or the mod cannot be started.
pub fn dry_run(
    model: &Model,
    factory: &dyn ModFactory,
    run: &Document,
    options: DryRunOptions<'_>,
) -> Result<DryRunReport, String> {
    let first = run.events.first().and_then(|event| event.measured.as_ref());
    let prompt = first.and_then(|measured| measured.prompt.as_ref()).filter(|prompt| !prompt.tokens.is_empty());
    let prompt = prompt.ok_or("its prompt is not recorded, because it comes from another engine")?;
    check_vocabulary(model, prompt, run)?;
    let parameters = prompt.parameters.clone().unwrap_or_default();
    let mod_name = factory.describe().name;
    let mut entries = parameters["mods"].as_array().into_iter().flatten();
    let entry = entries.find(|entry| entry["name"] == mod_name.as_str());
    let later_mods = entries.filter_map(|entry| entry["name"].as_str().map(str::to_owned)).collect();
    let config = options.config.or_else(|| entry.map(|entry| &entry["config"])).cloned().unwrap_or_default();
    let template = model.card().chat_template.as_deref().unwrap_or_default();
    let answer_format =
        AnswerFormat::from_recording(template, prompt.tools.as_ref(), recorded_parameter(&parameters, "answer_format"));
    let view = Arc::new(RunView {
        run_id: RunId::now(),
        owner: None,
        request_id: run.request.request_id.clone(),
        model: run.request.model.clone().unwrap_or_default(),
        vocabulary: Arc::clone(model.vocabulary()),
        conversation: prompt.conversation.clone(),
        tools: prompt.tools.clone(),
        images: PromptImage::from_records(&prompt.images, &prompt.tokens),
        answer_format: Arc::new(answer_format),
        stop_tokens: serde_json::from_value(parameters["limits"]["stop_tokens"].clone()).unwrap_or_default(),
        seed: initial_seed(&parameters),
        parameters,
        grammars: Arc::clone(model.grammars()),
        hidden_layers: Err(NoHiddenStates::Recorded),
    });
    let instance = factory.start(&config, &view).map_err(|message| format!("mod '{mod_name}': {message}"))?;
    let was_used = run.mod_calls.iter().any(|call| call.mod_name == mod_name);
    let files = match factory.upload().map(|upload| &upload.source) {
        Some(ModSource::Files(files)) => files.keys().cloned().collect(),
        _ => Vec::new(),
    };
    let mut dry_run = DryRun {
        view,
        instance,
        mod_name,
        files,
        health: ModHealth::default(),
        later_mods,
        sequence: RecordedSequence::new(options.limits),
        undelivered: None,
        is_own_call: false,
        had_own_call: false,
        new_reply: None,
        recorded_reply: ExpectedReply::default(),
        calls: 0,
        events: Vec::new(),
    };
    let replayed = dry_run.replay(run, options.deadline);
    dry_run.instance.finished();
    let DryRun { calls, events, .. } = dry_run;
    Ok(DryRunReport {
        run: options.run.to_owned(),
        calls,
        recorded: was_used,
        complete: replayed?,
        difference: events.iter().find(|reply| reply.differs).map(FirstDifference::from),
        events,
    })
}

/// Returns the seed of the mods. Those of a fork have the seed with which the first of its recorded runs started.
fn initial_seed(mut parameters: &Value) -> u32 {
    while parameters["fork"]["earlier"].is_object() {
        parameters = &parameters["fork"]["earlier"];
    }
    parameters["sampling"]["seed"].as_u64().unwrap_or(0) as u32
}

/// Returns an error for a run of another model, in which token ids stand for other tokens.
fn check_vocabulary(model: &Model, prompt: &PromptRecord, run: &Document) -> Result<(), String> {
    let named = run.request.model.as_deref().unwrap_or("another model");
    let vocabulary = model.vocabulary();
    let has_tokens = prompt.tokens.iter().all(|&token| vocabulary.is_prompt_token(token))
        && (prompt.texts.len() != prompt.tokens.len() || vocabulary.storable_texts(&prompt.tokens) == prompt.texts);
    if !has_tokens {
        return Err(format!(
            "the run used the model {named}, whose vocabulary differs from that of {}; choose that model",
            model.name()
        ));
    }
    Ok(())
}

/// The recorded reply of the mod at an event.
#[derive(Default)]
struct ExpectedReply {
    action: Option<RequestedAction>,
    exception: Option<String>,
}

/// Returns a reply as text, with the texts of its tokens.
fn describe(action: Option<&RequestedAction>, exception: Option<&str>, vocabulary: &Vocabulary) -> String {
    match (exception, action) {
        (Some(message), _) => format!("failed: {message}"),
        (None, Some(action)) if action.tokens.is_empty() => action.to_string(),
        (None, Some(action)) => format!("{action} {:?}", vocabulary.decode(&action.tokens)),
        (None, None) => "Noop".to_owned(),
    }
}

struct DryRun {
    view: Arc<RunView>,
    instance: Box<dyn ModInstance>,
    mod_name: String,
    /// Paths of the files, if the mod is a package.
    files: Vec<String>,
    /// Failures of the mod in the dry run.
    health: ModHealth,
    /// Names of the mods that the recorded run called after this one.
    later_mods: Vec<String>,
    sequence: RecordedSequence,
    /// The newest event until the mod receives it.
    undelivered: Option<Event>,
    /// True if the newest recorded call is the one to compare with: the first call of the mod at the event.
    is_own_call: bool,
    /// True after that call.
    had_own_call: bool,
    /// The mod's reply at the newest event, until it is compared.
    new_reply: Option<ModReplyReport>,
    /// The recorded reply at the newest event.
    recorded_reply: ExpectedReply,
    /// Number of events with which the mod was called.
    calls: usize,
    /// Events with an action, an error or output.
    events: Vec<ModReplyReport>,
}

impl DryRun {
    /// Replays the run. Returns false if it ended at the deadline.
    fn replay(&mut self, run: &Document, deadline: Option<Instant>) -> Result<bool, String> {
        for item in run.items() {
            match item {
                TraceItem::Event(event) => {
                    self.end_event()?;
                    if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                        return Ok(false);
                    }
                    self.sequence.apply_event(&event, &self.view.vocabulary)?;
                    self.recorded_reply = ExpectedReply::default();
                    self.had_own_call = false;
                    self.undelivered = Some(event);
                }
                TraceItem::ModCall(call) => self.recorded_call(&call)?,
                TraceItem::Action(action) => self.recorded_action(&action),
                TraceItem::ModLog(_) | TraceItem::Attention(_) => {}
            }
        }
        self.end_event()?;
        Ok(true)
    }

    /// Ends the newest event: calls the mod if it was not called yet, and compares the replies.
    fn end_event(&mut self) -> Result<(), String> {
        self.deliver()?;
        self.compare();
        Ok(())
    }

    /// Calls the mod with the newest event, unless it was called or is disabled.
    fn deliver(&mut self) -> Result<(), String> {
        let Some(event) = self.undelivered.take() else { return Ok(()) };
        let mut report = ModReplyReport {
            sequence_order: event.sequence_order,
            step: event.step,
            event: event.event_type.as_str(),
            ..ModReplyReport::default()
        };
        if self.health.disabled.is_none()
            && let Some(reply) = self.sequence.deliver(&event, self.instance.as_mut(), &self.view)?
        {
            let ReplayedReply { action, exception, traceback, mut logs } = reply;
            let (name, step) = (&self.mod_name, event.step.max(0) as u32);
            let disabled = self.health.count_call(name, event.event_type, step, exception.as_deref());
            logs.extend(disabled.map(|message| format!("{}: {message}", LogLevel::Error.as_str())));
            let (file, line) = self.location(&traceback.unwrap_or_default());
            self.calls += 1;
            report = ModReplyReport { action, exception, file, line, logs, ..report };
        }
        self.new_reply = Some(report);
        Ok(())
    }

    /// Returns the file of a package and the line of the source that a traceback names last.
    fn location(&self, traceback: &str) -> (Option<String>, Option<u32>) {
        match last_location(self.files.iter().map(String::as_str), traceback) {
            Some((file, line)) => (Some(file.to_owned()), Some(line)),
            None => (None, line_in(&format!("{}.py", self.mod_name), traceback)),
        }
    }

    /// Calls the mod at its place among the recorded calls of the event, and stores its recorded error.
    fn recorded_call(&mut self, call: &ModCall) -> Result<(), String> {
        let is_own = call.mod_name == self.mod_name;
        if is_own || self.later_mods.contains(&call.mod_name) {
            self.deliver()?;
        }
        self.is_own_call = is_own && !self.had_own_call;
        self.had_own_call |= is_own;
        if self.is_own_call && call.exception_occurred {
            self.recorded_reply.exception = Some(call.exception_message.clone().unwrap_or_default());
        }
        Ok(())
    }

    /// Stores the recorded action of the mod, and applies the recorded changes to the sequence.
    fn recorded_action(&mut self, action: &ActionRecord) {
        if action.action_type == ActionType::Noop {
            return;
        }
        if self.is_own_call {
            self.recorded_reply.action = Some(RequestedAction::from(action));
        }
        self.sequence.apply_action(action);
    }

    /// Compares the mod's actions at the newest event with the recorded ones.
    fn compare(&mut self) {
        let Some(mut reply) = self.new_reply.take() else { return };
        let (vocabulary, recorded) = (&self.view.vocabulary, &self.recorded_reply);
        reply.differs = reply.action != recorded.action || reply.exception.is_some() != recorded.exception.is_some();
        reply.now = describe(reply.action.as_ref(), reply.exception.as_deref(), vocabulary);
        reply.recorded = describe(recorded.action.as_ref(), recorded.exception.as_deref(), vocabulary);
        if reply.differs || reply.has_effect() || !reply.logs.is_empty() {
            self.events.push(reply);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::initial_seed;
    use serde_json::json;

    #[test]
    fn mods_of_a_fork_have_the_seed_of_the_first_run() {
        let first = json!({ "sampling": { "seed": 3 }, "fork": null });
        let second = json!({ "sampling": { "seed": 5 }, "fork": { "step": 2, "earlier": first } });
        let third = json!({ "sampling": { "seed": 7 }, "fork": { "step": 4, "earlier": second } });
        assert_eq!([&first, &second, &third].map(initial_seed), [3, 3, 3]);
    }
}
