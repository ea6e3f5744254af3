//! The page of an experiment: progress, means by mods and parameters, and the cells with links to their runs.

use super::error;
use super::experiments::{ExperimentView, number};
use super::shell::{Shell, render, runs_href, short};
use crate::events::Scope;
use crate::server::experiments::{CellCounts, ExperimentSummary, Grid, VariantSummary};
use crate::server::{ApiError, App, base};
use crate::store::{CellOutcome, CellState, Experiment, ExperimentCell, ExperimentState};
use askama::Template;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use uuid::Uuid;

/// Number of cells per page.
const PAGE_SIZE: i32 = 200;

/// Maximum characters of a prompt, a list of mods or a set of parameters. Each cell of the page repeats them.
const MAX_LABEL_CHARS: usize = 300;

/// The stored definition, as far as the page shows it.
#[derive(Debug, Deserialize)]
struct Definition {
    model: Option<String>,
    prompts: Vec<String>,
    seeds: Vec<u32>,
    mods: Vec<Vec<Value>>,
    parameters: Vec<Map<String, Value>>,
    score: Option<Map<String, Value>>,
}

impl Definition {
    fn grid(&self) -> Grid<'_> {
        Grid { mods: self.mods.len(), parameters: self.parameters.len(), seeds: &self.seeds }
    }
}

#[derive(Template)]
#[template(path = "experiment.html")]
struct ExperimentPage {
    shell: Shell,
    grid: GridView,
}

/// The part of the page that changes while the experiment runs.
#[derive(Template)]
#[template(path = "experiment_grid.html")]
struct Fragment {
    grid: GridView,
}

struct GridView {
    /// Prefix of every path.
    base: String,
    experiment: ExperimentView,
    counts: CellCounts,
    can_resume: bool,
    facts: Vec<String>,
    runs_href: String,
    /// Failed cells without a run.
    not_started: usize,
    failed_href: String,
    again_href: String,
    csv_href: String,
    parquet_href: String,
    variants: Vec<VariantView>,
    /// True if there are several lists of mods, sets of parameters, or seeds.
    has_mods: bool,
    has_parameters: bool,
    has_seeds: bool,
    cells: Vec<CellView>,
    previous_href: String,
    next_href: String,
    range: String,
}

/// The means of a list of mods with a set of parameters.
struct VariantView {
    mods: String,
    parameters: String,
    done: usize,
    failed: usize,
    tokens: String,
    score: String,
    standard_error: String,
    /// The score in percent, for the bar.
    percent: String,
}

struct CellView {
    number: i32,
    /// True if its score can be changed.
    has_ended: bool,
    prompt: String,
    mods: String,
    parameters: String,
    seed: u32,
    state: &'static str,
    run_id: String,
    run_href: String,
    answer: String,
    error: String,
    tokens: String,
    logprob: String,
    score: String,
    score_error: String,
    compare_href: String,
}

/// Query parameters of the page.
#[derive(Debug, Default, Deserialize)]
pub(super) struct PageParams {
    #[serde(default)]
    from: i32,
}

/// `GET /experiments/{id}`: renders an experiment; with `X-Fragment: grid` only the part that changes.
pub(super) async fn page(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(params): Query<PageParams>,
    headers: HeaderMap,
) -> Response {
    let grid = match load(&app, &scope, &id, params.from, base(&headers)).await {
        Ok(grid) => grid,
        Err(error) => return error::render(&headers, &error),
    };
    if headers.contains_key("x-fragment") {
        return render(StatusCode::OK, &Fragment { grid });
    }
    render(StatusCode::OK, &ExperimentPage { shell: Shell::new(&headers, "experiments"), grid })
}

async fn load(app: &App, scope: &Scope, id: &str, from: i32, base: &str) -> Result<GridView, ApiError> {
    let unknown = || ApiError::not_found("experiment", id);
    let experiment_id: Uuid = id.parse().map_err(|_| unknown())?;
    let store = app.store()?;
    let active = app.experiments().ids();
    let found = store.experiment(scope, experiment_id).await?;
    let mut experiment = found.ok_or_else(unknown)?;
    app.experiments().update_state(&active, store.server_id(), &mut experiment);
    let definition: Definition = serde_json::from_str(&experiment.definition).map_err(ApiError::internal)?;
    // A position after the last cell selects the last page.
    let from = from.clamp(0, (experiment.cells - 1).max(0)) / PAGE_SIZE * PAGE_SIZE;
    let range = from..experiment.cells.min(from + PAGE_SIZE);
    let cells = store.cells(scope, experiment_id, range).await?;
    let outcomes = store.cell_outcomes(scope, experiment_id).await?;
    Ok(GridView::new(&experiment, &definition, cells, &outcomes, from, base))
}

