//! `/slots` and `/metrics`.

use crate::harness::{Server, server};
use futures::StreamExt;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Maximum wait for a state while other tests use all cores.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

#[tokio::test]
async fn slots_report_state() {
    let server = Server::start(&["--parallel", "2"]);
    server.wait_ready().await;
    let (status, idle) = server.get("/slots").await;
    assert_eq!((status, idle.as_array().unwrap().len()), (200, 2));
    assert_eq!((&idle[0]["is_processing"], idle[0].get("params")), (&json!(false), None));
    let body = json!({"prompt": "Once", "n_predict": 4000, "ignore_eos": true, "stream": true, "temperature": 0.3});
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = server.request(Method::POST, "/completion").json(&body).send().await.unwrap().bytes_stream();
        stream.next().await.unwrap().unwrap();
        streams.push(stream);
    }
    // Slots are updated after each decode.
    let has_decoded = |slot: &Value| slot["next_token"][0]["n_decoded"].as_u64() > Some(0);
    let begun = Instant::now();
    let busy = loop {
        let (_, slots) = server.get("/slots").await;
        if slots.as_array().unwrap().iter().all(has_decoded) {
            break slots;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "not every slot has decoded: {slots}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    for slot in busy.as_array().unwrap() {
        assert_eq!(slot["is_processing"], true, "{slot}");
        assert_eq!(slot["params"]["temperature"], 0.3);
        assert_eq!(slot["next_token"][0]["has_next_token"], true);
        assert!(slot["n_prompt_tokens"].as_u64().unwrap() > 0);
        assert!(slot.get("prompt").is_none() && slot.get("generated").is_none());
    }
    assert_ne!(busy[0]["id_task"], busy[1]["id_task"]);
    let (status, full) = server.get("/slots?fail_on_no_slot=1").await;
    assert_eq!((status, &full["error"]["type"]), (503, &json!("unavailable_error")));
    drop(streams);
    let begun = Instant::now();
    loop {
        let (status, slots) = server.get("/slots?fail_on_no_slot=1").await;
        if status == 200 {
            let free = slots.as_array().unwrap().iter().find(|slot| slot["is_processing"] == false).unwrap();
            let processed = free["n_prompt_tokens_processed"].as_u64().unwrap();
            let cached = free["n_prompt_tokens_cache"].as_u64().unwrap();
            assert_eq!(free["n_prompt_tokens"], processed + cached, "{free}");
            return;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "the slots are still in use: {slots}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the value of a metric, which must have a help line and a type line.
fn metric(text: &str, name: &str) -> f64 {
    let lines: Vec<&str> = text.lines().collect();
    let at = lines
        .iter()
        .position(|line| line.starts_with(&format!("llamacpp:{name} ")))
        .unwrap_or_else(|| panic!("{name}:\n{text}"));
    assert!(lines[at - 2].starts_with(&format!("# HELP llamacpp:{name} ")));
    assert!(lines[at - 1].starts_with(&format!("# TYPE llamacpp:{name} ")));
    lines[at].rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn metrics_are_cumulative() {
    let server = Server::start(&[]);
    server.wait_ready().await;
    let scrape = async || {
        let response = server.request(Method::GET, "/metrics").send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200);
        assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4");
        assert!(response.headers().contains_key("process-start-time-unix"));
        response.text().await.unwrap()
    };
    assert!(metric(&scrape().await, "tokens_predicted_total") == 0.0);
    let body = json!({"prompt": "Once upon a time", "n_predict": 20, "ignore_eos": true});
    let answer = server.answer("/completion", &body).await;
    server.answer("/completion", &body).await;
    // The decode thread counts a run after its last token was sent.
    let begun = Instant::now();
    let text = loop {
        let text = scrape().await;
        if metric(&text, "tokens_predicted_total") == 40.0 && metric(&text, "requests_processing") == 0.0 {
            break text;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "{text}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let prompt = answer["tokens_evaluated"].as_f64().unwrap();
    let (decoded, cached) = (metric(&text, "prompt_tokens_total"), metric(&text, "prompt_tokens_cached_total"));
    assert_eq!(decoded + cached, 2.0 * prompt);
    assert!(cached > 0.0);
    assert!(metric(&text, "n_decode_total") >= 40.0);
    assert_eq!(metric(&text, "n_tokens_max"), prompt + 19.0);
    assert!(metric(&text, "tokens_predicted_seconds_total") > 0.0);
    let rate = metric(&text, "predicted_tokens_seconds");
    assert!(rate > 0.0);
    assert_eq!(metric(&scrape().await, "predicted_tokens_seconds"), rate, "every scraper gets the same values");
    assert_eq!((metric(&text, "requests_processing"), metric(&text, "requests_deferred")), (0.0, 0.0));
    assert_eq!(metric(&text, "n_busy_slots_per_decode"), 1.0);
    assert_eq!(text.lines().filter(|line| line.starts_with("llamacpp:")).count(), 15);
}

#[tokio::test]
async fn errors_have_format_of_path() {
    let server = server().await;
    for path in ["/health", "/v1/health"] {
        let (status, health) = server.get(path).await;
        assert_eq!((status, health["status"].as_str()), (200, Some("ok")));
    }
    let (status, answer): (u16, Value) = server.get("/slots/nowhere/at/all").await;
    assert_eq!(
        (status, &answer["error"]["type"], &answer["error"]["code"]),
        (404, &json!("not_found_error"), &json!(404))
    );
    let (status, answer) = server.get("/nowhere").await;
    assert_eq!((status, &answer["error"]["type"]), (404, &json!("not_found_error")));
    let (status, answer) = server.get("/api/v1/nowhere").await;
    assert_eq!((status, &answer["type"]), (404, &json!("/problems/not-found")));
    let (status, answer) = server.get("/completion").await;
    assert_eq!((status, &answer["error"]["type"]), (405, &json!("invalid_request_error")));
}
