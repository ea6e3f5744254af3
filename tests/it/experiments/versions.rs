//! Experiments whose mods change while they run.

use super::{ROUTE, action, column, resume, start, wait_for_run, wait_for_state};
use crate::harness::{Server, psql};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

/// Keeps the first cell of an experiment from ending until the transaction ends.
async fn lock_cells(url: &str) -> PgConnection {
    let mut lock = PgConnection::connect(url).await.unwrap();
    sqlx::raw_sql("begin; lock table experiment_cells in exclusive mode").execute(&mut lock).await.unwrap();
    lock
}

async fn unlock(mut lock: PgConnection) {
    sqlx::raw_sql("commit").execute(&mut lock).await.unwrap();
}

/// Uploads the mod `changing`, which does nothing. Its version depends on `comment`.
async fn upload(server: &Server, comment: &str) {
    let source = format!(
        "from thunder_mods import Added, mod\n\n\n# {comment}\n@mod(events=[Added])\n\
         def changing(event, actions, tokenizer):\n    \"\"\"Does nothing.\"\"\"\n"
    );
    let (status, answer) = server.post("/v1/mods", &json!({"name": "changing", "source": source})).await;
    assert_eq!(status, 200, "{answer}");
}

async fn model(server: &Server) -> String {
    server.get("/v1/models").await.1["data"][0]["id"].as_str().unwrap().to_owned()
}

/// Returns the mods of the run of each cell, with their versions.
async fn recorded_mods(server: &Server, experiment: &Value) -> Vec<Value> {
    let mut mods = Vec::new();
    for id in column(experiment, "run_id") {
        let (_, run) = server.get(&format!("/api/v1/runs/{}", id.as_str().unwrap())).await;
        mods.push(run["events"][0]["details"]["prompt"]["parameters"]["mods"].clone());
    }
    mods
}

#[tokio::test]
async fn all_cells_use_one_version_of_a_mod() {
    let process = Server::start(&["--parallel", "1", "--mod-key", "boss", "--allow-mod-upload"]);
    let server = Server::external(process.wait_ready().await.base.clone(), Some("boss"));
    let url = process.database_url();
    upload(&server, "first").await;
    let lock = lock_cells(&url).await;
    let definition = json!({"name": "changed-mod", "prompts": ["Hello"], "seeds": [1, 2], "mods": [["changing"]],
        "model": format!("{}/log-top", model(&server).await), "parameters": [{"max_tokens": 1}]});
    let id = start(&server, &definition).await;
    wait_for_run(&server, &id, "done").await;
    upload(&server, "second").await;
    unlock(lock).await;
    let done = wait_for_state(&server, &id, "done").await;
    let mods = recorded_mods(&server, &done).await;
    assert_eq!((&mods[0][0]["name"], &mods[0][1]["name"]), (&json!("log-top"), &json!("changing")), "{mods:?}");
    assert_eq!(mods[0], mods[1]);

    let lose_cell = format!(
        "delete from experiment_cells where experiment_id = '{id}' and cell = 1;
        update experiments set state = 'cancelled' where experiment_id = '{id}'"
    );
    psql(&url, &lose_cell).await;
    let (status, problem) = action(&server, &id, "resume").await;
    let detail = problem["detail"].as_str().unwrap();
    let expected = format!("experiment '{id}' cannot be resumed: the mod 'changing' has changed: its version is ");
    assert!(status == 409 && detail.starts_with(&expected), "{problem}");
    upload(&server, "first").await;
    resume(&server, &id).await;
    let resumed = wait_for_state(&server, &id, "done").await;
    assert_eq!(recorded_mods(&server, &resumed).await, mods);

    let other_model = format!(
        "update experiments set state = 'cancelled', definition = regexp_replace(definition::text,
            '\"model\":\"[0-9a-f]{{32}}\"', '\"model\":\"0\"')::json where experiment_id = '{id}'"
    );
    psql(&url, &other_model).await;
    let (status, problem) = action(&server, &id, "resume").await;
    let detail = problem["detail"].as_str().unwrap();
    assert!(status == 409 && detail.contains("its model is another file or has other overrides now"), "{problem}");
}

#[tokio::test]
async fn disabled_mod_interrupts_experiment_until_it_is_enabled() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let lock = lock_cells(&server.database_url()).await;
    let definition = json!({"name": "disabled-mod", "prompts": ["Hello"], "seeds": [1, 2, 3], "mods": [["log-top"]],
        "parameters": [{"max_tokens": 1}]});
    let id = start(&server, &definition).await;
    wait_for_run(&server, &id, "done").await;
    assert_eq!(server.post("/v1/mods/log-top/disable", &json!({})).await.0, 200);
    unlock(lock).await;
    let interrupted = wait_for_state(&server, &id, "interrupted").await;
    assert_eq!(column(&interrupted, "state"), ["done", "failed", "pending"], "{interrupted}");
    assert_eq!(interrupted["grid"][1]["error"], "the mod 'log-top' was disabled or removed");
    assert_eq!(
        (&interrupted["ended"], interrupted["definition"]["model"].as_str()),
        (&json!(1), Some(&*model(&server).await))
    );
    let page = server.request(reqwest::Method::GET, &format!("/experiments/{id}")).send().await.unwrap();
    assert!(page.text().await.unwrap().contains("1 could not be started"));
    let (status, problem) = action(&server, &id, "resume").await;
    assert!(status == 400 && problem["detail"].as_str().unwrap().contains("is disabled"), "{problem}");

    assert_eq!(server.post("/v1/mods/log-top/enable", &json!({})).await.0, 200);
    resume(&server, &id).await;
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), ["done"; 3], "{done}");
    assert_eq!(column(&done, "error"), [&Value::Null; 3]);
    assert_eq!(done["grid"][0], interrupted["grid"][0], "the first run is kept");
    assert_eq!(server.get(&format!("{ROUTE}/{id}")).await.1["ended"], 3);
}

#[tokio::test]
async fn cell_that_cannot_be_started_fails_and_the_others_are_run() {
    let server = Server::start(&[]);
    server.wait_ready().await;
    let choices = |list: &[&str]| json!([{"name": "choices", "config": {"choices": list}}]);
    let definition = json!({"name": "invalid-config", "prompts": ["Hello"], "seeds": [1], "parameters": [{"max_tokens": 4}],
        "mods": [choices(&["a", "a"]), choices(&["a", "b"])]});
    let id = start(&server, &definition).await;
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), ["failed", "done"], "{done}");
    assert!(done["grid"][0]["error"].as_str().unwrap().contains("choices"), "{done}");
}
