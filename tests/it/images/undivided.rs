//! Images whose tokens share a position (M-RoPE) or attend to each other, through the API.

use super::reference::reference;
use super::{assert_close, image_request, logprobs, sized_bmp};
use crate::harness::Server;
use serde_json::{Value, json};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures");
/// Models and their projectors.
const FILES: [(&str, &str); 3] = [
    ("vision/qwen2vl", "vision/qwen2vl-mmproj"),
    ("vision/qwen35", "vision/qwen2vl-mmproj"),
    ("memories/window", "vision/gemma3-mmproj"),
];

/// Returns the tokens that were added in a run.
fn generated(run: &Value) -> Vec<&Value> {
    let events = run["events"].as_array().unwrap_or_else(|| panic!("{run}"));
    events.iter().filter_map(|event| event["added_tokens"].as_array()).flatten().collect()
}

#[tokio::test]
async fn answers_and_forks_are_exact() {
    for (model, projector) in FILES {
        let (model, projector) = (format!("{ROOT}/{model}.gguf"), format!("{ROOT}/{projector}.gguf"));
        let arguments =
            ["--model", &model, "--mmproj", &projector, "-ctk", "f32", "-ctv", "f32", "-ub", "16", "--record-images"];
        let server = Server::start(&arguments);
        server.wait_ready().await;
        let image = sized_bmp(140, 84, 5);
        let body = image_request(&image, &json!({"ignore_eos": false}));
        let prompt = server.answer("/apply-template", &body).await["prompt"].as_str().unwrap().to_owned();
        let found = logprobs(&server.answer("/v1/chat/completions", &body).await);
        let (answer, files) = (found.clone(), (model.clone(), projector.clone()));
        let expected = tokio::task::spawn_blocking(move || {
            reference((&files.0, &files.1), &prompt, &sized_bmp(140, 84, 5), &answer)
        });
        assert_close(&found, &expected.await.unwrap(), 1e-3);
        assert_eq!(server.log().contains("physical batch enlarged"), projector.contains("gemma3"), "{}", server.log());

        let body = image_request(&image, &json!({"max_tokens": 24, "temperature": 0.9, "seed": 4}));
        let answer = server.answer("/v1/chat/completions", &body).await;
        let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
        assert_eq!(generated(&run).len(), 24, "{model}");
        let grid = &run["events"][0]["details"]["prompt"]["images"][0]["tiles"][0];
        if projector.contains("qwen2vl") {
            assert_eq!((&grid["columns"], &grid["rows"]), (&json!(5), &json!(3)), "{grid}");
        }
        // After a restart, the image is read from the recorded run.
        assert_eq!(server.stop("TERM").await, Some(0));
        let server = server.start_again(&arguments);
        server.wait_ready().await;
        let path = format!("/api/v1/runs/{}/forks", run["run"]["run_id"].as_str().unwrap());
        let (status, fork) = server.post(&path, &json!({"at": {"step": 9}})).await;
        assert_eq!(status, 201, "{model}: {fork}");
        let fork = server.finished(fork["runs"][0]["run_id"].as_str().unwrap()).await;
        assert_eq!(generated(&fork), generated(&run), "{model}");
    }
}
