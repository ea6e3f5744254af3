//! Access checks that precede all handlers.
//!
//! There are three checks. The `Host` header must be a name of this server, so that a page of another site cannot reach
//! a loopback server by DNS rebinding. A request that changes something or opens a WebSocket must not come from a page
//! of another origin. Programs that are not browsers send no `Origin` and pass this check. If keys are configured, all
//! routes except those with [`Access::Public`] and [`Access::OptionalKey`] require one, as a header, in the login cookie
//! or in the body. Trace uploads may have separate keys, or need none.

mod body_key;
pub(super) mod caller;

pub use caller::Caller;
use caller::rejected_key;

use super::access_log::KeyLabel;
use super::error::RUN_ID;
use super::protocol::{Access, ErrorFormat, ErrorFormats, GuardRejection};
use super::{ApiError, App, ErrorKind, login, socket};
use crate::config::{Credentials, KeyHash, SecurityConfig};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Headers that contain only a key; the second one is used by Quote's clients.
const KEY_HEADERS: [&str; 2] = ["x-api-key", "x-user-api-key"];

/// Maximum time for which browsers cache a preflight response.
const PREFLIGHT_TTL: Duration = Duration::from_hours(1);

/// The access class and the error formats of guarded routes.
#[derive(Clone)]
pub(crate) struct Guard {
    app: App,
    access: Access,
    formats: ErrorFormats,
}

impl Guard {
    pub(crate) fn new(app: &App, access: Access, formats: impl Into<ErrorFormats>) -> Self {
        Self { app: app.clone(), access, formats: formats.into() }
    }

    /// Returns the format of a path's errors.
    pub(crate) fn format(&self, path: &str) -> ErrorFormat {
        self.formats.for_path(path)
    }

    /// Returns the state of the server.
    pub(crate) const fn app(&self) -> &App {
        &self.app
    }
}

/// Runs the access checks as middleware.
pub(crate) async fn guard(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    let format = guard.format(request.uri().path());
    if let Some(GuardRejection(error)) = request.extensions_mut().remove() {
        return format(error);
    }
    let credentials = guard.app.credentials();
    let security = &credentials.security;
    let mut admitted = admit(&guard, &request);
    let has_key = !sent_keys(request.headers()).is_empty();
    let login = match &admitted {
        Ok(Some(caller)) if !has_key => caller.label.clone(),
        _ => None,
    };
    login::set_label(request.headers_mut(), login.as_deref());
    if admitted.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unauthorized)
        && !has_key
        && body_key::may_contain_key(&request)
    {
        (request, admitted) = match body_key::read(request).await {
            Ok((request, None)) => (request, admitted),
            Ok((request, Some(sent))) => {
                let known = guard.access.find_key(security, &sent);
                let caller = known.map(|key| Some(Caller::new(security, Some(key))));
                (request, caller.ok_or_else(|| rejected_key(security, &[sent.as_str()])))
            }
            Err(error) => return format(error),
        };
    }
    match admitted {
        Ok(caller) => {
            let label = caller.as_ref().and_then(|caller| caller.label.clone());
            if let Some(caller) = caller {
                request.extensions_mut().insert(caller);
            }
            let mut response = next.run(request).await;
            if let Some(label) = label {
                response.extensions_mut().insert(KeyLabel(label));
            }
            response
        }
        Err(error)
            if error.kind() == ErrorKind::Unauthorized
                && guard.app.config().server.dashboard
                && is_page_request(&request) =>
        {
            Redirect::to(&login::address(request.uri())).into_response()
        }
        Err(error) => format(error),
    }
}

/// Counts requests that start runs; middleware after the access checks of such routes.
pub(crate) async fn limit_runs(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    if guard.access == Access::Run && request.method() == Method::POST {
        let caller = request.extensions().get::<Caller>();
        let address = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
        if let Err(error) = guard.app.rate_limits().check(caller, address) {
            return guard.format(request.uri().path())(error);
        }
    }
    next.run(request).await
}

