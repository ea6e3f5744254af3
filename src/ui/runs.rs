//! The list of runs, with its filter.

use super::error;
use super::run::RunSummaryView;
use super::shell::{Shell, curl_chat, curl_post, key_variable, render, runs_href};
use crate::config::SecurityConfig;
use crate::events::{RunId, Scope};
use crate::server::base;
use crate::server::{App, Caller, encode_component};
use crate::store::{BadFilter, Error, RunPage, RunQuery, RunSummary, SavedFilter};
use askama::Template;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{Redirect, Response};
use serde::Deserialize;
use std::collections::HashMap;

/// Built-in views in the order of keys 1–5.
const VIEWS: [(&str, &str); 5] = [
    ("All", ""),
    ("Running", "status:running"),
    ("Errors", "error>0"),
    ("Backtracked", "backtracks>0"),
    ("Forced", "forced>0"),
];

/// Number of runs per page.
const PAGE_SIZE: u32 = 50;

#[derive(Template)]
#[template(path = "runs.html")]
struct RunsPage {
    shell: Shell,
    views: Vec<View>,
    saved: Vec<SavedView>,
    list: List,
}

/// The part of the page that a new filter replaces.
#[derive(Template)]
#[template(path = "runs_list.html")]
struct Fragment {
    list: List,
}

struct List {
    q: String,
    filter_error: FilterErrorView,
    /// `rows`, `empty` (no runs at all), `no-match`, or "" if the filter is invalid.
    state: &'static str,
    runs: Vec<RunSummaryView>,
    /// The terms of a filter without results, if there is more than one.
    terms: Vec<TermView>,
    newest_href: String,
    older_href: String,
    /// Prefix of every path.
    base: String,
    curl_chat: String,
    curl_ingest: String,
}

/// One term of the filter, and the list without it.
struct TermView {
    text: String,
    without_q: String,
    without_href: String,
}

struct View {
    name: &'static str,
    q: &'static str,
    href: String,
    current: bool,
}

/// A filter that the user has named.
struct SavedView {
    name: String,
    q: String,
    href: String,
    current: bool,
}

/// An invalid filter, split around the invalid word; all empty if the filter is valid.
#[derive(Default)]
struct FilterErrorView {
    message: String,
    suggestion: String,
    suggestion_q: String,
    suggestion_href: String,
    before: String,
    invalid: String,
    after: String,
    indent: String,
    caret: String,
}

impl FilterErrorView {
    fn new(q: &str, error: &BadFilter) -> Self {
        let chars: Vec<char> = q.chars().collect();
        let start = error.at.min(chars.len());
        let end = (error.at + error.len).clamp(start, chars.len());
        let (before, invalid, after): (String, String, String) =
            (chars[..start].iter().collect(), chars[start..end].iter().collect(), chars[end..].iter().collect());
        let suggestion = error.did_you_mean.clone().unwrap_or_default();
        let fixed = format!("{before}{suggestion}{after}");
        Self {
            message: error::sentence(&error.message),
            suggestion_href: runs_href(&fixed),
            suggestion_q: fixed,
            suggestion,
            indent: " ".repeat(start),
            caret: "^".repeat((end - start).max(1)),
            before,
            invalid,
            after,
        }
    }
}

/// Query parameters of the page.
#[derive(Debug, Default, Deserialize)]
pub(super) struct RunListParams {
    #[serde(default)]
    q: String,
    before: Option<RunId>,
}

/// `GET /`: redirects to the runs, or to the playground if there are none.
pub(super) async fn start(State(app): State<App>, scope: Scope) -> Redirect {
    Redirect::temporary(if is_empty(&app, &scope).await { "/playground" } else { "/runs" })
}

/// Returns true if there are no runs in the scope; false if this is unknown.
pub(super) async fn is_empty(app: &App, scope: &Scope) -> bool {
    let query = RunQuery { limit: 1, ..RunQuery::default() };
    match app.store() {
        Ok(store) => store.runs(scope, &query).await.is_ok_and(|page| page.runs.is_empty()),
        Err(_) => false,
    }
}

