//! Experiments on several servers with one database.

use super::{action, slow_mod, start, wait_for_run};
use crate::harness::postgres::TestDatabase;
use crate::harness::{Server, folder};
use serde_json::json;
use thunder::events::{Scope, system};
use thunder::store::{CellRecord, Database, ExperimentState, NewExperiment, Store};
use uuid::Uuid;

#[tokio::test]
async fn cancel_through_another_server_ends_active_runs() {
    let mods = slow_mod();
    let flags = ["--parallel", "1", "--mods-dir", &mods];
    let server = Server::start(&flags);
    let other = server.start_beside(&flags);
    server.wait_ready().await;
    other.wait_ready().await;
    let definition = json!({"name": "cancelled-elsewhere", "prompts": ["Hello"], "seeds": [1, 2], "mods": [["slow"]],
        "parameters": [{"max_tokens": 3000, "ignore_eos": true}]});
    let id = start(&server, &definition).await;
    let run_id = wait_for_run(&server, &id, "running").await;
    let (status, cancelled) = action(&other, &id, "cancel").await;
    assert_eq!((status, &cancelled["state"]), (200, &json!("cancelled")), "{cancelled}");
    let run = server.finished(&run_id).await;
    assert_eq!((&run["run"]["status"], &run["run"]["end_cause"]), (&json!("cancelled"), &json!("cancel")), "{run}");
}

/// Opens a store of another server on a database.
async fn open(database: &TestDatabase) -> Store {
    let location = Database::Url { url: database.url(), direct_url: None, data_dir: folder() };
    Store::open(location, |_| {}).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_server_that_runs_experiment_stores_cells() {
    let database = TestDatabase::new();
    let (first, second) = (open(&database).await, open(&database).await);
    let id = system::new_id();
    let new = NewExperiment { id, owner: None, name: "owned", definition: "{}", cells: 2 };
    first.add_experiment(&new, system::now()).await.unwrap();
    let cell = |cell, ended| CellRecord { cell, run_id: Some(Uuid::nil()), score: None, ended, error: None };
    assert!(first.is_executor(id).await.unwrap() && !second.is_executor(id).await.unwrap());
    assert!(first.set_cell(id, &cell(0, false)).await.unwrap());
    assert!(!second.set_cell(id, &cell(0, true)).await.unwrap(), "another server runs it");
    assert!(!second.complete_experiment(id).await.unwrap());

    assert!(second.cancel_experiment(id).await.unwrap(), "a client can cancel it through any server");
    assert!(!first.is_executor(id).await.unwrap());
    assert!(!first.set_cell(id, &cell(1, false)).await.unwrap(), "no cell is started after the cancel");
    assert!(first.set_cell(id, &cell(0, true)).await.unwrap(), "a run that was active ends after the cancel");

    let cancelled = second.experiment(&Scope::All, id).await.unwrap().unwrap();
    assert!(second.resume_experiment(&cancelled).await.unwrap());
    assert!(!first.set_cell(id, &cell(0, true)).await.unwrap(), "the other server has resumed it");
    assert!(!first.complete_experiment(id).await.unwrap());
    assert!(second.set_cell(id, &cell(0, false)).await.unwrap() && second.is_executor(id).await.unwrap());
    assert!(second.complete_experiment(id).await.unwrap());
    let done = first.experiment(&Scope::All, id).await.unwrap().unwrap();
    assert_eq!((done.state, done.ended), (ExperimentState::Done, 0));
    second.close().await;
    first.close().await;
}