/// Returns the caller; `None` on a route without authentication, for a request without the key that its route does not
/// require, and for a WebSocket whose first message must contain the key.
fn admit(guard: &Guard, request: &Request) -> Result<Option<Caller>, ApiError> {
    let credentials = guard.app.credentials();
    if request.headers().get_all(header::HOST).iter().count() > 1 {
        return Err(ApiError::bad_request("the request must have one Host header, got several"));
    }
    let host = host(request).ok_or_else(|| ApiError::bad_request("the request must have a Host header"))?;
    if !is_own_host(&host, &credentials.security, &guard.app.config().server.listen) {
        return Err(ApiError::new(
            ErrorKind::Forbidden,
            format!("host '{host}' is not trusted; start the server with --trusted-host {host} to accept it"),
        ));
    }
    check_origin(guard.access, request, &credentials)?;
    if guard.access == Access::Public || request.method() == Method::OPTIONS {
        return Ok(None);
    }
    let sent = sent_keys(request.headers());
    let caller = authenticate(guard, &credentials, request, &sent);
    let may_lack_key = match guard.access {
        // The key must be in its first message.
        Access::Socket => socket::is_websocket_request(request.headers()),
        Access::OptionalKey => true,
        Access::Public | Access::Ingest | Access::Key | Access::Run => false,
    };
    if may_lack_key && sent.is_empty() { Ok(caller.ok()) } else { caller.map(Some) }
}

impl Access {
    fn needs_key(self, security: &SecurityConfig) -> bool {
        match self {
            Self::Ingest if security.ingest_open => false,
            Self::Ingest => !security.ingest_keys.is_empty() || !security.keys.is_empty(),
            _ => !security.keys.is_empty(),
        }
    }

    fn find_key<'a>(self, security: &'a SecurityConfig, sent: &str) -> Option<&'a KeyHash> {
        match self {
            Self::Ingest => security.find_ingest_key(sent),
            _ => security.find_key(sent),
        }
    }
}

/// Returns the keys in the headers, valid or not. Clients of Quote send theirs in addition to the placeholder key of
/// OpenAI's library.
fn sent_keys(headers: &HeaderMap) -> Vec<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| match value.trim().split_once(' ') {
        // Another scheme, such as the Basic authentication of a proxy, has no key.
        Some((scheme, key)) => scheme.eq_ignore_ascii_case("bearer").then_some(key.trim()),
        // llama-server also accepts the key alone.
        None => Some(value.trim()).filter(|key| !key.eq_ignore_ascii_case("bearer")),
    });
    let sent = bearer.into_iter().chain(KEY_HEADERS.into_iter().filter_map(text));
    sent.filter(|key| !key.is_empty()).collect()
}

/// Returns true if a browser requests a page.
pub(crate) fn is_page_request(request: &Request) -> bool {
    let accepts = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
    request.method() == Method::GET && accepts.is_some_and(|value| value.contains("text/html"))
}

/// Returns the host that the client addressed: lower case, without port and brackets.
fn host(request: &Request) -> Option<String> {
    // A request in absolute form has the host in its target.
    let value = match request.uri().authority() {
        Some(authority) => authority.as_str(),
        None => request.headers().get(header::HOST)?.to_str().ok()?,
    };
    Some(without_port(value))
}

fn without_port(authority: &str) -> String {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.rsplit_once(':').map_or(authority, |(host, _)| host),
    };
    host.trim_end_matches('.').to_ascii_lowercase()
}

fn is_own_host(host: &str, security: &SecurityConfig, listen: &[SocketAddr]) -> bool {
    if host == "localhost" || host.ends_with(".localhost") || security.trusted_hosts.iter().any(|t| t == host) {
        return true;
    }
    // DNS rebinding needs a name. A page at an IP address can only come from that address, so an address is trusted if
    // the server listens on it or on all addresses.
    host.parse::<IpAddr>()
        .is_ok_and(|ip| ip.is_loopback() || listen.iter().any(|own| own.ip() == ip || own.ip().is_unspecified()))
}

fn check_origin(access: Access, request: &Request, credentials: &Credentials) -> Result<(), ApiError> {
    // A WebSocket starts with a GET, has no preflight and carries cookies: pages of other origins must not open one.
    let only_reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if only_reads && !request.headers().contains_key(header::UPGRADE) {
        return Ok(());
    }
    // The public routes that change something are the login and the logout. They set the cookie without having
    // received it, so `*` does not include them.
    let any_origin = access != Access::Public && credentials.security.allows_any_origin();
    match header(request, "origin") {
        None if header(request, "sec-fetch-site") == Some("cross-site") => Err(foreign_origin("another site")),
        Some(origin) if !any_origin && !accepts_login(request, credentials) => Err(foreign_origin(origin)),
        _ => Ok(()),
    }
}

