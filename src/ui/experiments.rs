//! The list of experiments.

use super::error;
use super::shell::{Shell, TimeView, render};
use crate::events::Scope;
use crate::server::{ApiError, App};
use crate::store::{Experiment, ExperimentState, MAX_LISTED_EXPERIMENTS};
use askama::Template;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;

#[derive(Template)]
#[template(path = "experiments.html")]
struct ExperimentsPage {
    shell: Shell,
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

/// Formats a mean with two decimals.
pub(super) fn number(value: f64) -> String {
    format!("{value:.2}")
}

/// `GET /experiments`: renders the list.
pub(super) async fn page(State(app): State<App>, scope: Scope, headers: HeaderMap) -> Response {
    match experiments(&app, &scope).await {
        Ok(found) => render(StatusCode::OK, &ExperimentsPage::new(&headers, &found)),
        Err(error) => error::render(&headers, &error),
    }
}

async fn experiments(app: &App, scope: &Scope) -> Result<Vec<Experiment>, ApiError> {
    let store = app.store()?;
    let active = app.experiments().ids();
    let mut found = store.experiments(scope).await?;
    found.iter_mut().for_each(|experiment| app.experiments().update_state(&active, store.server_id(), experiment));
    Ok(found)
}

impl ExperimentsPage {
    fn new(headers: &HeaderMap, found: &[Experiment]) -> Self {
        Self {
            shell: Shell::new(headers, "experiments"),
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
        let html = ExperimentsPage::new(&HeaderMap::new(), &[sample()]).render().unwrap();
        crate::ui::checks::page(&html);
        assert!(!html.contains("<b>greetings") && html.contains("3 of 8") && html.contains("0.50"), "{html}");
        let empty = ExperimentsPage::new(&HeaderMap::new(), &[]).render().unwrap();
        crate::ui::checks::page(&empty);
        assert!(empty.contains("No experiments yet"));
        let many: Vec<Experiment> = (0..MAX_LISTED_EXPERIMENTS).map(|_| sample()).collect();
        let truncated = "Only the newest 200 experiments are listed.";
        assert!(ExperimentsPage::new(&HeaderMap::new(), &many).render().unwrap().contains(truncated));
        assert!(!html.contains(truncated));
    }
}