/// `GET /runs`: renders the list; with `X-Fragment: list` only the part that depends on the filter.
pub(super) async fn page(
    State(app): State<App>,
    caller: Caller,
    Query(params): Query<RunListParams>,
    headers: HeaderMap,
) -> Response {
    let store = match app.store() {
        Ok(store) => store,
        Err(error) => return error::render(&headers, &error),
    };
    let q = params.q.trim().to_owned();
    let query = RunQuery { q: q.clone(), before: params.before, limit: PAGE_SIZE };
    let found = match store.runs(&caller.scope, &query).await {
        Ok(page) => Ok(page),
        Err(Error::BadFilter(bad)) => Err(bad),
        Err(error) => return error::render(&headers, &error.into()),
    };
    let status = if found.is_ok() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    let list = List::new(q, params.before.is_some(), found, &headers, &app.credentials().security);
    if headers.contains_key("x-fragment") {
        return render(status, &Fragment { list });
    }
    // The list is useful without them.
    let saved = store.saved_filters(caller.tenant.as_ref()).await.unwrap_or_default();
    let saved = saved_views(saved, &list.q);
    let page = RunsPage { shell: Shell::new(&headers, "runs"), views: views(&list.q), saved, list };
    render(status, &page)
}

fn views(q: &str) -> Vec<View> {
    VIEWS.iter().map(|&(name, view)| View { name, q: view, href: runs_href(view), current: view == q }).collect()
}

fn saved_views(saved: Vec<SavedFilter>, q: &str) -> Vec<SavedView> {
    let view = |SavedFilter { name, q: filter, .. }| SavedView {
        name,
        href: runs_href(&filter),
        current: filter == q,
        q: filter,
    };
    saved.into_iter().map(view).collect()
}

/// Returns the terms of a valid filter as written. Terms are separated by spaces outside of quotation marks.
fn terms(q: &str) -> Vec<String> {
    let mut terms = vec![String::new()];
    let mut quoted = false;
    for c in q.chars() {
        quoted ^= c == '"';
        if c.is_whitespace() && !quoted {
            terms.push(String::new());
        } else if let Some(term) = terms.last_mut() {
            term.push(c);
        }
    }
    terms.retain(|term| !term.is_empty());
    terms
}

/// Returns the terms of a filter, each with the rest of the filter; empty if there is only one.
fn term_views(q: &str) -> Vec<TermView> {
    let terms = terms(q);
    if terms.len() < 2 {
        return Vec::new();
    }
    let others = |i: usize| {
        let rest: Vec<&str> =
            terms.iter().enumerate().filter(|(k, _)| *k != i).map(|(_, term)| term.as_str()).collect();
        rest.join(" ")
    };
    terms
        .iter()
        .enumerate()
        .map(|(i, term)| TermView { text: term.clone(), without_href: runs_href(&others(i)), without_q: others(i) })
        .collect()
}

/// Returns the runs of a page with those of a family together, at the place of its newest run: the original first, if the
/// page has it, then its forks. Forks are branches if the page has their original.
fn by_family(runs: &[RunSummary], q: &str) -> Vec<RunSummaryView> {
    let parents: HashMap<RunId, RunId> =
        runs.iter().filter_map(|run| Some((run.run_id, run.parent.as_ref()?.run_id))).collect();
    let origin = |run: RunId| std::iter::successors(Some(run), |run| parents.get(run).copied()).last().unwrap_or(run);
    let mut families: Vec<(RunId, Vec<&RunSummary>)> = Vec::new();
    let mut known: HashMap<RunId, usize> = HashMap::new();
    for run in runs {
        let origin = origin(run.run_id);
        let index = *known.entry(origin).or_insert_with(|| {
            families.push((origin, Vec::new()));
            families.len() - 1
        });
        families[index].1.push(run);
    }
    let members = families.into_iter().flat_map(|(origin, mut members)| {
        members.sort_by_key(|run| run.run_id != origin);
        let has_origin = members.first().is_some_and(|run| run.run_id == origin);
        members.into_iter().map(move |run| (has_origin && run.run_id != origin, run))
    });
    members.map(|(is_branch, run)| RunSummaryView { is_branch, ..RunSummaryView::new(run, q) }).collect()
}

/// Returns the variable of the environment with the key that permits sending traces; empty if none is needed.
fn ingest_key_variable(security: &SecurityConfig) -> &'static str {
    match key_variable(security) {
        _ if security.ingest_open => "",
        "" if !security.ingest_keys.is_empty() => "THUNDER_INGEST_KEY",
        variable => variable,
    }
}

