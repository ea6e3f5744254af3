//! `/api/v1/experiments/{id}/cells.csv`: the cells as comma-separated values (RFC 4180).

use super::{ExperimentDefinition, MAX_PAGE, find, parse_stored};
use crate::events::{FinishReason, Scope};
use crate::server::extract::Path;
use crate::server::{ApiError, App, Problem};
use crate::store::{CellState, ExperimentCell};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A line of the export. The columns have the names and the order of the fields; values that a cell lacks are empty.
#[derive(Debug, Serialize, ToSchema)]
pub struct CellRow {
    /// Number of the cell, from 0.
    cell: i32,
    /// The prompt.
    prompt: String,
    /// The list of mods as JSON.
    mods: String,
    /// The set of parameters as JSON.
    parameters: String,
    /// The seed.
    seed: u32,
    /// State of the cell.
    state: CellState,
    /// Its run.
    run_id: Option<String>,
    /// Finish reason of the run.
    finish_reason: Option<FinishReason>,
    /// Tokens of the answer.
    completion_tokens: i32,
    /// Mean ln p of the answer's tokens.
    mean_logprob: Option<f64>,
    /// Score from 0 to 1.
    score: Option<f64>,
    /// Beginning of the answer.
    output_preview: String,
    /// The error of a failed cell.
    error: Option<String>,
}

impl CellRow {
    fn new(definition: &ExperimentDefinition, cell: ExperimentCell) -> Result<Self, serde_json::Error> {
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
            output_preview: cell.output_preview,
            error: cell.error,
        })
    }
}

/// Exports the cells as comma-separated values with a line of column names: state, run, tokens, log-probability and score
/// of each cell.
#[utoipa::path(get, path = "/api/v1/experiments/{id}/cells.csv", operation_id = "export_experiment", tag = "experiments",
    params(("id" = String, Path, description = "Id of the experiment")), responses(
    (status = 200, content_type = "text/csv", body = CellRow, description = "One line per cell; the columns are the fields"),
    (status = 404, body = Problem)))]
pub async fn export(State(app): State<App>, scope: Scope, Path(id): Path<String>) -> Result<Response, ApiError> {
    let experiment = find(&app, &scope, &id).await?;
    let definition = parse_stored(&experiment)?;
    let store = app.store()?;
    let mut text = String::new();
    for from in (0..experiment.cells).step_by(MAX_PAGE as usize) {
        let end = experiment.cells.min(from.saturating_add(MAX_PAGE));
        for cell in store.cells(&scope, experiment.experiment_id, from..end).await? {
            let row = CellRow::new(&definition, cell).and_then(serde_json::to_value).map_err(ApiError::internal)?;
            let Value::Object(row) = row else { continue };
            if text.is_empty() {
                write_line(&mut text, row.keys().cloned());
            }
            write_line(&mut text, row.into_iter().map(|(_, value)| to_text(value)));
        }
    }
    let file = format!("attachment; filename=\"{}.csv\"", experiment.experiment_id);
    let headers = [(header::CONTENT_TYPE, "text/csv; charset=utf-8".to_owned()), (header::CONTENT_DISPOSITION, file)];
    Ok((headers, text).into_response())
}

fn to_text(value: Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text,
        other => other.to_string(),
    }
}

/// Appends a line. Values with a separator, a quotation mark or a line break are quoted.
fn write_line(text: &mut String, values: impl Iterator<Item = String>) {
    for (index, value) in values.enumerate() {
        if index > 0 {
            text.push(',');
        }
        if value.contains([',', '"', '\n', '\r']) {
            text.push('"');
            text.push_str(&value.replace('"', "\"\""));
            text.push('"');
        } else {
            text.push_str(&value);
        }
    }
    text.push_str("\r\n");
}

#[cfg(test)]
mod tests {
    use super::write_line;

    #[test]
    fn values_with_separators_are_quoted() {
        let mut text = String::new();
        write_line(&mut text, ["a", "", "b,c", "say \"x\"", "two\nlines"].into_iter().map(str::to_owned));
        assert_eq!(text, "a,,\"b,c\",\"say \"\"x\"\"\",\"two\nlines\"\r\n");
    }
}
