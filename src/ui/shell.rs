//! The parts that all pages share, and small formats.

use super::assets;
use crate::config::SecurityConfig;
use crate::server::{ApiError, base, encode_component, login};
use askama::Template;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use chrono::{DateTime, Utc};

/// The fields of `base.html`.
pub(super) struct Shell {
    /// `system`, `light` or `dark`, from the cookie, so that a page never flashes in the wrong theme.
    pub(super) theme: &'static str,
    /// Prefix of every path of this server; usually empty.
    pub(super) base: String,
    /// Path of this version's assets.
    pub(super) assets: String,
    /// The current entry of the navigation.
    pub(super) page: &'static str,
    /// The label of the key with which the browser has logged in, if it has.
    pub(super) login: Option<String>,
}

impl Shell {
    pub(super) fn new(headers: &HeaderMap, page: &'static str) -> Self {
        let base = base(headers).to_owned();
        let assets = format!("{base}/assets/{}", assets::version());
        Self { theme: theme(headers), assets, base, page, login: login::label(headers) }
    }
}

/// Renders a page; a template error is a bug and becomes a 500.
pub(super) fn render(status: StatusCode, page: &impl Template) -> Response {
    match page.render() {
        Ok(html) => (status, Html(html)).into_response(),
        Err(error) => ApiError::internal(format!("page rendering failed: {error}")).into_response(),
    }
}

fn theme(headers: &HeaderMap) -> &'static str {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let chosen =
        cookies.flat_map(|line| line.split(';')).find_map(|cookie| cookie.trim().strip_prefix("thunder_theme="));
    match chosen {
        Some("light") => "light",
        Some("dark") => "dark",
        _ => "system",
    }
}

/// Returns the URL of the run list with a filter.
pub(super) fn runs_href(q: &str) -> String {
    if q.is_empty() { "/runs".to_owned() } else { format!("/runs?q={}", encode_component(q)) }
}

/// A time for machines and for people.
pub(super) struct TimeView {
    pub(super) machine: String,
    /// On two lines, for browsers without JavaScript; scripts convert it to the local time zone.
    pub(super) text: String,
}

impl From<DateTime<Utc>> for TimeView {
    fn from(at: DateTime<Utc>) -> Self {
        Self {
            machine: at.to_rfc3339_opts(chrono::SecondsFormat::Millis, true),
            text: at.format("%H:%M:%S UTC\n%-d %b %Y").to_string(),
        }
    }
}

/// Formats a duration in microseconds.
pub(super) fn duration(us: f64) -> String {
    match us {
        _ if us >= 1e6 => format!("{:.1} s", us / 1e6),
        _ if us >= 1e4 => format!("{:.0} ms", us / 1e3),
        _ if us >= 1e3 => format!("{:.1} ms", us / 1e3),
        _ if us >= 10.0 => format!("{us:.0} µs"),
        _ => format!("{us:.1} µs"),
    }
}

/// Removes the digits added by the conversion of an `f32`.
pub(super) fn short(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// Returns the server's origin as seen by the client.
pub(super) fn origin(headers: &HeaderMap) -> String {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text("host").filter(|host| !host.chars().any(|c| c.is_whitespace() || c.is_control()));
    let scheme = if text("x-forwarded-proto") == Some("https") { "https" } else { "http" };
    format!("{scheme}://{}{}", host.unwrap_or("127.0.0.1:6767"), base(headers))
}

/// Returns the variable of the environment with the API key that examples send; empty if the server has no keys.
pub(super) fn key_variable(security: &SecurityConfig) -> &'static str {
    if security.keys.is_empty() { "" } else { "THUNDER_API_KEY" }
}

/// Returns a curl command that posts JSON. `key_variable` is the one with the key, or empty.
pub(super) fn curl_post(headers: &HeaderMap, path: &str, key_variable: &str, json: &str) -> String {
    let key = match key_variable {
        "" => String::new(),
        variable => format!(" \\\n  -H \"Authorization: Bearer ${variable}\""),
    };
    format!("curl {}{path}{key} \\\n  -H 'Content-Type: application/json' \\\n  -d {json}", origin(headers))
}

/// Returns a curl command that starts a run of a model; without a model, of the default one.
pub(super) fn curl_chat(headers: &HeaderMap, security: &SecurityConfig, model: Option<&str>) -> String {
    let model = model.map(|name| format!("\"model\": {}, ", serde_json::Value::from(name))).unwrap_or_default();
    let json = format!(r#"{{{model}"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}"#);
    let quoted = format!("'{}'", json.replace('\'', r"'\''"));
    curl_post(headers, "/v1/chat/completions", key_variable(security), &quoted)
}

#[cfg(test)]
mod tests {
    use super::{Shell, curl_chat, duration, origin};
    use crate::config::{KeyHash, SecurityConfig};
    use axum::http::HeaderMap;

    #[test]
    fn theme_is_read_from_cookie() {
        let mut headers = HeaderMap::new();
        assert_eq!(Shell::new(&headers, "runs").theme, "system");
        headers.insert("cookie", "a=b; thunder_theme=dark".parse().unwrap());
        assert_eq!(Shell::new(&headers, "runs").theme, "dark");
        headers.insert("cookie", "thunder_theme=\"><script>".parse().unwrap());
        assert_eq!(Shell::new(&headers, "runs").theme, "system");
    }

    #[test]
    fn origin_has_the_scheme_and_the_host() {
        let mut headers = HeaderMap::new();
        headers.insert("host", "thunder.test:8080".parse().unwrap());
        assert_eq!(origin(&headers), "http://thunder.test:8080");
    }

    #[test]
    fn durations_have_the_unit_of_their_size() {
        let texts = [0.0, 2.5, 250.0, 1_250.0, 99_600.0, 9_999_000.0, 12_345_000.0].map(duration);
        assert_eq!(texts, ["0.0 µs", "2.5 µs", "250 µs", "1.2 ms", "100 ms", "10.0 s", "12.3 s"]);
    }

    #[test]
    fn examples_send_the_key_of_servers_with_keys() {
        let open = SecurityConfig::default();
        let closed = SecurityConfig { keys: vec![KeyHash::new("secret")], ..SecurityConfig::default() };
        assert!(!curl_chat(&HeaderMap::new(), &open, None).contains("Authorization"));
        let command = curl_chat(&HeaderMap::new(), &closed, Some("it's"));
        assert!(command.contains("\n  -H \"Authorization: Bearer $THUNDER_API_KEY\" \\\n"), "{command}");
        assert!(command.contains(r#"-d '{"model": "it'\''s", "messages": [{"#), "{command}");
    }
}
