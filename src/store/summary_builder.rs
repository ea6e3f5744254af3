//! Computes the summary row of a run from its trace items.

use super::extras;
use super::full_text::index_text;
use super::run_summary::RunSummary;
use super::runs::pack;
use super::statistics::{MAX_CALL_MODS, MAX_CALL_US};
use crate::events::{EndCause, RunEnd, RunId, RunStart, RunStatus, Surface, Tenant, TraceItem, Usage};
use crate::trace::columns;
use crate::trace::document::{RequestExtras, RequestMeta, RunDetails};
use crate::trace::fold::{Fold, client_text, flags};
use chrono::{DateTime, Utc};
use serde_json::{Map, Value};
use uuid::Uuid;

/// Maximum characters of the prompt's and of the answer's preview.
const MAX_PREVIEW_CHARS: usize = 300;
/// Maximum characters of the prompt's and of the answer's searchable text.
const MAX_SEARCH_CHARS: usize = 60_000;
/// Maximum characters of error messages that the filter can search.
const MAX_ERROR_CHARS: usize = 2_000;
/// Maximum mod names of a run. An ingested trace may name a different mod in each call.
const MAX_MODS: usize = 64;
/// Maximum bytes of a surprise strip.
const MAX_STRIP_BYTES: usize = 96;

/// A builder of a run's summary row.
#[derive(Debug)]
pub struct RunSummaryBuilder {
    summary: RunSummary,
    server_id: Option<Uuid>,
    fold: Fold,
    error_text: String,
    calls: Vec<ModCallTime>,
    /// Fields that the engine of an ingested run reported; for a run of this server, only the answer that the client
    /// received, if it differs from the text of the tokens or from [`client_text`].
    reported: RequestExtras,
    /// True if the run was ingested as a document.
    ingested: bool,
    /// Token counts from the engine at the run's end. They replace the counts of the fold, because only the engine knows
    /// exactly which tokens form the answer.
    usage: Option<Usage>,
}

/// Durations of the calls of a mod in a run. Calls without a measured duration do not count.
#[derive(Debug, Clone)]
pub struct ModCallTime {
    /// Name of the mod.
    pub name: String,
    /// Number of calls.
    pub calls: i64,
    total_ms: f64,
    max_ms: f64,
}

impl ModCallTime {
    /// Returns the sum of the durations in microseconds.
    pub fn total_us(&self) -> i64 {
        (self.total_ms * 1e3).min(MAX_CALL_US).round() as i64
    }

    /// Returns the longest duration in microseconds.
    pub fn max_us(&self) -> i64 {
        (self.max_ms * 1e3).min(MAX_CALL_US).round() as i64
    }
}

/// A row of the table `runs`.
#[derive(Debug)]
pub struct RunRow {
    /// The columns that readers receive.
    pub summary: RunSummary,
    /// The server that generates the run.
    pub server_id: Option<Uuid>,
    /// The first error messages, for the filter.
    pub error_text: String,
    /// Durations of mod calls, in the order of the first calls.
    pub calls: Vec<ModCallTime>,
    /// Searchable text in the form of [`index_text`]; `None` keeps the stored text.
    pub search: Option<String>,
    /// The compressed column file of a finished run.
    pub columns: Option<Vec<u8>>,
    /// The fingerprint of the ingested document.
    pub fingerprint: Option<[u8; 32]>,
    /// Fields of the document's request beyond the columns, as JSON.
    pub request_extras: Option<String>,
}