impl GridView {
    fn new(
        experiment: &Experiment,
        definition: &Definition,
        cells: Vec<ExperimentCell>,
        outcomes: &[CellOutcome],
        from: i32,
        base: &str,
    ) -> Self {
        let grid = definition.grid();
        let total = usize::try_from(experiment.cells).unwrap_or_default();
        let summary = ExperimentSummary::new(grid, total, outcomes);
        let runs: HashMap<i32, String> =
            outcomes.iter().filter_map(|one| Some((one.cell, one.run_id?.to_string()))).collect();
        let view = ExperimentView::from(experiment);
        let filter = format!("experiment:{}", view.id);
        let is_not_started = |one: &&CellOutcome| one.state == CellState::Failed && one.run_id.is_none();
        let page_href = |from: i32| format!("{}?from={from}", view.href);
        let end = from + i32::try_from(cells.len()).unwrap_or_default();
        Self {
            base: base.to_owned(),
            counts: summary.counts,
            can_resume: matches!(experiment.state, ExperimentState::Cancelled | ExperimentState::Interrupted),
            facts: facts(definition),
            runs_href: runs_href(&filter),
            not_started: outcomes.iter().filter(is_not_started).count(),
            failed_href: runs_href(&format!("{filter} status:failed")),
            again_href: format!("/experiments/-new?from={}", view.id),
            csv_href: format!("/api/v1/experiments/{}/cells.csv", view.id),
            parquet_href: format!("/api/v1/experiments/{}/cells.parquet", view.id),
            variants: variants(&summary, definition),
            has_mods: definition.mods.len() > 1,
            has_parameters: definition.parameters.len() > 1,
            has_seeds: definition.seeds.len() > 1,
            previous_href: if from > 0 { page_href((from - PAGE_SIZE).max(0)) } else { String::new() },
            next_href: if end < experiment.cells { page_href(end) } else { String::new() },
            range: format!("{}–{} of {}", from + 1, end, experiment.cells),
            cells: cells.into_iter().map(|cell| CellView::new(cell, definition, &runs)).collect(),
            experiment: view,
        }
    }
}

/// Returns the sizes of the definition's lists or their only entry, its model and its scorer.
fn facts(definition: &Definition) -> Vec<String> {
    let count = |number: usize, one: &str, many: &str| format!("{number} {}", if number == 1 { one } else { many });
    let mut facts = vec![
        count(definition.prompts.len(), "prompt", "prompts"),
        match definition.mods.as_slice() {
            [only] => format!("mods: {}", mods_label(only)),
            several => format!("{} lists of mods", several.len()),
        },
        match definition.parameters.as_slice() {
            [only] => format!("parameters: {}", parameters_label(only)),
            several => format!("{} sets of parameters", several.len()),
        },
        count(definition.seeds.len(), "seed", "seeds"),
    ];
    facts.extend(definition.model.iter().map(|model| format!("model {model}")));
    for (kind, value) in definition.score.iter().flatten() {
        facts.push(match value.as_str().filter(|_| kind != "python") {
            Some(pattern) => format!("score: {kind} {pattern}"),
            None => format!("score: {kind}"),
        });
    }
    facts
}

fn variants(summary: &ExperimentSummary, definition: &Definition) -> Vec<VariantView> {
    let view = |one: &VariantSummary| VariantView {
        mods: mods_label(&definition.mods[one.mods]),
        parameters: parameters_label(&definition.parameters[one.parameters]),
        done: one.done,
        failed: one.failed,
        tokens: one.mean_tokens.map(|tokens| format!("{tokens:.1}")).unwrap_or_default(),
        score: one.mean_score.map(number).unwrap_or_default(),
        standard_error: one.score_standard_error.map(number).unwrap_or_default(),
        percent: one.mean_score.map(|score| format!("{:.1}", score * 100.0)).unwrap_or_default(),
    };
    summary.variants.iter().map(view).collect()
}

/// Returns the beginning of a long text.
fn beginning(text: &str) -> String {
    match text.char_indices().nth(MAX_LABEL_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns a list of mods as text, or its beginning.
fn mods_label(mods: &[Value]) -> String {
    let label = |one: &Value| match (one.as_str(), one["name"].as_str()) {
        (Some(name), _) => name.to_owned(),
        (None, Some(name)) if one["config"].is_null() => name.to_owned(),
        (None, Some(name)) => format!("{name} {}", one["config"]),
        (None, None) => one.to_string(),
    };
    if mods.is_empty() { "none".to_owned() } else { beginning(&mods.iter().map(label).collect::<Vec<_>>().join(", ")) }
}

/// Returns a set of parameters as text, or its beginning.
fn parameters_label(parameters: &Map<String, Value>) -> String {
    if parameters.is_empty() {
        return "default".to_owned();
    }
    beginning(&parameters.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" "))
}

const fn state_name(state: CellState) -> &'static str {
    match state {
        CellState::Pending => "pending",
        CellState::Running => "running",
        CellState::Done => "done",
        CellState::Cancelled => "cancelled",
        CellState::Failed => "failed",
        CellState::Interrupted => "interrupted",
        CellState::Deleted => "deleted",
    }
}

