//! `/api/v1/experiments` on the real server.

use super::harness::{Server, folder, server, thunder};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::time::Duration;

const ROUTE: &str = "/api/v1/experiments";

/// Two prompts, with and without a mod, two seeds. Answers with the mod begin with `{}`.
fn grid() -> Value {
    json!({
        "name": "greetings",
        "prompts": ["Hello", "The sky"],
        "seeds": [1, 2],
        "mods": [[], [{"name": "force-prefix", "config": {"text": "{} "}}]],
        "parameters": [{"max_tokens": 6, "temperature": 1.0}],
        "score": {"regex": "^\\{\\}"},
    })
}

async fn start(server: &Server, definition: &Value) -> String {
    let (status, experiment) = server.post(ROUTE, definition).await;
    assert_eq!(status, 201, "{experiment}");
    assert_eq!(experiment["name"], definition["name"]);
    experiment["experiment_id"].as_str().unwrap().to_owned()
}

/// Waits until an experiment has a state, and returns it.
async fn wait_for_state(server: &Server, id: &str, state: &str) -> Value {
    for _ in 0..2400 {
        let (status, experiment) = server.get(&format!("{ROUTE}/{id}")).await;
        assert_eq!(status, 200, "{experiment}");
        if experiment["state"] == state {
            return experiment;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("the experiment does not become {state}")
}

/// Returns the values of a field of all cells.
fn column<'a>(experiment: &'a Value, field: &str) -> Vec<&'a Value> {
    experiment["grid"].as_array().unwrap().iter().map(|cell| &cell[field]).collect()
}

async fn action(server: &Server, id: &str, action: &str) -> (u16, Value) {
    server.post(&format!("{ROUTE}/{id}/{action}"), &json!({})).await
}

#[tokio::test]
async fn grid_is_run_scored_and_found() {
    let server = server().await;
    let id = start(server, &grid()).await;
    let done = wait_for_state(server, &id, "done").await;
    assert_eq!((&done["cells"], &done["next"]), (&json!(8), &Value::Null));
    assert_eq!(column(&done, "state"), [&json!("done"); 8]);
    assert_eq!(column(&done, "cell"), (0..8).map(Value::from).collect::<Vec<_>>().iter().collect::<Vec<_>>());
    for cell in done["grid"].as_array().unwrap() {
        let has_mod = cell["mods"] == 1;
        assert_eq!(cell["score"], f64::from(u8::from(has_mod)), "{cell}");
        assert_eq!(cell["output_preview"].as_str().unwrap().starts_with("{}"), has_mod, "{cell}");
        assert!(cell["completion_tokens"].as_i64().unwrap() > 0, "{cell}");
        assert!(cell["mean_logprob"].as_f64().unwrap() < 0.0, "{cell}");
        let (_, run) = server.get(&format!("/api/v1/runs/{}", cell["run_id"].as_str().unwrap())).await;
        assert_eq!(run["run"]["seed"], cell["seed"]);
        assert_eq!(run["run"]["metadata"], json!({"experiment": id, "cell": cell["cell"].to_string()}));
    }
    let (_, list) = server.get(&format!("/api/v1/runs?q=experiment:{id}")).await;
    assert_eq!(list["runs"].as_array().unwrap().len(), 8);

    // Equal seeds give equal answers.
    let again = wait_for_state(server, &start(server, &grid()).await, "done").await;
    assert_eq!(column(&again, "output_preview"), column(&done, "output_preview"));
    assert_ne!(column(&again, "run_id"), column(&done, "run_id"));
    assert_ne!(done["grid"][0]["output_preview"], done["grid"][1]["output_preview"]);

    let counts = &done["summary"]["counts"];
    assert_eq!((&counts["done"], &counts["pending"], &counts["failed"]), (&json!(8), &json!(0), &json!(0)));
    let variants: Vec<_> =
        done["summary"]["variants"].as_array().unwrap().iter().map(|one| (&one["mods"], &one["mean_score"])).collect();
    assert_eq!(variants, [(&json!(0), &json!(0.0)), (&json!(1), &json!(1.0))]);
    assert_eq!((&done["ended"], &done["mean_score"]), (&json!(8), &json!(0.5)));

    let response = server.request(Method::GET, &format!("{ROUTE}/{id}/cells.csv")).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/csv; charset=utf-8");
    let csv = response.text().await.unwrap();
    let lines: Vec<&str> = csv.split("\r\n").collect();
    assert_eq!((lines.len(), lines[9]), (10, ""), "{csv}");
    assert_eq!(
        lines[0],
        "cell,prompt,mods,parameters,seed,state,run_id,finish_reason,completion_tokens,mean_logprob,score,output,error,score_error"
    );
    let run = done["grid"][2]["run_id"].as_str().unwrap();
    let row = format!(
        "2,Hello,\"[{{\"\"name\"\":\"\"force-prefix\"\",\"\"config\"\":{{\"\"text\"\":\"\"{{}} \"\"}}}}]\",\"{{\"\"max_tokens\"\":6,\"\"temperature\"\":1.0}}\",1,done,{run},"
    );
    assert!(lines[3].starts_with(&row), "{csv}\n{row}");

    let score = async |cell: i32, body: Value| {
        let path = format!("{ROUTE}/{id}/cells/{cell}");
        server.request(Method::PUT, &path).json(&body).send().await.unwrap().status().as_u16()
    };
    assert_eq!(score(0, json!({"score": 0.25})).await, 204);
    assert_eq!(score(1, json!({"score": null})).await, 204);
    assert_eq!((score(0, json!({"score": 1.5})).await, score(8, json!({"score": 1})).await), (400, 404));
    let (_, scored) = server.get(&format!("{ROUTE}/{id}")).await;
    assert_eq!(column(&scored, "score")[..2], [&json!(0.25), &Value::Null]);
    assert_eq!(scored["summary"]["variants"][0]["mean_score"], json!(0.25 / 3.0));

    for name in ["cancel", "resume"] {
        assert_eq!(action(server, &id, name).await.0, 409, "{name}");
    }
    let (_, list) = server.get(ROUTE).await;
    assert!(list["experiments"].as_array().unwrap().iter().any(|one| one["experiment_id"] == id && one["cells"] == 8));
    let removed = server.request(Method::DELETE, &format!("{ROUTE}/{id}")).send().await.unwrap();
    assert_eq!(removed.status(), 204);
    assert_eq!(server.get(&format!("{ROUTE}/{id}")).await.0, 404);
    let (_, list) = server.get(&format!("/api/v1/runs?q=experiment:{id}")).await;
    assert_eq!(list["runs"].as_array().unwrap().len(), 8, "the runs remain");
}

