//! Login of browsers. The login page exchanges the key for a cookie that scripts and other sites cannot use.
//!
//! The cookie is derived from the key's hash and a secret in the database: it is valid on every server of that database
//! while the key is configured there, and does not reveal the key.

use super::{Access, App, Protocol, base};
use crate::config::{KeyHash, SecurityConfig};
use crate::events::hex;
use crate::store::Store;
use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Form, FromRequest, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::get;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::time::timeout;

pub(crate) const PATH: &str = "/login";
const COOKIE: &str = "thunder_session";
/// Maximum body size of a login. It is read before the client is authenticated, so it is smaller than `--max-body`.
const MAX_BODY_BYTES: usize = 16 << 10;
/// Maximum time for the body of a login to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Content-Security-Policy of the login page, which contains only a form.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The secret that cookies are derived from; empty until it is read. All servers of the database have the same one, so a
/// login is valid on all of them.
static SECRET: OnceLock<Vec<u8>> = OnceLock::new();

/// Query of the login page.
#[derive(Deserialize)]
struct Destination {
    next: Option<String>,
}

#[derive(Deserialize)]
struct Login {
    key: String,
    next: Option<String>,
}

/// Returns the login page.
pub(crate) fn protocol() -> Protocol {
    let routes = Router::new().route(PATH, get(page).post(log_in)).layer(DefaultBodyLimit::max(MAX_BODY_BYTES));
    Protocol::native(&[PATH]).routes(Access::Public, routes)
}

/// Returns the address of the login page, which redirects to `uri` after the login.
pub(crate) fn address(uri: &Uri) -> String {
    let wanted = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut address = PATH.to_owned();
    if wanted != "/" {
        address.push_str("?next=");
        for byte in wanted.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
                address.push(char::from(byte));
            } else {
                // Writing to a String cannot fail.
                let _ = write!(address, "%{byte:02X}");
            }
        }
    }
    address
}

/// Returns `next` if it is a path of this server, otherwise the start page: a link to the login page must not redirect
/// to another site.
fn local_path(next: Option<&str>) -> &str {
    let is_local = |next: &&str| {
        let only_visible = next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
        next.starts_with('/') && !next.starts_with("//") && only_visible
    };
    next.filter(is_local).unwrap_or("/")
}

async fn page(State(app): State<App>, Query(Destination { next }): Query<Destination>, headers: HeaderMap) -> Response {
    let next = local_path(next.as_deref());
    if app.credentials().security.keys.is_empty() {
        return Redirect::to(next).into_response();
    }
    form(base(&headers), next, "")
}

async fn log_in(
    State(app): State<App>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    request: Request,
) -> Response {
    let base = base(&headers);
    // Check the rate limit before the body and the key, so that rejected attempts cost little and do not reveal whether a
    // key is valid.
    if let Err(error) = app.rate_limits().check_login(peer) {
        let notice = format!("<p role=\"alert\">{}.</p>", error.problem().detail);
        return (error.status(), form(base, "/", &notice)).into_response();
    }
    let login: Login = match timeout(BODY_TIMEOUT, Form::from_request(request, &())).await {
        Ok(Ok(Form(login))) => login,
        Ok(Err(rejection)) => return rejection.into_response(),
        Err(_) => {
            let notice = "<p role=\"alert\">The key did not arrive in time. Try again.</p>";
            return (StatusCode::REQUEST_TIMEOUT, form(base, "/", notice)).into_response();
        }
    };
    let next = local_path(login.next.as_deref());
    let credentials = app.credentials();
    let Some(key) = credentials.security.find_key(login.key.trim()) else {
        let notice = "<p role=\"alert\">Unknown API key.</p>";
        return (StatusCode::UNAUTHORIZED, form(base, next, notice)).into_response();
    };
    let Some(token) = token(key) else {
        let notice = "<p role=\"alert\">The server is starting. Try again in a moment.</p>";
        return (StatusCode::SERVICE_UNAVAILABLE, form(base, next, notice)).into_response();
    };
    let secure = if credentials.tls.is_some() { "; Secure" } else { "" };
    let path = if base.is_empty() { "/" } else { base };
    let cookie = format!("{COOKIE}={token}; Path={path}; HttpOnly; SameSite=Strict{secure}");
    ([(header::SET_COOKIE, cookie)], Redirect::to(next)).into_response()
}

fn form(base: &str, next: &str, notice: &str) -> Response {
    let next = next.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;");
    let page = Html(format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>Thunder: log in</title><h1>Thunder</h1>{notice}\
         <form method=\"post\" action=\"{base}{PATH}\"><input type=\"hidden\" name=\"next\" value=\"{next}\">\
         <label>API key <input type=\"password\" name=\"key\" autocomplete=\"current-password\" required autofocus></label> \
         <button>Log in</button></form></html>"
    ));
    // Without a referrer a browser sends "null" as the form's origin.
    let headers =
        [(header::REFERRER_POLICY, "same-origin"), (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY)];
    (headers, page).into_response()
}

/// Finds the key from which the request's login cookie was derived.
pub(crate) fn find_key<'a>(security: &'a SecurityConfig, headers: &HeaderMap) -> Option<&'a KeyHash> {
    let sent = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok()).find_map(|cookies| {
        cookies.split(';').find_map(|cookie| cookie.trim().strip_prefix(COOKIE)?.strip_prefix('='))
    })?;
    security.keys.iter().find(|key| token(key).is_some_and(|token| token.as_bytes().ct_eq(sent.as_bytes()).into()))
}

/// Reads the secret that cookies are derived from.
///
/// # Errors
/// The database failed.
pub async fn load_login_secret(store: &Store) -> Result<(), crate::store::Error> {
    let secret = store.shared_secret("login").await?;
    // A second call reads the same secret.
    let _ = SECRET.set(secret);
    Ok(())
}

fn token(key: &KeyHash) -> Option<String> {
    let digest = Sha256::new_with_prefix(SECRET.get()?).chain_update(key.as_bytes()).finalize();
    Some(hex(&digest))
}

#[cfg(test)]
mod tests {
    use super::{address, local_path};

    #[test]
    fn login_address_names_the_page() {
        let of = |uri: &str| address(&uri.parse().unwrap());
        assert_eq!(of("/"), "/login");
        assert_eq!(of("/runs?q=model:a%20b&before=1"), "/login?next=/runs%3Fq%3Dmodel%3Aa%2520b%26before%3D1");
    }

    #[test]
    fn login_redirects_to_local_paths_only() {
        for next in ["/runs", "/runs/1?at=3&q=a%20b", "/compare?a=//b"] {
            assert_eq!(local_path(Some(next)), next);
        }
        for next in
            ["", "runs", "//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil.example", "/\r\nx: y"]
        {
            assert_eq!(local_path(Some(next)), "/", "{next:?}");
        }
        assert_eq!(local_path(None), "/");
    }
}
