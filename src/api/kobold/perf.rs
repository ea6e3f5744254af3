//! `/api/extra/perf`: the load of the server, and figures of the caller's last generation.

use super::error::KoboldError;
use super::genkeys::Genkeys;
use crate::engine::PromptTiming;
use crate::events::{Finish, FinishReason, Scope};
use crate::server::App;
use axum::extract::State;
use axum::{Extension, Json};
use serde::Serialize;
use std::time::Instant;
use utoipa::ToSchema;

/// The number of `KoboldCPP` for an answer that neither a limit nor the model nor a stop string has ended.
const UNKNOWN_STOP_REASON: i8 = -1;

/// Figures of an ended generation.
#[derive(Debug, Clone, Copy)]
pub(super) struct GenerationFigures {
    ended_at: Instant,
    prompt_s: f64,
    answer_s: f64,
    token_count: u32,
    seed: u32,
    stop_reason: i8,
}

/// The generations of one or several owners since the start of the server.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GenerationStatistics {
    pub(super) last_start: Option<Instant>,
    pub(super) ended: u64,
    /// The generation that ended last.
    last: Option<GenerationFigures>,
}

/// The load of the server, and figures of the caller's last generation with a `prompt`.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldPerfResponse {
    /// Seconds spent on the prompt of the last generation.
    last_process: f64,
    /// Seconds spent on the answer of the last generation.
    last_eval: f64,
    /// Tokens of the answer of the last generation.
    last_token_count: u32,
    /// Seed of the last generation; -1 if there was none.
    last_seed: i64,
    /// Number of ended generations, also of those that failed or whose client disconnected.
    total_gens: u64,
    /// Reason for the end of the last generation: 0 for the maximum length, 1 for a token that ends the answer, 2 for a
    /// stop string, -1 for another one and if there was no generation.
    stop_reason: i8,
    /// Number of waiting runs.
    queue: usize,
    /// 1 if no run is active, otherwise 0.
    idle: u8,
    /// Seconds since the start of the server.
    uptime: f64,
    /// Seconds since the start of the last generation, or of the server if there was none.
    idletime: f64,
}

/// Returns the load of the server, and figures of the last generation with a `prompt` on `KoboldCPP`'s routes. A key
/// with a tenant gets those of its tenant.
#[utoipa::path(get, path = "/api/extra/perf", tag = "KoboldCPP",
    responses((status = 200, body = KoboldPerfResponse), (status = 503, description = "No model is loaded")))]
pub(super) async fn perf(
    State(app): State<App>,
    scope: Scope,
    genkeys: Extension<Genkeys>,
) -> Result<Json<KoboldPerfResponse>, KoboldError> {
    let engine = app.get_or_wake(None).await?.engine().clone();
    let active = engine.unfinished_runs();
    let uptime = (app.now() - app.started_at()).num_milliseconds() as f64 / 1e3;
    let GenerationStatistics { last_start, ended, last } = genkeys.statistics(&scope);
    Ok(Json(KoboldPerfResponse {
        last_process: last.map_or(0.0, |last| last.prompt_s),
        last_eval: last.map_or(0.0, |last| last.answer_s),
        last_token_count: last.map_or(0, |last| last.token_count),
        last_seed: last.map_or(-1, |last| last.seed.into()),
        total_gens: ended,
        stop_reason: last.map_or(UNKNOWN_STOP_REASON, |last| last.stop_reason),
        queue: active.saturating_sub(engine.slots() as usize),
        idle: u8::from(active == 0),
        uptime,
        idletime: last_start.map_or(uptime, |start| start.elapsed().as_secs_f64()),
    }))
}

impl GenerationFigures {
    /// Returns the figures of a generation that ended by itself.
    pub(super) fn new(finish: &Finish, seed: u32) -> Self {
        let stop_reason = match finish.reason {
            FinishReason::Length => 0,
            FinishReason::Stop if finish.stop_string.is_some() => 2,
            FinishReason::Stop => 1,
            FinishReason::ToolCalls | FinishReason::Cancelled | FinishReason::Error => UNKNOWN_STOP_REASON,
        };
        Self {
            ended_at: Instant::now(),
            prompt_s: finish.prompt_us as f64 / 1e6,
            answer_s: finish.generation_us as f64 / 1e6,
            token_count: finish.usage.completion_tokens,
            seed,
            stop_reason,
        }
    }

    /// Returns the figures of a generation without a complete answer; `prompt` is `None` if it had no first token.
    pub(super) fn aborted(prompt: Option<&PromptTiming>, token_count: u32, seed: u32) -> Self {
        Self {
            ended_at: Instant::now(),
            prompt_s: prompt.map_or(0.0, |prompt| prompt.elapsed_us as f64 / 1e6),
            answer_s: prompt.map_or(0.0, |prompt| prompt.at.elapsed().as_secs_f64()),
            token_count,
            seed,
            stop_reason: UNKNOWN_STOP_REASON,
        }
    }
}

impl GenerationStatistics {
    /// Counts the start of a generation.
    pub(super) fn add_start(&mut self) {
        self.last_start = Some(Instant::now());
    }

    /// Counts the end of a generation.
    pub(super) fn add_end(&mut self, figures: GenerationFigures) {
        self.ended += 1;
        self.last = Some(figures);
    }

    /// Returns the statistics of both.
    pub(super) fn merge(self, other: Self) -> Self {
        let last = self.last.into_iter().chain(other.last).max_by_key(|figures| figures.ended_at);
        Self { last_start: self.last_start.max(other.last_start), ended: self.ended + other.ended, last }
    }
}
