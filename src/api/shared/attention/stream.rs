//! The events of a request's runs: tokens with their attention, in order.

use super::pruning::{Prunable, PruningHistory, SentenceTracker};
use super::request::AttentionOptions;
use super::row_format::{AttentionPayload, RowFormat};
use crate::api::shared::generation::Runs;
use crate::engine::{AttentionRow, MeasuredToken, Output};
use crate::events::{Alternative, EndCause, FinishReason, RunEnd, RunId, TokenMeasurement};
use crate::server::{ApiError, ErrorKind};
use crate::trace::attention::AttentionRows;
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Maximum values of a row that is converted on the calling thread, because switching threads would take longer.
const MAX_INLINE_VALUES: usize = 1 << 14;

/// An event of an attention request.
#[derive(Debug)]
pub(crate) enum AttentionEvent {
    /// A token of a sample.
    Token(Box<GeneratedToken>),
    /// A mod removed the last tokens of a sample.
    Retract { sample: usize, chars: usize, tokens: usize },
    /// Sentences that can be removed from the context.
    Pruning { sample: usize, sentences: Vec<Prunable> },
    /// A sample has ended.
    Done(SampleEnd),
    /// A sample failed.
    Failed { sample: usize, error: ApiError },
}

/// A generated token.
#[derive(Debug)]
pub(crate) struct GeneratedToken {
    pub(crate) sample: usize,
    pub(crate) measurement: TokenMeasurement,
    pub(crate) top: Vec<Alternative>,
    pub(crate) row: Option<Arc<AttentionRow>>,
}

/// The end of a sample.
#[derive(Debug, Clone)]
pub(crate) struct SampleEnd {
    pub(crate) sample: usize,
    /// The run of the sample, if it has started.
    pub(crate) run_id: Option<RunId>,
    pub(crate) finish_reason: &'static str,
    /// Tokens of the answer, without retracted ones.
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens: u32,
    pub(crate) generation_time_ms: u64,
    /// Tool calls with which a mod ended the answer.
    pub(crate) tool_calls: Option<Value>,
}

impl GeneratedToken {
    /// Returns the token's text; "" for incomplete UTF-8.
    pub(crate) fn text(&self) -> &str {
        &self.measurement.text
    }
}

impl SampleEnd {
    /// Returns the end of a sample that was cancelled before it started.
    pub(crate) fn before_start(sample: usize, prompt_tokens: u32, received: Instant) -> Self {
        Self {
            sample,
            run_id: None,
            finish_reason: "cancelled",
            total_tokens: 0,
            prompt_tokens,
            generation_time_ms: received.elapsed().as_millis() as u64,
            tool_calls: None,
        }
    }
}

/// The runs of one request.
pub(crate) struct AttentionStream {
    runs: Runs,
    pub(crate) options: AttentionOptions,
    history: PruningHistory,
    /// Number of tokens of each sample.
    counts: Vec<usize>,
    trackers: Vec<Option<SentenceTracker>>,
    /// True for each sample that has ended.
    ended: Vec<bool>,
    pending: VecDeque<AttentionEvent>,
}

impl AttentionStream {
    /// Creates a stream without history.
    pub(crate) fn new(runs: Runs, options: AttentionOptions) -> Self {
        Self::with_history(runs, options, PruningHistory::default())
    }

    /// Creates a stream on a connection, whose history contains the attention of earlier answers.
    pub(crate) fn with_history(runs: Runs, options: AttentionOptions, history: PruningHistory) -> Self {
        let samples = options.samples;
        let trackers = vec![options.pruning.clone(); samples];
        let (counts, ended) = (vec![0; samples], vec![false; samples]);
        Self { runs, options, history, counts, trackers, ended, pending: VecDeque::new() }
    }

    /// Returns the id of the first run.
    pub(crate) fn run_id(&self) -> RunId {
        self.runs.run_id()
    }

    /// Returns true if no event follows the returned ones.
    pub(crate) fn has_ended(&self) -> bool {
        self.pending.is_empty() && self.ended.iter().all(|&ended| ended)
    }

