//! Experiments whose engine stops, whose runs cannot be read, or whose cells have ended without a stored score.

use super::{ROUTE, action, column, resume, slow_mod, start, wait_for_run, wait_for_state};
use crate::harness::{Server, psql, server};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use std::time::Duration;

/// Returns the experiment as in the list, which does not read the runs.
async fn listed(server: &Server, id: &str) -> Value {
    let (_, list) = server.get(ROUTE).await;
    list["experiments"].as_array().unwrap().iter().find(|one| one["experiment_id"] == id).unwrap().clone()
}

/// The server of such a cell ended between the end of the run and the score.
#[tokio::test]
async fn resumed_experiment_scores_stored_answer_of_done_run() {
    let server = server().await;
    let definition = json!({
        "name": "stored-answer", "prompts": ["Hello"], "seeds": [1, 2],
        "mods": [[{"name": "force-prefix", "config": {"text": "one STOP two"}}]],
        "parameters": [{"max_tokens": 40, "ignore_eos": true, "stop": ["STOP"]}],
        "score": {"regex": "^one\\s*$"},
    });
    let id = start(server, &definition).await;
    let done = wait_for_state(server, &id, "done").await;
    assert_eq!(column(&done, "score"), [&json!(1.0); 2], "{done}");
    let csv =
        server.request(Method::GET, &format!("{ROUTE}/{id}/cells.csv")).send().await.unwrap().text().await.unwrap();
    assert!(csv.contains("one STOP two") && csv.matches(",one ,").count() == 2, "the answer ends before STOP: {csv}");
    let lose_score = format!(
        "update experiment_cells set ended = false, score = null where experiment_id = '{id}' and cell = 1;
        update experiments set state = 'cancelled' where experiment_id = '{id}'"
    );
    psql(&server.database_url(), &lose_score).await;
    resume(server, &id).await;
    let scored = wait_for_state(server, &id, "done").await;
    assert_eq!(scored["grid"], done["grid"], "the run is not repeated, and its score is that of the whole answer");
    assert_eq!((&scored["ended"], &scored["mean_score"]), (&json!(2), &json!(1.0)));
    let (_, list) = server.get(&format!("/api/v1/runs?q=experiment:{id}")).await;
    assert_eq!(list["runs"].as_array().unwrap().len(), 2, "{list}");
}

