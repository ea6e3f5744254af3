//! The page of one run.

use super::feedback::{self, FeedbackView};
use super::notes::{self, NoteView};
use super::reported::{self, ReportedView};
use super::text;
use super::view::{Banner, RunSummaryView, banners};
use crate::events::{RunStatus, Scope};
use crate::server::{ApiError, App, ErrorKind, encode_component};
use crate::store::{RunQuery, RunSummary};
use crate::ui::shell::{Shell, render, runs_href};
use crate::ui::steering::control_vectors;
use crate::ui::{assets, error};
use askama::Template;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;
use std::sync::LazyLock;

/// Number of retries of the page of an unknown run, one second apart.
const MAX_RETRIES: u32 = 5;

/// Number of events that the page's script requests at a time: `EVENTS_PER_BLOCK` in `replay/events.js`.
const EVENTS_PER_REQUEST: u32 = 96;

/// Maximum forks that a run's page links to.
const MAX_FORKS_SHOWN: u32 = 8;

static MODULES: LazyLock<Vec<String>> = LazyLock::new(|| assets::modules("replay/page.js"));

#[derive(Template)]
#[template(path = "replay.html")]
struct ReplayPage {
    shell: Shell,
    run: RunSummaryView,
    banners: Vec<Banner>,
    reported: ReportedView,
    feedback: Vec<FeedbackView>,
    notes: Vec<NoteView>,
    /// The newest forks of the run.
    forks: Vec<RunSummaryView>,
    /// The list of all of them.
    forks_href: String,
    /// Values and labels of the feedback form.
    ratings: [(&'static str, &'static str); 5],
    newer_href: String,
    older_href: String,
    pane: Pane,
}

/// The fields of the replay component. By default, a script sets the run.
#[derive(Default)]
pub(in crate::ui) struct Pane {
    /// Empty if a script sets the run.
    pub run_id: String,
    pub status: &'static str,
    pub attention: bool,
    /// Control vectors that forks can select, as JSON; empty if there are none.
    pub vectors: String,
    /// URLs of the page's modules, for preloading.
    pub modules: Vec<String>,
    /// URLs that the component requests first, for preloading.
    pub requests: Vec<String>,
}

/// Query parameters of the page; the scripts read their own from the URL.
#[derive(Debug, Default, Deserialize)]
pub(in crate::ui) struct ReplayParams {
    #[serde(default)]
    q: String,
    #[serde(default)]
    view: String,
    from: Option<i32>,
    /// Number of retries so far.
    #[serde(default)]
    retry: u32,
}

/// `GET /runs/{id}`: renders the replay; `?view=text` renders plain text and a table of events.
pub(in crate::ui) async fn page(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(params): Query<ReplayParams>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let run = match app.find_run(&scope, &id).await {
        Ok(run) => run,
        Err(error) if error.kind() == ErrorKind::NotFound && params.retry < MAX_RETRIES => {
            let waiting = "it may have just started on another server; this page retries for a few seconds";
            let error = ApiError::new(ErrorKind::NotFound, format!("{}: {waiting}", error.problem().detail));
            return error::render_and_retry(&headers, &error, &href(&id, uri.query(), params.retry + 1));
        }
        Err(error) => return error::render(&headers, &error),
    };
    if params.retry > 0 {
        return Redirect::to(&href(&id, uri.query(), 0)).into_response();
    }
    if params.view == "text" {
        return text::page(&app, &scope, &run, params.from.unwrap_or(0), &headers).await;
    }
    let (reported, feedback, notes, forks) = tokio::join!(
        reported::find(&app, &scope, &run),
        feedback::list(&app, &scope, &run),
        notes::list(&app, &scope, &run),
        forks(&app, &scope, &run)
    );
    let mut page = ReplayPage { feedback, notes, ..ReplayPage::new(&run, reported, forks, &params.q, &headers) };
    page.pane.vectors = control_vectors(&app, run.model.as_deref());
    render(StatusCode::OK, &page)
}