impl List {
    fn new(
        q: String,
        paged: bool,
        found: Result<RunPage, BadFilter>,
        headers: &HeaderMap,
        security: &SecurityConfig,
    ) -> Self {
        let (page, filter_error) = match found {
            Ok(page) => (Some(page), FilterErrorView::default()),
            Err(error) => (None, FilterErrorView::new(&q, &error)),
        };
        let state = match &page {
            None => "",
            Some(page) if !page.runs.is_empty() => "rows",
            Some(_) if q.is_empty() && !paged => "empty",
            Some(_) => "no-match",
        };
        let terms = if state == "no-match" { term_views(&q) } else { Vec::new() };
        let next = page.as_ref().and_then(|page| page.next);
        let older_href = next.map_or_else(String::new, |before| match q.as_str() {
            "" => format!("/runs?before={before}"),
            q => format!("/runs?q={}&before={before}", encode_component(q)),
        });
        Self {
            filter_error,
            state,
            terms,
            runs: by_family(page.as_ref().map_or(&[][..], |page| &page.runs), &q),
            newest_href: if paged { runs_href(&q) } else { String::new() },
            older_href,
            base: base(headers).to_owned(),
            curl_chat: curl_chat(headers, security, None),
            curl_ingest: curl_post(headers, "/ingest", ingest_key_variable(security), "@sample_payload.json"),
            q,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::RunParent;
    use crate::ui::run::sample;
    use chrono::DateTime;

    fn rendered(q: &str, found: Result<RunPage, BadFilter>) -> String {
        let headers = HeaderMap::new();
        let list = List::new(q.to_owned(), false, found, &headers, &SecurityConfig::default());
        let saved = SavedFilter { name: "<b>mine</b>".into(), q: "a b".into(), created_at: DateTime::default() };
        let saved = saved_views(vec![saved], q);
        RunsPage { shell: Shell::new(&headers, "runs"), views: views(q), saved, list }.render().unwrap()
    }

    #[test]
    fn text_of_runs_is_escaped() {
        let html = rendered("", Ok(RunPage { runs: vec![sample()], next: None }));
        crate::ui::checks::page(&html);
        assert!(!html.contains("<script>alert"));
        assert!(!html.contains("<b>KeyError") && !html.contains("<b>mine"));
        assert!(html.contains("href=\"/runs?q=a%20b\""));
    }

    #[test]
    fn families_are_together_with_the_original_first() {
        let id = |number: u128| RunId(uuid::Uuid::from_u128(number));
        let run = |number: u128, parent: Option<u128>| RunSummary {
            run_id: id(number),
            parent: parent.map(|parent| RunParent {
                run_id: id(parent),
                sequence_order: 3,
                step: 1,
                change: serde_json::json!({}),
            }),
            ..sample()
        };
        // Newest first. The original of 7 and 4 is on another page.
        let runs = [run(9, Some(5)), run(8, None), run(7, Some(1)), run(6, Some(9)), run(5, None), run(4, Some(1))];
        let shown: Vec<_> = by_family(&runs, "").into_iter().map(|run| (run.id, run.is_branch)).collect();
        let expected = [(5, false), (9, true), (6, true), (8, false), (7, false), (4, false)];
        assert_eq!(shown, expected.map(|(number, is_branch)| (id(number).to_string(), is_branch)));
    }

    #[test]
    fn invalid_filter_is_marked() {
        let bad = BadFilter {
            at: 2,
            len: 5,
            message: "there is no field 'modle'".into(),
            did_you_mean: Some("model".into()),
        };
        let html = rendered("a modle:x", Err(bad));
        crate::ui::checks::page(&html);
        assert!(html.contains("<mark>modle</mark>:x\n  <b>^^^^^</b>"), "{html}");
        assert!(html.contains("/runs?q=a%20model%3Ax"));
    }

    #[test]
    fn empty_list_shows_example_request() {
        let html = rendered("", Ok(RunPage { runs: vec![], next: None }));
        crate::ui::checks::page(&html);
        assert!(html.contains("No runs yet") && html.contains("/v1/chat/completions"));
        assert!(rendered("x", Ok(RunPage { runs: vec![], next: None })).contains("No run matches<"));
        let unfinished = rendered("x", Ok(RunPage { runs: vec![], next: Some(sample().run_id) }));
        assert!(unfinished.contains("Search older runs") && !unfinished.contains("No run matches<"), "{unfinished}");
        let two = rendered("model:demo \"a b\"", Ok(RunPage { runs: vec![], next: None }));
        crate::ui::checks::page(&two);
        assert!(two.contains("href=\"/runs?q=model%3Ademo\"") && two.contains("href=\"/runs?q=%22a%20b%22\""), "{two}");
    }
}