/// Returns 0.5. For some seeds it fails, hangs, or returns no number.
const SCORER: &str = "import time

def score(text, cell):
    print(cell['run_id'])
    if cell['seed'] == 2:
        raise ValueError('bad \x1b answer')
    if cell['seed'] == 3:
        time.sleep(60)
    if cell['seed'] == 4:
        return None
    if cell['seed'] == 5:
        return 'high'
    assert cell['prompt'] == 'Hello' and cell['mods'] == [] and cell['parameters']['max_tokens'] == 6
    assert cell['finish_reason'] == 'length' and cell['completion_tokens'] == 6 and text
    return 0.5
";

#[tokio::test]
async fn python_scores_answers_and_errors_are_kept_per_cell() {
    let process = Server::start(&["--mod-key", "boss", "--allow-mod-upload", "--mod-timeout", "4000"]);
    let server = Server::external(process.wait_ready().await.base.clone(), Some("boss"));
    let definition = json!({
        "name": "python", "prompts": ["Hello"], "seeds": [1, 2, 3, 4, 5, 6],
        "parameters": [{"max_tokens": 6, "ignore_eos": true}], "score": {"python": SCORER},
    });
    let id = start(&server, &definition).await;
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), [&json!("done"); 6], "the runs themselves are done");
    assert_eq!(column(&done, "error"), [&Value::Null; 6]);
    let half = json!(0.5);
    assert_eq!(column(&done, "score"), [&half, &Value::Null, &Value::Null, &Value::Null, &Value::Null, &half]);
    let errors: Vec<&str> =
        column(&done, "score_error").into_iter().map(|error| error.as_str().unwrap_or_default()).collect();
    assert_eq!((errors[0], errors[3], errors[5]), ("", "", ""), "{errors:?}");
    assert_eq!(errors[1], "ValueError: bad \u{1b} answer (line 6)");
    assert!(errors[2].starts_with("deadline of 4000 ms exceeded (line "), "{errors:?}");
    assert!(errors[4].contains("score must return a number from 0 to 1, a bool or None, got 'high'"), "{errors:?}");
    assert_eq!(done["summary"]["variants"][0]["mean_score"], json!(0.5));
    let page = server.request(Method::GET, &format!("/experiments/{id}")).send().await.unwrap().text().await.unwrap();
    assert!(page.contains("Not scored: ValueError: bad") && page.contains("score: python"), "{page}");

    // A score given by hand replaces the error.
    let path = format!("{ROUTE}/{id}/cells/1");
    let scored = server.request(Method::PUT, &path).json(&json!({"score": 1})).send().await.unwrap();
    assert_eq!(scored.status(), 204);
    let (_, changed) = server.get(&format!("{ROUTE}/{id}")).await;
    assert_eq!((&changed["grid"][1]["score"], &changed["grid"][1]["score_error"]), (&json!(1.0), &Value::Null));

    for (source, expected) in [
        ("def score(text):", "`score.python`: IndentationError: expected an indented block"),
        ("def rate(text): return 1", "has no function 'score'; define `def score(text):`"),
        ("def score(a, b, c): return 1", "score must take (text) or (text, cell), but it takes (a, b, c)"),
        ("1 / 0\ndef score(text): return 1", "ZeroDivisionError: division by zero (line 1)"),
    ] {
        let definition = json!({"name": "x", "prompts": ["a"], "seeds": [1], "score": {"python": source}});
        let (status, problem) = server.post(ROUTE, &definition).await;
        let detail = problem["detail"].as_str().unwrap();
        assert!(status == 400 && detail.contains(expected), "{source}: {problem}");
        assert_eq!(problem["pointer"], "score.python");
    }
    let (code, out, err) = command(
        &server,
        "prompts = [\"Hello\"]\nseeds = [1, 2]\nparameters = [{ max_tokens = 2 }]\nscore.python = '''\ndef score(text, cell):\n    return 1 / (cell[\"seed\"] - 1)\n'''\n",
        &["--api-key", "boss"],
    )
    .await;
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(err.contains("thunder: cell 1 could not be scored: ZeroDivisionError: division by zero (line 2)"), "{err}");
    assert!(err.contains("2 cells: 2 done; mean score 1.00"), "{err}");
}

