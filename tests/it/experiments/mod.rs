//! `/api/v1/experiments` on the real server.

mod command;
mod recovery;
mod scorers;
mod servers;
mod states;
mod versions;

use crate::harness::{ErrorTable, Server, folder, server};
use reqwest::Method;
use serde_json::{Value, json};
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
    for _ in 0..7200 {
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

/// Resumes an experiment as soon as its last execution has ended.
async fn resume(server: &Server, id: &str) -> Value {
    for _ in 0..7200 {
        let (status, experiment) = action(server, id, "resume").await;
        if status != 409 {
            assert_eq!(status, 200, "{experiment}");
            return experiment;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("the experiment cannot be resumed")
}

/// Waits until a run of an experiment has a status, and returns its id.
async fn wait_for_run(server: &Server, id: &str, status: &str) -> String {
    for _ in 0..7200 {
        let (_, list) = server.get(&format!("/api/v1/runs?q=experiment:{id}")).await;
        if let Some(run) = list["runs"].as_array().unwrap().iter().find(|run| run["status"] == status) {
            return run["run_id"].as_str().unwrap().to_owned();
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("no run of the experiment is {status}")
}

/// Returns a folder with the mod `slow`, which sleeps at every token.
fn slow_mod() -> String {
    let mods = folder();
    let source = "import time\nfrom thunder_mods import Added, mod\n\n\n@mod(events=[Added])\n\
                  def slow(event, actions, tokenizer):\n    time.sleep(0.02)\n";
    std::fs::write(mods.join("slow.py"), source).unwrap();
    mods.to_str().unwrap().to_owned()
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
    let (_, list) = server.get(&format!("/api/v1/runs?q=experiment:{id}%20seed:2")).await;
    let seeds: Vec<_> = list["runs"].as_array().unwrap().iter().map(|run| &run["seed"]).collect();
    assert_eq!(seeds, [&json!(2); 4]);

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
    let variant = &scored["summary"]["variants"][0];
    assert_eq!(variant["mean_score"], json!(0.25 / 3.0));
    let error = variant["score_standard_error"].as_f64().unwrap();
    assert!((error - 0.25 / 3.0).abs() < 1e-9, "the sample variance of 0.25, 0 and 0 is 0.0625 / 3: {error}");

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
    assert!(lines[2].starts_with("1,-5,"), "a number stays a number: {csv}");
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
    let rows: Vec<(&str, &str)> = csv.lines().filter_map(|line| line.split_once(",Hello,")).collect();
    let numbers: Vec<&str> = rows.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (0..450).map(|number| number.to_string()).collect::<Vec<_>>());
    let mut pending = rows.iter().filter(|(_, values)| values.contains(",pending,"));
    let empty = format!(",pending{}", ",".repeat(8));
    assert!(pending.all(|(_, values)| values.ends_with(&empty)), "a cell without a run has no values: {csv}");
}

#[tokio::test]
async fn cell_of_deleted_run_has_neither_answer_nor_measurements() {
    let server = server().await;
    let definition = json!({
        "name": "deleted-answers", "prompts": ["Hello"], "seeds": [1],
        "mods": [[{"name": "force-prefix", "config": {"text": "a secret answer"}}]],
        "parameters": [{"max_tokens": 24, "ignore_eos": true}],
    });
    let id = start(server, &definition).await;
    let done = wait_for_state(server, &id, "done").await;
    let csv = async || {
        let response = server.request(Method::GET, &format!("{ROUTE}/{id}/cells.csv")).send().await.unwrap();
        response.text().await.unwrap().lines().nth(1).unwrap().to_owned()
    };
    let row = csv().await;
    assert_eq!(row.matches("a secret answer").count(), 2, "the configuration of the mod and the answer: {row}");
    let run = done["grid"][0]["run_id"].as_str().unwrap();
    let (status, deletion) = server.post("/api/v1/deletions", &json!({"runs": [run]})).await;
    assert_eq!(status, 201, "{deletion}");

    let (_, deleted) = server.get(&format!("{ROUTE}/{id}")).await;
    let cell = &deleted["grid"][0];
    assert_eq!((&cell["state"], &cell["output_preview"]), (&json!("deleted"), &json!("")), "{cell}");
    assert_eq!((&cell["mean_logprob"], &cell["completion_tokens"]), (&Value::Null, &Value::Null), "{cell}");
    let row = csv().await;
    let empty = ",".repeat(7);
    assert!(row.ends_with(&format!(",1,deleted,{run}{empty}")), "{row}");
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
    let mut errors = ErrorTable::default();
    for (field, value, pointer) in [
        ("name", json!(""), "name"),
        ("prompts", json!([]), "prompts"),
        ("seeds", json!([-1]), "seeds[0]"),
        ("seeds", json!((0..2501).collect::<Vec<_>>()), "seeds"),
        ("seeds", json!([1, 2, 1]), "seeds[2]"),
        ("mods", json!([[], ["unknown_mod"]]), "mods[1]"),
        ("parameters", json!([{}, {"temperature": -3}]), "parameters[1].temperature"),
        ("parameters", json!([{"seed": 3}]), "parameters[0].seed"),
        ("prompts", json!(["a", "long ".repeat(20_000)]), "prompts[1]"),
        ("score", json!({"regex": "("}), "score.regex"),
        ("score", json!({"json": false}), "score.json"),
        ("score", json!({"type": "regex", "pattern": "x"}), "score"),
        ("colour", json!(1), "colour"),
    ] {
        let answer = server.post(ROUTE, &with_field(field, value.clone())).await;
        assert!(answer.1["pointer"].as_str().unwrap().starts_with(pointer), "{}", answer.1);
        errors.add(format!("{field}: {value}"), &answer);
    }
    insta::assert_snapshot!("experiment_errors", errors);
    let (_, list) = server.get(ROUTE).await;
    assert!(list["experiments"].as_array().unwrap().iter().all(|one| one["name"] != "invalid"), "{list}");
}
