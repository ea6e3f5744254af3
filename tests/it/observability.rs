//! Metrics, access log and request ids.

use super::harness::postgres::TestDatabase;
use super::harness::{Server, folder, output_of, server, text, thunder};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time until something is logged, counted or stored while other tests use all cores.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

async fn scrape(server: &Server) -> String {
    let response = server.request(Method::GET, "/metrics").send().await.unwrap();
    let status = response.status();
    let text = response.text().await.unwrap();
    assert_eq!(status, 200, "{text}");
    text
}

/// Returns the samples by name with labels.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').map(|(name, value)| (name, value.parse().unwrap())).unwrap()).collect()
}

/// Waits until the server has logged a number of requests; returns their fields.
async fn access_log(server: &Server, count: usize) -> Vec<Value> {
    let begun = Instant::now();
    loop {
        let log = server.log();
        let complete = log.rsplit_once('\n').map_or("", |(complete, _)| complete);
        let lines = complete.lines().filter(|line| line.starts_with('{'));
        let lines = lines.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")));
        let found: Vec<Value> =
            lines.filter(|line: &Value| line["target"] == "thunder::access" && line["status"] != 503).collect();
        if found.len() >= count {
            return found;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "{log}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn metrics_count_requests_runs_and_mod_calls() {
    let server = Server::start(&[]);
    server.wait_ready().await;
    let body =
        json!({"prompt": "Once upon", "n_predict": 12, "ignore_eos": true, "mods": ["log-top"], "attention": true});
    for _ in 0..2 {
        server.answer("/completion", &body).await;
    }
    let streamed = server.stream("/completion", &json!({"prompt": "Once", "n_predict": 4, "stream": true})).await;
    assert!(!streamed.is_empty());
    let (status, _) = server.post("/completion", &json!({"prompt": "Once", "n_predict": "many"})).await;
    assert_eq!(status, 400);
    let (status, _) = server.get("/nowhere").await;
    assert_eq!(status, 404);
    let begun = Instant::now();
    let text = loop {
        let text = scrape(&server).await;
        let found = samples(&text);
        let requests = found.get("thunder_http_request_duration_seconds_count{route=\"/completion\",method=\"POST\"}");
        if requests == Some(&4.0)
            && found["thunder_time_per_output_token_seconds_count"] == 3.0
            && found["thunder_recorder_lag_seconds_count"] > 0.0
        {
            break text;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "{text}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let found = samples(&text);
    for (name, expected) in [
        ("thunder_queue_time_seconds_count", 3.0),
        ("thunder_time_to_first_token_seconds_count", 3.0),
        ("thunder_http_requests_total{route=\"/completion\",method=\"POST\",status=\"200\"}", 3.0),
        ("thunder_http_requests_total{route=\"/completion\",method=\"POST\",status=\"400\"}", 1.0),
        ("thunder_http_requests_total{route=\"other\",method=\"GET\",status=\"404\"}", 1.0),
        ("thunder_mod_call_failures_total{mod=\"log-top\"}", 0.0),
        ("thunder_spool_bytes", 0.0),
        ("thunder_database_errors_total{kind=\"unavailable\"}", 0.0),
        ("thunder_database_errors_total{kind=\"refused\"}", 0.0),
    ] {
        assert_eq!(found.get(name), Some(&expected), "{name}\n{text}");
    }
    // The mod is called for each of the 12 forward passes of two runs.
    assert_eq!(found["thunder_mod_call_duration_seconds_count{mod=\"log-top\"}"], 24.0, "{text}");
    assert!(found["thunder_recorded_attention_bytes_total"] > 0.0, "{text}");
    let first_token_seconds = found["thunder_time_to_first_token_seconds_sum"];
    assert!(first_token_seconds > found["thunder_queue_time_seconds_sum"], "{text}");
    for (bucket, count) in found.iter().filter(|(name, _)| name.contains("le=\"+Inf\"")) {
        let total = bucket.replace("_bucket{", "_count{").replace(",le=\"+Inf\"", "").replace("{le=\"+Inf\"}", "");
        assert_eq!(found.get(total.as_str()), Some(count), "{bucket}");
    }
    promtool(&["check", "metrics"], &text);
}

/// Checks the input with `promtool` of Prometheus if it is installed.
fn promtool(arguments: &[&str], input: &str) {
    let Ok(mut child) = Command::new("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
    else {
        eprintln!("promtool is not installed");
        return;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    // Exit code 3 reports names that differ from Prometheus' conventions, such as those of llama-server.
    let printed = String::from_utf8_lossy(&output.stderr);
    let problems =
        printed.lines().filter(|line| !line.starts_with("llamacpp:") && !line.is_empty()).collect::<Vec<_>>();
    assert!(problems.is_empty() && matches!(output.status.code(), Some(0 | 3)), "{printed}");
}

#[tokio::test]
async fn metrics_are_on_by_default_on_loopback_addresses_only() {
    let (status, _) = server().await.get("/metrics").await;
    assert_eq!(status, 200);
    let public = Server::start(&["--listen", "0.0.0.0:0", "--api-key", "secret"]);
    public.wait_ready().await;
    let (status, error) = public.get("/metrics").await;
    assert_eq!((status, error["error"]["code"].as_u64()), (501, Some(501)), "{error}");
}

#[tokio::test]
async fn access_log_has_a_json_line_per_request() {
    let server = Server::start(&["--log-format", "json", "--api-key", "secret"]);
    server.wait_ready().await;
    let completion = json!({"prompt": "Once", "max_tokens": 3, "stream": true});
    let request = server.request(Method::POST, "/v1/completions").header("x-request-id", "from-the-client/1");
    let response = request.json(&completion).send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "from-the-client/1");
    let run_id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    assert!(response.text().await.unwrap().contains("[DONE]"));
    let run = server.request(Method::GET, &format!("/api/v1/runs/{run_id}")).send().await.unwrap();
    assert_eq!(run.status(), 200);
    let assigned_id = run.headers()["x-request-id"].to_str().unwrap().to_owned();
    drop(run.bytes().await.unwrap());
    let log = access_log(&server, 2).await;
    assert_eq!(log.len(), 2, "{log:?}");
    let fields = ["method", "route", "status", "key", "run_id", "request_id", "complete"];
    let selected = |line: &Value| fields.map(|field| line[field].clone());
    let key = log[0]["key"].clone();
    assert!(key.as_str().is_some_and(|label| !label.is_empty() && !label.contains("secret")), "{key}");
    assert_eq!(
        selected(&log[0]),
        [
            json!("POST"),
            json!("/v1/completions"),
            json!(200),
            key.clone(),
            json!(run_id),
            json!("from-the-client/1"),
            json!(true)
        ]
    );
    assert_eq!(
        selected(&log[1]),
        [json!("GET"), json!("/api/v1/runs/{id}"), json!(200), key, Value::Null, json!(assigned_id), json!(true)]
    );
    let text = server.log();
    let complete = text.rsplit_once('\n').unwrap().0;
    assert!(complete.lines().all(|line| line.starts_with('{')), "standard error has only JSON lines: {complete}");
    assert!(
        complete.contains(&format!("\"message\":\"ready, dashboard and APIs are on {}\"", server.base)),
        "{complete}"
    );
    for line in &log {
        assert_eq!((&line["level"], &line["message"]), (&json!("INFO"), &json!("request")), "{line}");
        assert!(line["elapsed_ms"].as_f64().unwrap() > 0.0 && line["timestamp"].is_string(), "{line}");
    }
    // The run is found by the id that the client sent.
    server.finished(&run_id).await;
    let (_, found) = server.get("/api/v1/runs?q=metadata.x-request-id:from-the-client/1").await;
    assert_eq!(found["runs"][0]["run_id"], json!(run_id), "{found}");
    let run = server.get(&format!("/api/v1/runs/{run_id}")).await.1;
    let rerun = json!({"prompt": run["events"][0]["details"]["prompt"]});
    let rerun = server.answer("/api/v1/reruns", &rerun).await["run_id"].clone();
    let fork = server.post(&format!("/api/v1/runs/{run_id}/forks"), &json!({"at": {"step": 1}})).await.1;
    let forked = fork["runs"][0]["run_id"].clone();
    let routes = [("/api/v1/reruns", rerun), ("/api/v1/runs/{id}/forks", forked)];
    let begun = Instant::now();
    for (route, run_id) in routes {
        let line = loop {
            let log = access_log(&server, 3).await;
            if let Some(line) = log.into_iter().find(|line| line["route"] == route) {
                break line;
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{}", server.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert!(run_id.is_string() && line["run_id"] == run_id, "{line}");
    }
}

#[tokio::test]
async fn disconnected_stream_is_logged_as_incomplete() {
    let server = Server::start(&["--log-format", "json"]);
    server.wait_ready().await;
    let body = json!({"prompt": "Once", "n_predict": 4000, "ignore_eos": true, "stream": true});
    let mut stream = server.sse("/completion", &body).await;
    stream.next().await.unwrap();
    drop(stream);
    let log = access_log(&server, 1).await;
    assert_eq!((&log[0]["route"], &log[0]["complete"]), (&json!("/completion"), &json!(false)), "{log:?}");
    // A client that disconnects before the response.
    let body = json!({"prompt": "Once", "n_predict": 4000, "ignore_eos": true, "request_id": "no-response"});
    let request = tokio::spawn(server.request(Method::POST, "/completion").json(&body).send());
    let begun = Instant::now();
    while server.get("/api/v1/runs/no-response").await.0 != 200 {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "the run does not start");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let run_id = server.get("/api/v1/runs/no-response").await.1["run"]["run_id"].clone();
    request.abort();
    let cancelled = loop {
        let log = access_log(&server, 1).await;
        if let Some(line) = log.into_iter().find(|line| line["status"] == 499) {
            break line;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "{}", server.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(cancelled["run_id"], run_id, "{cancelled}");
    assert!(run_id.is_string());
}

#[tokio::test]
async fn access_log_can_be_turned_off() {
    let server = Server::start(&["--log-format", "json", "--log", "info,thunder::access=off"]);
    server.wait_ready().await;
    server.get("/props").await;
    server.stop("TERM").await;
    let log = server.log();
    assert!(log.contains("context created") && !log.contains("thunder::access"), "{log}");
    assert!(!log.contains("\"llama-cpp-2\"") && !log.contains("\"refinery_core"), "{log}");
}

/// The database server answers, and has no database of this name.
#[tokio::test]
async fn error_that_ends_the_start_is_an_event_of_the_log() {
    let folder = folder();
    let (file, url) = (folder.join("thunder.log"), TestDatabase::empty().url());
    let url = format!("{}/missing", url.rsplit_once('/').unwrap().0);
    let run = async |name: &[&str], arguments: &[&str]| {
        let mut command = thunder();
        command.args(name).args(["--database-url", &url, "--data-dir"]).arg(&folder).args(arguments);
        let output = output_of(command).await;
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    let serve = async |arguments: &[&str]| run(&["serve", "--no-model", "--port", "0"], arguments).await;
    let reason = "rejected the connection: database \"missing\" does not exist";
    let expect_error = |lines: &str| {
        let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let last = events.last().unwrap();
        let message = last["message"].as_str().unwrap();
        assert!(message.starts_with("the database at ") && message.ends_with(reason), "{message}");
        assert_eq!(last["level"], "ERROR");
        assert!(events.iter().any(|event| event["message"].as_str().unwrap().starts_with("listening on http://")));
    };
    let expect_plain_lines = |printed: &str| {
        let is_plain = printed.lines().all(|line| line.starts_with("thunder: "));
        assert!(is_plain && printed.ends_with(&format!("{reason}\n")), "{printed}");
    };
    expect_error(&serve(&["--log-format", "json"]).await);
    expect_plain_lines(&serve(&["--log-format", "json", "--log-file", file.to_str().unwrap()]).await);
    expect_error(&std::fs::read_to_string(&file).unwrap());
    // The filter hides the event with the address, but not the address.
    let printed = serve(&["--log-format", "json", "--log", "warn"]).await;
    let (plain, events): (Vec<&str>, Vec<&str>) = printed.lines().partition(|line| line.starts_with("thunder: "));
    assert!(plain[0].starts_with("thunder: listening on http://"), "{printed}");
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert!(last["message"].as_str().unwrap().ends_with(reason), "{printed}");
    // Only the server reports errors as events.
    expect_plain_lines(&run(&["db", "status"], &["--log-format", "json"]).await);
    let printed = serve(&[]).await;
    assert_eq!(printed.matches(reason).count(), 1, "{printed}");
}

#[tokio::test]
async fn errors_have_a_request_id() {
    let server = server().await;
    for (method, path) in [(Method::GET, "/nowhere"), (Method::PUT, "/completion"), (Method::POST, "/v1/messages")] {
        let request = server.request(method.clone(), path).header("x-request-id", "err-1");
        let response = request.body("{").send().await.unwrap();
        assert!(response.status().is_client_error(), "{method} {path}");
        assert_eq!(response.headers()["x-request-id"], "err-1", "{method} {path}");
    }
    for invalid in ["", "two words", &"x".repeat(129)] {
        let request = server.request(Method::GET, "/nowhere").header("x-request-id", invalid);
        let response = request.send().await.unwrap();
        let id = response.headers()["x-request-id"].to_str().unwrap();
        assert!(id != invalid && id.len() == 36, "{invalid:?}: {id}");
    }
}

#[tokio::test]
async fn dashboard_for_grafana_queries_existing_metrics() {
    let text = include_str!("../examples/grafana.json");
    let dashboard: Value = serde_json::from_str(text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let expressions: Vec<&str> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
    assert!(expressions.len() >= panels.len() && panels.len() >= 10, "{} panels", panels.len());
    let server = server().await;
    let body = json!({"prompt": "Once", "n_predict": 2, "mods": ["log-top"]});
    server.answer("/completion", &body).await;
    let metrics = scrape(server).await;
    let existing: BTreeSet<&str> = samples(&metrics).keys().map(|name| name.split('{').next().unwrap()).collect();
    let is_name = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | ':');
    for expression in &expressions {
        let words = expression.split(|character| !is_name(character));
        let names: Vec<&str> =
            words.filter(|word| word.starts_with("thunder_") || word.starts_with("llamacpp:")).collect();
        assert!(!names.is_empty(), "{expression}");
        for name in names {
            assert!(existing.contains(name), "{name} in {expression}\n{metrics}");
        }
    }
    // Prometheus parses every expression as a recording rule.
    let rules: Vec<Value> = expressions
        .iter()
        .enumerate()
        .map(|(index, expression)| {
            let expression = expression.replace("$__rate_interval", "1m");
            json!({"record": format!("panel:{index}"), "expr": expression})
        })
        .collect();
    let folder = folder();
    let file = folder.join("rules.yml");
    std::fs::write(&file, json!({"groups": [{"name": "panels", "rules": rules}]}).to_string()).unwrap();
    promtool(&["check", "rules", file.to_str().unwrap()], "");
}
