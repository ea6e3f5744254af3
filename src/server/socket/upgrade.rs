use super::activity::LastActivity;
use super::unauthenticated::{LimitedStream, MAX_CONNECTIONS};
use super::{Close, OpenConnection, Socket, connection};
use crate::server::peers::ForwardHeaders;
use crate::server::{ApiError, App, Caller, ErrorKind};
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::header;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::watch;
use yawc::{IncomingUpgrade, Role, WebSocket};

/// A WebSocket request that passed the access checks.
pub(crate) struct Upgrade {
    app: App,
    upgrade: IncomingUpgrade,
    connection: OnUpgrade,
    caller: Option<Caller>,
    address: Option<SocketAddr>,
    headers: ForwardHeaders,
}

/// Returns true for a WebSocket request.
pub(crate) fn is_websocket_request(headers: &axum::http::HeaderMap) -> bool {
    let upgrade = headers.get(header::UPGRADE).and_then(|value| value.to_str().ok());
    upgrade.is_some_and(|value| value.eq_ignore_ascii_case("websocket"))
}

impl FromRequestParts<App> for Upgrade {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let path = parts.uri.path();
        if !is_websocket_request(&parts.headers) {
            return Err(ApiError::bad_request(format!(
                "{path} is a WebSocket: connect to ws://…{path}; its protocol is described at /api/v1/asyncapi.json"
            )));
        }
        let caller = parts.extensions.get::<Caller>().cloned();
        let address = parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
        let headers = ForwardHeaders::from_headers(&parts.headers);
        let incomplete = || {
            ApiError::bad_request(
                "this is not a WebSocket handshake: expected the headers Connection: Upgrade, Sec-WebSocket-Version: 13 \
                 and Sec-WebSocket-Key",
            )
        };
        let connection = parts.extensions.get::<OnUpgrade>().cloned().ok_or_else(incomplete)?;
        let upgrade = IncomingUpgrade::from_request_parts(parts, app).await.map_err(|_| incomplete())?;
        Ok(Self { app: app.clone(), upgrade, connection, caller, address, headers })
    }
}

impl Upgrade {
    /// Completes the handshake and serves the connection with `handler`. `error` renders errors that occur before the
    /// handler runs.
    pub(crate) fn serve<H, F>(self, error: fn(&ApiError) -> String, handler: H) -> Response
    where
        H: FnOnce(Socket) -> F + Send + 'static,
        F: Future<Output = Close> + Send + 'static,
    {
        let Self { app, upgrade, connection, caller, address, headers } = self;
        if let Err(unavailable) = app.check_accepts_sockets() {
            return unavailable.into_response();
        }
        let needs_key = caller.is_none();
        let permit = match needs_key.then(|| Arc::clone(&app.sockets().unauthenticated).try_acquire_owned()) {
            None => None,
            Some(Ok(permit)) => Some(permit),
            Some(Err(_)) => {
                let text = format!(
                    "{MAX_CONNECTIONS} connections already wait for the message with their API key; send the key as the \
                     header 'Authorization: Bearer KEY', or try again in a few seconds"
                );
                return ApiError::new(ErrorKind::Unavailable, text).into_response();
            }
        };
        let options = app.sockets().options.clone();
        // yawc completes the handshake. `LimitedStream` limits the bytes of the connection.
        let response = match upgrade.upgrade(options.clone()) {
            Ok((response, _)) => response,
            Err(error) => {
                return ApiError::bad_request(format!("the WebSocket handshake failed: {error}")).into_response();
            }
        };
        let extensions = response.headers().get(header::SEC_WEBSOCKET_EXTENSIONS).cloned();
        let open = OpenConnection::new(app.clone());
        tokio::spawn(async move {
            let (authenticated, accepted) = watch::channel(permit.is_none());
            let activity = Arc::new(LastActivity::new());
            let connection = connection.await.map_err(|error| error.to_string()).and_then(|upgraded| {
                let stream = LimitedStream::new(TokioIo::new(upgraded), accepted, Arc::clone(&activity));
                let extensions = extensions.as_ref().and_then(|value| value.to_str().ok());
                WebSocket::from_stream_with_extensions(stream, Role::Server, extensions, options)
                    .map_err(|error| error.to_string())
            });
            match connection {
                Ok(connection) => {
                    let client = connection::Client { caller, address, headers, authenticated, permit, activity };
                    connection::serve(connection.into_streaming(), &app, client, error, handler).await;
                }
                Err(error) => tracing::debug!(%error, "WebSocket handshake failed"),
            }
            drop(open);
        });
        response.map(axum::body::Body::new).into_response()
    }
}
