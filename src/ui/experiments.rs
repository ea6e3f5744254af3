//! The list of experiments.

use super::error;
use super::shell::{Shell, TimeView, render};
use crate::events::Scope;
use crate::server::{ApiError, App, base};
use crate::store::{Experiment, ExperimentState, MAX_LISTED_EXPERIMENTS};
use askama::Template;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;

#[derive(Template)]
#[template(path = "experiments.html")]
struct ExperimentsPage {
    shell: Shell,
    list: List,
}

/// The part of the page that changes while experiments run.
#[derive(Template)]
#[template(path = "experiments_list.html")]
struct Fragment {
    list: List,
}

struct List {
    /// Prefix of every path.
    base: String,
    rows: Vec<ExperimentView>,
    /// True if older experiments may be missing.
    is_truncated: bool,
}

/// The fields of an experiment as texts for the templates.
pub(super) struct ExperimentView {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) href: String,
    pub(super) state: &'static str,
    pub(super) cells: i32,
    pub(super) ended: i64,
    pub(super) score: String,
    pub(super) created: TimeView,
}

impl From<&Experiment> for ExperimentView {
    fn from(experiment: &Experiment) -> Self {
        Self {
            id: experiment.experiment_id.to_string(),
            name: experiment.name.clone(),
            href: format!("/experiments/{}", experiment.experiment_id),
            state: state_name(experiment.state),
            cells: experiment.cells,
            ended: experiment.ended,
            score: experiment.mean_score.map(number).unwrap_or_default(),
            created: experiment.created_at.into(),
        }
    }
}

const fn state_name(state: ExperimentState) -> &'static str {
    match state {
        ExperimentState::Running => "running",
        ExperimentState::Done => "done",
        ExperimentState::Cancelled => "cancelled",
        ExperimentState::Interrupted => "interrupted",
    }
}

/// Formats a mean with two decimals, and a minus sign that has the width of a digit unless it is rounded to zero.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    if text == "-0.00" { "0.00".to_owned() } else { text.replace('-', "−") }
}

/// `GET /experiments`: renders the page; with `X-Fragment: list` only the list.
pub(super) async fn page(State(app): State<App>, scope: Scope, headers: HeaderMap) -> Response {
    let list = match experiments(&app, &scope).await {
        Ok(found) => List::new(base(&headers), &found),
        Err(error) => return error::render(&headers, &error),
    };
    if headers.contains_key("x-fragment") {
        return render(StatusCode::OK, &Fragment { list });
    }
    render(StatusCode::OK, &ExperimentsPage { shell: Shell::new(&headers, "experiments"), list })
}

async fn experiments(app: &App, scope: &Scope) -> Result<Vec<Experiment>, ApiError> {
    let store = app.store()?;
    let active = app.experiments().ids();
    let mut found = store.experiments(scope).await?;
    found.iter_mut().for_each(|experiment| app.experiments().update_state(&active, store.server_id(), experiment));
    Ok(found)
}

impl List {
    fn new(base: &str, found: &[Experiment]) -> Self {
        Self {
            base: base.to_owned(),
            rows: found.iter().map(ExperimentView::from).collect(),
            is_truncated: found.len() >= MAX_LISTED_EXPERIMENTS,
        }
    }
}

/// Returns an experiment for tests.
#[cfg(test)]
pub(super) fn sample() -> Experiment {
    Experiment {
        experiment_id: uuid::Uuid::nil(),
        name: "<b>greetings</b>".into(),
        created_at: chrono::DateTime::default(),
        state: ExperimentState::Running,
        cells: 8,
        ended: 3,
        mean_score: Some(0.5),
        owner: None,
        server_id: uuid::Uuid::nil(),
        definition: r#"{"name":"greetings","prompts":["<i>Hello</i>","The sky"],"seeds":[1,2],"mods":[[],["ban-phrases"]],"parameters":[{"max_tokens":6}],"score":{"regex":"x"}}"#.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_links_and_escapes_names() {
        let render = |found: &[Experiment]| {
            let shell = Shell::new(&HeaderMap::new(), "experiments");
            ExperimentsPage { shell, list: List::new("", found) }.render().unwrap()
        };
        let html = render(&[sample()]);
        crate::ui::checks::page(&html);
        assert!(!html.contains("<b>greetings") && html.contains("3 of 8") && html.contains("0.50"), "{html}");
        let empty = render(&[]);
        crate::ui::checks::page(&empty);
        assert!(empty.contains("No experiments yet"));
        let many: Vec<Experiment> = (0..MAX_LISTED_EXPERIMENTS).map(|_| sample()).collect();
        let truncated = "Only the newest 200 experiments are listed.";
        assert!(render(&many).contains(truncated));
        assert!(!html.contains(truncated));
    }
}
