//! The access checks of every route: host, origin, key.

use super::harness::{Server, folder, message_of, server, thunder};
use reqwest::{Method, Response};
use serde_json::{Value, json};

const KEY: &str = "correct-horse-battery";

async fn send(server: &Server, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut request = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap().request(
        if path.starts_with("/v1/chat") { Method::POST } else { Method::GET },
        format!("{}{path}", server.base),
    );
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body("{}").send().await.unwrap()
}

#[tokio::test]
async fn untrusted_host_name_is_rejected() {
    let server = server().await;
    for (host, status) in [
        ("evil.example", 403),
        ("evil.example:6767", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("thunder.localhost", 200),
        ("127.0.0.1", 200),
        ("[::1]:6767", 200),
    ] {
        let response = send(server, "/v1/models", &[("host", host)]).await;
        assert_eq!(response.status().as_u16(), status, "{host}");
    }
    let rejected: Value = send(server, "/v1/models", &[("host", "evil.example")]).await.json().await.unwrap();
    assert_eq!(rejected["error"]["type"], "permission_error");
    assert_eq!(
        message_of(&rejected),
        "host 'evil.example' is not trusted; start the server with --trusted-host evil.example to accept it"
    );
    let native: Value = send(server, "/api/v1/openapi.json", &[("host", "evil.example")]).await.json().await.unwrap();
    assert_eq!(native["type"], "/problems/forbidden");
}

#[tokio::test]
async fn page_of_other_origin_cannot_start_runs() {
    let server = server().await;
    let own = server.base.clone();
    let path = "/v1/chat/completions";
    for (headers, status) in [
        (vec![("origin", "https://evil.example")], 403),
        (vec![("origin", "null")], 403),
        (vec![("sec-fetch-site", "cross-site")], 403),
        // A page of another program on the same machine.
        (vec![("origin", "http://127.0.0.1:1")], 403),
        (vec![("origin", own.as_str())], 400),
        (vec![("sec-fetch-site", "same-origin")], 400),
        (vec![], 400),
    ] {
        assert_eq!(send(server, path, &headers).await.status().as_u16(), status, "{headers:?}");
    }
    let read = send(server, "/v1/models", &[("origin", "https://evil.example")]).await;
    assert_eq!(read.status().as_u16(), 200);
    assert!(
        read.headers().get("access-control-allow-origin").is_none(),
        "a page of another origin must not read the answer"
    );
}

#[tokio::test]
async fn all_routes_except_health_require_key() {
    let flags =
        ["--api-key", KEY, "--api-key", "second", "--ingest-key", "traces", "--cors-origin", "https://app.example"];
    let server = Server::start(&flags);
    server.wait_ready().await;
    let bearer = format!("Bearer {KEY}");
    for (path, headers, status) in [
        ("/health", vec![], 200),
        ("/v1/models", vec![], 401),
        ("/v1/models", vec![("authorization", "Bearer wrong")], 401),
        ("/v1/models", vec![("authorization", "Basic c2Vjb25k")], 401),
        ("/v1/models", vec![("authorization", bearer.as_str())], 200),
        ("/v1/models", vec![("authorization", "bearer second")], 200),
        ("/v1/models", vec![("authorization", "second")], 200),
        ("/v1/models", vec![("authorization", "Bearer")], 401),
        ("/v1/models", vec![("x-api-key", "second")], 200),
        ("/v1/models", vec![("x-api-key", "traces")], 403),
        ("/api/v1/openapi.json", vec![], 401),
        ("/nowhere", vec![], 401),
        ("/", vec![("accept", "text/html")], 303),
        ("/login", vec![], 200),
        ("/favicon.ico", vec![], 308),
        ("/assets/any/icon.svg", vec![], 200),
        ("/assets/any/%2e%2e/api/v1/runs", vec![], 404),
        ("/v1/models", vec![("cookie", "thunder_session=0")], 401),
    ] {
        let response = send(&server, path, &headers).await;
        assert_eq!(response.status().as_u16(), status, "{path} {headers:?}");
    }
    let rejected = send(&server, "/v1/models", &[]).await;
    assert_eq!(rejected.headers()["www-authenticate"], "Bearer");
    let rejected: Value = rejected.json().await.unwrap();
    assert_eq!(rejected["error"]["type"], "authentication_error");

    assert_browser_can_log_in(&server).await;
    assert_allowed_origin_can_call(&server).await;
    let answer = server.answer("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).await;
    assert!(answer["thunder"]["run_id"].is_string());
    assert!(!server.log().contains(KEY), "the log contains the key");
}

/// Logs in and returns the cookie.
async fn login_cookie(server: &Server) -> String {
    let client = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let login =
        client.post(format!("{}/login", server.base)).header("content-type", "application/x-www-form-urlencoded");
    let response = login.body(format!("key={KEY}")).send().await.unwrap();
    response.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn wildcard_origin_does_not_permit_the_login_of_the_dashboard() {
    const FOREIGN: &str = "http://127.0.0.1:1";
    let server = Server::start(&["--api-key", KEY, "--cors-origin", "*", "--cors-origin", "https://app.example"]);
    server.wait_ready().await;
    let cookie = login_cookie(&server).await;
    for (origin, permitted) in [
        (None, true),
        (Some(server.base.as_str()), true),
        (Some("https://app.example"), true),
        (Some(FOREIGN), false),
        (Some("null"), false),
    ] {
        let mut headers = vec![("cookie", cookie.as_str())];
        headers.extend(origin.map(|origin| ("origin", origin)));
        for (path, status) in [("/v1/models", 200), ("/v1/chat/completions", 400)] {
            let expected = if permitted { status } else { 401 };
            assert_eq!(send(&server, path, &headers).await.status().as_u16(), expected, "{origin:?}");
        }
        let client = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
        for path in ["/login", "/logout"] {
            let mut request = client.post(format!("{}{path}", server.base)).body(format!("key={KEY}"));
            request = request.header("content-type", "application/x-www-form-urlencoded");
            if let Some(origin) = origin {
                request = request.header("origin", origin);
            }
            let expected = if permitted { 303 } else { 403 };
            assert_eq!(request.send().await.unwrap().status().as_u16(), expected, "{path} {origin:?}");
        }
    }
    let headers = [("cookie", cookie.as_str()), ("origin", FOREIGN)];
    let mut socket = crate::stream::Client::connect_with(&server, &headers).await.unwrap();
    socket.send(&json!({"type": "config", "prompt": "Once"})).await;
    let rejected = socket.message().await.to_string();
    assert!(rejected.contains("an API key is required"), "{rejected}");
}

#[tokio::test]
async fn login_rejects_late_bodies_and_counts_attempts_before_their_bodies() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = Server::start(&["--api-key", KEY]);
    server.wait_ready().await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        let mut stream = tokio::net::TcpStream::connect(server.base.trim_start_matches("http://")).await.unwrap();
        let head = "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n";
        stream.write_all(format!("{head}Content-Length: 100\r\n\r\nkey=").as_bytes()).await.unwrap();
        streams.push(stream);
    }
    let mut statuses = Vec::new();
    for mut stream in streams {
        let mut start = [0; "HTTP/1.1 200".len()];
        let response = tokio::time::timeout(std::time::Duration::from_mins(1), stream.read_exact(&mut start)).await;
        response.expect("the server waits for the body").unwrap();
        statuses.push(String::from_utf8_lossy(&start[9..]).into_owned());
    }
    let has = |status: &str| statuses.iter().any(|received| received == status);
    assert!(has("408") && has("429"), "{statuses:?}");
}

async fn assert_browser_can_log_in(server: &Server) {
    let client = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let login = |key: &str| {
        let form = format!("key={key}");
        client
            .post(format!("{}/login", server.base))
            .header("content-type", "application/x-www-form-urlencoded")
            .header("origin", &server.base)
            .body(form)
            .send()
    };
    assert_eq!(login("wrong").await.unwrap().status().as_u16(), 401);
    assert_eq!(login("traces").await.unwrap().status().as_u16(), 403);
    let response = login(KEY).await.unwrap();
    assert_eq!(response.status().as_u16(), 303);
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    assert!(cookie.contains("; Max-Age=2592000; HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap();
    assert!(!cookie.contains(KEY));
    assert_eq!(send(server, "/v1/models", &[("cookie", cookie)]).await.status().as_u16(), 200);
    let form = "action=\"/logout\"";
    let proxy = ("authorization", "Basic YTpi");
    for (headers, has_form) in
        [(vec![("cookie", cookie)], true), (vec![("cookie", cookie), proxy], true), (vec![("x-api-key", KEY)], false)]
    {
        let headers = [vec![("accept", "text/html")], headers].concat();
        let response = send(server, "/nowhere", &headers).await;
        // Otherwise a browser sends "null" as the origin of the form.
        assert_eq!(response.headers()["referrer-policy"], "same-origin");
        assert!(response.headers().contains_key("content-security-policy"));
        let vary = response.headers().get_all("vary").iter().any(|vary| vary.to_str().unwrap().contains("Cookie"));
        assert!(vary, "{:?}", response.headers());
        let page = response.text().await.unwrap();
        assert!(page.contains("<h1>") && page.contains(form) == has_form, "{headers:?}: {page}");
    }
    let log_out = |origin| client.post(format!("{}/logout", server.base)).header("origin", origin).send();
    assert_eq!(log_out("https://evil.example").await.unwrap().status().as_u16(), 403);
    let response = log_out(&server.base).await.unwrap();
    let location = response.headers()["location"].to_str().unwrap();
    assert_eq!((response.status().as_u16(), location), (303, "/login"));
    assert_eq!(response.headers()["set-cookie"], "thunder_session=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict");
    assert_eq!(response.headers()["clear-site-data"], "\"cache\", \"storage\"");
}

#[tokio::test]
async fn login_redirects_to_requested_page() {
    let server = Server::start(&["--api-key", KEY]);
    server.wait_ready().await;
    let client = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let location = |response: &reqwest::Response| response.headers()["location"].to_str().unwrap().to_owned();
    let page_path = "/runs?q=model:%22a%20b%22&before=1";
    let rejected =
        client.get(format!("{}{page_path}", server.base)).header("accept", "text/html").send().await.unwrap();
    let login = location(&rejected);
    let page = client.get(format!("{}{login}", server.base)).send().await.unwrap().text().await.unwrap();
    let next = page.split("name=\"next\" value=\"").nth(1).unwrap().split('"').next().unwrap().replace("&#38;", "&");
    assert_eq!(next, page_path);
    let log_in = |key: &str, next: &str| {
        let mut body = reqwest::Url::parse("http://form.example").unwrap();
        body.query_pairs_mut().append_pair("key", key).append_pair("next", next);
        client
            .post(format!("{}/login", server.base))
            .header("content-type", "application/x-www-form-urlencoded")
            .body(body.query().unwrap().to_owned())
            .send()
    };
    for (next, expected) in [(next.as_str(), page_path), ("//evil.example/", "/"), ("https://evil.example", "/")] {
        let again = log_in("wrong", next).await.unwrap();
        assert_eq!(again.status().as_u16(), 401);
        let again = again.text().await.unwrap().replace("&#38;", "&");
        assert!(again.contains(&format!("value=\"{expected}\"")), "{again}");
        let done = log_in(KEY, next).await.unwrap();
        assert_eq!((done.status().as_u16(), location(&done)), (303, expected.to_owned()));
    }
}

#[tokio::test]
async fn login_page_has_no_scripts_and_limits_attempts() {
    let server = Server::start(&["--api-key", KEY]);
    server.wait_ready().await;
    let page = send(&server, "/login", &[]).await;
    let policy = page.headers()["content-security-policy"].to_str().unwrap();
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
    let client = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let login = |key: &str| {
        let request = client.post(format!("{}/login", server.base)).body(format!("key={key}"));
        request.header("content-type", "application/x-www-form-urlencoded").header("origin", &server.base).send()
    };
    let long = login(&"x".repeat(17 << 10)).await.unwrap();
    assert_eq!(long.status().as_u16(), 413, "a login has at most 16 KiB");
    let mut rejected = None;
    for _ in 0..40 {
        let response = login("wrong").await.unwrap();
        if response.status().as_u16() == 429 {
            rejected = Some(response.text().await.unwrap());
            break;
        }
        assert_eq!(response.status().as_u16(), 401);
    }
    assert!(rejected.as_ref().is_some_and(|page| page.contains("10 logins per minute")), "{rejected:?}");
    assert_eq!(login(KEY).await.unwrap().status().as_u16(), 429, "the correct key is rejected, too");
    assert_eq!(server.get("/v1/models").await.0, 200, "a client with the key needs no login");
}

#[tokio::test]
async fn request_with_two_host_headers_is_rejected() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let address = server().await.base.trim_start_matches("http://").to_owned();
    let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
    let request = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("one Host header"), "{answer}");
}

async fn assert_allowed_origin_can_call(server: &Server) {
    let preflight = crate::harness::http()
        .request(Method::OPTIONS, format!("{}/v1/chat/completions", server.base))
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "content-type,authorization,x-stainless-os")
        .send()
        .await
        .unwrap();
    assert_eq!(preflight.status().as_u16(), 200);
    assert_eq!(preflight.headers()["access-control-allow-origin"], "https://app.example");
    assert!(preflight.headers()["access-control-allow-headers"].to_str().unwrap().contains("x-stainless-os"));
    assert!(preflight.headers().get("access-control-allow-credentials").is_none());
    // Errors must be readable by the page, too.
    let rejected = send(server, "/v1/chat/completions", &[("origin", "https://app.example")]).await;
    assert_eq!(rejected.status().as_u16(), 401);
    assert_eq!(rejected.headers()["access-control-allow-origin"], "https://app.example");
    let other = send(server, "/v1/models", &[("origin", "https://evil.example")]).await;
    assert!(other.headers().get("access-control-allow-origin").is_none());
}

