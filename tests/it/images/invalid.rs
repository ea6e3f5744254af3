//! Invalid images, a model without a projector, and unsuitable projectors.

use super::{DEMO, PNG, PROJECTOR, bmp, data_url, part, server};
use crate::harness::{ErrorTable, Server};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

#[tokio::test]
async fn invalid_images_are_rejected() {
    let server = server().await;
    let bomb =
        [b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".as_slice(), &60_000u32.to_be_bytes(), &60_000u32.to_be_bytes()].concat();
    let png = STANDARD.decode(PNG).unwrap();
    let mut errors = ErrorTable::default();
    for url in [
        data_url(&bomb),
        data_url(&png[..50]),
        data_url(b"RIFF\0\0\0\0WEBPVP8 "),
        data_url(b"hello"),
        data_url(b"ID3\0\0\0\0\0\0\0\0\0\0\0"),
        data_url(b""),
        "data:image/png;base64,?".into(),
        "https://example.org/a.png".into(),
        "file:///etc/passwd".into(),
        "/etc/passwd".into(),
    ] {
        let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
        errors.add(url, &server.post("/v1/chat/completions", &body).await);
    }
    for count in [40, 65] {
        let content = vec![part(&bmp(1)); count];
        let body = json!({"messages": [{"role": "user", "content": content}]});
        errors.add(format!("{count} images"), &server.post("/v1/chat/completions", &body).await);
    }
    for (text, data) in [
        ("no marker", json!([PNG])),
        ("<__media__><__media__>", json!([PNG])),
        ("<__media__>", json!([5])),
        ("<__media__>", json!(["aGk="])),
    ] {
        let body = json!({"prompt": {"prompt_string": text, "multimodal_data": data}});
        errors.add(&body, &server.post("/completion", &body).await);
    }
    insta::assert_snapshot!("image_errors", errors);
}

#[tokio::test]
async fn model_without_projector_rejects_images() {
    let server = crate::harness::server().await;
    let image = part(&bmp(1));
    let source = json!({"type": "base64", "media_type": "image/bmp", "data": PNG});
    let content = |part: Value| json!([{"role": "user", "content": [part]}]);
    let message = json!({"system": "Describe it.", "max_tokens": 1,
        "messages": content(json!({"type": "image", "source": source}))});
    let input_image = json!({"type": "input_image", "image_url": data_url(&bmp(1))});
    let mut errors = ErrorTable::default();
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": content(image)})),
        ("/v1/messages", message.clone()),
        ("/v1/messages/count_tokens", message),
        ("/v1/responses", json!({"instructions": "Describe it.", "input": content(input_image)})),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "?", "images": [PNG]}]})),
        ("/api/generate", json!({"prompt": "?", "images": [PNG]})),
        ("/api/v1/generate", json!({"prompt": "?", "images": [PNG]})),
        ("/completion", json!({"prompt": {"prompt_string": "<__media__>", "multimodal_data": [PNG]}})),
    ] {
        errors.add(path, &server.post(path, &body).await);
    }
    insta::assert_snapshot!("errors_without_projector", errors);
}

#[tokio::test]
async fn unsuitable_projector_is_rejected() {
    for (model, projector, expected) in [
        (crate::harness::model().display().to_string(), PROJECTOR, "mismatch between text model"),
        (DEMO.to_owned(), DEMO, "cannot load the projector"),
        (DEMO.to_owned(), concat!(env!("CARGO_MANIFEST_DIR"), "/README.md"), "cannot load the projector"),
    ] {
        let server = Server::start(&["--model", &model, "--mmproj", projector]);
        let code = server.wait_for_exit().await;
        assert!(code != Some(0) && server.log().contains(expected), "{code:?}: {}", server.log());
    }
}