/// Returns the requests that the replay component makes for a run that has ended, before it shows anything: the columns
/// and the first block of events.
fn first_requests(run: &RunSummary) -> Vec<String> {
    if run.status == RunStatus::Running {
        return Vec::new();
    }
    let api = format!("/api/v1/runs/{}", run.run_id);
    vec![format!("{api}/columns"), format!("{api}/events?from=0&to={EVENTS_PER_REQUEST}")]
}

/// Returns the newest forks of a run; none if the database cannot be read.
async fn forks(app: &App, scope: &Scope, run: &RunSummary) -> Vec<RunSummaryView> {
    let Ok(store) = app.store() else { return Vec::new() };
    let query = RunQuery { q: forks_filter(run), before: None, limit: MAX_FORKS_SHOWN };
    let page = store.runs(scope, &query).await;
    page.map(|page| page.runs.iter().map(|fork| RunSummaryView::new(fork, "")).collect()).unwrap_or_default()
}

/// Returns the filter for the forks of a run.
fn forks_filter(run: &RunSummary) -> String {
    format!("parent:{}", run.run_id)
}

/// Returns the URL of a run's page with that query and number of retries.
fn href(id: &str, query: Option<&str>, retry: u32) -> String {
    let retry = (retry > 0).then(|| format!("retry={retry}"));
    let others = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty() && !pair.starts_with("retry="));
    let pairs: Vec<&str> = others.chain(retry.as_deref()).collect();
    let mark = if pairs.is_empty() { "" } else { "?" };
    format!("/runs/{}{mark}{}", encode_component(id), pairs.join("&"))
}

impl ReplayPage {
    fn new(run: &RunSummary, reported: ReportedView, forks: Vec<RunSummaryView>, q: &str, headers: &HeaderMap) -> Self {
        let id = run.run_id;
        let neighbor_href = |direction: &str| match q {
            "" => format!("/runs/{id}/{direction}"),
            q => format!("/runs/{id}/{direction}?q={}", encode_component(q)),
        };
        Self {
            shell: Shell::new(headers, "runs"),
            banners: banners(run),
            reported,
            feedback: Vec::new(),
            notes: Vec::new(),
            forks,
            forks_href: runs_href(&forks_filter(run)),
            ratings: [("-1", "Bad"), ("-0.5", "Rather bad"), ("0", "Neither"), ("0.5", "Rather good"), ("1", "Good")],
            newer_href: neighbor_href("newer"),
            older_href: neighbor_href("older"),
            pane: Pane {
                run_id: id.to_string(),
                status: run.status.as_str(),
                attention: run.has_attention,
                vectors: String::new(),
                modules: MODULES.clone(),
                requests: first_requests(run),
            },
            run: RunSummaryView::new(run, q),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::RunParent;
    use crate::store::Feedback;
    use crate::ui::run::sample;

    fn sample_feedback() -> Feedback {
        Feedback {
            feedback_id: uuid::Uuid::nil(),
            created_at: chrono::DateTime::default(),
            rating: 1.0,
            text: Some("Great <b>response</b>!".into()),
            position: Some(120),
            user_label: None,
        }
    }

    #[test]
    fn page_shows_escaped_run() {
        let change = serde_json::json!({"text": "<i>so</i>"});
        let parent = RunParent { run_id: sample().run_id, sequence_order: 7, step: 3, change };
        let fork = RunSummary { parent: Some(parent), ..sample() };
        let forks = vec![RunSummaryView::new(&fork, "")];
        let page = ReplayPage::new(&sample(), ReportedView::default(), forks, "status:failed", &HeaderMap::new());
        let feedback = vec![FeedbackView::new(&sample_feedback())];
        let html = ReplayPage { feedback, ..page }.render().unwrap();
        crate::ui::checks::page(&html);
        assert!(html.contains("data-fork") && html.contains("step 3: “") && !html.contains("<i>so"), "{html}");
        assert!(html.contains("This run failed: Mod &#39;x&#39; raised"), "{html}");
        assert!(html.contains("data-run=\"0192f0c4-0000-7000-8000-000000000001\""));
        assert!(html.contains("/older?q=status%3Afailed"));
        assert!(html.contains("Great &#60;b&#62;response"), "{html}");
        assert!(html.contains("at token 121"));
    }
}
