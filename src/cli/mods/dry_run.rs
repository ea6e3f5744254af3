//! Delivers the events of a recorded run to a mod and compares its actions with the recorded ones.
//!
//! The mod's actions do not change the events, so after the first difference a real run would have had other events. A
//! recording has the most probable tokens of each step and not all logits. The mod sees these tokens with their
//! probabilities, and all other tokens with an equal share of the remaining probability.

use crate::events::{ActionRecord, ActionType, Event, EventType, ModCall, PromptRecord, RunId, TokenId, TraceItem};
use crate::model::chat::answer::AnswerFormat;
use crate::model::llama::ModelOptions;
use crate::model::{Model, Vocabulary};
use crate::mods::{Action, Call, CallEvent, ModFactory, ModInstance, Pending, Reply, ReplySender, RunView};
use crate::trace::difference::RequestedAction;
use crate::trace::document::Document;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, mpsc};

/// The result of a dry run of a mod on a recorded run.
#[derive(Debug, Serialize)]
pub struct DryRunReport {
    run: String,
    /// Number of events delivered to the mod.
    calls: usize,
    /// True if the run used the mod.
    recorded: bool,
    /// Events with an action, an error or output of the mod.
    events: Vec<Answer>,
    /// The first event with an action that differs from the recorded one.
    pub difference: Option<FirstDifference>,
}

