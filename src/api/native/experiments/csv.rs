//! `/api/v1/experiments/{id}/cells.csv`: the cells as comma-separated values (RFC 4180).

use super::export::{CellRow, ExportFormat, respond};
use crate::events::Scope;
use crate::server::extract::Path;
use crate::server::{ApiError, App, Problem};
use axum::extract::State;
use axum::response::Response;
use serde_json::Value;

/// First characters with which a spreadsheet reads a text as a formula, as OWASP lists them, with the full-width ones that
/// some spreadsheets convert.
const FORMULA_STARTS: [char; 11] = ['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'];

/// Comma-separated values after a line of column names.
#[derive(Default)]
struct Csv {
    has_names: bool,
}

impl ExportFormat for Csv {
    const CONTENT_TYPE: &'static str = "text/csv; charset=utf-8";
    const EXTENSION: &'static str = "csv";

    fn part(&mut self, rows: &[CellRow]) -> Result<Vec<u8>, ApiError> {
        let mut text = String::new();
        for row in rows {
            let columns = row.columns()?;
            if !std::mem::replace(&mut self.has_names, true) {
                write_line(&mut text, columns.keys().cloned());
            }
            write_line(&mut text, columns.into_iter().map(|(_, value)| to_text(value)));
        }
        Ok(text.into_bytes())
    }

    fn end(self) -> Vec<u8> {
        Vec::new()
    }
}

/// Exports the cells as comma-separated values with a line of column names: state, run, tokens, log-probability, score and
/// the whole answer of each cell. A text that begins with `=`, `+`, `-`, `@`, their full-width forms, a tab or a line
/// break, and is not a number, has a `'` before it, so that spreadsheets do not read it as a formula.
#[utoipa::path(get, path = "/api/v1/experiments/{id}/cells.csv", operation_id = "export_experiment", tag = "experiments",
    params(("id" = String, Path, description = "Id of the experiment")), responses(
    (status = 200, content_type = "text/csv", body = CellRow, description = "One line per cell; the columns are the fields"),
    (status = 404, body = Problem)))]
pub async fn export(State(app): State<App>, scope: Scope, Path(id): Path<String>) -> Result<Response, ApiError> {
    respond(&app, scope, &id, Csv::default()).await
}

fn to_text(value: Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => protect(text),
        other => other.to_string(),
    }
}

/// Puts `'` before a text that a spreadsheet would read as a formula.
fn protect(text: String) -> String {
    let is_number = || text.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b)) && text.parse::<f64>().is_ok();
    if text.starts_with(FORMULA_STARTS) && !is_number() { format!("'{text}") } else { text }
}

/// Appends a line. Values with a separator, a quotation mark, a line break or a tab are quoted.
fn write_line(text: &mut String, values: impl Iterator<Item = String>) {
    for (index, value) in values.enumerate() {
        if index > 0 {
            text.push(',');
        }
        if value.contains([',', '"', '\n', '\r', '\t']) {
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
    use super::{protect, write_line};

    #[test]
    fn values_with_separators_are_quoted() {
        let mut text = String::new();
        write_line(&mut text, ["a", "", "b,c", "say \"x\"", "two\nlines"].into_iter().map(str::to_owned));
        assert_eq!(text, "a,,\"b,c\",\"say \"\"x\"\"\",\"two\nlines\"\r\n");
    }

    #[test]
    fn formulas_become_texts() {
        for formula in [
            "=1+1", "+SUM(A1)", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "＋1", "－1", "＠A1", "--1", "-inf",
            "+",
        ] {
            assert_eq!(protect(formula.to_owned()), format!("'{formula}"));
        }
        for text in ["a=1", "-1.5", "+2e3", "-5", "", " =1", "'=1"] {
            assert_eq!(protect(text.to_owned()), text);
        }
    }
}