fn header<'a>(request: &'a Request, name: &str) -> Option<&'a str> {
    request.headers().get(name)?.to_str().ok()
}

/// Returns true for the origin of this server's own pages.
fn is_own_origin(origin: &str, request: &Request, credentials: &Credentials) -> bool {
    // Behind a proxy, pages may use https while the server does not. Pages of a server with TLS always use https.
    let own = origin.split_once("://").filter(|(scheme, _)| credentials.tls.is_none() || *scheme == "https");
    let sent_to = request.uri().authority().map(Authority::as_str).or_else(|| header(request, "host"));
    own.zip(sent_to).is_some_and(|((_, own), sent_to)| own.eq_ignore_ascii_case(sent_to))
}

/// Returns true if a request may use or change the login cookie. Browsers also send it for pages of other origins on the same
/// site, such as another port of this machine, which `--cors-origin '*'` permits without it.
fn accepts_login(request: &Request, credentials: &Credentials) -> bool {
    header(request, "origin")
        .is_none_or(|origin| credentials.security.lists_origin(origin) || is_own_origin(origin, request, credentials))
}

fn foreign_origin(origin: &str) -> ApiError {
    ApiError::new(
        ErrorKind::Forbidden,
        format!("a page of {origin} may not send this request; start the server with --cors-origin to allow it"),
    )
}

fn authenticate(
    guard: &Guard,
    credentials: &Credentials,
    request: &Request,
    sent: &[&str],
) -> Result<Caller, ApiError> {
    let (access, security) = (guard.access, &credentials.security);
    let known = match sent {
        [] if accepts_login(request, credentials) => login::find_key(security, request.headers(), guard.app.now()),
        sent => sent.iter().find_map(|sent| access.find_key(security, sent)),
    };
    match known {
        Some(key) => Ok(Caller::new(security, Some(key))),
        None if !access.needs_key(security) => Ok(Caller::new(security, None)),
        None if !sent.is_empty() => Err(rejected_key(security, sent)),
        None => Err(ApiError::new(
            ErrorKind::Unauthorized,
            "an API key is required, sent as 'Authorization: Bearer KEY', 'X-Api-Key: KEY' or 'X-User-Api-Key: KEY'",
        )),
    }
}

/// Returns the CORS layer for the configured origins; without `--cors-origin` no origin may send requests from pages.
/// With `*` any page may send them, but without this server's cookies; llama-server reflects the origin and allows
/// cookies.
pub(crate) fn cors(security: &SecurityConfig) -> CorsLayer {
    let allowed = if security.allows_any_origin() {
        AllowOrigin::any()
    } else {
        let security = security.clone();
        AllowOrigin::predicate(move |origin, _| origin.to_str().is_ok_and(|origin| security.lists_origin(origin)))
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::DELETE])
        // Allow all headers, because clients send their own. The access checks decide which requests are permitted.
        .allow_headers(AllowHeaders::mirror_request())
        // Without this header, browsers send a preflight before each JSON request of a page.
        .max_age(PREFLIGHT_TTL)
        .expose_headers([header::HeaderName::from_static("x-request-id"), RUN_ID])
}

#[cfg(test)]
mod tests {
    use super::{sent_keys, without_port};
    use axum::http::HeaderMap;

    #[test]
    fn sent_keys_are_those_of_headers_that_contain_one() {
        for (name, value, expected) in [
            ("authorization", "Bearer a", Some("a")),
            ("authorization", "a", Some("a")),
            ("authorization", "Bearer", None),
            ("authorization", "Bearer ", None),
            ("authorization", "", None),
            ("authorization", "Basic YTpi", None),
            ("x-api-key", "a", Some("a")),
            ("x-api-key", "", None),
            ("x-user-api-key", "a", Some("a")),
        ] {
            let headers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
            assert_eq!(sent_keys(&headers), Vec::from_iter(expected), "{name}: {value}");
        }
    }

    #[test]
    fn host_is_parsed_without_port_and_brackets() {
        for (given, expected) in [
            ("LocalHost:6767", "localhost"),
            ("[::1]:80", "::1"),
            ("10.0.0.1", "10.0.0.1"),
            ("a.example.:1", "a.example"),
        ] {
            assert_eq!(without_port(given), expected);
        }
    }
}
