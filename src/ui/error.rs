//! The page for what could not be shown, with ways out of it.

use super::shell::Shell;
use crate::api::{ApiError, App, Kind};
use crate::store;
use askama::Template;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{Html, IntoResponse, Response};

#[derive(Template)]
#[template(path = "error.html")]
pub(super) struct ErrorPage {
    pub(super) shell: Shell,
    pub(super) status: u16,
    pub(super) title: String,
    pub(super) detail: String,
    pub(super) recovery_href: String,
    pub(super) recovery_text: String,
    /// The server is starting: the page asks again by itself.
    pub(super) waits: bool,
}

/// Renders a page; a template that fails is a bug, and the answer a plain 500.
pub(super) fn show(status: StatusCode, page: &impl Template) -> Response {
    match page.render() {
        Ok(html) => (status, Html(html)).into_response(),
        Err(error) => ApiError::internal(format!("a page could not be rendered: {error}")).into_response(),
    }
}

/// An error as a page.
pub(super) fn render(_app: &App, headers: &HeaderMap, error: &ApiError) -> Response {
    let problem = error.problem();
    let status = error.kind().status();
    let page = ErrorPage {
        shell: Shell::new(headers, ""),
        status: problem.status,
        title: problem.title.to_owned(),
        detail: sentence(&problem.detail),
        recovery_href: "/playground".to_owned(),
        recovery_text: "Playground".to_owned(),
        waits: error.kind() == Kind::Unavailable,
    };
    show(status, &page)
}

/// The page for an address that does not exist.
pub async fn not_found(State(app): State<App>, headers: HeaderMap, uri: Uri) -> Response {
    render(&app, &headers, &ApiError::not_found("page", uri.path()))
}

/// What a failure of the store means to somebody who wanted a page.
pub(super) fn failed(error: store::Error) -> ApiError {
    match error {
        store::Error::Unavailable(_) => ApiError::unavailable(error.to_string()),
        store::Error::BadFilter(bad) => ApiError::bad_request(bad.to_string()).did_you_mean(bad.did_you_mean),
        other => ApiError::internal(other),
    }
}

/// Error texts begin in lower case and have no stop; on a page they are sentences.
pub(super) fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    let stop = if text.ends_with(['.', '?', '!']) { "" } else { "." };
    format!("{first}{}{stop}", chars.as_str())
}
