//! Login of browsers. The login page exchanges the key for a cookie that scripts and other sites cannot use.
//!
//! The cookie contains the time at which it expires, and a code of this time and the key's hash with a secret in the
//! database (HMAC). It is valid on every server of that database while the key is configured there, and does not reveal
//! the key. No server stores logins, so a logout only removes the cookie from the browser.

use super::percent::encode_path;
use super::{Access, App, LoginForm, LoginPage, Protocol, base};
use crate::config::{KeyHash, SecurityConfig};
use crate::events::hex;
use crate::store::Store;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Form, FromRequest, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use chrono::{DateTime, Utc};
use hmac::{Hmac, KeyInit, Mac};
use serde::Deserialize;
use sha2::Sha256;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::time::timeout;

pub(crate) const PATH: &str = "/login";
const LOGOUT_PATH: &str = "/logout";
const COOKIE: &str = "thunder_session";
/// Time after which a login expires. Use does not renew it, so a stolen cookie expires, too.
const LIFETIME: Duration = Duration::from_hours(30 * 24);
/// Header with the label of the key with which the browser has logged in. Only [`set_label`] sets it.
const LABEL: HeaderName = HeaderName::from_static("x-thunder-login");
/// Maximum body size of a login. It is read before the client is authenticated, so it is smaller than `--max-body`.
const MAX_BODY_BYTES: usize = 16 << 10;
/// Maximum time for the body of a login to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The secret of the cookies; empty until it is read. All servers of the database have the same one, so a login is valid
/// on all of them.
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

/// Returns the login page and the routes of login and logout.
pub(crate) fn protocol(page: LoginPage) -> Protocol {
    let routes = Router::new().route(PATH, get(show).post(log_in)).route(LOGOUT_PATH, post(log_out));
    let routes = routes.layer(Extension(page)).layer(DefaultBodyLimit::max(MAX_BODY_BYTES));
    Protocol::native(&[PATH, LOGOUT_PATH]).routes(Access::Public, routes)
}

/// Returns the address of the login page, which redirects to `uri` after the login.
pub(crate) fn address(uri: &Uri) -> String {
    let wanted = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut address = PATH.to_owned();
    if wanted != "/" {
        address.push_str("?next=");
        address.push_str(&encode_path(wanted));
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

async fn show(
    State(app): State<App>,
    Extension(page): Extension<LoginPage>,
    Query(Destination { next }): Query<Destination>,
    headers: HeaderMap,
) -> Response {
    let next = local_path(next.as_deref());
    if app.credentials().security.keys.is_empty() {
        return Redirect::to(next).into_response();
    }
    page(&headers, LoginForm { next, error: "" })
}

async fn log_in(
    State(app): State<App>,
    Extension(page): Extension<LoginPage>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    request: Request,
) -> Response {
    // Check the rate limit before the body and the key, so that rejected attempts cost little and do not reveal whether a
    // key is valid.
    if let Err(error) = app.rate_limits().check_login(peer) {
        let notice = format!("{}.", error.problem().detail);
        return (error.status(), page(&headers, LoginForm { next: "/", error: &notice })).into_response();
    }
    let login: Login = match timeout(BODY_TIMEOUT, Form::from_request(request, &())).await {
        Ok(Ok(Form(login))) => login,
        Ok(Err(rejection)) => return rejection.into_response(),
        Err(_) => {
            let form = LoginForm { next: "/", error: "The key did not arrive in time. Try again." };
            return (StatusCode::REQUEST_TIMEOUT, page(&headers, form)).into_response();
        }
    };
    let next = local_path(login.next.as_deref());
    let credentials = app.credentials();
    let security = &credentials.security;
    let Some(key) = security.find_key(login.key.trim()) else {
        let (status, error) = match security.find_ingest_key(login.key.trim()) {
            Some(_) => {
                (StatusCode::FORBIDDEN, "This key only permits sending traces. Enter a key without this restriction.")
            }
            None => (StatusCode::UNAUTHORIZED, "Unknown API key. Enter an API key of this server."),
        };
        return (status, page(&headers, LoginForm { next, error })).into_response();
    };
    let Some(token) = token(key, (app.now() + LIFETIME).timestamp()) else {
        let form = LoginForm { next, error: "The server is starting. Try again in a moment." };
        return (StatusCode::SERVICE_UNAVAILABLE, page(&headers, form)).into_response();
    };
    ([(header::SET_COOKIE, cookie(&app, base(&headers), &token, LIFETIME))], Redirect::to(next)).into_response()
}

/// Removes the cookie from the browser, with the pages and the values that it has stored.
async fn log_out(State(app): State<App>, headers: HeaderMap) -> Response {
    let base = base(&headers);
    // Below a prefix, the storage also contains the data of the other programs at this address.
    let data = if base.is_empty() { r#""cache", "storage""# } else { r#""cache""# };
    let cookie = cookie(&app, base, "", Duration::ZERO);
    let clear = (HeaderName::from_static("clear-site-data"), data.to_owned());
    ([(header::SET_COOKIE, cookie), clear], Redirect::to(PATH)).into_response()
}

/// Returns the header that sets the login cookie, or removes it with a `max_age` of zero.
fn cookie(app: &App, base: &str, token: &str, max_age: Duration) -> String {
    let secure = if app.credentials().tls.is_some() { "; Secure" } else { "" };
    let path = if base.is_empty() { "/" } else { base };
    format!("{COOKIE}={token}; Path={path}; Max-Age={}; HttpOnly; SameSite=Strict{secure}", max_age.as_secs())
}

/// Finds the key with which the browser has logged in.
pub(crate) fn find_key<'a>(
    security: &'a SecurityConfig,
    headers: &HeaderMap,
    now: DateTime<Utc>,
) -> Option<&'a KeyHash> {
    let sent = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok()).find_map(|cookies| {
        cookies.split(';').find_map(|cookie| cookie.trim().strip_prefix(COOKIE)?.strip_prefix('='))
    })?;
    let expires = sent.split_once('.')?.0.parse().ok().filter(|&expires| now.timestamp() < expires)?;
    let is_sent = |token: String| -> bool { token.as_bytes().ct_eq(sent.as_bytes()).into() };
    security.keys.iter().find(|key| token(key, expires).is_some_and(is_sent))
}