/// The actions of the mod at an event.
#[derive(Debug, Clone, Default, Serialize)]
struct Answer {
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
        let known = if self.recorded { "" } else { "; the run ran without it" };
        println!("{}: {} calls, {} with an effect{known}", self.run, self.calls, self.events.len());
        for answer in &self.events {
            println!("  step {:4}  {:11}  {}", answer.step, answer.event, answer.words());
            for line in &answer.logs {
                println!("      {line}");
            }
        }
        match &self.difference {
            None => println!("  all as recorded"),
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

impl Answer {
    fn words(&self) -> String {
        match (&self.exception, &self.action) {
            (Some(message), _) => format!("failed: {message}"),
            (None, Some(action)) => action.to_string(),
            (None, None) => "Noop".to_owned(),
        }
    }
}

/// Delivers the events of all runs, one run after the other, to one worker.
pub fn feed_all(
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
    let own = factory.describe().name;
    let entry = parameters["mods"].as_array().into_iter().flatten().find(|entry| entry["name"] == own.as_str());
    let config = config.or_else(|| entry.map(|entry| &entry["config"])).cloned().unwrap_or_default();
    let template = model.card().chat_template.as_deref().unwrap_or_default();
    let answer_format = AnswerFormat::from_recording(template, prompt.tools.as_ref(), &parameters["reading"]);
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
    let session = factory.start(&config, &view).map_err(|message| anyhow::anyhow!("mod '{own}': {message}"))?;
    let recorded = run.mod_calls.iter().any(|call| call.mod_name == own);
    let mut feeder = Feeder {
        view,
        session,
        own,
        sequence: Vec::new(),
        prompt_len: 0,
        evicted: 0,
        max_steps: 0,
        newest: EventType::Prefilled,
        caller: String::new(),
        pending: None,
        then: Answer::default(),
        report: DryRunReport { run: name.to_owned(), calls: 0, recorded, events: Vec::new(), difference: None },
    };
    for item in run.items() {
        match item {
            TraceItem::Event(event) => {
                feeder.compare();
                feeder.event(&event)?;
            }
            TraceItem::ModCall(call) => feeder.recorded_call(&call),
            TraceItem::Action(action) => feeder.recorded_action(&action),
            TraceItem::ModLog(_) | TraceItem::Attention(_) => {}
        }
    }
    feeder.compare();
    feeder.session.finished();
    Ok(feeder.report)
}

/// Rejects a run of another model, because its token ids mean other tokens.
fn check_vocabulary(model: &Model, prompt: &PromptRecord, run: &Document) -> anyhow::Result<()> {
    let named = run.request.model.as_deref().unwrap_or("another model");
    let vocabulary = model.vocabulary();
    let fits = prompt.tokens.iter().all(|&token| vocabulary.contains(token))
        && (prompt.texts.len() != prompt.tokens.len() || vocabulary.texts(&prompt.tokens) == prompt.texts);
    if !fits {
        bail!(
            "the run used the model {named}, which has other tokens than {}; give its file with --model",
            model.name()
        );
    }
    Ok(())
}

struct Feeder {
    view: Arc<RunView>,
    session: Box<dyn ModInstance>,
    own: String,
    sequence: Vec<TokenId>,
    prompt_len: usize,
    /// Number of generated tokens evicted from the full context.
    evicted: usize,
    max_steps: u32,
    newest: EventType,
    /// The mod of the newest recorded call.
    caller: String,
    /// The mod's actions at the newest event.
    pending: Option<Answer>,
    /// The recorded actions at the newest event.
    then: Answer,
    report: DryRunReport,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    tokens: Vec<TokenId>,
    removed: Option<usize>,
    superseded: bool,
}

impl Feeder {
    fn event(&mut self, event: &Event) -> anyhow::Result<()> {
        self.newest = event.event_type;
        self.then = Answer::default();
        let measured = event.measured.as_deref();
        for &(from, to) in measured.and_then(|it| it.evicted.as_ref()).map_or(&[][..], |it| &it.ranges).iter().rev() {
            let (from, to) = (from as usize, (to as usize).min(self.sequence.len()));
            if from < to {
                let of_prompt = self.prompt_len.min(to).saturating_sub(from);
                self.prompt_len -= of_prompt;
                self.evicted += to - from - of_prompt;
                self.sequence.drain(from..to);
            }
        }
        if event.event_type == EventType::Prefilled {
            let prompt = measured.and_then(|measured| measured.prompt.as_ref());
            self.sequence = prompt.map(|prompt| prompt.tokens.clone()).unwrap_or_default();
            self.prompt_len = self.sequence.len();
            self.max_steps = event.max_steps.unwrap_or(0).max(0) as u32;
        }
        let added = event.added_tokens.clone().unwrap_or_default();
        let logprobs: Vec<_> =
            measured.into_iter().flat_map(|measured| &measured.tokens).map(|token| token.logprob).collect();
        self.sequence.extend_from_slice(&added);
        if let Some(token) = self.sequence.iter().find(|&&token| !self.view.vocabulary.contains(token)) {
            bail!("event {}: {token} is not a token of the model", event.sequence_order);
        }
        if !self.session.handles().contains(event.event_type) {
            return Ok(());
        }
        let logits;
        let happened = match event.event_type {
            EventType::Prefilled => CallEvent::Prefilled,
            EventType::ForwardPass => {
                logits = recorded_logits(event, &self.view.vocabulary);
                CallEvent::ForwardPass { logits: &logits }
            }
            EventType::Sampled => CallEvent::Sampled {
                token: event.sampled_token.unwrap_or(0),
                text: event.token_text.as_deref().unwrap_or_default(),
                logprob: measured.and_then(|it| it.tokens.first()?.logprob).unwrap_or(0.0),
            },
            EventType::Added => CallEvent::Added {
                tokens: &self.sequence[self.sequence.len() - added.len()..],
                logprobs: &logprobs,
                forced: event.forced.unwrap_or(false),
            },
        };
        let call = Call {
            run: &self.view,
            step: event.step.max(0) as u32,
            sequence: &self.sequence,
            prompt_len: self.prompt_len,
            evicted: self.evicted,
            max_steps: self.max_steps,
            event: happened,
        };
        let (late, later) = mpsc::channel();
        let done = ReplySender::new(move |reply| {
            let _ = late.send(reply);
        });
        let reply = match self.session.call(&call, done) {
            Ok(reply) => reply,
            Err(Pending) => later.recv().context("the mod's worker is gone")?,
        };
        self.report.calls += 1;
        let answer = answer(event, reply);
        if answer.action.is_some() || answer.exception.is_some() || !answer.logs.is_empty() {
            self.report.events.push(answer.clone());
        }
        self.pending = Some(answer);
        Ok(())
    }

    fn recorded_call(&mut self, call: &ModCall) {
        self.caller.clone_from(&call.mod_name);
        if call.mod_name == self.own && call.exception_occurred {
            self.then.exception = Some(call.exception_message.clone().unwrap_or_default());
        }
    }

    /// Stores the recorded actions of the mod, and applies the recorded changes to the sequence.
    fn recorded_action(&mut self, action: &ActionRecord) {
        if action.action_type == ActionType::Noop {
            return;
        }
        if self.caller == self.own {
            self.then.action = Some(RequestedAction::from(action));
        }
        let raw = action.details.as_ref();
        let details: Details = raw.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
        if details.superseded {
            return;
        }
        match action.action_type {
            ActionType::Backtrack => {
                let drawn = usize::from(self.newest == EventType::Sampled);
                let requested = (action.backtrack_steps.unwrap_or(0).max(0) as usize).saturating_sub(drawn);
                let removed = details.removed.unwrap_or(requested).min(self.sequence.len() - self.prompt_len);
                self.sequence.truncate(self.sequence.len() - removed);
            }
            ActionType::ForceOutput => self.sequence.truncate(self.prompt_len),
            ActionType::AdjustedPrefill if !details.tokens.is_empty() => {
                self.prompt_len = details.tokens.len();
                self.sequence = details.tokens;
                self.max_steps = action.adjusted_max_steps.map_or(self.max_steps, |steps| steps.max(0) as u32);
            }
            _ => {}
        }
    }

    /// Compares the mod's actions at the newest event with the recorded ones.
    fn compare(&mut self) {
        let Some(now) = self.pending.take() else { return };
        let same = now.action == self.then.action && now.exception.is_some() == self.then.exception.is_some();
        if !same && self.report.difference.is_none() {
            self.report.difference = Some(FirstDifference {
                sequence_order: now.sequence_order,
                step: now.step,
                event: now.event,
                recorded: self.then.words(),
                now: now.words(),
            });
        }
    }
}

fn answer(event: &Event, reply: Reply) -> Answer {
    let action = reply.action.unwrap_or(Action::Noop);
    let exception = reply.exception.map(|exception| exception.message);
    let exception = exception.or_else(|| action.event_error(event.event_type));
    let action = if exception.is_some() { None } else { requested_action(action) };
    Answer {
        sequence_order: event.sequence_order,
        step: event.step,
        event: event.event_type.as_str(),
        action,
        exception,
        logs: reply.logs.into_iter().map(|log| format!("{}: {}", log.level.as_str(), log.message)).collect(),
    }
}

fn requested_action(action: Action) -> Option<RequestedAction> {
    let of = RequestedAction::new(action.kind());
    Some(match action {
        Action::Noop => return None,
        Action::AdjustedPrefill { tokens, max_steps } => {
            RequestedAction { tokens, max_steps: max_steps.map(|steps| steps as i32), ..of }
        }
        Action::AdjustedLogits { edit, temperature } => {
            // Same number format as in the recording: 0.8, not 0.800000011920929.
            let temperature = temperature.and_then(|value| value.to_string().parse().ok());
            RequestedAction { edit: Some(edit.as_str().to_owned()), temperature, ..of }
        }
        Action::ForceTokens(tokens) | Action::ForceOutput(tokens) => RequestedAction { tokens, ..of },
        Action::Backtrack { n, tokens } => RequestedAction { steps: Some(n as i32), tokens, ..of },
        Action::ToolCalls(payload) => RequestedAction { tool_calls: Some(payload), ..of },
        Action::EmitError { message, .. } => RequestedAction { message: Some(message), ..of },
    })
}

/// Builds logits with the recorded probabilities of the most probable tokens. All other tokens share the rest evenly.
fn recorded_logits(event: &Event, vocabulary: &Vocabulary) -> Vec<f32> {
    let known = event.measured.as_ref().map_or(&[][..], |measured| &measured.model);
    let mass: f32 = known.iter().map(|alternative| alternative.prob).sum();
    let others = vocabulary.len().saturating_sub(known.len()).max(1) as f32;
    let mut logits = vec![((1.0 - mass).max(1e-9) / others).ln(); vocabulary.len()];
    for alternative in known {
        let place = usize::try_from(alternative.token).ok().and_then(|index| logits.get_mut(index));
        if let Some(logit) = place {
            *logit = alternative.prob.max(1e-30).ln();
        }
    }
    logits
}
