//! `/api/v1/runs/{id}/events`: the items of a run as JSON lines or as server-sent events.

mod sender;

use super::event_range;
use crate::events::{RunId, Scope};
use crate::server::extract::{Path, Query};
use crate::server::peers::find_recent;
use crate::server::{ApiError, App, Problem};
use crate::store::{Error, ItemPage, ItemRange, Store};
use crate::trace::document::item_to_json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use serde::Deserialize;
use utoipa::IntoParams;

/// Query parameters of the list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListEventsParams {
    /// First event by `sequence_order`; default 0.
    from: Option<i32>,
    /// Event after the last one; default is the end of the run. Ignored for a stream of server-sent events.
    to: Option<i32>,
}

/// Lists the items in order: each event, followed by its mod calls, each with its logs and actions.
///
/// With `Accept: text/event-stream` the response is a stream of `item` events that continues while the run is active
/// and ends with an `end` event, which has the run's summary. The id of an event is its `sequence_order`. A client that
/// reconnects with `Last-Event-ID` receives all items of that event again, because it may have missed some of them.
#[utoipa::path(get, path = "/api/v1/runs/{id}/events", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`"), ListEventsParams), responses(
    (status = 200, description = "One item per line", content_type = "application/x-ndjson"),
    (status = 400, body = Problem), (status = 404, body = Problem)))]
pub async fn list(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(query): Query<ListEventsParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let range = event_range(query.from, query.to)?;
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if header(header::ACCEPT).is_some_and(|accept| accept.contains("text/event-stream")) {
        let from = match header(header::HeaderName::from_static("last-event-id")) {
            Some(last) => last.trim().parse().ok().filter(|&last: &i32| last >= 0).ok_or_else(|| {
                ApiError::bad_request(format!("Last-Event-ID must be a sequence_order, got '{last}'"))
            })?,
            None => range.start,
        };
        // An active run of this server is followed without a query.
        let run_id = match id.parse::<RunId>() {
            Ok(run_id) if app.store()?.unstored(&scope, run_id).is_some() => run_id,
            _ => find_recent(&app, &scope, &id).await?.run_id,
        };
        return sender::respond(&app, scope, run_id, from);
    }
    let run = app.find_run(&scope, &id).await?;
    let store = app.store()?.clone();
    let pages = store.item_pages(&scope, run.run_id, range).await?;
    let lines = lines(store, scope, run.run_id, pages);
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response())
}

/// Returns the items as lines, read in pages of events. An error truncates the response, which clients detect.
fn lines(store: Store, scope: Scope, run_id: RunId, pages: Vec<ItemRange>) -> impl Stream<Item = Result<Bytes, Error>> {
    stream::iter(pages).then(move |page| {
        let (store, scope) = (store.clone(), scope.clone());
        async move {
            let read = store.item_page(&scope, run_id, &page).await;
            let ItemPage { mut numbering, items } =
                read.inspect_err(|error| tracing::error!(run.id = %run_id, %error, "list of items truncated"))?;
            let mut text = String::new();
            for line in items.iter().filter_map(|item| item_to_json(item, &mut numbering)) {
                text.push_str(&line);
                text.push('\n');
            }
            Ok(Bytes::from(text))
        }
    })
}
