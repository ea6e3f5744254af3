//! Recorded attention over the native routes: by step, by position, as a map, and of single heads.

use super::generate;
use crate::harness::{ErrorTable, Server};
use serde_json::{Value, json};
use std::sync::LazyLock;

async fn server_with_attention() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start(&["--attention", "on"]));
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

#[tokio::test]
async fn attention_at_one_position_is_exact_for_every_step_and_view() {
    // More steps than a map shows, and more events than one request reads.
    const STEPS: usize = 1100;
    let server = server_with_attention().await;
    let run = generate(server, json!({"attention": true, "max_tokens": STEPS, "ignore_eos": true})).await;
    let path = format!("/api/v1/runs/{}/attention", run["run"]["run_id"].as_str().unwrap());
    let (_, first) = server.get(&format!("{path}?at=1")).await;
    let layer = &first["attention"]["layer_ids"][0];
    let position = 2;
    for view in ["view=mean".to_owned(), "view=max".to_owned(), format!("view=layer&layer={layer}")] {
        let (mut rows, mut from, mut requests) = (Vec::new(), json!(0), 0);
        while !from.is_null() {
            let (status, column) = server.get(&format!("{path}?from={from}&position={position}&{view}")).await;
            assert_eq!(status, 200, "{column}");
            rows.extend(column["attention"]["rows"].as_array().unwrap().clone());
            from = column["attention"]["next"].clone();
            requests += 1;
        }
        assert!(requests > 1, "{requests}");
        assert_eq!(rows.len(), STEPS, "{view}");
        for row in [&rows[0], &rows[1], &rows[STEPS / 2], &rows[STEPS - 1]] {
            let (_, step) = server.get(&format!("{path}?at={}&{view}", row["sequence_order"])).await;
            assert_eq!(step["attention"]["sequence_order"], row["sequence_order"]);
            assert_eq!(step["attention"]["values"][position], row["value"], "{view} {row}");
        }
    }
    assert_eq!(server.get(&format!("{path}?from=0&position=0&view=layer&layer=99")).await.0, 400);
    let (status, beyond) = server.get(&format!("{path}?from=0&to=9&position=100000")).await;
    assert_eq!((status, &beyond["attention"]["rows"]), (200, &json!([])));
}

#[tokio::test]
async fn attention_is_returned_per_step_and_as_map() {
    let server = server_with_attention().await;
    let run = generate(server, json!({"attention": true})).await;
    assert_eq!(run["run"]["has_attention"], true);
    let path = format!("/api/v1/runs/{}/attention", run["run"]["run_id"].as_str().unwrap());
    let (status, step) = server.get(&format!("{path}?at=3")).await;
    assert_eq!(status, 200, "{step}");
    let step = &step["attention"];
    let (layers, heads) = (step["layer_ids"].as_array().unwrap(), step["heads"].as_u64().unwrap());
    let values: Vec<f64> = serde_json::from_value(step["values"].clone()).unwrap();
    assert_eq!((values.len() as u64, &step["sequence_order"]), (step["row_len"].as_u64().unwrap(), &json!(1)));
    assert!((values.iter().sum::<f64>() - 1.0).abs() < 0.02, "{values:?}");
    assert_eq!(step["stats"].as_array().unwrap().len() as u64, layers.len() as u64 * heads);
    assert_eq!(step["quality"], "f16");
    for layer in layers {
        let (status, row) = server.get(&format!("{path}?at=1&view=layer&layer={layer}")).await;
        assert_eq!((status, &row["attention"]["quality"]), (200, &json!("u8")));
        let values: Vec<f64> = serde_json::from_value(row["attention"]["values"].clone()).unwrap();
        assert!((values.iter().sum::<f64>() - 1.0).abs() < 0.05, "{values:?}");
    }
    assert_eq!(server.get(&format!("{path}?at=1&view=layer&layer=99")).await.0, 400);
    let (status, weighted) = server.get(&format!("{path}?at=1&view=weighted_layers")).await;
    assert_eq!((status, &weighted["attention"]["quality"]), (200, &json!("u8")), "{weighted}");
    let mut expected = vec![0.0; values.len()];
    let mut total = 0.0;
    for (index, layer) in layers.iter().enumerate() {
        let weight = 0.5 + index as f64 / layers.len() as f64;
        total += weight;
        let (_, row) = server.get(&format!("{path}?at=1&view=layer&layer={layer}")).await;
        for (sum, value) in expected.iter_mut().zip(row["attention"]["values"].as_array().unwrap()) {
            *sum += weight * value.as_f64().unwrap();
        }
    }
    let weighted: Vec<f64> = serde_json::from_value(weighted["attention"]["values"].clone()).unwrap();
    assert_eq!(weighted.len(), expected.len());
    for (value, expected) in weighted.iter().zip(expected) {
        assert!((value - expected / total).abs() < 1e-6, "{value} and {}", expected / total);
    }
    let (status, map) = server.get(&format!("{path}?from=0&view=weighted_layers")).await;
    assert_eq!((status, &map["attention"]["quality"]), (200, &json!("u8")), "{map}");

    let (status, map) = server.get(&format!("{path}?from=0&bins=4")).await;
    assert_eq!(status, 200, "{map}");
    let map = &map["attention"];
    let rows = map["rows"].as_array().unwrap();
    assert_eq!((rows.len(), &map["bins"], &map["sampled"]), (8, &json!(4), &json!(false)));
    assert_eq!(rows.last().unwrap()["values"].as_array().unwrap().len(), 4);
    assert_eq!(server.get(&format!("{path}?from=1000")).await.0, 404);
}

