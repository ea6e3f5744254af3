//! How a browser shows its key: once, on a login page, for a cookie that scripts and other sites cannot use.
//!
//! The cookie is derived from the key's hash and a secret of this process: it ends with the server, and does not
//! give the key away.

use super::{App, base};
use crate::config::{KeyHash, Security};
use axum::Router;
use axum::extract::{Form, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::get;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::sync::LazyLock;
use subtle::ConstantTimeEq;

pub(super) const PATH: &str = "/login";
const COOKIE: &str = "thunder_session";

static SECRET: LazyLock<[u8; 32]> = LazyLock::new(rand::random);

#[derive(Deserialize)]
struct Login {
    key: String,
}

pub(super) fn router() -> Router<App> {
    Router::new().route(PATH, get(page).post(log_in))
}

async fn page(State(app): State<App>, headers: HeaderMap) -> Response {
    if app.config().server.security.keys.is_empty() {
        return Redirect::to("/").into_response();
    }
    form(base(&headers), "")
}

async fn log_in(State(app): State<App>, headers: HeaderMap, Form(login): Form<Login>) -> Response {
    let base = base(&headers);
    let Some(key) = app.config().server.security.known(login.key.trim()) else {
        return (StatusCode::UNAUTHORIZED, form(base, "<p role=\"alert\">This key is not known here.</p>"))
            .into_response();
    };
    let secure = if app.config().server.tls.is_some() { "; Secure" } else { "" };
    let path = if base.is_empty() { "/" } else { base };
    let cookie = format!("{COOKIE}={}; Path={path}; HttpOnly; SameSite=Strict{secure}", token(key));
    ([(header::SET_COOKIE, cookie)], Redirect::to("/")).into_response()
}

fn form(base: &str, notice: &str) -> Response {
    let page = Html(format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>Thunder: log in</title><h1>Thunder</h1>{notice}<form method=\"post\" action=\"{base}{PATH}\">\
         <label>API key <input type=\"password\" name=\"key\" autocomplete=\"current-password\" required autofocus></label> \
         <button>Log in</button></form></html>"
    ));
    // Without a referrer a browser calls the origin of the form "null", which is nobody's.
    ([(header::REFERRER_POLICY, "same-origin")], page).into_response()
}

/// The key whose session the request's cookie is.
pub(super) fn known<'a>(security: &'a Security, headers: &HeaderMap) -> Option<&'a KeyHash> {
    let sent = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok()).find_map(|cookies| {
        cookies.split(';').find_map(|cookie| cookie.trim().strip_prefix(COOKIE)?.strip_prefix('='))
    })?;
    security.keys.iter().find(|key| bool::from(token(key).as_bytes().ct_eq(sent.as_bytes())))
}

fn token(key: &KeyHash) -> String {
    let digest = Sha256::new_with_prefix(*SECRET).chain_update(key.as_bytes()).finalize();
    digest.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
