//! Control vectors of the command line: answers change, and states saved with other vectors are not used.

use crate::exact::gguf::Writer;
use crate::harness::{Server, folder, model, text, thunder};
use serde_json::{Value, json};
use std::path::PathBuf;
use thunder::model::llama::GgufHeader;

/// Returns the path of a control vector for the tiny model.
fn vector() -> PathBuf {
    let width = GgufHeader::read(&model()).unwrap().parameter("embedding_length").unwrap() as usize;
    let values: Vec<f32> = (0..width).map(|at| (at % 7) as f32 / 4.0 - 0.75).collect();
    let path = folder().join("control.gguf");
    std::fs::write(&path, Writer::default().with_tensors(&[("direction.1", vec![width], &values)])).unwrap();
    path
}

async fn probabilities(server: &Server) -> Value {
    let body = json!({"prompt": "Once there was a fox", "temperature": 0, "n_predict": 4, "n_probs": 5, "ignore_eos": true,
                      "id_slot": 0});
    server.answer("/completion", &body).await["completion_probabilities"].clone()
}

async fn save_state(server: &Server) -> Value {
    server.answer("/slots/0?action=save-state", &json!({})).await["state"].clone()
}

async fn restore_status(server: &Server, state: &Value) -> u16 {
    server.post("/slots/0?action=restore-state", &json!({"state": state})).await.0
}

#[tokio::test]
async fn control_vector_changes_answers_and_identifies_states() {
    let path = vector().display().to_string();
    let with_vector =
        Server::start(&["--control-vector-scaled", &format!("{path}:4"), "--control-vector-layer-range", "1", "1"]);
    // Runs of other tests on a shared server would change the last digits of the probabilities.
    let without_vector = Server::start(&[]);
    with_vector.wait_ready().await;
    without_vector.wait_ready().await;
    let (changed, plain) = (probabilities(&with_vector).await, probabilities(&without_vector).await);
    assert!(changed.is_array() && changed != plain, "{changed}");
    assert_eq!(probabilities(&with_vector).await, changed);
    let foreign = {
        let with_zero_scale = Server::start(&["--control-vector-scaled", &format!("{path}:0")]);
        with_zero_scale.wait_ready().await;
        assert_eq!(probabilities(&with_zero_scale).await, plain);
        save_state(&with_zero_scale).await
    };
    let own = save_state(&with_vector).await;
    // A state without control vectors is accepted, but only runs without them use it.
    assert_eq!(restore_status(&with_vector, &foreign).await, 200);
    assert_eq!(probabilities(&with_vector).await, changed);
    assert_eq!(restore_status(&with_vector, &own).await, 200);
    assert_eq!(restore_status(&without_vector, &own).await, 400);
}

#[test]
fn invalid_control_vector_ends_start() {
    let mut command = thunder();
    command.args(["serve", "--port", "0", "--data-dir"]).arg(folder()).arg("--model").arg(model());
    let output = command.arg("--control-vector").arg(model()).output().unwrap();
    assert!(!output.status.success());
    let printed = text(&output.stderr);
    assert!(printed.contains("cannot load the control vector"), "{printed}");
    assert!(printed.contains("tiny.gguf") && printed.contains("direction.N"), "{printed}");
}