#[tokio::test]
async fn python_scorer_needs_the_right_to_upload_mods() {
    let keys = folder().join("keys.txt");
    std::fs::write(&keys, "ann-key name=ann\nmod-key name=ann mods\n").unwrap();
    let score = json!({"python": "score = len"});
    let definition =
        json!({"name": "x", "prompts": ["a"], "seeds": [1], "parameters": [{"max_tokens": 1}], "score": score});
    let with_keys = ["--api-key-file", keys.to_str().unwrap(), "--allow-mod-upload"];
    for (flags, key, status) in
        [(&with_keys[..], "ann-key", 403), (&with_keys, "mod-key", 201), (&with_keys[..2], "mod-key", 403)]
    {
        let process = Server::start(flags);
        let server = Server::external(process.wait_ready().await.base.clone(), Some(key));
        let (found, body) = server.post(ROUTE, &definition).await;
        let detail = body["detail"].as_str().unwrap_or_default();
        assert!(found == status && detail.is_empty() == (status == 201), "{flags:?} {key}: {body}");
        assert!(found == 201 || detail.starts_with("a Python scorer needs the right to upload mods: "), "{body}");
        let page = server.request(Method::GET, "/experiments/-new").send().await.unwrap().text().await.unwrap();
        assert_eq!(page.contains("value=\"python\" disabled"), status == 403, "{page}");
    }
}

