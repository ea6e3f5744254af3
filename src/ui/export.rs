//! A run as one HTML file with its replay, which opens from disk without a server.
//!
//! Text of the run reaches the page in two ways: escaped by the template, and as base64 of compressed JSON, which scripts
//! insert as text nodes. The policy of the page admits only its own script and style sheet, by their hashes.

use super::run::{Banner, Pane, RunSummaryView, banners};
use super::{assets, bundle, error};
use crate::events::{RunId, Scope};
use crate::server::{ApiError, App};
use crate::store::ItemPage;
use crate::trace::document::item_to_json;
use askama::Template;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use std::io::Write;

/// The style sheets of an exported run, in their order.
pub(super) const STYLE_SHEETS: [&str; 4] = ["base.css", "parts.css", "replay.css", "panel.css"];

#[derive(Template)]
#[template(path = "export.html")]
struct ExportPage {
    run: RunSummaryView,
    banners: Vec<Banner>,
    pane: Pane,
    policy: String,
    style: String,
    script: String,
    /// Base64 of the run's items: gzipped lines of JSON.
    items: String,
    /// True if the actions of the items do not have Quote's form.
    has_specified_actions: bool,
}

/// `GET /runs/{id}/export.html`: returns the run as one file.
pub(super) async fn page(State(app): State<App>, scope: Scope, Path(id): Path<String>, headers: HeaderMap) -> Response {
    file(&app, &scope, &id).await.unwrap_or_else(|error| error::render(&headers, &error))
}

async fn file(app: &App, scope: &Scope, id: &str) -> Result<Response, ApiError> {
    let run = app.find_run(scope, id).await?;
    let lines = lines(app, scope, run.run_id).await?;
    let has_specified_actions = app.store()?.reported(scope, run.run_id).await?.request.specified_actions;
    let html = tokio::task::spawn_blocking(move || {
        let (style, script) = (STYLE_SHEETS.map(assets::text).concat(), bundle::script("replay/exported-page.js"));
        let policy = format!(
            "default-src 'none'; script-src '{}'; style-src '{}'; img-src data:; base-uri 'none'; form-action 'none'",
            hash(&script),
            hash(&style)
        );
        let view = RunSummaryView::new(&run, "");
        let pane = Pane { run_id: view.id.clone(), status: view.status, ..Pane::default() };
        let items = STANDARD.encode(compress(&lines)?);
        let page =
            ExportPage { banners: banners(&run), run: view, pane, policy, style, script, items, has_specified_actions };
        page.render().map_err(ApiError::internal)
    });
    let html = html.await.map_err(ApiError::internal)??;
    let head = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        // Sent as a download, so that scripts of the file have no access to pages of this server.
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{id}.html\"", id = run_name(id))),
    ];
    Ok((head, html).into_response())
}

/// Returns the id without characters that are unsafe in a file name.
fn run_name(id: &str) -> String {
    id.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).take(80).collect()
}

/// Reads the items of a run as lines of JSON.
async fn lines(app: &App, scope: &Scope, run_id: RunId) -> Result<String, ApiError> {
    let store = app.store()?;
    let mut text = String::new();
    for page in store.item_pages(scope, run_id, 0..i32::MAX).await? {
        let ItemPage { mut numbering, items } = store.item_page(scope, run_id, &page).await?;
        for line in items.iter().filter_map(|item| item_to_json(item, &mut numbering)) {
            text.push_str(&line);
            text.push('\n');
        }
    }
    Ok(text)
}

fn compress(text: &str) -> Result<Vec<u8>, ApiError> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish()).map_err(ApiError::internal)
}

/// Returns the hash of an inline script or style sheet for a content security policy.
fn hash(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(Sha256::digest(text.as_bytes())))
}
