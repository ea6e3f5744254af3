//! Hidden states over the native route, and in a Python mod.

use crate::harness::{ErrorTable, Server, folder};
use base64::Engine as _;
use serde_json::{Value, json};

const ROUTE: &str = "/api/v1/hidden-states";

const MODS: &str = r#"
import json
from thunder_mods import ForwardPass, mod

@mod(events=ForwardPass, hidden_states=[-1, 0])
def read_states(event, actions):
    """Logs the beginning of the hidden states of two layers."""
    states = [event.hidden_state(layer).tolist()[:8] for layer in (0, -1)]
    print(json.dumps({"tokens": event.context_info.tokens, "states": states}))

@mod(hidden_states=99)
def read_layer_99(event, actions):
    """Declares a layer that no model of the tests has."""
"#;

fn start() -> Server {
    let mods = folder();
    std::fs::write(mods.join("states.py"), MODS).unwrap();
    Server::start(&["--mods-dir", mods.to_str().unwrap(), "--embedding"])
}

fn floats(values: &Value) -> Vec<f64> {
    serde_json::from_value(values.clone()).unwrap()
}

/// The mod reads the states of the decode thread, and the route those of the encoder.
#[tokio::test]
async fn mod_and_route_return_the_same_hidden_states() {
    let server = start();
    server.wait_ready().await;
    let body = json!({"prompt": "The sky is", "max_tokens": 4, "ignore_eos": true, "seed": 1, "mods": ["read_states"], "record": "required"});
    let answer = server.answer("/v1/completions", &body).await;
    let id = answer["thunder"]["run_id"].as_str().unwrap();
    let run = server.finished(id).await;
    let logs = run["mod_logs"].as_array().unwrap();
    assert_eq!(logs.len(), 4, "{logs:?}");
    for log in logs {
        let log: Value = serde_json::from_str(log["log_message"].as_str().unwrap()).unwrap();
        let request = json!({"input": log["tokens"], "layers": [-1, 0], "tokens": "last"});
        let answer = server.answer(ROUTE, &request).await;
        let (last, width) = (answer["layers"][1].as_u64().unwrap(), answer["width"].as_u64().unwrap());
        assert_eq!(answer["layers"], json!([0, last]), "layers are in ascending order");
        let input = &answer["inputs"][0];
        assert_eq!((&input["tokens"], &input["shape"]), (&log["tokens"], &json!([1, 2, width])));
        for (layer, read) in log["states"].as_array().unwrap().iter().enumerate() {
            let state = floats(&input["states"][0][layer]);
            assert_eq!(state.len() as u64, width);
            let largest = state.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
            for (value, expected) in floats(read).iter().zip(&state) {
                assert!((value - expected).abs() < 0.02 * largest, "layer {layer}: {value} instead of {expected}");
            }
        }
    }
    let mut errors = ErrorTable::default();
    let body = json!({"prompt": "a", "max_tokens": 1, "mods": ["read_layer_99"]});
    errors.add("a mod reads layer 99", &server.post("/v1/completions", &body).await);
    let fork = server.post(&format!("/api/v1/runs/{id}/forks"), &json!({"at": {"step": 3}})).await;
    errors.add("a fork of a run whose mod reads hidden states", &fork);
    for (case, body) in [
        ("no input", json!({})),
        ("a number", json!({"input": 1})),
        ("an unknown field", json!({"input": "a", "layer": 1})),
        ("no layers", json!({"input": "a", "layers": []})),
        ("layer 99", json!({"input": "a", "layers": [0, 99]})),
        ("layer -99", json!({"input": "a", "layers": [-99]})),
        ("tokens", json!({"input": "a", "tokens": "first"})),
        ("an empty input", json!({"input": ["a", []]})),
        ("too many values", json!({"input": vec!["a ".repeat(200); 400], "layers": [0, 1, 2, 3]})),
    ] {
        errors.add(case, &server.post(ROUTE, &body).await);
    }
    let refused = crate::harness::server().await.post(ROUTE, &json!({"input": "a"})).await;
    errors.add("a server without --embedding", &refused);
    insta::assert_snapshot!("hidden_state_errors", errors);
}

#[tokio::test]
async fn inputs_have_a_state_for_each_token_and_layer() {
    let server = start();
    server.wait_ready().await;
    let long = "The sky is blue. ".repeat(40);
    let request = json!({"input": ["Hello there", {"prompt_string": long}], "layers": [0, 1]});
    let answer = server.answer(ROUTE, &request).await;
    let width = answer["width"].as_u64().unwrap();
    let inputs = answer["inputs"].as_array().unwrap();
    let tokens: usize = inputs.iter().map(|input| input["tokens"].as_array().unwrap().len()).sum();
    assert_eq!(answer["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    for (index, input) in inputs.iter().enumerate() {
        let count = input["tokens"].as_array().unwrap().len();
        assert_eq!(input["shape"], json!([count, 2, width]), "input {index}");
        let states = input["states"].as_array().unwrap();
        assert!(states.len() == count && states.iter().all(|layers| layers.as_array().unwrap().len() == 2));
    }
    let encoded = json!({"input": "Hello there", "layers": [0, 1], "encoding_format": "base64"});
    let encoded = server.answer(ROUTE, &encoded).await["inputs"][0].clone();
    assert_eq!(encoded["shape"], inputs[0]["shape"]);
    let bytes = base64::engine::general_purpose::STANDARD.decode(encoded["states"].as_str().unwrap()).unwrap();
    let decoded = bytes.chunks_exact(4).map(|bytes| f64::from(f32::from_le_bytes(bytes.try_into().unwrap())));
    let nested: Vec<Vec<Vec<f64>>> = serde_json::from_value(inputs[0]["states"].clone()).unwrap();
    let flat: Vec<f64> = nested.into_iter().flatten().flatten().collect();
    assert_eq!(decoded.clone().count(), flat.len());
    // The other input shared the decode, which changes the rounding.
    let largest = flat.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    for (decoded, value) in decoded.zip(flat) {
        assert!((decoded - value).abs() < 0.01 * largest, "{decoded} instead of {value}");
    }
}