/// A trigger damages the row of the run with seed 1 at its end, and marks the one with seed 2 as deleted.
#[tokio::test]
async fn failed_read_of_run_interrupts_experiment_and_deleted_run_ends_its_cell() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let url = server.database_url();
    let trigger = "create function damage_run() returns trigger language plpgsql as $$ begin
            if new.seed = 1 then new.surface := 'unknown';
            else new.deletion := 'ffffffff-ffff-7fff-bfff-ffffffffffff'; end if;
            return new;
        end $$;
        create trigger damage_run before insert or update on runs for each row when (new.status = 'done')
            execute function damage_run()";
    psql(&url, trigger).await;
    let definition = |name: &str, seed: u32| {
        json!({"name": name, "prompts": ["Hello"], "seeds": [seed], "score": {"json": true},
            "parameters": [{"max_tokens": 2, "ignore_eos": true}]})
    };

    let deleted = start(&server, &definition("deleted-early", 2)).await;
    let done = wait_for_state(&server, &deleted, "done").await;
    assert_eq!((column(&done, "state"), &done["ended"]), (vec![&json!("deleted")], &json!(1)), "{done}");

    let unreadable = start(&server, &definition("unreadable", 1)).await;
    let stopped = loop {
        let experiment = listed(&server, &unreadable).await;
        if experiment["state"] != "running" {
            break experiment;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!((&stopped["state"], &stopped["ended"]), (&json!("interrupted"), &json!(0)), "{stopped}");
    let run = psql(&url, &format!("select run_id from experiment_cells where experiment_id = '{unreadable}'")).await;
    psql(&url, "drop trigger damage_run on runs; update runs set surface = 'openai' where surface = 'unknown'").await;
    resume(&server, &unreadable).await;
    let done = wait_for_state(&server, &unreadable, "done").await;
    assert_eq!(column(&done, "run_id"), [&json!(run)], "the run is not repeated");
    assert!(done["grid"][0]["score"].is_number() && done["ended"] == 1, "{done}");
}

#[tokio::test]
async fn unloaded_model_interrupts_experiment_and_its_cell_can_be_resumed() {
    let mods = slow_mod();
    let server = Server::start(&["--parallel", "1", "--shutdown-grace", "0", "--mods-dir", &mods]);
    server.wait_ready().await;
    let definition = json!({"name": "unloaded", "prompts": ["Hello"], "seeds": [1], "mods": [["slow"]],
        "parameters": [{"max_tokens": 3000, "ignore_eos": true}]});
    let id = start(&server, &definition).await;
    let first = wait_for_run(&server, &id, "running").await;
    let (_, models) = server.get("/v1/models").await;
    let unloaded = server.post("/models/unload", &json!({"model": models["data"][0]["id"]})).await;
    assert_eq!(unloaded, (200, json!({"success": true})));
    let interrupted = wait_for_state(&server, &id, "interrupted").await;
    assert_eq!(interrupted["ended"], 0, "{interrupted}");
    resume(&server, &id).await;
    for _ in 0..7200 {
        let (_, resumed) = server.get(&format!("{ROUTE}/{id}")).await;
        if resumed["grid"][0]["run_id"] != first.as_str() {
            assert_eq!(resumed["state"], "running", "{resumed}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("the cell is not run again");
}

#[tokio::test]
async fn cancel_while_queue_is_full_leaves_cell_pending() {
    let mods = slow_mod();
    let server = Server::start(&["--parallel", "1", "--mods-dir", &mods]);
    server.wait_ready().await;
    // The lock keeps the first cell from ending until the queue is full.
    let mut lock = PgConnection::connect(&server.database_url()).await.unwrap();
    sqlx::raw_sql("begin; lock table experiment_cells in exclusive mode").execute(&mut lock).await.unwrap();
    let definition =
        json!({"name": "full-queue", "prompts": ["Hello"], "seeds": [1, 2], "parameters": [{"max_tokens": 1}]});
    let id = start(&server, &definition).await;
    wait_for_run(&server, &id, "done").await;
    let complete = |body: Value| tokio::spawn(server.request(Method::POST, "/v1/completions").json(&body).send());
    let mut requests = vec![complete(json!({"prompt": "Hello", "mods": ["slow"], "max_tokens": 3000,
        "ignore_eos": true, "record": false}))];
    wait_for_metric(&server, "requests_processing", "1").await;
    // The queue has 1024 places, and a request has up to 256 prompts.
    for _ in 0..4 {
        requests.push(complete(json!({"prompt": vec!["x"; 256], "max_tokens": 1, "record": false})));
    }
    wait_for_metric(&server, "requests_deferred", "1024").await;
    sqlx::raw_sql("commit").execute(&mut lock).await.unwrap();
    while server.get(&format!("{ROUTE}/{id}")).await.1["ended"] != 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(action(&server, &id, "cancel").await.0, 200);
    // The server tries to start the second cell again within 200 ms.
    for _ in 0..20 {
        let (_, experiment) = server.get(&format!("{ROUTE}/{id}")).await;
        assert_eq!(column(&experiment, "state"), [&json!("done"), &json!("pending")], "{experiment}");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    requests.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Waits until a metric has a value.
async fn wait_for_metric(server: &Server, name: &str, value: &str) {
    let line = format!("llamacpp:{name} {value}");
    let mut text = String::new();
    for _ in 0..7200 {
        text = server.request(Method::GET, "/metrics").send().await.unwrap().text().await.unwrap();
        if text.lines().any(|one| one == line) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("{name} is not {value}:\n{text}");
}
