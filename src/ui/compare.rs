//! Page that compares two runs: the server renders the differing settings, a script the differing tokens.

use super::assets;
use super::error;
use super::run::{RunSummaryView, one_line};
use super::shell::{Shell, render, short};
use crate::events::Scope;
use crate::server::{ApiError, App};
use crate::store::RunSummary;
use askama::Template;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Deserialize;
use std::sync::LazyLock;

static MODULES: LazyLock<Vec<String>> = LazyLock::new(|| assets::modules("compare.js"));

#[derive(Template)]
#[template(path = "compare.html")]
struct ComparePage {
    shell: Shell,
    a: RunSummaryView,
    b: RunSummaryView,
    settings: Vec<Setting>,
    swap_href: String,
    /// URLs of the page's modules, for preloading.
    modules: Vec<String>,
    /// URLs that the page's script requests first, for preloading.
    requests: [String; 2],
}

/// A setting or number that differs between the runs.
struct Setting {
    name: &'static str,
    a: String,
    b: String,
}

/// Query parameters of the page: run ids or request ids.
#[derive(Debug, Default, Deserialize)]
pub(super) struct CompareParams {
    #[serde(default)]
    a: String,
    #[serde(default)]
    b: String,
}

/// `GET /compare?a=&b=`: renders the comparison.
pub(super) async fn page(
    State(app): State<App>,
    scope: Scope,
    Query(params): Query<CompareParams>,
    headers: HeaderMap,
) -> Response {
    let both = async {
        if params.a.is_empty() || params.b.is_empty() {
            return Err(ApiError::bad_request("a comparison requires two runs; open /compare?a=…&b=… with their ids"));
        }
        Ok((app.find_run(&scope, &params.a).await?, app.find_run(&scope, &params.b).await?))
    };
    match both.await {
        Ok((a, b)) => render(StatusCode::OK, &ComparePage::new(&a, &b, &headers)),
        Err(error) => error::render(&headers, &error),
    }
}

impl ComparePage {
    fn new(a: &RunSummary, b: &RunSummary, headers: &HeaderMap) -> Self {
        Self {
            shell: Shell::new(headers, "runs"),
            settings: settings(a, b),
            swap_href: format!("/compare?a={}&b={}", b.run_id, a.run_id),
            a: RunSummaryView::new(a, ""),
            b: RunSummaryView::new(b, ""),
            modules: MODULES.clone(),
            requests: [a, b].map(|run| format!("/api/v1/runs/{}/columns", run.run_id)),
        }
    }
}

/// Returns the differing settings.
fn settings(a: &RunSummary, b: &RunSummary) -> Vec<Setting> {
    let rows = |run: &RunSummary| {
        let view = RunSummaryView::new(run, "");
        let number = |value: Option<i64>| value.map(|value| value.to_string()).unwrap_or_default();
        [
            ("started", view.created.text.replace('\n', ", ")),
            ("model", view.model),
            ("surface", view.surface),
            ("prompt", one_line(&run.prompt_preview)),
            ("mods", run.mods.join(" → ")),
            ("temperature", run.temperature.map(|value| short(value).to_string()).unwrap_or_default()),
            ("seed", number(run.seed.map(i64::from))),
            ("max tokens", number(run.max_tokens.map(i64::from))),
            ("status", format!("{} {}", view.status, view.reason)),
            ("tokens", run.completion_tokens.to_string()),
            ("backtracked", run.backtracked.to_string()),
            ("forced", run.forced.to_string()),
            ("errors", run.errors.to_string()),
            ("speed", view.speed),
        ]
    };
    let pairs = rows(a).into_iter().zip(rows(b));
    pairs.filter(|((_, a), (_, b))| a != b).map(|((name, a), (_, b))| Setting { name, a, b }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ui::run::sample;

    #[test]
    fn only_differences_are_listed() {
        let (a, mut b) = (sample(), sample());
        b.seed = Some(43);
        b.mods = vec!["x".into(), "<y>".into()];
        let names: Vec<_> = settings(&a, &b).iter().map(|row| row.name).collect();
        assert_eq!(names, ["mods", "seed"]);
        let html = ComparePage::new(&a, &b, &HeaderMap::new()).render().unwrap();
        crate::ui::checks::page(&html);
        assert!(!html.contains("<y>"));
    }

    #[test]
    fn request_ids_of_runs_without_prompt_text_are_no_difference() {
        let run = |id: &str| RunSummary { request_id: id.into(), prompt_preview: String::new(), ..sample() };
        assert_eq!(settings(&run("a"), &run("b")).len(), 0);
    }
}
