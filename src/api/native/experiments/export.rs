//! Exports of the cells of an experiment, sent in parts.

use super::versions::parse_stored;
use super::{ExperimentDefinition, find};
use crate::events::{FinishReason, RunId, Scope};
use crate::server::{ApiError, App};
use crate::store::{CellState, ExperimentCell, Store};
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use serde_json::{Map, Value};
use std::io;
use utoipa::ToSchema;
use uuid::Uuid;

/// Number of cells in a part of the file, whose answers are all in memory at the same time. A file has all cells.
const CELLS_PER_PART: i32 = 200;
/// Maximum answers read at the same time.
const MAX_CONCURRENT_READS: usize = 4;

/// A row of the export. The columns have the names and the order of the fields; values that a cell lacks are empty.
#[derive(Debug, Serialize, ToSchema)]
pub struct CellRow {
    /// Number of the cell, from 0.
    pub(super) cell: i32,
    /// The prompt.
    pub(super) prompt: String,
    /// The list of mods as JSON.
    pub(super) mods: String,
    /// The set of parameters as JSON.
    pub(super) parameters: String,
    /// The seed.
    pub(super) seed: u32,
    /// State of the cell.
    pub(super) state: CellState,
    /// Its run.
    pub(super) run_id: Option<String>,
    /// Finish reason of the run.
    pub(super) finish_reason: Option<FinishReason>,
    /// Tokens of the answer; empty for a cell without a run, and if the run was deleted.
    pub(super) completion_tokens: Option<i32>,
    /// Mean ln p of the added tokens, computed like `mean_logprob` in the family of a run.
    pub(super) mean_logprob: Option<f64>,
    /// Score from 0 to 1.
    pub(super) score: Option<f64>,
    /// The whole answer.
    pub(super) output: Option<String>,
    /// The error of a failed cell.
    pub(super) error: Option<String>,
    /// The error of the scorer, for a cell without a score.
    pub(super) score_error: Option<String>,
}

impl CellRow {
    fn new(
        definition: &ExperimentDefinition,
        cell: ExperimentCell,
        output: Option<String>,
    ) -> Result<Self, serde_json::Error> {
        let position = definition.position(usize::try_from(cell.cell).unwrap_or_default());
        let (prompt, mods, parameters) = definition.values(position);
        Ok(Self {
            cell: cell.cell,
            prompt: prompt.to_owned(),
            mods: serde_json::to_string(mods)?,
            parameters: serde_json::to_string(parameters)?,
            seed: position.seed,
            state: cell.state,
            run_id: cell.run_id.map(|id| id.to_string()),
            finish_reason: cell.finish_reason,
            completion_tokens: cell.completion_tokens,
            mean_logprob: cell.mean_logprob,
            // As written, without the digits of the conversion.
            score: cell.score.map(|score| (f64::from(score) * 1e6).round() / 1e6),
            output,
            error: cell.error,
            score_error: cell.score_error,
        })
    }

    /// Returns the columns with their names.
    pub(super) fn columns(&self) -> Result<Map<String, Value>, ApiError> {
        match serde_json::to_value(self).map_err(ApiError::internal)? {
            Value::Object(columns) => Ok(columns),
            _ => Ok(Map::new()),
        }
    }
}

/// A file format of exports.
pub(super) trait ExportFormat: Send + Sync + 'static {
    /// Content type of the response.
    const CONTENT_TYPE: &'static str;
    /// Extension of the file's name.
    const EXTENSION: &'static str;

    /// Returns the bytes of the next rows, which follow the bytes of earlier ones.
    ///
    /// # Errors
    /// The rows cannot be written.
    fn part(&mut self, rows: &[CellRow]) -> Result<Vec<u8>, ApiError>;

    /// Returns the bytes after all rows.
    fn end(self) -> Vec<u8>;
}

/// An export in progress.
struct Export<F> {
    store: Store,
    scope: Scope,
    id: Uuid,
    cells: i32,
    definition: ExperimentDefinition,
    /// The next cell.
    next: i32,
    /// `None` after the end.
    format: Option<F>,
}

impl<F: ExportFormat> Export<F> {
    /// Returns the next bytes; `None` after the end.
    async fn advance(&mut self) -> Result<Option<Bytes>, ApiError> {
        if self.next < self.cells {
            let end = self.cells.min(self.next.saturating_add(CELLS_PER_PART));
            let rows = self.rows(end).await?;
            self.next = end;
            return self.format.as_mut().map(|format| format.part(&rows).map(Bytes::from)).transpose();
        }
        Ok(self.format.take().map(|format| Bytes::from(format.end())))
    }

    async fn rows(&self, end: i32) -> Result<Vec<CellRow>, ApiError> {
        let cells = self.store.cells(&self.scope, self.id, self.next..end).await?;
        let ids: Vec<Option<RunId>> = cells.iter().map(|cell| cell.run_id).collect();
        let answers: Vec<Option<String>> =
            stream::iter(ids).map(|run_id| self.answer(run_id)).buffered(MAX_CONCURRENT_READS).try_collect().await?;
        let rows = cells.into_iter().zip(answers).map(|(cell, answer)| CellRow::new(&self.definition, cell, answer));
        rows.collect::<Result<_, _>>().map_err(ApiError::internal)
    }

    async fn answer(&self, run_id: Option<RunId>) -> Result<Option<String>, ApiError> {
        match run_id {
            Some(run_id) => Ok(self.store.answer(&self.scope, run_id).await?),
            None => Ok(None),
        }
    }
}

/// Returns the cells of an experiment as a file. An error after the first part truncates the response, which clients detect.
///
/// # Errors
/// The experiment is unknown, or the first part cannot be read.
pub(super) async fn respond<F: ExportFormat>(
    app: &App,
    scope: Scope,
    id: &str,
    format: F,
) -> Result<Response, ApiError> {
    let experiment = find(app, &scope, id).await?;
    let mut export = Export {
        store: app.store()?.clone(),
        scope,
        id: experiment.experiment_id,
        cells: experiment.cells,
        definition: parse_stored(&experiment.definition)?.0,
        next: 0,
        format: Some(format),
    };
    let first = export.advance().await?.unwrap_or_default();
    let rest = stream::try_unfold(export, |mut export| async move {
        let part = export.advance().await.map_err(|error| {
            tracing::error!(experiment = %export.id, error = error.log_detail(), "export truncated");
            io::Error::other("export truncated")
        })?;
        Ok::<_, io::Error>(part.map(|part| (part, export)))
    });
    let body = Body::from_stream(stream::once(async move { Ok(first) }).chain(rest));
    let file = format!("attachment; filename=\"{}.{}\"", experiment.experiment_id, F::EXTENSION);
    let headers = [(header::CONTENT_TYPE, F::CONTENT_TYPE.to_owned()), (header::CONTENT_DISPOSITION, file)];
    Ok((headers, body).into_response())
}