#[tokio::test]
async fn selected_heads_are_stored_and_read_by_step_and_by_position() {
    let server = server_with_attention().await;
    let heads = json!([[3, 0], [1, 2]]);
    let run = generate(server, json!({"attention": {"heads": heads}})).await;
    let id = run["run"]["run_id"].as_str().unwrap();
    let path = format!("/api/v1/runs/{id}/attention");
    let (status, step) = server.get(&format!("{path}?at=4&view=head&layer=1&head=2")).await;
    assert_eq!(status, 200, "{step}");
    let step = &step["attention"];
    assert_eq!((&step["quality"], &step["stored_heads"]), (&json!("f16"), &json!([[1, 2], [3, 0]])));
    let values: Vec<f64> = serde_json::from_value(step["values"].clone()).unwrap();
    assert!((values.iter().sum::<f64>() - 1.0).abs() < 0.01, "{values:?}");
    let measures =
        step["stats"].as_array().unwrap().iter().find(|stat| stat["layer"] == 1 && stat["head"] == 2).unwrap();
    let peak = measures["peak_position"].as_u64().unwrap() as usize;
    assert_eq!(values.iter().copied().fold(0.0, f64::max), values[peak], "{measures}");
    assert_eq!(step["values"][peak], measures["peak"]);

    // The value of each step at a position equals the value in the row of that step.
    for (layer, head) in [(1, 2), (3, 0)] {
        let view = format!("view=head&layer={layer}&head={head}");
        let (status, column) = server.get(&format!("{path}?from=0&position=2&{view}")).await;
        assert_eq!(status, 200, "{column}");
        let rows = column["attention"]["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 8, "{column}");
        for row in rows {
            let (_, step) = server.get(&format!("{path}?at={}&{view}", row["sequence_order"])).await;
            assert_eq!(step["attention"]["values"][2], row["value"]);
        }
    }
    let mut errors = ErrorTable::default();
    for query in [
        "at=4&view=head&layer=0&head=0",
        "from=0&position=2&view=head&layer=0&head=0",
        "at=4&view=head&layer=1",
        "from=0&view=head&layer=1&head=2",
    ] {
        errors.add(query, &server.get(&format!("{path}?{query}")).await);
    }
    insta::assert_snapshot!("attention_of_heads_errors", errors);

    // The selection is recorded, and a fork stores the same heads.
    let (_, prefilled) = server.get(&format!("/api/v1/runs/{id}/events?from=0&to=1")).await;
    assert_eq!(prefilled["details"]["prompt"]["parameters"]["attention_heads"], json!([[1, 2], [3, 0]]));
    let fork = json!({"at": {"step": 4}});
    let (status, forks) = server.post(&format!("/api/v1/runs/{id}/forks"), &fork).await;
    assert_eq!(status, 201, "{forks}");
    let fork = forks["runs"][0]["run_id"].as_str().unwrap();
    let run = server.finished(fork).await;
    let last = run["run"]["events"].as_u64().unwrap() - 1;
    let (_, step) = server.get(&format!("/api/v1/runs/{fork}/attention?at={last}")).await;
    assert_eq!(step["attention"]["stored_heads"], json!([[1, 2], [3, 0]]), "{step}");
}

#[tokio::test]
async fn invalid_heads_are_rejected_before_the_run() {
    let server = server_with_attention().await;
    let rejection = async |attention: Value| {
        let body = json!({"prompt": "Hello", "max_tokens": 4, "attention": attention});
        let (status, error) = server.post("/v1/completions", &body).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!("attention.heads")), "{error}");
        error["error"]["message"].as_str().unwrap().to_owned()
    };
    let unknown = rejection(json!({"heads": [[0, 1], [7, 1]]})).await;
    assert_eq!(unknown, "layer 7, head 1 does not exist; heads are 0 to 3, and layers with attention are [0, 1, 2, 3]");
    assert_eq!(
        rejection(json!({"heads": [[0]]})).await,
        "`attention.heads` must be \"all\" or a list of 1 to 4096 pairs [layer, head], got [[0]]"
    );
}
