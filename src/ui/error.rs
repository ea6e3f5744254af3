//! The error page.

use super::shell::{self, Shell};
use crate::server::{ApiError, ErrorKind, base};
use askama::Template;
use axum::http::{HeaderMap, Uri};
use axum::response::Response;

#[derive(Template)]
#[template(path = "error.html")]
pub(super) struct ErrorPage {
    pub(super) shell: Shell,
    pub(super) status: u16,
    pub(super) title: String,
    pub(super) detail: String,
    /// Value of the refresh header that makes the page retry; empty if it does not.
    pub(super) refresh: String,
}

/// Renders an error as a page.
pub(super) fn render(headers: &HeaderMap, error: &ApiError) -> Response {
    let refresh = if error.kind() == ErrorKind::Unavailable { "3" } else { "" };
    shell::render(error.kind().status(), &page(headers, error, refresh.to_owned()))
}

/// Renders an error as a page that redirects to `href` after a second.
pub(super) fn render_and_retry(headers: &HeaderMap, error: &ApiError, href: &str) -> Response {
    shell::render(error.kind().status(), &page(headers, error, format!("1; url={}{href}", base(headers))))
}

fn page(headers: &HeaderMap, error: &ApiError, refresh: String) -> ErrorPage {
    let problem = error.problem();
    ErrorPage {
        shell: Shell::new(headers, ""),
        status: problem.status,
        title: problem.title.to_owned(),
        detail: sentence(&problem.detail),
        refresh,
    }
}

/// Renders the 404 page.
pub(super) fn not_found(headers: &HeaderMap, uri: &Uri) -> Response {
    super::add_headers(render(headers, &ApiError::not_found("page", uri.path())))
}

/// Converts an error text to a sentence: capital letter and full stop.
pub(super) fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    let stop = if text.ends_with(['.', '?', '!']) { "" } else { "." };
    format!("{first}{}{stop}", chars.as_str())
}

#[cfg(test)]
mod tests {
    use crate::config::SecurityConfig;
    use crate::server::Caller;
    use crate::ui::{checks, testing};
    use axum::body::{Body, to_bytes};
    use axum::http::{Request, StatusCode, header};
    use tower::ServiceExt;

    async fn get(path: &str, tag: Option<&str>) -> (StatusCode, axum::http::HeaderMap, String) {
        let mut request = Request::get(path);
        if let Some(tag) = tag {
            request = request.header(header::IF_NONE_MATCH, tag);
        }
        let request = request.body(Body::empty()).unwrap();
        let caller = Caller::new(&SecurityConfig::default(), None);
        let groups = crate::ui::protocol(bytes::Bytes::new()).into_groups();
        let router = groups.into_iter().fold(axum::Router::new(), |router, group| router.merge(group.routes));
        let router = router.layer(axum::Extension(caller));
        let response = router.with_state(testing::app()).oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        (parts.status, parts.headers, String::from_utf8(body.to_vec()).unwrap())
    }

    #[test]
    fn page_of_starting_server_retries() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (status, headers, html) = runtime.block_on(get("/runs", None));
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap().contains("default-src 'self'"));
        assert!(html.contains("http-equiv=\"refresh\""));
        checks::page(&html);
    }

    #[tokio::test]
    async fn assets_are_checked_by_their_tag() {
        let path = format!("/assets/{}/replay/replay.js", crate::ui::assets::version());
        let (status, headers, _) = get(&path, None).await;
        assert_eq!(
            (status, &headers[header::CONTENT_TYPE]),
            (StatusCode::OK, &"text/javascript; charset=utf-8".parse().unwrap())
        );
        let tag = headers[header::ETAG].to_str().unwrap();
        assert_eq!(get(&path, Some(tag)).await.0, StatusCode::NOT_MODIFIED);
        assert_eq!(get("/assets/x/../mod.rs", None).await.0, StatusCode::NOT_FOUND);
    }
}
