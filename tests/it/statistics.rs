//! `/api/v1/stats` and the page `/stats`.

use super::harness::{ErrorTable, Server, folder};
use reqwest::Method;
use serde_json::{Value, json};

async fn get(server: &Server, key: &str, path: &str) -> (u16, String) {
    let response = server.request(Method::GET, path).bearer_auth(key).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn stats(server: &Server, key: &str, query: &str) -> Value {
    let (status, text) = get(server, key, &format!("/api/v1/stats{query}")).await;
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[tokio::test]
async fn statistics_count_the_runs_of_the_tenant() {
    let keys = folder().join("keys");
    std::fs::write(&keys, "ann-key name=ann\nbob-key name=bob\nadmin-key name=ops admin\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_ready().await;
    let mods = json!([{"name": "force-prefix", "config": {"text": "a"}}]);
    for (key, body) in [
        ("ann-key", json!({"prompt": "Hello", "max_tokens": 4, "ignore_eos": true})),
        ("ann-key", json!({"prompt": "Hello", "max_tokens": 5, "ignore_eos": true, "mods": mods})),
        ("bob-key", json!({"prompt": "Hello", "max_tokens": 3, "ignore_eos": true})),
    ] {
        let request = server.request(Method::POST, "/v1/completions").bearer_auth(key).json(&body);
        let answer: Value = request.send().await.unwrap().json().await.unwrap();
        let run_id = answer["thunder"]["run_id"].as_str().unwrap_or_else(|| panic!("{answer}"));
        loop {
            let (_, run) = get(&server, "admin-key", &format!("/api/v1/runs/{run_id}")).await;
            let run: Value = serde_json::from_str(&run).unwrap();
            if run["run"]["status"] == "done" {
                break;
            }
        }
    }
    let ann = stats(&server, "ann-key", "?days=2").await;
    assert_eq!((&ann["total"]["runs"], &ann["total"]["completion_tokens"]), (&json!(2), &json!(9)), "{ann}");
    assert_eq!(ann["total"]["finish_length"], 2);
    assert_eq!(ann["unit"], "hour");
    assert_eq!(ann["mods"][0]["mod"], "force-prefix");
    let compared = (&ann["mods"][0]["with"]["runs"], &ann["mods"][0]["without"]["completion_tokens"]);
    assert_eq!(compared, (&json!(1), &json!(4)));
    assert!(ann["mods"][0]["with"]["forced"].as_i64() > Some(0) && ann["mods"][0]["without"]["forced"] == 0, "{ann}");
    assert!(ann["total"]["tokens_per_second"].is_f64() && ann["total"]["first_token_ms_p95"].is_f64(), "{ann}");
    assert_eq!(stats(&server, "bob-key", "").await["total"]["completion_tokens"], 3);
    assert_eq!(stats(&server, "admin-key", "?unit=day").await["total"]["runs"], 3);
    assert_eq!(stats(&server, "ann-key", "?mod=force-prefix").await["total"]["runs"], 1);
    assert_eq!(stats(&server, "ann-key", "?model=absent").await["total"]["runs"], 0);
    assert_eq!(stats(&server, "ann-key", "?model=%00&mod=a%00b").await["total"]["runs"], 0);
    let calls = &ann["mod_calls"][0];
    assert_eq!(ann["mod_calls"].as_array().map(Vec::len), Some(1), "{ann}");
    assert!(calls["mod"] == "force-prefix" && calls["calls"].as_i64() >= Some(2), "{calls}");
    assert!(calls["total_ms"].as_f64() >= calls["max_ms"].as_f64() && calls["mean_ms"].as_f64() > Some(0.0), "{calls}");
    assert_eq!((&calls["steps"][0]["calls"], &calls["models"][0]["calls"]), (&calls["calls"], &calls["calls"]));
    assert_eq!(stats(&server, "bob-key", "").await["mod_calls"], json!([]));
    assert_eq!(stats(&server, "ann-key", "?mod=absent").await["mod_calls"], json!([]));
    let mut errors = ErrorTable::default();
    for query in ["?days=0", "?unit=week", "?x=1"] {
        let (status, text) = get(&server, "ann-key", &format!("/api/v1/stats{query}")).await;
        errors.add(query, &(status, serde_json::from_str(&text).unwrap()));
    }
    insta::assert_snapshot!("statistics_errors", errors);

    // The link of a bar leads to the bar's runs. The runs may have begun in two hours, or on two days.
    let (_, page) = get(&server, "ann-key", "/stats?days=2").await;
    let (runs, mod_calls) = page.split_once("<h2>Mod call time</h2>").unwrap();
    for (part, expected) in [(runs, 2), (mod_calls, 1)] {
        let mut found = Vec::new();
        let (_, chart) = part.split_once("<figure").unwrap();
        let (chart, _) = chart.split_once("</figure>").unwrap();
        for link in chart.split("<a href=\"").skip(1) {
            let link = link.split('"').next().unwrap().replace("&amp;", "&").replace("&#38;", "&");
            let (_, list) = get(&server, "ann-key", &format!("/api/v1{link}")).await;
            let list: Value = serde_json::from_str(&list).unwrap();
            let runs = list["runs"].as_array().unwrap_or_else(|| panic!("{link} {list}"));
            assert!(!runs.is_empty(), "{link} {list}");
            found.extend(runs.iter().map(|run| run["request_id"].clone()));
        }
        assert_eq!(found.len(), expected, "{found:?} {chart}");
    }
    let (_, empty) = get(&server, "ann-key", "/stats?days=1&model=absent").await;
    assert!(empty.contains("No run ended in this period"));
}
