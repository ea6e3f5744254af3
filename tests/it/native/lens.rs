//! The logit lens over the native routes: recorded, listed, exported, ingested and forked.

use super::generate;
use crate::harness::{ErrorTable, Server, server};
use serde_json::{Value, json};

/// Returns the steps of a run with their candidates.
async fn steps(server: &Server, id: &str) -> Vec<Value> {
    let (status, listed) = server.get(&format!("/api/v1/runs/{id}/alternatives")).await;
    assert_eq!(status, 200, "{listed}");
    listed["alternatives"].as_array().unwrap().clone()
}

fn floats(values: &Value) -> Vec<f64> {
    serde_json::from_value(values.clone()).unwrap()
}

#[tokio::test]
async fn lens_is_recorded_for_every_step_and_survives_export_and_ingest() {
    let server = server().await;
    let layers = server.get("/api/v1/control-vectors").await.1["layers"].as_u64().unwrap();
    let run = generate(server, json!({"lens": true})).await;
    let id = run["run"]["run_id"].as_str().unwrap();
    let recorded = steps(server, id).await;
    assert_eq!(recorded.len(), 8);
    for step in &recorded {
        let (lens, model) = (&step["lens"], step["model"].as_array().unwrap());
        assert_eq!(lens["layers"], json!((0..layers).collect::<Vec<_>>()), "{step}");
        let logits = lens["logits"].as_array().unwrap();
        assert_eq!(logits.len() as u64, layers);
        assert!(logits.iter().all(|layer| layer.as_array().unwrap().len() == model.len()), "{step}");
        // After the last layer, differences of logits are those of log-probabilities.
        let last = floats(&logits[layers as usize - 1]);
        for (logit, candidate) in last.iter().zip(model) {
            let expected = (candidate["prob"].as_f64().unwrap() / model[0]["prob"].as_f64().unwrap()).ln();
            assert!((logit - last[0] - expected).abs() < 0.05, "{step}");
        }
        assert_ne!(floats(&logits[0]), last, "the first layer differs from the last");
    }
    let mut document = run.clone();
    document.as_object_mut().unwrap().remove("run");
    let copy = format!("{id}-again");
    document["request"]["request_id"] = json!(copy);
    assert_eq!(server.post("/ingest", &document).await.0, 201);
    assert_eq!(steps(server, &copy).await, recorded);
    let plain = generate(server, json!({})).await;
    let plain = steps(server, plain["run"]["run_id"].as_str().unwrap()).await;
    for (plain, recorded) in plain.iter().zip(&recorded) {
        assert_eq!((&plain["lens"], &plain["chosen"]), (&Value::Null, &recorded["chosen"]));
    }
}

#[tokio::test]
async fn fork_has_the_lens_of_its_run() {
    let server = server().await;
    let run = generate(server, json!({"lens": true})).await;
    let id = run["run"]["run_id"].as_str().unwrap();
    let (status, forks) = server.post(&format!("/api/v1/runs/{id}/forks"), &json!({"at": {"step": 4}})).await;
    assert_eq!(status, 201, "{forks}");
    let fork = forks["runs"][0]["run_id"].as_str().unwrap();
    server.finished(fork).await;
    let (original, forked) = (steps(server, id).await, steps(server, fork).await);
    let lenses = |steps: &[Value]| steps.iter().map(|step| step["lens"].clone()).collect::<Vec<_>>();
    let (original, forked) = (lenses(&original), lenses(&forked));
    assert_eq!(forked[..3], original[..3], "the recorded steps are copied");
    let new = forked.iter().zip(&original).skip(3);
    assert!(new.clone().count() > 0);
    for (forked, original) in new {
        let logits = |lens: &Value| lens["logits"].as_array().unwrap().iter().flat_map(floats).collect::<Vec<_>>();
        let deviations = logits(forked).into_iter().zip(logits(original)).map(|(a, b)| (a - b).abs());
        assert!(deviations.fold(0.0, f64::max) < 0.1, "{forked} {original}");
    }
}

#[tokio::test]
async fn invalid_lens_is_rejected() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for (route, body) in [
        ("/v1/completions", json!({"prompt": "a", "lens": "yes"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}], "lens": [0]})),
    ] {
        errors.add(route, &server.post(route, &body).await);
    }
    insta::assert_snapshot!(errors);
}
