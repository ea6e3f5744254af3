//! The logit lens over the native routes: recorded, listed, exported, ingested and forked.

use super::generate;
use crate::harness::{ErrorTable, Server, folder, server};
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
async fn refused_draw_leaves_the_candidates_of_the_model() {
    let mods = folder();
    let source = "from thunder import Sampled, mod\n\n@mod(events=[Sampled])\ndef refuses(event, actions):\n    \
                  if event.step == 2:\n        return actions.backtrack(1)\n";
    std::fs::write(mods.join("refuses.py"), source).unwrap();
    let server = Server::start(&["--mods-dir", mods.to_str().unwrap()]);
    server.wait_ready().await;
    // The client gets the candidates after the sampler, at temperature 0 only one.
    let body = json!({"prompt": "Once upon a time", "n_predict": 3, "temperature": 0, "lens": true, "mods": ["refuses"],
                      "n_probs": 3, "post_sampling_probs": true, "request_id": "refused"});
    let answer = server.answer("/completion", &body).await;
    let shown = answer["completion_probabilities"].as_array().unwrap();
    assert!(shown.iter().all(|token| token["top_probs"].as_array().unwrap().len() == 1), "{answer}");
    let run = server.finished("refused").await;
    let events = run["events"].as_array().unwrap();
    let passes: Vec<&Value> = events.iter().filter(|event| event["event_type"] == "ForwardPass").collect();
    assert_eq!(passes.len(), 4, "three tokens and a refused draw");
    let [refused, repeated] = [1, 2].map(|step| &passes[step]["details"]);
    assert!(refused["model"].as_array().unwrap().len() > 1 && refused["lens"].is_object(), "{refused}");
    for field in ["position", "entropy", "model", "lens"] {
        assert_eq!(refused[field], repeated[field], "{field}");
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
