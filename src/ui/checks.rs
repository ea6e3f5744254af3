//! Checks that apply to every rendered page; used by the pages' tests.

use super::testing::status;
use axum::http::StatusCode;

/// Panics if a page breaks a rule for all pages.
pub(super) fn page(html: &str) {
    assert_eq!(html.matches("<h1").count(), 1, "one h1");
    assert!(html.contains("lang=\"en\"") && html.contains("<title>"), "language and title");
    for tag in tags(html) {
        assert!(!tag.contains(" style="), "inline style: {tag}");
        assert!(
            !tag.split_whitespace().any(|word| word.starts_with("on") && word.contains("=\"")),
            "inline handler: {tag}"
        );
        if tag.starts_with("<script") {
            assert!(tag.contains(" src="), "inline script: {tag}");
        }
    }
    labels(html);
    links(html);
}

/// Checks that every local link has a route; an unavailable database is accepted.
fn links(html: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for attribute in [" href=\"", " src=\""] {
        for rest in html.split(attribute).skip(1) {
            let path = rest.split('"').next().unwrap().replace("&#38;", "&").replace("&amp;", "&");
            if path.starts_with('/') && !path.starts_with("/api/") {
                let status = runtime.block_on(status(&path));
                assert!(status != StatusCode::NOT_FOUND && status != StatusCode::BAD_REQUEST, "{path}: {status}");
            }
        }
    }
}

/// Checks that every visible field has a label: around it, by `for`, or by `aria-label`.
fn labels(html: &str) {
    let mut depth = 0;
    for tag in tags(html) {
        if tag.starts_with("<label") {
            depth += 1;
        } else if tag.starts_with("</label") {
            depth -= 1;
        } else if tag.starts_with("<input") || tag.starts_with("<select") || tag.starts_with("<textarea") {
            let id = tag.split("id=\"").nth(1).and_then(|rest| rest.split('"').next());
            let named = id.is_some_and(|id| html.contains(&format!("for=\"{id}\"")));
            let is_hidden = tag.contains("type=\"hidden\"");
            assert!(depth > 0 || named || is_hidden || tag.contains("aria-label"), "no label: {tag}");
        }
    }
}

/// Returns the tags of a page; attributes never contain a raw `>`.
fn tags(html: &str) -> impl Iterator<Item = &str> {
    html.split('<').skip(1).filter_map(move |part| {
        let end = part.find('>')?;
        let start = part.as_ptr() as usize - html.as_ptr() as usize - 1;
        html.get(start..start + end + 2)
    })
}