impl CellView {
    fn new(cell: ExperimentCell, definition: &Definition, runs: &HashMap<i32, String>) -> Self {
        let grid = definition.grid();
        let index = usize::try_from(cell.cell).unwrap_or_default();
        let position = grid.position(index);
        let run = runs.get(&cell.cell).cloned().unwrap_or_default();
        let baseline = i32::try_from(grid.baseline(index)).ok().filter(|baseline| *baseline != cell.cell);
        let compare = baseline.and_then(|baseline| runs.get(&baseline)).filter(|_| !run.is_empty());
        Self {
            number: cell.cell + 1,
            has_ended: cell.run_id.is_some() && cell.state != CellState::Running,
            prompt: beginning(&definition.prompts[position.prompt]),
            mods: mods_label(&definition.mods[position.mods]),
            parameters: parameters_label(&definition.parameters[position.parameters]),
            seed: position.seed,
            state: state_name(cell.state),
            run_href: if run.is_empty() { String::new() } else { format!("/runs/{run}") },
            compare_href: compare.map(|baseline| format!("/compare?a={baseline}&b={run}")).unwrap_or_default(),
            run_id: run,
            answer: cell.output_preview,
            error: cell.error.unwrap_or_default(),
            tokens: cell.completion_tokens.map(|tokens| tokens.to_string()).unwrap_or_default(),
            logprob: cell.mean_logprob.map(number).unwrap_or_default(),
            score: cell.score.map(|score| short(f64::from(score)).to_string()).unwrap_or_default(),
            score_error: cell.score_error.unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::RunId;

    #[test]
    fn page_links_cells_to_runs_and_compares_with_the_baseline() {
        let experiment = crate::ui::experiments::sample();
        let definition: Definition = serde_json::from_str(&experiment.definition).unwrap();
        let outcome = |cell| CellOutcome {
            cell,
            run_id: Some(RunId(Uuid::from_u128(100 + cell as u128))),
            state: CellState::Done,
            ended: true,
            score: Some(1.0),
            completion_tokens: 6,
        };
        let cell = |number| ExperimentCell {
            cell: number,
            state: CellState::Done,
            run_id: None,
            finish_reason: None,
            completion_tokens: Some(6),
            mean_logprob: Some(-1.5),
            score: Some(0.25),
            output_preview: "<script>x</script>".into(),
            error: None,
            score_error: Some("ValueError: <b>".into()),
        };
        let outcomes: Vec<_> = (0..3).map(outcome).collect();
        let grid = GridView::new(&experiment, &definition, (0..8).map(cell).collect(), &outcomes, 0, "");
        let html = ExperimentPage { shell: Shell::new(&HeaderMap::new(), "experiments"), grid }.render().unwrap();
        crate::ui::checks::page(&html);
        assert!(html.contains("Not scored: ValueError: &#60;b&#62;"), "{html}");
        assert!(!html.contains("<script>x") && !html.contains("<i>Hello"), "{html}");
        let (a, b) = (Uuid::from_u128(100), Uuid::from_u128(102));
        assert!(html.contains(&format!("/compare?a={a}&#38;b={b}")), "{html}");
        assert_eq!(html.matches("/compare?a=").count(), 1, "the first two cells are baselines");
        assert!(html.contains("ban-phrases") && html.contains("max_tokens=6") && html.contains("score: regex x"));
    }

    #[test]
    fn page_has_the_beginning_of_long_values_and_counts_cells_without_run() {
        let experiment = Experiment { ended: 1, ..crate::ui::experiments::sample() };
        let mut definition: Definition = serde_json::from_str(&experiment.definition).unwrap();
        definition.prompts[0] = "ü".repeat(10_000);
        definition.mods[1] = vec![serde_json::json!({"name": "m", "config": "n".repeat(10_000)})];
        definition.parameters[0].insert("grammar".into(), "g".repeat(10_000).into());
        let cells = (0..8).map(|cell| ExperimentCell {
            cell,
            state: CellState::Failed,
            run_id: None,
            finish_reason: None,
            completion_tokens: None,
            mean_logprob: None,
            score: None,
            output_preview: String::new(),
            error: None,
            score_error: None,
        });
        let outcome = |cell, run_id| CellOutcome {
            cell,
            run_id,
            state: CellState::Failed,
            ended: false,
            score: None,
            completion_tokens: 0,
        };
        let outcomes = [outcome(0, Some(RunId(Uuid::nil()))), outcome(1, None), outcome(2, None)];
        let grid = GridView::new(&experiment, &definition, cells.collect(), &outcomes, 0, "");
        let html = Fragment { grid }.render().unwrap();
        assert!(html.contains(&format!("{}…", "ü".repeat(300))) && !html.contains(&"ü".repeat(301)));
        assert!(!html.contains(&"n".repeat(301)) && !html.contains(&"g".repeat(301)));
        assert!(html.contains("1 of 8 cells"), "cells that could not be started have not ended: {html}");
        assert!(html.contains(">1 failed</a>") && html.contains(">2 could not be started</span>"), "{html}");
    }

    #[test]
    fn lists_of_mods_are_short_texts() {
        let value = serde_json::json!([{"name": "a", "config": {"x": 1}}, "b", {"name": "c"}]);
        assert_eq!(mods_label(value.as_array().unwrap()), "a {\"x\":1}, b, c");
        assert_eq!((mods_label(&[]), parameters_label(&Map::new())), ("none".to_owned(), "default".to_owned()));
    }
}