impl RunSummaryBuilder {
    /// Creates a builder for a run that starts on this server.
    pub fn from_start(start: &RunStart, server_id: Uuid) -> Self {
        let mut summary = empty_summary(start.run_id, start.request_id.clone(), start.created_at, start.surface);
        summary.model = Some(start.model.clone());
        summary.owner.clone_from(&start.owner);
        summary.user_label.clone_from(&start.user_label);
        let metadata = start.metadata.0.iter().map(|(key, value)| (key.clone(), value.as_str().into()));
        summary.metadata = Some(metadata.collect()).filter(|metadata: &Map<String, Value>| !metadata.is_empty());
        summary.mods.clone_from(&start.mods);
        summary.max_tokens = start.max_tokens;
        summary.temperature = start.temperature;
        summary.seed = start.seed;
        summary.prompt_preview = truncate(&start.prompt_preview, MAX_PREVIEW_CHARS);
        summary.parent.clone_from(&start.parent);
        Self::from_stored(summary, Some(server_id))
    }

    /// Creates a builder for an ingested run, which has finished.
    pub fn from_request(run_id: RunId, meta: &RequestMeta, owner: Option<Tenant>, now: DateTime<Utc>) -> Self {
        let surface = meta.surface.unwrap_or(Surface::Ingest);
        let mut summary = empty_summary(run_id, meta.request_id.clone(), meta.created_at.unwrap_or(now), surface);
        summary.owner = owner;
        summary.status = meta.extras.status();
        summary.completed_at = meta.completed_at;
        summary.model.clone_from(&meta.model);
        summary.user_label.clone_from(&meta.user_api_key);
        summary.max_tokens = meta.max_tokens;
        summary.temperature = meta.temperature;
        summary.mod_text.clone_from(&meta.mod_text);
        summary.prompt_preview = truncate(meta.extras.user_prompt.as_deref().unwrap_or_default(), MAX_PREVIEW_CHARS);
        let mut builder = Self { ingested: true, reported: meta.extras.clone(), ..Self::from_stored(summary, None) };
        builder.fold.set_has_specified_actions(meta.extras.specified_actions);
        if let Some(details) = &meta.extras.thunder_run {
            builder.set_details(details);
        }
        builder
    }

    /// Sets the fields that Thunder recorded before the run was exported.
    fn set_details(&mut self, details: &RunDetails) {
        let summary = &mut self.summary;
        summary.finish_reason = details.finish_reason;
        summary.end_cause = details.end_cause;
        summary.message = details.message.as_ref().map(|message| truncate(message, MAX_ERROR_CHARS));
        summary.seed = details.seed;
        let metadata = details.metadata.iter().flatten().map(|(key, value)| (key.clone(), value.as_str().into()));
        summary.metadata = Some(metadata.collect()).filter(|metadata: &Map<String, Value>| !metadata.is_empty());
        if let Some(preview) = &details.prompt_preview {
            summary.prompt_preview = truncate(preview, MAX_PREVIEW_CHARS);
        }
        summary.first_token_us = details.first_token_us.map(saturate);
        summary.prompt_us = details.prompt_us.map(saturate);
        summary.generation_us = details.generation_us.map(saturate);
        self.usage = details.usage();
    }

    /// Creates a builder for a stored run. The caller applies the run's items again, beginning with the first.
    pub fn from_stored(summary: RunSummary, server_id: Option<Uuid>) -> Self {
        Self {
            summary,
            server_id,
            fold: Fold::new(),
            error_text: String::new(),
            calls: Vec::new(),
            reported: RequestExtras::default(),
            ingested: false,
            usage: None,
        }
    }

    /// Sets [`RequestExtras::specified_actions`] of a stored run.
    pub fn set_has_specified_actions(&mut self, has_specified_actions: bool) {
        self.fold.set_has_specified_actions(has_specified_actions);
    }

    /// Sets whether the run has stored attention, for items that were read without it.
    pub fn set_has_attention(&mut self, has_attention: bool) {
        self.summary.has_attention = has_attention;
    }

