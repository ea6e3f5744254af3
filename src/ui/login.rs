//! The login page. It has no scripts, and shows nothing that requires a key.

use super::shell::{self, Shell};
use crate::server::LoginForm;
use askama::Template;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// Content-Security-Policy of the page.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; \
                                       base-uri 'none'; frame-ancestors 'none'";

#[derive(Template)]
#[template(path = "login.html")]
struct Page<'a> {
    shell: Shell,
    form: LoginForm<'a>,
}

/// Renders the login page.
pub(super) fn page(headers: &HeaderMap, form: LoginForm<'_>) -> Response {
    let page = shell::render(StatusCode::OK, &Page { shell: Shell::new(headers, ""), form });
    // Without a referrer a browser sends "null" as the form's origin.
    let headers =
        [(header::REFERRER_POLICY, "same-origin"), (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY)];
    (headers, page).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ui::checks;

    #[test]
    fn login_page_has_its_form_and_no_link_to_a_page() {
        let form = LoginForm { next: "/runs?q=a&before=1", error: "Unknown \"key\"." };
        let html = Page { shell: Shell::new(&HeaderMap::new(), ""), form }.render().unwrap();
        checks::page(&html);
        assert!(html.contains("value=\"/runs?q=a&#38;before=1\"") && html.contains("Unknown &#34;key&#34;."), "{html}");
        assert!(!html.contains("<a ") && !html.contains("<script"), "{html}");
    }
}
