//! The handbook: Markdown pages of `templates/docs`, embedded in the binary and rendered once.
//!
//! `README.md` of that folder lists the pages in their order. The page `reference` ends with the routes of the `OpenAPI`
//! document. Links between pages are relative, so that they work in the repository and below any `--api-prefix`.

mod markdown;
mod reference;

use super::error;
use super::shell::{Shell, render};
use crate::server::{ApiError, App};
use askama::Template;
use axum::extract::{Extension, Path};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router};
use bytes::Bytes;
use markdown::{Group, Page, Section};
use rust_embed::RustEmbed;
use serde::Serialize;
use std::sync::{Arc, OnceLock};

#[derive(RustEmbed)]
#[folder = "templates/docs/"]
struct Sources;

/// File that lists the pages.
const CONTENTS: &str = "README.md";
/// Page that `/docs` redirects to.
const FIRST: &str = "getting-started";
/// Page that the routes are appended to.
const REFERENCE: &str = "reference";

/// The handbook of one server.
struct Handbook {
    openapi: Bytes,
    rendered: OnceLock<RenderedHandbook>,
}

struct RenderedHandbook {
    groups: Vec<Group>,
    pages: Vec<Page>,
}

#[derive(Template)]
#[template(path = "docs.html")]
struct DocsPage<'a> {
    shell: Shell,
    groups: &'a [Group],
    page: &'a Page,
    previous: Option<&'a Page>,
    next: Option<&'a Page>,
}

impl DocsPage<'_> {
    fn is_current(&self, slug: &str) -> bool {
        self.page.slug == slug
    }
}

/// A searchable section, as the dashboard's search reads it.
#[derive(Serialize)]
struct SearchEntry<'a> {
    page: &'a str,
    slug: &'a str,
    #[serde(flatten)]
    section: &'a Section,
}

/// Creates the routes of the handbook; the reference is generated from `openapi`.
pub(super) fn router(openapi: Bytes) -> Router<App> {
    let handbook = Arc::new(Handbook { openapi, rendered: OnceLock::new() });
    Router::new()
        .route("/docs", get(Redirect::temporary(&format!("/docs/{FIRST}"))))
        .route("/docs/search.json", get(search))
        .route("/docs/images/{name}", get(image))
        .route("/docs/{name}", get(page))
        .layer(Extension(handbook))
}

impl Handbook {
    fn rendered(&self) -> &RenderedHandbook {
        self.rendered.get_or_init(|| {
            let groups = markdown::contents(&source(CONTENTS));
            let slugs = groups.iter().flat_map(|group| &group.entries).map(|entry| entry.slug.as_str());
            let pages = slugs.map(|slug| Page::render(slug, self.markdown(slug))).collect();
            RenderedHandbook { groups, pages }
        })
    }

    /// Returns the Markdown of a page, including its generated part.
    fn markdown(&self, slug: &str) -> String {
        let mut text = source(&format!("{slug}.md"));
        if slug == REFERENCE {
            text.push('\n');
            text.push_str(&reference::markdown(&self.openapi));
        }
        text
    }
}

/// Returns an embedded file as text; empty if the file does not exist. A test checks that all pages exist.
fn source(name: &str) -> String {
    Sources::get(name).map(|file| String::from_utf8_lossy(&file.data).into_owned()).unwrap_or_default()
}

/// `GET /docs/{name}`: returns a page, or its Markdown if the name ends with `.md`.
async fn page(Path(name): Path<String>, Extension(handbook): Extension<Arc<Handbook>>, headers: HeaderMap) -> Response {
    let RenderedHandbook { groups, pages } = handbook.rendered();
    let slug = name.strip_suffix(".md").unwrap_or(&name);
    let Some(at) = pages.iter().position(|page| page.slug == slug) else {
        return error::render(&headers, &ApiError::not_found("page of the handbook", name));
    };
    let page = &pages[at];
    if slug != name {
        return ([(header::CONTENT_TYPE, "text/markdown; charset=utf-8")], page.markdown.clone()).into_response();
    }
    let shell = Shell::new(&headers, if slug == REFERENCE { "api" } else { "docs" });
    let previous = at.checked_sub(1).map(|at| &pages[at]);
    render(StatusCode::OK, &DocsPage { shell, groups, page, previous, next: pages.get(at + 1) })
}

/// `GET /docs/search.json`: returns every section and every flag of all pages.
async fn search(Extension(handbook): Extension<Arc<Handbook>>) -> Response {
    let pages = handbook.rendered().pages.iter();
    let entries = pages.flat_map(|page| {
        page.sections.iter().map(|section| SearchEntry { page: &page.title, slug: &page.slug, section })
    });
    Json(entries.collect::<Vec<_>>()).into_response()
}

/// `GET /docs/images/{name}`: returns an image of a page.
async fn image(Path(name): Path<String>, headers: HeaderMap) -> Response {
    match Sources::get(&format!("images/{name}")) {
        Some(file) => {
            let kind = file.metadata.mimetype().to_owned();
            ([(header::CONTENT_TYPE, kind)], file.data.into_owned()).into_response()
        }
        None => error::render(&headers, &ApiError::not_found("image", name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn rendered() -> Handbook {
        let handbook = Handbook { openapi: Bytes::from_static(b"{}"), rendered: OnceLock::new() };
        handbook.rendered();
        handbook
    }

    #[test]
    fn handbook_contents_list_every_page_once() {
        let handbook = rendered();
        let listed: Vec<_> = handbook.rendered().pages.iter().map(|page| format!("{}.md", page.slug)).collect();
        let unique: BTreeSet<_> = listed.iter().cloned().collect();
        assert_eq!(unique.len(), listed.len(), "{listed:?}");
        let files: BTreeSet<_> = Sources::iter()
            .filter(|name| name.ends_with(".md") && name != CONTENTS)
            .map(|name| name.to_string())
            .collect();
        assert_eq!(unique, files, "README.md of templates/docs lists the files");
    }

    #[test]
    fn handbook_pages_pass_the_page_checks() {
        let handbook = rendered();
        let RenderedHandbook { groups, pages } = handbook.rendered();
        for page in pages {
            let shell = Shell::new(&HeaderMap::new(), "docs");
            let html = DocsPage { shell, groups, page, previous: None, next: None }.render().unwrap();
            crate::ui::checks::page(&html);
            assert!(!page.title.is_empty(), "{}", page.slug);
        }
    }

    #[test]
    fn handbook_links_lead_to_pages_and_sections() {
        let handbook = rendered();
        let pages = &handbook.rendered().pages;
        let mut count = 0;
        for page in pages {
            for link in &page.links {
                let (slug, anchor) = link.split_once('#').unwrap_or((link, ""));
                let slug = if slug.is_empty() { &page.slug } else { slug };
                let target = pages.iter().find(|page| page.slug == slug);
                let target = target.unwrap_or_else(|| panic!("{}: {link} leads to no page", page.slug));
                let known = anchor.is_empty() || target.sections.iter().any(|section| section.anchor == anchor);
                assert!(known, "{}: {link} leads to no section of {slug}", page.slug);
                count += 1;
            }
        }
        assert!(count > 20, "only {count} links were found");
    }
}
