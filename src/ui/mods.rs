//! The list of mods: versions, origin, cost and problems.

use super::shell::{Shell, TimeView, duration, render, runs_href};
use crate::mods::{ModInfo, ModOrigin, ModProblem};
use crate::server::{App, Caller, encode_component};
use askama::Template;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::Value;

#[derive(Template)]
#[template(path = "mods.html")]
struct ModsPage {
    shell: Shell,
    mods: Vec<ModRow>,
    /// True if the caller may disable and enable mods.
    may_switch: bool,
    problems: Vec<ProblemView>,
}

struct ModRow {
    name: String,
    description: String,
    documentation: String,
    fields: Vec<Field>,
    href: String,
    runs_href: String,
    try_href: String,
    version: String,
    hash: String,
    earlier: usize,
    from: String,
    at: Option<TimeView>,
    enabled: bool,
    calls: String,
    failures: u64,
    mean: String,
    last_failure: String,
    failure_href: String,
}

/// A field of a mod's configuration.
pub(super) struct Field {
    pub(super) name: String,
    pub(super) required: bool,
    /// Default as JSON; empty without a default.
    pub(super) default: String,
    pub(super) description: String,
}

/// Returns the fields of a JSON schema of an object.
pub(super) fn fields(schema: &Value) -> Vec<Field> {
    let is_required =
        |name: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|one| one.as_str() == Some(name)));
    let known = schema["properties"].as_object().into_iter().flatten();
    known
        .map(|(name, field)| Field {
            name: name.clone(),
            required: is_required(name),
            default: field.get("default").filter(|value| !value.is_null()).map(Value::to_string).unwrap_or_default(),
            description: field["description"].as_str().unwrap_or_default().to_owned(),
        })
        .collect()
}

struct ProblemView {
    file: String,
    message: String,
    traceback: String,
    at: TimeView,
}

/// `GET /mods`: renders the list.
pub(super) async fn page(State(app): State<App>, caller: Caller, headers: HeaderMap) -> Response {
    let (mods, problems) = (app.registry().list_info(Some(&caller.scope)), app.registry().problems());
    render(StatusCode::OK, &ModsPage::new(&headers, mods, problems, caller.rights.mods))
}

impl ModsPage {
    fn new(headers: &HeaderMap, mods: Vec<ModInfo>, problems: Vec<ModProblem>, may_switch: bool) -> Self {
        Self {
            shell: Shell::new(headers, "mods"),
            mods: mods.into_iter().map(ModRow::from).collect(),
            may_switch,
            problems: problems.into_iter().map(ProblemView::from).collect(),
        }
    }
}

impl From<ModInfo> for ModRow {
    fn from(shown: ModInfo) -> Self {
        let ModInfo { description, current, enabled, earlier, stats, .. } = shown;
        let by = current.registered_by.unwrap_or_default();
        let failure = stats.last_failure;
        Self {
            href: format!("/mods/{}", encode_component(&description.name)),
            runs_href: runs_href(&format!("mod:{}", description.name)),
            try_href: format!("/playground?mod={}", encode_component(&description.name)),
            fields: fields(&description.schema),
            documentation: description.documentation,
            from: match current.origin {
                ModOrigin::Builtin => "built in".to_owned(),
                ModOrigin::File if by.is_empty() => "a file".to_owned(),
                ModOrigin::File => by,
                ModOrigin::Uploaded if by.is_empty() => "uploaded".to_owned(),
                ModOrigin::Uploaded => format!("uploaded by {by}"),
            },
            at: current.registered_at.map(TimeView::from),
            name: description.name,
            description: description.description,
            version: description.version,
            hash: current.hash,
            earlier: earlier.len(),
            enabled,
            calls: stats.calls.to_string(),
            failures: stats.failures,
            mean: stats.mean_us.map(duration).unwrap_or_default(),
            failure_href: failure.as_ref().map(|failure| format!("/runs/{}", failure.run_id)).unwrap_or_default(),
            last_failure: failure.map(|failure| failure.message).unwrap_or_default(),
        }
    }
}

impl From<ModProblem> for ProblemView {
    fn from(problem: ModProblem) -> Self {
        Self {
            file: problem.file,
            message: problem.message,
            traceback: problem.traceback.unwrap_or_default(),
            at: TimeView::from(problem.at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{RunId, system};
    use crate::mods::{CallFailure, CallStats, ModRegistry};

    #[test]
    fn mods_and_load_errors_are_listed() {
        let mut shown = ModRegistry::with_builtin().list_info(None);
        let last = shown.len() - 1;
        shown[last].description.name = "<i>".into();
        shown[last].stats = CallStats {
            calls: 7,
            failures: 1,
            mean_us: Some(1500.0),
            last_failure: Some(CallFailure { message: "<b>boom".into(), at: system::now(), run_id: RunId::now() }),
        };
        let problem = ModProblem {
            file: "x.py".into(),
            message: "<u>".into(),
            traceback: Some("line 3".into()),
            at: system::now(),
        };
        let count = shown.len();
        let html = ModsPage::new(&HeaderMap::new(), shown, vec![problem], true).render().unwrap();
        crate::ui::checks::page(&html);
        assert_eq!(html.matches("<tr").count(), count + 1);
        assert!(html.contains("href=\"/playground?mod=ban-phrases\"") && html.contains("max_retries"));
        assert!(html.contains("1.5 ms") && html.contains("line 3") && html.contains("boom"));
        assert!(!html.contains("<b>boom") && !html.contains("<u>") && !html.contains("<i>"));
    }
}