#[tokio::test]
async fn responses_have_security_headers_and_request_id() {
    let server = server().await;
    for path in ["/healthz", "/v1/models", "/nowhere", "/api/v1/openapi.json"] {
        let response = send(server, path, &[("x-request-id", "mine-1")]).await;
        assert_eq!(response.headers()["x-content-type-options"], "nosniff", "{path}");
        assert!(response.headers().contains_key("referrer-policy"), "{path}");
        assert_eq!(response.headers()["x-request-id"], "mine-1", "{path}");
    }
    let response = send(server, "/healthz", &[]).await;
    assert!(!response.headers()["x-request-id"].is_empty());
}

#[tokio::test]
async fn too_large_body_is_rejected_in_format_of_route() {
    let server = Server::start(&["--max-body", "1K"]);
    server.wait_ready().await;
    let body = json!({"prompt": "a ".repeat(1000)});
    let (status, answer) = server.post("/v1/completions", &body).await;
    assert_eq!((status, answer["error"]["type"].as_str()), (413, Some("invalid_request_error")), "{answer}");
}

#[tokio::test]
async fn unsupported_encoding_is_rejected_in_format_of_route() {
    use std::io::Write;
    let server = Server::start(&["--rate-limit-address", "1"]);
    server.wait_ready().await;
    let complete = |encoding: &'static str, body: Vec<u8>| {
        server.request(Method::POST, "/v1/completions").header("content-encoding", encoding).body(body).send()
    };
    for encoding in ["br", "deflate", "gzip, gzip"] {
        let response = complete(encoding, b"{}".to_vec()).await.unwrap();
        assert_eq!(response.status().as_u16(), 415, "{encoding}");
        assert_eq!(response.headers()["accept-encoding"], "gzip, zstd");
        let error: Value = response.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(message, format!("the header Content-Encoding must be gzip, zstd or identity, got {encoding:?}"));
    }
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(json!({"prompt": "Once", "max_tokens": 1}).to_string().as_bytes()).unwrap();
    let response = complete("GZIP", gzip.finish().unwrap()).await.unwrap();
    assert_eq!(response.status().as_u16(), 200, "rejected bodies do not count towards the rate limit");
}

#[test]
fn other_machines_are_not_served_without_a_key() {
    let output = thunder().args(["serve", "--listen", "0.0.0.0:0", "--data-dir"]).arg(folder()).output().unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(printed.contains("--api-key") && printed.contains("--allow-unauthenticated"), "{printed}");
}

#[tokio::test]
async fn localhost_origin_permits_local_pages() {
    let server = Server::start(&["--cors-origins", "localhost"]);
    server.wait_ready().await;
    for (origin, allowed) in [
        ("http://localhost:3000", true),
        ("http://127.0.0.1:5173", true),
        ("https://localhost", true),
        ("http://localhost.evil.example", false),
        ("http://evil.example", false),
        ("null", false),
    ] {
        let response = send(&server, "/v1/models", &[("origin", origin)]).await;
        let header = response.headers().get("access-control-allow-origin").map(|value| value.to_str().unwrap());
        assert_eq!(header, allowed.then_some(origin));
        let status = send(&server, "/v1/chat/completions", &[("origin", origin)]).await.status().as_u16();
        assert_eq!(status, if allowed { 400 } else { 403 }, "{origin}");
    }
}