/// Sets the label of the key with which the browser has logged in, if any, for [`label`].
pub(crate) fn set_label(headers: &mut HeaderMap, label: Option<&str>) {
    headers.remove(LABEL);
    if let Some(value) = label.and_then(|label| HeaderValue::from_bytes(label.as_bytes()).ok()) {
        headers.insert(LABEL, value);
    }
}

/// Returns the label of the key with which the browser has logged in, if it has.
pub(crate) fn label(headers: &HeaderMap) -> Option<String> {
    headers.get(LABEL).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
}

/// Reads the secret of the cookies.
///
/// # Errors
/// The database failed.
pub async fn load_login_secret(store: &Store) -> Result<(), crate::store::Error> {
    let secret = store.shared_secret("login").await?;
    // A second call reads the same secret.
    let _ = SECRET.set(secret);
    Ok(())
}

/// Returns the value of the cookie for `key` that expires at a Unix time; `None` until the secret is read.
fn token(key: &KeyHash, expires: i64) -> Option<String> {
    let mac = Hmac::<Sha256>::new_from_slice(SECRET.get()?).ok()?;
    let code = mac.chain_update(key.as_bytes()).chain_update(expires.to_be_bytes()).finalize();
    Some(format!("{expires}.{}", hex(&code.into_bytes())))
}

#[cfg(test)]
mod tests {
    use super::{COOKIE, SECRET, address, find_key, label, local_path, set_label, token};
    use crate::config::{KeyHash, SecurityConfig};
    use axum::http::{HeaderMap, header};
    use chrono::DateTime;

    #[test]
    fn cookie_is_valid_until_it_expires_and_while_its_key_is_configured() {
        const EXPIRES: i64 = 1_800_000_000;
        SECRET.get_or_init(|| b"secret".to_vec());
        let security = SecurityConfig { keys: vec![KeyHash::new("a"), KeyHash::new("b")], ..SecurityConfig::default() };
        let cookie = token(&security.keys[1], EXPIRES).unwrap();
        let find = |security: &SecurityConfig, cookie: &str, seconds: i64| {
            let mut headers = HeaderMap::new();
            headers.insert(header::COOKIE, format!("x=1; {COOKIE}={cookie}").parse().unwrap());
            find_key(security, &headers, DateTime::from_timestamp(seconds, 0).unwrap()).map(KeyHash::label)
        };
        let label = security.keys[1].label();
        assert_eq!(find(&security, &cookie, EXPIRES - 1), Some(label));
        assert_eq!(find(&security, &cookie, EXPIRES), None);
        let removed = SecurityConfig { keys: vec![KeyHash::new("a")], ..SecurityConfig::default() };
        assert_eq!(find(&removed, &cookie, EXPIRES - 1), None);
        let (_, code) = cookie.split_once('.').unwrap();
        for forged in [format!("{}.{code}", EXPIRES + 1), format!("+{cookie}"), code.to_owned(), "0".to_owned()] {
            assert_eq!(find(&security, &forged, EXPIRES - 1), None, "{forged}");
        }
    }

    #[test]
    fn label_of_a_client_is_ignored() {
        let mut headers = HeaderMap::new();
        set_label(&mut headers, Some("jürgen"));
        assert_eq!(label(&headers).as_deref(), Some("jürgen"));
        set_label(&mut headers, None);
        assert_eq!(label(&headers), None);
    }

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
