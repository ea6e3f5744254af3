//! Images that the server fetches by URL.

use super::harness::{ErrorTable, Server, message_of};
use super::images::{arguments, bmp, part};
use axum::Router;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Redirect};
use axum::routing::get;
use serde_json::{Value, json};

/// Starts a server of images. Returns its port.
async fn image_server() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let image = || async { ([(header::CONTENT_TYPE, "image/bmp")], bmp(51)) };
    let endless = || async {
        let chunks = futures::stream::repeat_with(|| Ok::<_, std::io::Error>(vec![0u8; 1 << 20]));
        ([(header::CONTENT_TYPE, "image/png")], Body::from_stream(chunks))
    };
    let slow = || async {
        std::future::pending::<()>().await;
        StatusCode::OK
    };
    let routes = Router::new()
        .route("/a.bmp", get(image))
        .route("/moved", get(|| async { Redirect::temporary("/a.bmp") }))
        .route("/circle", get(|| async { Redirect::temporary("/circle") }))
        .route("/inside", get(move || async move { Redirect::temporary(&format!("http://127.0.0.2:{port}/a.bmp")) }))
        .route("/file", get(|| async { Redirect::temporary("file:///etc/passwd") }))
        .route("/page", get(|| async { ([(header::CONTENT_TYPE, "text/html")], "<p>").into_response() }))
        .route("/text", get(|| async { ([(header::CONTENT_TYPE, "image/png")], "hello").into_response() }))
        .route("/endless", get(endless))
        .route("/slow", get(slow));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    port
}

fn image_request(url: &str) -> Value {
    let content = json!([{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]);
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, "ignore_eos": true})
}

#[tokio::test]
async fn images_are_fetched_from_permitted_addresses_only() {
    let port = image_server().await;
    let listed = format!("127.0.0.1:{port}");
    let server = Server::start(&arguments(&["--allow-image-urls", "--image-url-hosts", &listed]));
    server.wait_ready().await;
    let url = |path: &str| format!("http://{listed}{path}");
    let mut sent = image_request("");
    sent["messages"][0]["content"][1] = part(&bmp(51));
    let expected = server.answer("/v1/chat/completions", &sent).await["choices"][0]["message"]["content"].clone();
    for path in ["/a.bmp", "/moved"] {
        let answer = server.answer("/v1/chat/completions", &image_request(&url(path))).await;
        assert_eq!(answer["choices"][0]["message"]["content"], expected, "{path}");
    }
    let source = json!({"type": "image", "source": {"type": "url", "url": url("/a.bmp")}});
    let body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, source]}],
                      "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    assert_eq!(server.answer("/v1/messages", &body).await["content"][0]["text"], expected);
    let mut errors = ErrorTable::default();
    for url in [
        url("/circle"),
        url("/inside"),
        url("/file"),
        url("/page"),
        url("/text"),
        url("/none"),
        url("/endless"),
        format!("http://localhost:{port}/a.bmp"),
        format!("http://[::ffff:127.0.0.1]:{port}/a.bmp"),
        format!("http://2130706433:{port}/b.bmp"),
        "http://169.254.169.254/latest/meta-data".into(),
        "http://[::1]/a.png".into(),
        "http://10.0.0.1/a.png".into(),
        "http://ann:secret@example.org/a.png".into(),
        "file:///etc/passwd".into(),
    ] {
        let (status, answer) = server.post("/v1/chat/completions", &image_request(&url)).await;
        assert_eq!(status, 400, "{url}: {answer}");
        let without_port = |text: &str| text.replace(&port.to_string(), "[port]");
        errors.add_text(without_port(&url), &without_port(message_of(&answer)));
    }
    insta::assert_snapshot!("image_url_errors", errors);
}

#[tokio::test]
async fn images_are_not_fetched_without_the_flag() {
    let port = image_server().await;
    let listed = format!("127.0.0.1:{port}");
    let server = Server::start(&arguments(&[]));
    server.wait_ready().await;
    let (status, answer) = server.post("/v1/chat/completions", &image_request(&format!("http://{listed}/a.bmp"))).await;
    let expected = "the server does not fetch images from http: URLs; start it with --allow-image-urls";
    assert!(status == 400 && message_of(&answer).contains(expected), "{answer}");
}