    /// Returns the next event, or `None` when all samples have ended. If the client cancels the runs, the samples that
    /// have not ended are reported as cancelled. If the future is dropped, events may be lost.
    ///
    /// # Errors
    /// The server is stopping.
    pub(crate) async fn next(&mut self) -> Result<Option<AttentionEvent>, ApiError> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Ok(Some(event));
            }
            if self.has_ended() {
                return Ok(None);
            }
            let Some((sample, output)) = self.runs.next_output().await? else {
                self.cancel_active_samples();
                continue;
            };
            match output {
                Output::Text(delta) => {
                    let mut rows = delta.rows.into_iter();
                    for MeasuredToken { measurement, alternatives, .. } in delta.tokens {
                        let row = rows.next().flatten();
                        self.track(sample, row.as_ref()).await?;
                        self.counts[sample] += 1;
                        self.pending.push_back(AttentionEvent::Token(Box::new(GeneratedToken {
                            sample,
                            measurement,
                            top: alternatives,
                            row,
                        })));
                    }
                }
                Output::Retract { chars, tokens } => {
                    self.counts[sample] = self.counts[sample].saturating_sub(tokens);
                    if let Some(tracker) = &mut self.trackers[sample] {
                        tracker.retract(tokens);
                    }
                    self.pending.push_back(AttentionEvent::Retract { sample, chars, tokens });
                }
                Output::Ended(end) => {
                    self.add_end(sample, &end);
                    self.ended[sample] = true;
                    if self.ended.iter().all(|&ended| ended) {
                        self.history.add(self.trackers.iter().flatten());
                    }
                }
                // Not requested.
                Output::PromptProbabilities(_) | Output::PromptProgress(_) => {}
            }
        }
    }

    /// Adds the attention of a token to the sentences. Rows after a context shift or a change of the prompt by a mod
    /// are ignored, because their positions are not those of the sentences.
    async fn track(&mut self, sample: usize, row: Option<&Arc<AttentionRow>>) -> Result<(), ApiError> {
        let sequence_len = self.options.prompt_tokens + self.counts[sample] as u32;
        let row = row.filter(|row| row.row_len == sequence_len).cloned();
        let Some(mut tracker) = self.trackers[sample].take() else { return Ok(()) };
        let added = row.clone();
        let add_step = move || {
            let rows = added
                .as_ref()
                .and_then(|row| AttentionRows::new(&row.values, row.layer_ids.len(), usize::from(row.heads)).ok());
            tracker.add_step(rows.as_ref());
            Ok(tracker)
        };
        self.trackers[sample] = Some(run_blocking(row.as_deref(), add_step).await?);
        Ok(())
    }

    fn add_end(&mut self, sample: usize, end: &RunEnd) {
        if !was_stopped(end)
            && let Some(error) = self.runs.failure(sample, end)
        {
            let context = end.finish.usage.prompt_tokens + self.counts[sample] as u32;
            self.pending.push_back(AttentionEvent::Failed { sample, error: error.at_context(context) });
            self.trackers[sample] = None;
            return;
        }
        if let Some(tracker) = &self.trackers[sample] {
            let sentences = tracker.suggestion(&self.history);
            self.pending.push_back(AttentionEvent::Pruning { sample, sentences });
        }
        let done = self.done(sample, finish_reason(end), end.finish.usage.prompt_tokens);
        self.pending.push_back(AttentionEvent::Done(SampleEnd { tool_calls: end.finish.tool_calls.clone(), ..done }));
    }

    fn cancel_active_samples(&mut self) {
        for sample in 0..self.ended.len() {
            if !std::mem::replace(&mut self.ended[sample], true) {
                let done = self.done(sample, "cancelled", self.options.prompt_tokens);
                self.pending.push_back(AttentionEvent::Done(done));
            }
        }
    }

    fn done(&self, sample: usize, finish_reason: &'static str, prompt_tokens: u32) -> SampleEnd {
        SampleEnd {
            sample,
            run_id: Some(self.runs.started[sample].id),
            finish_reason,
            total_tokens: self.counts[sample],
            prompt_tokens,
            generation_time_ms: self.options.elapsed_ms(),
            tool_calls: None,
        }
    }
}

/// Returns true if a request or the time limit stopped the run; the tokens so far are its answer.
pub(crate) fn was_stopped(end: &RunEnd) -> bool {
    matches!(end.finish.cause, Some(EndCause::ClientStop | EndCause::Cancel | EndCause::Timeout))
}

/// Returns this API's name of a finish reason.
fn finish_reason(end: &RunEnd) -> &'static str {
    match end.finish.reason {
        FinishReason::Stop if end.finish.stop_string.is_some() => "stop_string",
        FinishReason::Stop => "stop_token",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Cancelled if end.finish.cause == Some(EndCause::Timeout) => "timeout",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Error => "error",
    }
}

/// Runs `work` on a blocking thread, or on the calling thread if the row is small.
pub(crate) async fn run_blocking<T: Send + 'static>(
    row: Option<&AttentionRow>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if row.is_none_or(|row| row.values.len() <= MAX_INLINE_VALUES) {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(ApiError::new(ErrorKind::Internal, "converting attention panicked")),
    }
}

/// Converts a token's row to the requested format.
pub(crate) fn convert_row(
    row: Option<&AttentionRow>,
    format: Option<&RowFormat>,
    layers: usize,
) -> Result<Option<AttentionPayload>, ApiError> {
    match (row, format) {
        (Some(row), Some(format)) => format.convert(row, layers).map(Some),
        _ => Ok(None),
    }
}
