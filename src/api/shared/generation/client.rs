//! The client of a request that starts runs.

use crate::engine::Request;
use crate::events::{RunMetadata, Surface};
use crate::server::access_log::client_request_id;
use crate::server::{ApiError, App, Caller};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName};

/// `thunder run` sends this header, so that its runs can be distinguished from those of other programs.
const CLIENT: HeaderName = HeaderName::from_static("x-thunder-client");

/// The client of a request that starts runs, with the state of the server.
#[derive(Clone)]
pub(crate) struct RunClient {
    pub(crate) app: App,
    pub(crate) caller: Caller,
    pub(crate) headers: HeaderMap,
}

impl RunClient {
    /// Returns the client of a WebSocket, whose headers do not apply to a single run.
    pub(crate) fn socket(app: App, caller: Caller) -> Self {
        Self { app, caller, headers: HeaderMap::new() }
    }

    /// Sets the fields of a request that identify its client: owner and user label from the API key, the surface for
    /// `thunder run`, and the HTTP request's id as metadata. A user label in the request is kept.
    pub(crate) fn set_client(&self, request: &mut Request) {
        if self.headers.get(CLIENT).is_some_and(|client| client == "cli") {
            request.surface = Surface::Cli;
        }
        if let Some(id) = client_request_id(&self.headers) {
            request.metadata.set(RunMetadata::HTTP_REQUEST, id);
        }
        self.caller.set_owner(request);
    }
}

impl FromRequestParts<App> for RunClient {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let caller = Caller::from_request_parts(parts, app).await?;
        Ok(Self { app: app.clone(), caller, headers: parts.headers.clone() })
    }
}
