//! The parts that all pages share, and small formats.

use super::assets;
use crate::server::base;
use axum::http::{HeaderMap, header};
use chrono::{DateTime, Utc};
use std::fmt::Write as _;

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
}

impl Shell {
    pub(super) fn new(headers: &HeaderMap, page: &'static str) -> Self {
        let base = base(headers).to_owned();
        Self { theme: theme(headers), assets: format!("{base}/assets/{}", assets::version()), base, page }
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

/// Encodes a text for a URL's query or path.
pub(super) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// Returns the URL of the run list with a filter.
pub(super) fn runs_href(q: &str) -> String {
    if q.is_empty() { "/runs".to_owned() } else { format!("/runs?q={}", encoded(q)) }
}

/// Formats a time on two lines for browsers without JavaScript; scripts convert it to the local time zone.
pub(super) fn format_timestamp(at: DateTime<Utc>) -> String {
    at.format("%H:%M:%S UTC\n%-d %b %Y").to_string()
}

/// Formats a time for machines.
pub(super) fn machine_time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
}

/// Returns the server's origin as seen by the client.
pub(super) fn origin(headers: &HeaderMap) -> String {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text("host").filter(|host| !host.chars().any(|c| c.is_whitespace() || c.is_control()));
    let scheme = if text("x-forwarded-proto") == Some("https") { "https" } else { "http" };
    format!("{scheme}://{}{}", host.unwrap_or("127.0.0.1:6767"), base(headers))
}

/// Returns a curl command that starts a run.
pub(super) fn curl_chat(headers: &HeaderMap) -> String {
    format!(
        "curl {}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  \
         -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}}]}}'",
        origin(headers)
    )
}

#[cfg(test)]
mod tests {
    use super::{Shell, encoded, origin};
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
    fn addresses_survive_any_text() {
        assert_eq!(encoded("a b&c=\"é\"/"), "a%20b%26c%3D%22%C3%A9%22%2F");
        let mut headers = HeaderMap::new();
        headers.insert("host", "thunder.test:8080".parse().unwrap());
        assert_eq!(origin(&headers), "http://thunder.test:8080");
    }
}