#[tokio::test]
async fn export_has_whole_answers_and_no_formulas() {
    let server = server().await;
    let definition = json!({
        "name": "export", "prompts": ["=1+1", "-5"], "seeds": [1],
        "mods": [[{"name": "force-prefix", "config": {"text": format!("=SUM(A1) {}", "long ".repeat(80))}}]],
        "parameters": [{"max_tokens": 400, "ignore_eos": true}],
    });
    let id = start(server, &definition).await;
    let done = wait_for_state(server, &id, "done").await;
    let get = async |name: &str| {
        let response = server.request(Method::GET, &format!("{ROUTE}/{id}/{name}")).send().await.unwrap();
        assert_eq!(response.status(), 200, "{name}");
        let disposition = response.headers()["content-disposition"].to_str().unwrap().to_owned();
        assert_eq!(disposition, format!("attachment; filename=\"{id}.{}\"", name.rsplit('.').next().unwrap()));
        response.bytes().await.unwrap()
    };
    let csv = String::from_utf8(get("cells.csv").await.to_vec()).unwrap();
    let lines: Vec<&str> = csv.split("\r\n").collect();
    assert!(lines[1].starts_with("0,'=1+1,"), "{csv}");
    assert!(lines[2].starts_with("1,-5,"), "a number stays one: {csv}");
    let preview = done["grid"][0]["output_preview"].as_str().unwrap();
    let whole = format!("=SUM(A1) {}", "long ".repeat(80));
    assert!(preview.len() < whole.len() && csv.contains(&format!("'{whole}")), "{csv}");
    let parquet = get("cells.parquet").await;
    assert!(parquet.starts_with(b"PAR1") && parquet.ends_with(b"PAR1"));
    let missing = server.get(&format!("{ROUTE}/{}/cells.parquet", uuid::Uuid::nil())).await;
    assert_eq!(missing.0, 404);
}