    /// Applies the next item.
    pub fn apply(&mut self, item: &TraceItem) {
        self.fold.apply(item);
        match item {
            TraceItem::Event(event) if self.summary.prompt_preview.is_empty() => {
                if let Some(text) = &event.input_text {
                    self.summary.prompt_preview = truncate(text, MAX_PREVIEW_CHARS);
                }
            }
            TraceItem::ModCall(call) => {
                let mods = &mut self.summary.mods;
                if self.ingested && mods.len() < MAX_MODS && !mods.contains(&call.mod_name) {
                    mods.push(call.mod_name.clone());
                }
                if let Some(ms) = call.execution_time_ms.filter(|ms| ms.is_finite() && *ms >= 0.0) {
                    self.add_call(&call.mod_name, ms);
                }
                if let Some(message) = &call.exception_message {
                    self.add_error(&call.mod_name, message);
                }
            }
            TraceItem::Action(action) => {
                if let Some(message) = &action.error_message {
                    self.add_error("EmitError", message);
                }
            }
            TraceItem::Attention(_) => self.summary.has_attention = true,
            TraceItem::Event(_) | TraceItem::ModLog(_) => {}
        }
    }

    /// Records the end of the run.
    pub fn end(&mut self, end: &RunEnd) {
        let (summary, finish) = (&mut self.summary, &end.finish);
        summary.status = end.status;
        summary.completed_at = Some(end.completed_at);
        summary.finish_reason = Some(finish.reason);
        summary.end_cause = finish.cause;
        summary.message.clone_from(&finish.message);
        summary.first_token_us = finish.first_token_us.map(saturate);
        summary.prompt_us = Some(saturate(finish.prompt_us));
        summary.generation_us = Some(saturate(finish.generation_us));
        self.usage = Some(finish.usage);
        // The tokens may also contain a stop string, hidden control tokens or a part of a character; without a stored answer,
        // it is `client_text`. An engine that stopped does not report the answer.
        let estimate = client_text(self.fold.answer(), finish.stop_string.as_deref());
        let differs = finish.text != self.fold.answer_text() || finish.text != estimate;
        if finish.cause != Some(EndCause::EngineStopped) && differs {
            self.reported.final_text = Some(finish.text.clone());
        }
    }

    /// Records that the run's server ended before the run did.
    pub fn interrupt(&mut self, at: DateTime<Utc>) {
        self.summary.status = RunStatus::Interrupted;
        self.summary.completed_at = Some(at);
    }

    /// Returns the current status.
    pub fn status(&self) -> RunStatus {
        self.summary.status
    }

    /// Returns the current row.
    pub fn row(&self) -> RunRow {
        let mut summary = self.summary.clone();
        let counters = self.fold.counters();
        let answer = self.reported.final_text.clone().unwrap_or_else(|| self.fold.answer_text());
        if summary.mods.is_empty() {
            summary.mods.extend(self.reported.active_mod_name.clone());
        }
        summary.events = self.fold.event_count().cast_signed();
        summary.prompt_tokens = counters.prompt_tokens.cast_signed();
        summary.completion_tokens = counters.tokens_out.cast_signed();
        if let Some(usage) = self.usage {
            summary.prompt_tokens = usage.prompt_tokens.cast_signed();
            summary.completion_tokens = usage.completion_tokens.cast_signed();
            summary.cached_tokens = usage.cached_tokens.cast_signed();
        }
        summary.backtracked = counters.backtracked.cast_signed();
        summary.forced = counters.forced.cast_signed();
        summary.actions = counters.actions.cast_signed();
        summary.errors = counters.errors.cast_signed();
        summary.output_preview = truncate(&answer, MAX_PREVIEW_CHARS);
        summary.surprise_strip = surprise_strip(&self.fold);
        if self.ingested && self.reported.thunder_run.is_none() && summary.message.is_none() {
            summary.message = self.error_text.lines().next().map(|line| truncate(line, MAX_PREVIEW_CHARS));
        }
        let has_ended = summary.status != RunStatus::Running;
        let first = self.fold.event_count() <= 1;
        RunRow {
            search: (has_ended || first).then(|| self.searchable(&answer)),
            // If compression fails, readers build the file from the items.
            columns: if has_ended { pack(&columns::encode(&self.fold)).ok() } else { None },
            fingerprint: None,
            request_extras: extras::to_json(&self.reported),
            error_text: self.error_text.clone(),
            calls: self.calls.clone(),
            server_id: self.server_id,
            summary,
        }
    }

