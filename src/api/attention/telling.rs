//! The runs of a request, as what a client is told of them: tokens with their attention, in order.

use super::ask::Answer;
use super::pruning::{History, Prunable};
use super::shape::{Attention, Shape};
use crate::api::generation::{self, Runs};
use crate::api::{ApiError, ErrorKind};
use crate::engine::{AttentionRow, Output};
use crate::events::{Alternative, FinishReason, RunEnd, RunId, TokenMeasurement};
use crate::trace::attention::AttentionRows;
use std::collections::VecDeque;
use std::sync::Arc;

/// AttentionRows of fewer values are put into their shape at once; the way to another thread and back would take longer.
const SMALL: usize = 1 << 14;

/// What a client is told.
#[derive(Debug)]
pub(in crate::api) enum Said {
    /// A token of a sample.
    Token(Box<Told>),
    /// A mod took back the last tokens of a sample.
    TakenBack { sample: usize, tokens: usize },
    /// What could go from the context.
    Pruning { sample: usize, sentences: Vec<Prunable> },
    /// A sample is over.
    Done(Done),
    /// A sample failed.
    Failed { sample: usize, error: ApiError },
}

/// A token.
#[derive(Debug)]
pub(in crate::api) struct Told {
    pub(super) sample: usize,
    pub(super) measure: TokenMeasurement,
    pub(super) top: Vec<Alternative>,
    pub(super) row: Option<Arc<AttentionRow>>,
}

/// How a sample ended.
#[derive(Debug, Clone)]
pub(in crate::api) struct Done {
    pub(super) sample: usize,
    pub(in crate::api) finish_reason: &'static str,
    /// Tokens that the client was told of and that were not taken back.
    pub(super) total_tokens: usize,
    pub(super) prompt_tokens: u32,
    pub(super) generation_time_ms: u64,
}

impl Told {
    /// Its text; "" for an incomplete piece of UTF-8.
    pub(in crate::api) fn text(&self) -> &str {
        &self.measure.text
    }
}

impl Done {
    /// The end of a sample of which nothing was heard.
    pub(super) fn before_it_began(sample: usize, answer: &Answer) -> Self {
        Self {
            sample,
            finish_reason: "cancelled",
            total_tokens: 0,
            prompt_tokens: answer.prompt_tokens,
            generation_time_ms: answer.elapsed_ms(),
        }
    }
}

impl Said {
    /// The text of a token.
    pub(in crate::api) fn text(&self) -> Option<&str> {
        match self {
            Self::Token(told) => Some(told.text()),
            _ => None,
        }
    }
}

/// Runs that have begun.
pub(in crate::api) struct Telling {
    runs: Runs,
    pub(in crate::api) answer: Answer,
    history: History,
    /// Tokens of each sample.
    counts: Vec<usize>,
    watches: Vec<Option<super::pruning::Watch>>,
    ready: VecDeque<Said>,
}

impl Telling {
    /// What these runs do, told as the answer wants it.
    pub(in crate::api) fn new(runs: Runs, answer: Answer) -> Self {
        Self::with_history(runs, answer, History::default())
    }

    /// The same, on a connection that remembers.
    pub(super) fn with_history(runs: Runs, answer: Answer, history: History) -> Self {
        let samples = answer.samples;
        let watches = vec![answer.pruning.clone(); samples];
        Self { runs, answer, history, counts: vec![0; samples], watches, ready: VecDeque::new() }
    }

    /// The first run's id.
    pub(in crate::api) fn run_id(&self) -> Option<RunId> {
        self.runs.started.first().map(|run| run.id)
    }

    /// The next thing to tell; `None` when all samples are over.
    ///
    /// # Errors
    /// The server stops.
    pub(in crate::api) async fn next(&mut self) -> Result<Option<Said>, ApiError> {
        loop {
            if let Some(said) = self.ready.pop_front() {
                return Ok(Some(said));
            }
            let Some((sample, output)) = self.runs.next().await? else { return Ok(None) };
            match output {
                Output::Text(delta) => {
                    if delta.retracted > 0 {
                        self.counts[sample] = self.counts[sample].saturating_sub(delta.retracted);
                        self.ready.push_back(Said::TakenBack { sample, tokens: delta.retracted });
                    }
                    self.counts[sample] += delta.tokens.len();
                    let mut rows = delta.rows.into_iter();
                    for (measure, top) in delta.tokens {
                        let row = rows.next().flatten();
                        self.watch(sample, row.as_deref());
                        self.ready.push_back(Said::Token(Box::new(Told { sample, measure, top, row })));
                    }
                }
                Output::Ended(end) => self.ended(sample, &end),
                // Not sent to those who want each token, and not asked for.
                Output::Retract { .. } | Output::Prompt(_) | Output::Progress(_) => {}
            }
        }
    }

    fn watch(&mut self, sample: usize, row: Option<&AttentionRow>) {
        if let (Some(watch), Some(row)) = (&mut self.watches[sample], row)
            && let Ok(rows) = AttentionRows::new(&row.values, row.layer_ids.len(), usize::from(row.heads))
        {
            watch.see(&rows);
        }
    }

    fn ended(&mut self, sample: usize, end: &RunEnd) {
        if let Some(error) = generation::failure(end, self.runs.started[sample].id) {
            let context = end.finish.usage.prompt_tokens + self.counts[sample] as u32;
            self.ready.push_back(Said::Failed { sample, error: error.at_context(context) });
            return;
        }
        if let Some(watch) = &self.watches[sample] {
            let sentences = watch.suggestion(&self.history);
            self.ready.push_back(Said::Pruning { sample, sentences });
        }
        let done = self.done(sample, finish_reason(end), end.finish.usage.prompt_tokens);
        self.ready.push_back(Said::Done(done));
    }

    /// How samples that are not over end when the client has had enough.
    pub(in crate::api) fn cancelled(&self, sample: usize) -> Done {
        self.done(sample, "cancelled", self.answer.prompt_tokens)
    }

    fn done(&self, sample: usize, finish_reason: &'static str, prompt_tokens: u32) -> Done {
        Done {
            sample,
            finish_reason,
            total_tokens: self.counts[sample],
            prompt_tokens,
            generation_time_ms: self.answer.elapsed_ms(),
        }
    }
}

/// Why a run ended, in this API's words.
fn finish_reason(end: &RunEnd) -> &'static str {
    match end.finish.reason {
        FinishReason::Stop if end.finish.stop_string.is_some() => "stop_string",
        FinishReason::Stop => "stop_token",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Error => "error",
    }
}

/// Does `work` away from the async threads, unless the row is so small that this is not worth it.
pub(super) async fn beside<T: Send + 'static>(
    row: Option<&AttentionRow>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if row.is_none_or(|row| row.values.len() < SMALL) {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(ApiError::new(ErrorKind::Internal, "putting attention into its shape panicked")),
    }
}

/// The row of a token, in its shape.
pub(super) fn attention_of(
    row: Option<&AttentionRow>,
    shape: Option<&Shape>,
    layers: usize,
) -> Result<Option<Attention>, ApiError> {
    match (row, shape) {
        (Some(row), Some(shape)) => shape.of(row, layers).map(Some),
        _ => Ok(None),
    }
}
