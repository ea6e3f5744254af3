//! Files of images that are recorded with their runs.

use super::harness::{Server, folder, message_of, psql};
use super::images::{IMAGE_TOKENS, arguments, bmp, image_request, part};
use reqwest::{Method, header};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// SQL that returns the number of images, and the number of their uses by runs.
const COUNTS: &str = "select (select count(*) from images) || ' ' || (select count(*) from run_images)";

fn hash(image: &[u8]) -> String {
    thunder::events::hex(&Sha256::digest(image))
}

/// Generates an answer about an image. Returns the id of the run and its recorded prompt.
async fn generate(server: &Server, image: &[u8]) -> (String, Value) {
    let answer = server.answer("/v1/chat/completions", &image_request(image, &Value::Null)).await;
    let id = answer["thunder"]["run_id"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
    let run = server.finished(&id).await;
    (id, run["events"][0]["details"]["prompt"].clone())
}

#[tokio::test]
async fn image_files_are_stored_once_and_removed_with_their_last_run() {
    let server = Server::start(&arguments(&["--record-images", "--parallel", "1"]));
    server.wait_ready().await;
    let image = bmp(41);
    let (first, prompt) = generate(&server, &image).await;
    let start = prompt["tokens"].as_array().unwrap().iter().position(|token| token.as_i64() < Some(-1)).unwrap();
    assert_eq!(
        prompt["images"],
        json!([{"sha256": hash(&image), "media_type": "image/bmp", "bytes": image.len(), "width": 40, "height": 40,
                "recorded": true, "tiles": [{"start": start, "columns": 8, "rows": IMAGE_TOKENS / 8}]}])
    );
    let url = server.database_url();
    let written = psql(&url, "select xmin::text from images").await;
    let (second, _) = generate(&server, &image).await;
    assert_eq!(psql(&url, "select xmin::text from images").await, written, "a known image is not written again");
    let (other, _) = generate(&server, &bmp(42)).await;
    assert_eq!(psql(&url, COUNTS).await, "2 3");
    let path = |id: &str| format!("/api/v1/runs/{id}/images/{}", hash(&image));
    let response = server.request(Method::GET, &path(&first)).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let headers = response.headers().clone();
    assert_eq!(headers[header::CONTENT_TYPE], "image/bmp");
    assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    assert_eq!(headers[header::CONTENT_SECURITY_POLICY], "default-src 'none'; sandbox");
    assert_eq!(headers[header::CACHE_CONTROL], "private, no-cache");
    assert_eq!(response.bytes().await.unwrap(), image);
    let known = server.request(Method::GET, &path(&first)).header(header::IF_NONE_MATCH, &headers[header::ETAG]);
    assert_eq!(known.send().await.unwrap().status(), 304);
    // A run with another image, a hash of no image, an unknown run, and an invalid hash.
    for missing in [
        path(&other),
        format!("/api/v1/runs/{first}/images/{}", "0".repeat(64)),
        path("none"),
        format!("/api/v1/runs/{first}/images/x"),
    ] {
        assert_eq!(server.get(&missing).await.0, 404, "{missing}");
    }
    for (id, left) in [(&first, "2 2"), (&second, "1 1"), (&other, "0 0")] {
        let deleted = server.request(Method::DELETE, &format!("/api/v1/runs/{id}")).send().await.unwrap();
        assert_eq!(deleted.status(), 204);
        assert_eq!(psql(&url, COUNTS).await, left);
        assert_eq!(server.get(&path(id)).await.0, 404);
    }
}

#[tokio::test]
async fn recorded_images_are_forked_and_repeated_after_a_restart() {
    let server = Server::start(&arguments(&["--record-images", "--parallel", "1"]));
    server.wait_ready().await;
    let (id, prompt) = generate(&server, &bmp(43)).await;
    assert_eq!(server.stop("TERM").await, Some(0));
    let server = server.start_again(&arguments(&["--record-images", "--parallel", "1"]));
    server.wait_ready().await;
    let (status, fork) = server.post(&format!("/api/v1/runs/{id}/forks"), &json!({"at": {"step": 2}})).await;
    assert_eq!(status, 201, "{fork}");
    let fork = fork["runs"][0]["run_id"].as_str().unwrap().to_owned();
    let (original, forked) = (server.finished(&id).await, server.finished(&fork).await);
    assert_eq!(forked["run"]["status"], "done", "{forked}");
    assert_eq!(forked["run"]["final_text"], original["run"]["final_text"]);
    let rerun = server.answer("/api/v1/reruns", &json!({"prompt": prompt})).await;
    let rerun = rerun["run_id"].as_str().unwrap();
    server.finished(rerun).await;
    // The new runs keep the image when the first one is removed.
    assert_eq!(psql(&server.database_url(), COUNTS).await, "1 3");
    let deleted = server.request(Method::DELETE, &format!("/api/v1/runs/{id}")).send().await.unwrap();
    assert_eq!(deleted.status(), 204);
    let path = format!("/api/v1/runs/{rerun}/images/{}", hash(&bmp(43)));
    assert_eq!(server.request(Method::GET, &path).send().await.unwrap().bytes().await.unwrap(), bmp(43));
}

#[tokio::test]
async fn size_of_recorded_images_is_limited() {
    let image = bmp(44);
    let limit = image.len().to_string();
    let server = Server::start(&arguments(&["--record-images", "--record-images-size", &limit]));
    server.wait_ready().await;
    let both = json!([part(&image), part(&bmp(45)), part(&image)]);
    let body = json!({"messages": [{"role": "user", "content": both}], "max_tokens": 1});
    let answer = server.answer("/v1/chat/completions", &body).await;
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    let images = run["events"][0]["details"]["prompt"]["images"].as_array().unwrap();
    assert_eq!(
        images.iter().map(|image| image["recorded"].as_bool().unwrap()).collect::<Vec<_>>(),
        [true, false, true]
    );
    assert_eq!(psql(&server.database_url(), COUNTS).await, "1 1");
    // Runs that are not recorded leave no image.
    let mut body = image_request(&bmp(46), &json!({"record": false}));
    body["max_tokens"] = 1.into();
    server.answer("/v1/chat/completions", &body).await;
    assert_eq!(psql(&server.database_url(), COUNTS).await, "1 1");
}

#[tokio::test]
async fn images_belong_to_the_tenant_of_their_run() {
    let keys = folder().join("keys");
    std::fs::write(&keys, "ann-key name=ann\nbob-key name=bob\n").unwrap();
    let flags = ["--record-images", "--parallel", "1", "--api-key-file", keys.to_str().unwrap()];
    let server = Server::start(&arguments(&flags));
    server.wait_ready().await;
    let send = async |server: &Server, key: &str, method: Method, path: &str, body: Option<&Value>| {
        let mut request = server.request(method, path).bearer_auth(key);
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.bytes().await.unwrap())
    };
    let image = bmp(47);
    let mut ids = Vec::new();
    for key in ["ann-key", "bob-key"] {
        let body = image_request(&image, &json!({"record": "required"}));
        let (status, answer) = send(&server, key, Method::POST, "/v1/chat/completions", Some(&body)).await;
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(status, 200, "{answer}");
        ids.push(answer["thunder"]["run_id"].as_str().unwrap().to_owned());
    }
    // Each tenant has its own copy, so the size of the database does not reveal that another tenant has the same image.
    assert_eq!(psql(&server.database_url(), COUNTS).await, "2 2");
    let path = format!("/api/v1/runs/{}/images/{}", ids[0], hash(&image));
    assert_eq!(send(&server, "ann-key", Method::GET, &path, None).await.0, 200);
    assert_eq!(send(&server, "bob-key", Method::GET, &path, None).await.0, 404);
    let bob_run = format!("/api/v1/runs/{}", ids[1]);
    assert_eq!(send(&server, "bob-key", Method::DELETE, &bob_run, None).await.0, 204);
    let ann_run = format!("/api/v1/runs/{}", ids[0]);
    let (_, run) = send(&server, "ann-key", Method::GET, &ann_run, None).await;
    let run: Value = serde_json::from_slice(&run).unwrap();
    assert_eq!(server.stop("TERM").await, Some(0));
    let server = server.start_again(&arguments(&flags));
    server.wait_ready().await;
    let rerun = json!({"prompt": run["events"][0]["details"]["prompt"]});
    let (status, answer) = send(&server, "bob-key", Method::POST, "/api/v1/reruns", Some(&rerun)).await;
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    let message = "the prompt contains an image that is neither cached nor recorded; send the conversation with the image \
                   again, or start the server with --record-images";
    assert_eq!((status, message_of(&answer)), (400, message));
    assert_eq!(send(&server, "ann-key", Method::POST, "/api/v1/reruns", Some(&rerun)).await.0, 200);
}