    /// Returns the current column file.
    pub fn columns(&self) -> Vec<u8> {
        columns::encode(&self.fold)
    }

    fn add_call(&mut self, name: &str, ms: f64) {
        let index = self.calls.iter().position(|call| call.name == name);
        if index.is_none() && self.calls.len() < MAX_CALL_MODS {
            self.calls.push(ModCallTime { name: name.to_owned(), calls: 0, total_ms: 0.0, max_ms: 0.0 });
        }
        let call = match index {
            Some(index) => self.calls.get_mut(index),
            None => self.calls.last_mut().filter(|call| call.name == name),
        };
        if let Some(call) = call {
            call.calls += 1;
            call.total_ms += ms;
            call.max_ms = call.max_ms.max(ms);
        }
    }

    fn add_error(&mut self, source: &str, message: &str) {
        let left = MAX_ERROR_CHARS.saturating_sub(self.error_text.chars().count());
        if left > 0 {
            self.error_text.push_str(&truncate(&format!("{source}: {message}\n"), left));
        }
    }

    fn searchable(&self, answer: &str) -> String {
        let prompt_rows = self.fold.rows().iter().filter(|row| row.flags & flags::PROMPT != 0);
        let mut text: String = prompt_rows.flat_map(|row| row.text.chars()).take(MAX_SEARCH_CHARS).collect();
        if text.is_empty() {
            let reported = [&self.reported.system_prompt, &self.reported.user_prompt].map(Option::as_deref);
            match reported {
                [_, None] => text.push_str(&self.summary.prompt_preview),
                prompts => prompts.into_iter().flatten().for_each(|prompt| {
                    text.push_str(truncate(prompt, MAX_SEARCH_CHARS / 2).as_str());
                    text.push('\n');
                }),
            }
        }
        index_text(&format!("{text}\n{}", truncate(answer, MAX_SEARCH_CHARS)))
    }
}

/// Returns the largest −ln p × 32 of each of up to [`MAX_STRIP_BYTES`] equal groups of generated tokens.
fn surprise_strip(fold: &Fold) -> Vec<u8> {
    let generated: Vec<u8> = fold
        .rows()
        .iter()
        .filter(|row| row.flags & flags::PROMPT == 0)
        .map(|row| row.logprob.map_or(0, |logprob| (-logprob * 32.0) as u8))
        .collect();
    let groups = generated.len().min(MAX_STRIP_BYTES);
    (0..groups)
        .map(|group| {
            let (from, to) = (group * generated.len() / groups, (group + 1) * generated.len() / groups);
            generated[from..to].iter().copied().max().unwrap_or(0)
        })
        .collect()
}

fn empty_summary(run_id: RunId, request_id: String, created_at: DateTime<Utc>, surface: Surface) -> RunSummary {
    RunSummary {
        run_id,
        request_id,
        created_at,
        completed_at: None,
        status: RunStatus::Running,
        finish_reason: None,
        end_cause: None,
        message: None,
        surface,
        model: None,
        owner: None,
        user_label: None,
        metadata: None,
        tags: Vec::new(),
        mods: Vec::new(),
        max_tokens: None,
        temperature: None,
        seed: None,
        prompt_preview: String::new(),
        output_preview: String::new(),
        prompt_tokens: 0,
        completion_tokens: 0,
        cached_tokens: 0,
        events: 0,
        backtracked: 0,
        forced: 0,
        actions: 0,
        errors: 0,
        first_token_us: None,
        prompt_us: None,
        generation_us: None,
        has_attention: false,
        surprise_strip: Vec::new(),
        mod_text: None,
        parent: None,
        version: 1,
    }
}

/// Returns the first `length` characters.
fn truncate(text: &str, length: usize) -> String {
    text.char_indices().nth(length).map_or(text, |(end, _)| &text[..end]).to_owned()
}

fn saturate(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
