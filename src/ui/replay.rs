//! The page of one run.

use super::assets;
use super::error::{self, show};
use super::feedback::{self, FeedbackView};
use super::notes::{self, NoteView};
use super::replay_text;
use super::reported::{self, ReportedView};
use super::run::{Banner, RunPageView, banners};
use super::shell::{Shell, encoded, runs_href};
use super::steering::control_vectors;
use crate::events::{RunStatus, Scope};
use crate::server::{ApiError, App, ErrorKind};
use crate::store::{RunQuery, RunSummary};
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
    run: RunPageView,
    banners: Vec<Banner>,
    reported: ReportedView,
    feedback: Vec<FeedbackView>,
    notes: Vec<NoteView>,
    /// The newest forks of the run.
    forks: Vec<RunPageView>,
    /// The list of all of them.
    forks_href: String,
    /// Values and labels of the feedback form.
    ratings: [(&'static str, &'static str); 5],
    prev_href: String,
    next_href: String,
    pane: Pane,
}

/// The fields of the replay component.
pub(super) struct Pane {
    /// Empty if a script sets the run.
    pub(super) run_id: String,
    pub(super) status: &'static str,
    pub(super) attention: bool,
    /// Control vectors that forks can select, as JSON; empty if there are none.
    pub(super) vectors: String,
    /// URLs of the page's modules, for preloading.
    pub(super) modules: Vec<String>,
    /// URLs that the component requests first, for preloading.
    pub(super) requests: Vec<String>,
}

impl Pane {
    /// Returns a component whose run is set by a script.
    pub(super) fn idle() -> Self {
        Self {
            run_id: String::new(),
            status: "",
            attention: false,
            vectors: String::new(),
            modules: Vec::new(),
            requests: Vec::new(),
        }
    }
}

/// Query parameters of the page; the scripts read their own from the URL.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ReplayParams {
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
pub(super) async fn page(
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
        return replay_text::page(&app, &scope, &run, params.from.unwrap_or(0), &headers).await;
    }
    let (reported, feedback, notes, forks) = tokio::join!(
        reported::find(&app, &scope, &run),
        feedback::list(&app, &scope, &run),
        notes::list(&app, &scope, &run),
        forks(&app, &scope, &run)
    );
    let mut page = ReplayPage { feedback, notes, ..ReplayPage::new(&run, reported, forks, &params.q, &headers) };
    page.pane.vectors = control_vectors(&app, run.model.as_deref());
    show(StatusCode::OK, &page)
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
async fn forks(app: &App, scope: &Scope, run: &RunSummary) -> Vec<RunPageView> {
    let Ok(store) = app.store() else { return Vec::new() };
    let query = RunQuery { q: forks_filter(run), before: None, limit: MAX_FORKS_SHOWN };
    let page = store.runs(scope, &query).await;
    page.map(|page| page.runs.iter().map(|fork| RunPageView::new(fork, "")).collect()).unwrap_or_default()
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
    format!("/runs/{}{mark}{}", encoded(id), pairs.join("&"))
}

impl ReplayPage {
    fn new(run: &RunSummary, reported: ReportedView, forks: Vec<RunPageView>, q: &str, headers: &HeaderMap) -> Self {
        let id = run.run_id;
        let neighbor_href = |direction: &str| match q {
            "" => format!("/runs/{id}/{direction}"),
            q => format!("/runs/{id}/{direction}?q={}", encoded(q)),
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
            prev_href: neighbor_href("newer"),
            next_href: neighbor_href("older"),
            pane: Pane {
                run_id: id.to_string(),
                status: run.status.as_str(),
                attention: run.has_attention,
                vectors: String::new(),
                modules: MODULES.clone(),
                requests: first_requests(run),
            },
            run: RunPageView::new(run, q),
        }
    }
}

/// `GET /runs/{id}/older`: redirects to the next older run in the list filtered by `q`.
pub(super) async fn older(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(params): Query<ReplayParams>,
    headers: HeaderMap,
) -> Response {
    redirect_to_neighbor(&app, &scope, &id, &params.q, true)
        .await
        .unwrap_or_else(|error| error::render(&headers, &error))
}

/// `GET /runs/{id}/newer`: redirects to the next newer run in the list filtered by `q`.
pub(super) async fn newer(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(params): Query<ReplayParams>,
    headers: HeaderMap,
) -> Response {
    redirect_to_neighbor(&app, &scope, &id, &params.q, false)
        .await
        .unwrap_or_else(|error| error::render(&headers, &error))
}

/// Redirects to the neighbor of a run, or to the list if the run has no neighbor.
async fn redirect_to_neighbor(app: &App, scope: &Scope, id: &str, q: &str, older: bool) -> Result<Response, ApiError> {
    let run = app.find_run(scope, id).await?;
    let neighbor = if older {
        older_in_pages(app, scope, q, &run).await?
    } else {
        // The list can only be read from new to old, so only its first pages are searched. For a run after them, the
        // result is their last run.
        newer_in_pages(app, scope, q, &run).await?
    };
    let href = neighbor.map_or_else(|| runs_href(q), |run| RunPageView::new(&run, q).href);
    Ok(Redirect::to(&href).into_response())
}

/// Maximum number of pages of the list that are searched for a neighbor.
const MAX_PAGES: usize = 10;

async fn older_in_pages(app: &App, scope: &Scope, q: &str, run: &RunSummary) -> Result<Option<RunSummary>, ApiError> {
    let store = app.store()?;
    let mut before = Some(run.run_id);
    for _ in 0..MAX_PAGES {
        let page = store.runs(scope, &RunQuery { q: q.to_owned(), before, limit: 1 }).await.map_err(error::failed)?;
        before = page.next;
        if let Some(run) = page.runs.into_iter().next() {
            return Ok(Some(run));
        }
        if before.is_none() {
            break;
        }
    }
    Ok(None)
}

async fn newer_in_pages(app: &App, scope: &Scope, q: &str, run: &RunSummary) -> Result<Option<RunSummary>, ApiError> {
    let store = app.store()?;
    let mut before = None;
    let mut last = None;
    for _ in 0..MAX_PAGES {
        let query = RunQuery { q: q.to_owned(), before, limit: crate::store::MAX_PAGE_RUNS };
        let page = store.runs(scope, &query).await.map_err(error::failed)?;
        for other in page.runs {
            // The list is ordered by id, so a trace from last year that was ingested today is among today's runs.
            if other.run_id <= run.run_id {
                return Ok(last);
            }
            last = Some(other);
        }
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    Ok(last)
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
        let forks = vec![RunPageView::new(&fork, "")];
        let page = ReplayPage::new(&sample(), ReportedView::default(), forks, "status:failed", &HeaderMap::new());
        let feedback = vec![FeedbackView::new(&sample_feedback())];
        let html = ReplayPage { feedback, ..page }.render().unwrap();
        crate::ui::checks::page(&html);
        assert!(html.contains("data-fork") && html.contains("step 3: “") && !html.contains("<i>so"), "{html}");
        assert!(
            html.contains("This run failed: Mod &#39;x&#39; raised") || html.contains("This run failed: Mod"),
            "{html}"
        );
        assert!(html.contains("data-run=\"0192f0c4-0000-7000-8000-000000000001\""));
        assert!(html.contains("/older?q=status%3Afailed"));
        assert!(html.contains("Great &#60;b&#62;response") || html.contains("Great &lt;b&gt;response"), "{html}");
        assert!(html.contains("at token 121"));
    }
}
