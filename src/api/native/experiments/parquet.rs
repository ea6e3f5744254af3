//! `/api/v1/experiments/{id}/cells.parquet`: the cells as a Parquet file.

use super::export::{CellRow, ExportFormat, respond};
use crate::events::Scope;
use crate::server::extract::Path;
use crate::server::{ApiError, App, Problem};
use crate::trace::parquet::{ColumnType, ColumnValue, ParquetWriter};
use axum::extract::State;
use axum::response::Response;
use serde_json::Value;

/// The columns, in the order of the fields of [`CellRow`].
const COLUMNS: [(&str, ColumnType); 14] = [
    ("cell", ColumnType::Integer),
    ("prompt", ColumnType::Text),
    ("mods", ColumnType::Text),
    ("parameters", ColumnType::Text),
    ("seed", ColumnType::Integer),
    ("state", ColumnType::Text),
    ("run_id", ColumnType::Text),
    ("finish_reason", ColumnType::Text),
    ("completion_tokens", ColumnType::Integer),
    ("mean_logprob", ColumnType::Float),
    ("score", ColumnType::Float),
    ("output", ColumnType::Text),
    ("error", ColumnType::Text),
    ("score_error", ColumnType::Text),
];

/// A Parquet file with a row group per part.
struct Parquet(ParquetWriter);

impl ExportFormat for Parquet {
    const CONTENT_TYPE: &'static str = "application/vnd.apache.parquet";
    const EXTENSION: &'static str = "parquet";

    fn part(&mut self, rows: &[CellRow]) -> Result<Vec<u8>, ApiError> {
        let rows: Vec<_> = rows.iter().map(values).collect::<Result<_, _>>()?;
        self.0.row_group(&rows).map_err(ApiError::internal)
    }

    fn end(self) -> Vec<u8> {
        self.0.finish()
    }
}

/// Exports the cells as a Parquet file with the columns of `cells.csv`. Texts are unchanged.
#[utoipa::path(get, path = "/api/v1/experiments/{id}/cells.parquet", operation_id = "export_experiment_parquet",
    tag = "experiments", params(("id" = String, Path, description = "Id of the experiment")), responses(
    (status = 200, content_type = "application/vnd.apache.parquet", body = CellRow,
        description = "One row per cell; the columns are the fields"),
    (status = 404, body = Problem)))]
pub async fn export(State(app): State<App>, scope: Scope, Path(id): Path<String>) -> Result<Response, ApiError> {
    respond(&app, scope, &id, Parquet(ParquetWriter::new(&COLUMNS))).await
}

/// Returns the values of a row.
fn values(row: &CellRow) -> Result<Vec<Option<ColumnValue>>, ApiError> {
    let mut columns = row.columns()?;
    let value = |(name, kind): &(&str, ColumnType)| match (columns.remove(*name)?, kind) {
        (Value::String(text), ColumnType::Text) => Some(ColumnValue::Text(text)),
        (Value::Number(number), ColumnType::Integer) => number.as_i64().map(ColumnValue::Integer),
        (Value::Number(number), ColumnType::Float) => number.as_f64().map(ColumnValue::Float),
        _ => None,
    };
    Ok(COLUMNS.iter().map(value).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::CellState;

    #[test]
    fn columns_are_the_fields_of_a_row() {
        let row = CellRow {
            cell: 1,
            prompt: "p".into(),
            mods: "[]".into(),
            parameters: "{}".into(),
            seed: 7,
            state: CellState::Done,
            run_id: Some("r".into()),
            finish_reason: Some(crate::events::FinishReason::Stop),
            completion_tokens: Some(3),
            mean_logprob: Some(-0.5),
            score: Some(1.0),
            output: Some("=1".into()),
            error: Some("e".into()),
            score_error: Some("s".into()),
        };
        let names: Vec<String> = row.columns().unwrap().keys().cloned().collect();
        assert_eq!(names, COLUMNS.map(|(name, _)| name));
        assert!(values(&row).unwrap().iter().all(Option::is_some));
        let without_tokens = values(&CellRow { completion_tokens: None, ..row }).unwrap();
        let missing: Vec<_> = COLUMNS.iter().zip(&without_tokens).filter(|(_, value)| value.is_none()).collect();
        assert!(matches!(missing[..], [(("completion_tokens", _), _)]));
    }
}