/// A file is written in parts of 200 cells.
#[tokio::test]
async fn export_of_large_experiment_has_all_cells() {
    let server = server().await;
    let seeds: Vec<u32> = (1..=450).collect();
    let definition = json!({"name": "large", "prompts": ["Hello"], "seeds": seeds, "parameters": [{"max_tokens": 1}]});
    let id = start(server, &definition).await;
    action(server, &id, "cancel").await;
    let csv =
        server.request(Method::GET, &format!("{ROUTE}/{id}/cells.csv")).send().await.unwrap().text().await.unwrap();
    let rows = csv.lines().filter_map(|line| line.split_once(",Hello,"));
    let numbers: Vec<&str> = rows.map(|(number, _)| number).collect();
    assert_eq!(numbers, (0..450).map(|number| number.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn invalid_experiment_starts_nothing() {
    let server = server().await;
    let with_field = |field: &str, value: Value| {
        let mut definition = grid();
        definition["name"] = "invalid".into();
        definition[field] = value;
        definition
    };
    for (definition, status, detail, pointer) in [
        (with_field("name", json!("")), 400, "`name` must have 1 to 64 characters", "name"),
        (with_field("prompts", json!([])), 400, "`prompts` must not be empty", "prompts"),
        (
            with_field("seeds", json!([-1])),
            400,
            "`seeds[0]` must be an integer between 0 and 4294967295, got -1",
            "seeds[0]",
        ),
        (with_field("seeds", json!((0..2501).collect::<Vec<_>>())), 400, "at most 10000 cells, got 10004", "seeds"),
        (with_field("mods", json!([[], ["unknown_mod"]])), 400, "prompts[0], mods[1], parameters[0]: ", "mods[1]"),
        (
            with_field("parameters", json!([{}, {"temperature": -3}])),
            400,
            "prompts[0], mods[0], parameters[1]: `temperature` must be a number",
            "parameters[1].temperature",
        ),
        (
            with_field("parameters", json!([{"seed": 3}])),
            400,
            "`parameters[0].seed` is not allowed",
            "parameters[0].seed",
        ),
        (
            with_field("prompts", json!(["a", "long ".repeat(20_000)])),
            400,
            "prompts[1], mods[0], parameters[0]: ",
            "prompts[1]",
        ),
        (with_field("score", json!({"regex": "("})), 400, "`score.regex` must be a regular expression", "score.regex"),
        (with_field("score", json!({"json": false})), 400, "must be true", "score.json"),
        (
            with_field("score", json!({"type": "regex", "pattern": "x"})),
            400,
            "`score` must be {\"regex\": \"PATTERN\"}",
            "score",
        ),
        (with_field("colour", json!(1)), 400, "unknown field `colour`; known fields: name, model, prompts", "colour"),
    ] {
        let (found, problem) = server.post(ROUTE, &definition).await;
        let text = problem["detail"].as_str().unwrap();
        assert!(found == status && text.contains(detail), "{found} {problem}, expected {status} {detail}");
        let found = problem["pointer"].as_str().unwrap_or_default();
        assert!(if pointer.is_empty() { found.is_empty() } else { found.starts_with(pointer) }, "{problem}");
    }
    let (_, list) = server.get(ROUTE).await;
    assert!(list["experiments"].as_array().unwrap().iter().all(|one| one["name"] != "invalid"), "{list}");
}

#[tokio::test]
async fn cancelled_experiment_ends_at_once_and_can_be_resumed() {
    let server = Server::start(&["--parallel", "2"]);
    server.wait_ready().await;
    let mut definition = grid();
    definition["mods"] = json!([[]]);
    definition["parameters"] = json!([{"max_tokens": 400, "ignore_eos": true}]);
    definition["seeds"] = json!([1, 2, 3, 4]);
    let id = start(&server, &definition).await;
    let (status, cancelled) = action(&server, &id, "cancel").await;
    assert_eq!((status, &cancelled["state"]), (200, &json!("cancelled")), "{cancelled}");
    // An execution that is still ending cannot be resumed.
    let resumed = loop {
        let (status, body) = action(&server, &id, "resume").await;
        if status != 409 {
            break (status, body);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!((resumed.0, &resumed.1["state"]), (200, &json!("running")), "{resumed:?}");
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), [&json!("done"); 8]);
    assert_eq!(column(&done, "completion_tokens"), [&json!(400); 8]);
}

#[tokio::test]
async fn experiment_of_killed_server_is_interrupted_and_can_be_resumed() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let mut definition = grid();
    definition["parameters"] = json!([{"max_tokens": 300, "ignore_eos": true}]);
    let id = start(&server, &definition).await;
    let first = loop {
        let (_, experiment) = server.get(&format!("{ROUTE}/{id}")).await;
        if experiment["grid"][0]["state"] == "done" && experiment["grid"][0]["score"].is_number() {
            break experiment["grid"][0].clone();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    server.stop("KILL").await;
    let server = server.start_again(&["--parallel", "1"]);
    server.wait_ready().await;
    let interrupted = wait_for_state(&server, &id, "interrupted").await;
    assert!(column(&interrupted, "state").contains(&&json!("pending")), "{interrupted}");
    assert_eq!(action(&server, &id, "resume").await.0, 200);
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), [&json!("done"); 8]);
    assert_eq!(done["grid"][0], first, "a run that had ended is kept");
    let ids: HashSet<&str> = column(&done, "run_id").into_iter().map(|id| id.as_str().unwrap()).collect();
    assert_eq!(ids.len(), 8);
}

#[tokio::test]
async fn server_runs_a_limited_number_of_experiments() {
    let process = Server::start(&["--parallel", "1", "--mod-key", "boss", "--allow-mod-upload"]);
    let server = Server::external(process.wait_ready().await.base.clone(), Some("boss"));
    let mut definition = grid();
    definition["parameters"] = json!([{"max_tokens": 1000, "ignore_eos": true}]);
    // An experiment with an invalid scorer does not count.
    let mut invalid = definition.clone();
    invalid["score"] = json!({"regex": "("});
    for _ in 0..9 {
        assert_eq!(server.post(ROUTE, &invalid).await.0, 400);
    }
    definition["seeds"] = json!((0..100).collect::<Vec<_>>());
    let mut ids = Vec::new();
    for _ in 0..8 {
        ids.push(start(&server, &definition).await);
    }
    let (status, problem) = server.post(ROUTE, &definition).await;
    assert!(status == 429 && problem["detail"].as_str().unwrap().contains("runs 8 experiments already"), "{problem}");
    // The limit is checked before a worker imports the scorer, so the error in this scorer is not found.
    invalid["score"] = json!({"python": "1 / 0"});
    assert_eq!(server.post(ROUTE, &invalid).await.0, 429);
    // Other clients are served meanwhile.
    server.answer("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 2})).await;
    assert_eq!(action(&server, &ids[0], "cancel").await.0, 200);
    loop {
        let (status, problem) = server.post(ROUTE, &definition).await;
        if status == 201 {
            break;
        }
        assert_eq!(status, 429, "{problem}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn experiment_belongs_to_its_tenant() {
    let keys = folder().join("keys.txt");
    std::fs::write(&keys, "ann-key name=ann\nbob-key name=bob\nadmin-key name=ops admin\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_ready().await;
    let send = async |key: &str, method: Method, path: &str, body: Option<&Value>| {
        let mut request = server.request(method, path).bearer_auth(key);
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap_or_default())
    };
    let (status, experiment) = send("ann-key", Method::POST, ROUTE, Some(&grid())).await;
    assert_eq!(status, 201, "{experiment}");
    let path = format!("{ROUTE}/{}", experiment["experiment_id"].as_str().unwrap());
    for (method, path) in [
        (Method::GET, path.clone()),
        (Method::DELETE, path.clone()),
        (Method::POST, format!("{path}/cancel")),
        (Method::POST, format!("{path}/resume")),
    ] {
        assert_eq!(send("bob-key", method.clone(), &path, None).await.0, 404, "{method} {path}");
    }
    for (key, count) in [("ann-key", 1), ("bob-key", 0), ("admin-key", 1)] {
        let (_, list) = send(key, Method::GET, ROUTE, None).await;
        assert_eq!(list["experiments"].as_array().unwrap().len(), count, "{key}");
    }
    assert_eq!(send("admin-key", Method::GET, &path, None).await.0, 200);
}

/// Runs `thunder experiment` with a definition in a file.
async fn command(server: &Server, definition: &str, flags: &[&str]) -> (Option<i32>, String, String) {
    let file = folder().join("greetings.toml");
    std::fs::write(&file, definition).unwrap();
    let mut command = thunder();
    command.args(["experiment", file.to_str().unwrap(), "--server", &server.base]).args(flags);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn command_runs_definition_and_prints_cells() {
    let server = server().await;
    let definition = "prompts = [\"Hello\"]\nseeds = [1, 2]\nmods = [[], [{ name = \"force-prefix\", config = { text = \"{} \" } }]]\n\
                      parameters = [{ max_tokens = 6 }]\nscore = { json = true }\n";
    let csv = folder().join("cells.csv");
    let (code, out, err) = command(server, definition, &["--csv", csv.to_str().unwrap()]).await;
    assert_eq!(code, Some(0), "{out}{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 5, "{out}");
    let head: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(head, ["CELL", "MODS", "SEED", "STATE", "TOKENS", "SCORE", "ANSWER"]);
    assert!(lines[3].contains("force-prefix {\"text\":\"{} \"}") && lines[3].contains("done"), "{out}");
    assert!(lines[1].starts_with("1 ") && lines[4].starts_with("4 "), "{out}");
    assert!(err.contains("4 cells: 4 done; mean score"), "{err}");
    let csv = std::fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), 5);
    assert!(csv.lines().nth(1).unwrap().starts_with("0,"), "the fields of the API count from 0: {csv}");
    let (_, list) = server.get(ROUTE).await;
    assert_eq!(list["experiments"][0]["name"], "greetings");

    let (code, out, _) = command(server, definition, &["--json"]).await;
    assert_eq!(code, Some(0));
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["grid"].as_array().unwrap().len(), 4);

    for (definition, message) in [
        ("prompts = [", "is not TOML"),
        ("prompts = []\nseeds = [1]", "`prompts` must not be empty"),
        ("seeds = [1]", "prompts"),
    ] {
        let (code, _, err) = command(server, definition, &[]).await;
        assert!(code == Some(1) && err.contains(message), "{code:?} {err}");
    }
}

/// A mod that was disabled after the cells had been checked makes a cell fail.
#[tokio::test]
async fn command_fails_if_a_cell_failed() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let definition = "prompts = [\"Hello\"]\nseeds = [1, 2, 3]\nmods = [[], [\"log-top\"]]\nparameters = [{ max_tokens = 200, ignore_eos = true }]\n";
    let disabling = async {
        loop {
            let (_, list) = server.get(ROUTE).await;
            if !list["experiments"].as_array().unwrap().is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        server.post("/v1/mods/log-top/disable", &json!({})).await
    };
    let ((code, out, err), (status, _)) = tokio::join!(command(&server, definition, &[]), disabling);
    assert_eq!(status, 200);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains("failed") && err.contains("failed"), "{out}{err}");
}
