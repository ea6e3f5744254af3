use super::{Close, Open, PATHS, Socket, serving};
use crate::api::{ApiError, App, Caller};
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::header;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use std::net::SocketAddr;
use yawc::IncomingUpgrade;

/// A request to become a WebSocket, behind the gates of `security`.
pub(in crate::api) struct Upgrade {
    app: App,
    upgrade: IncomingUpgrade,
    caller: Option<Caller>,
    address: Option<SocketAddr>,
}

/// Whether the request wants to become a WebSocket at an address that is one.
pub(in crate::api) fn is_wanted(path: &str, headers: &axum::http::HeaderMap) -> bool {
    let upgrade = headers.get(header::UPGRADE).and_then(|value| value.to_str().ok());
    PATHS.contains(&path) && upgrade.is_some_and(|value| value.eq_ignore_ascii_case("websocket"))
}

impl FromRequestParts<App> for Upgrade {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let path = parts.uri.path();
        if !is_wanted(path, &parts.headers) {
            return Err(ApiError::bad_request(format!(
                "{path} is a WebSocket: connect to ws://…{path}; its protocol is described at /api/v1/asyncapi.json"
            )));
        }
        let caller = parts.extensions.get::<Caller>().cloned();
        let address = parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
        let upgrade = IncomingUpgrade::from_request_parts(parts, app).await.map_err(|_| {
            ApiError::bad_request(
                "this is not a WebSocket handshake: it takes the headers Connection: Upgrade, Sec-WebSocket-Version: 13 \
                 and Sec-WebSocket-Key",
            )
        })?;
        Ok(Self { app: app.clone(), upgrade, caller, address })
    }
}

impl Upgrade {
    /// Answers the handshake and serves the connection with `handler`. `error` writes an error as this protocol's clients
    /// read it, for those that come before the handler.
    pub(in crate::api) fn serve<H, F>(self, error: fn(&ApiError) -> String, handler: H) -> Response
    where
        H: FnOnce(Socket) -> F + Send + 'static,
        F: Future<Output = Close> + Send + 'static,
    {
        let Self { app, upgrade, caller, address } = self;
        if let Err(not_now) = app.open_for_sockets() {
            return not_now.into_response();
        }
        let (response, upgraded) = match upgrade.upgrade(app.sockets().options.clone()) {
            Ok(answer) => answer,
            Err(why) => return ApiError::bad_request(format!("the WebSocket cannot be set up: {why}")).into_response(),
        };
        let open = Open::new(app.clone());
        tokio::spawn(async move {
            match upgraded.await {
                Ok(connection) => {
                    let connection = connection.into_streaming();
                    serving::serve(connection, &app, caller, address, error, handler).await;
                }
                Err(error) => tracing::debug!(%error, "a WebSocket was given up before it began"),
            }
            drop(open);
        });
        response.map(axum::body::Body::new).into_response()
    }
}
