//! `thunder db` on plain PostgreSQL. `store::citus` tests the same commands on a cluster.

use super::harness::postgres::TestDatabase;
use super::harness::{Server, folder, model, output_of, psql, text, thunder};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use thunder::events::system;

fn db(data_dir: &Path, arguments: &[&str]) -> Command {
    let mut command = thunder();
    command.arg("db").args(arguments).arg("--data-dir").arg(data_dir);
    command
}

/// Creates the schema and stores a run.
async fn ingest(data_dir: &Path) {
    let payload = data_dir.join("payload.json");
    let run = r#"{"request": {"request_id": "one", "model": "elsewhere"}, "events": [
        {"event_type": "Added", "step": 1, "sequence_order": 0, "added_tokens": [5], "token_text": "hi", "forced": false}],
        "mod_calls": [], "mod_logs": [], "actions": []}"#;
    std::fs::write(&payload, run).unwrap();
    let mut command = thunder();
    command.arg("ingest").arg(&payload).arg("--data-dir").arg(data_dir);
    // The flag selects the embedded database.
    command.env("DATABASE_URL", "postgres://127.0.0.1:1/x");
    let output = output_of(command).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[tokio::test]
async fn status_lists_tables_partitions_and_spool_of_a_running_server() {
    let server = Server::start_embedded(&[]);
    server.wait_ready().await;
    std::fs::write(server.data_dir.join("spool/record.refused"), "12345").unwrap();
    let output = output_of(db(&server.data_dir, &["status", "--json"])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["runs"], 0);
    assert_eq!(status["citus"], Value::Null);
    assert_eq!(status["partitions"]["unit"], "day");
    assert_eq!(status["partitions"]["count"], 3);
    let table = |name: &str| status["tables"].as_array().unwrap().iter().find(|table| table["name"] == name).unwrap();
    assert_eq!((&table("events")["placement"], &table("events")["partitions"]), (&"local".into(), &4.into()));
    assert_eq!(table("runs")["partitions"], 0);
    assert!(table("runs")["bytes"].as_u64().unwrap() > 0 && status["bytes"].as_u64() > table("runs")["bytes"].as_u64());
    assert_eq!((&status["spool"]["records"], &status["spool"]["refused_bytes"]), (&0.into(), &5.into()));

    let list = text(&output_of(db(&server.data_dir, &["status"])).await.stdout);
    let events = list.lines().find(|line| line.starts_with("events ")).unwrap();
    assert_eq!(events.split_whitespace().take(4).collect::<Vec<_>>(), ["events", "local", "-", "4"]);
    assert!(list.contains("\nPartitions: 3 from 20"), "{list}");
    assert!(list.contains("\nSpool: empty; 5 B of rejected or damaged records in"), "{list}");

    let mut doctor = thunder();
    doctor.args(["doctor", "--no-model", "--port", "0", "--data-dir"]).arg(&server.data_dir);
    let report = text(&output_of(doctor).await.stdout);
    let failed: Vec<&str> = report.lines().filter(|line| line.starts_with("FAILED")).collect();
    let owner = format!("is in use by another Thunder (process {})", server.pid());
    assert!(failed.len() == 1 && failed[0].contains(&owner), "{report}");
    assert_eq!(server.stop("TERM").await, Some(0));
}

#[tokio::test]
async fn distribution_without_citus_shows_its_plan_and_is_rejected() {
    let data_dir = folder();
    ingest(&data_dir).await;
    let output = output_of(db(&data_dir, &["distribute", "--dry-run", "--shards", "8", "--partitions", "day"])).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    insta::assert_snapshot!(text(&output.stdout), @r"
    -- no Citus, 8 shards, one partition per day
    -- obstacle: the embedded database has no Citus: give the coordinator's address with --database-url

    -- distribute runs and feedback
    begin;
    set local citus.multi_shard_modify_mode = 'sequential';
    alter table feedback drop constraint feedback_run_id_fkey;
    select create_distributed_table('runs', 'run_id', colocate_with => 'none', shard_count => 8);
    select create_distributed_table('feedback', 'run_id', colocate_with => 'runs');
    delete from feedback f where not exists (select 1 from runs r where r.run_id = f.run_id);
    alter table feedback add constraint feedback_run_id_fkey foreign key (run_id) references runs on delete cascade;
    commit;

    -- free the coordinator's copy of runs
    begin;
    select truncate_local_data_after_distributing_table('runs');
    commit;

    -- free the coordinator's copy of feedback
    begin;
    select truncate_local_data_after_distributing_table('feedback');
    commit;

    -- distribute events
    begin;
    select create_distributed_table('events', 'run_id', colocate_with => 'runs');
    commit;

    -- free the coordinator's copy of events
    begin;
    select truncate_local_data_after_distributing_table('events');
    commit;

    -- distribute mod_calls
    begin;
    select create_distributed_table('mod_calls', 'run_id', colocate_with => 'runs');
    commit;

    -- free the coordinator's copy of mod_calls
    begin;
    select truncate_local_data_after_distributing_table('mod_calls');
    commit;

    -- distribute mod_logs
    begin;
    select create_distributed_table('mod_logs', 'run_id', colocate_with => 'runs');
    commit;

    -- free the coordinator's copy of mod_logs
    begin;
    select truncate_local_data_after_distributing_table('mod_logs');
    commit;

    -- distribute actions
    begin;
    select create_distributed_table('actions', 'run_id', colocate_with => 'runs');
    commit;

    -- free the coordinator's copy of actions
    begin;
    select truncate_local_data_after_distributing_table('actions');
    commit;

    -- distribute attention
    begin;
    select create_distributed_table('attention', 'run_id', colocate_with => 'runs');
    commit;

    -- free the coordinator's copy of attention
    begin;
    select truncate_local_data_after_distributing_table('attention');
    commit;

    -- distribute run_columns
    begin;
    select create_distributed_table('run_columns', 'run_id', colocate_with => 'runs');
    commit;

    -- free the coordinator's copy of run_columns
    begin;
    select truncate_local_data_after_distributing_table('run_columns');
    commit;

    -- copy run_keys to every node
    begin;
    select create_reference_table('run_keys');
    commit;

    -- free the coordinator's copy of run_keys
    begin;
    select truncate_local_data_after_distributing_table('run_keys');
    commit;
    ");

    let months = text(&output_of(db(&data_dir, &["distribute", "--dry-run"])).await.stdout);
    assert!(months.starts_with("-- no Citus, 32 shards, one partition per month\n"), "{months}");
    assert!(months.contains("\nupdate partitioning set unit = 'month';\n"), "{months}");
    let month = system::now().format("select merge_partitions('%Y-%m-01');").to_string();
    assert!(months.contains(&month), "{months}");

    let rejected = output_of(db(&data_dir, &["distribute"])).await;
    assert_eq!(rejected.status.code(), Some(1));
    let error = text(&rejected.stderr);
    assert!(error.contains("the embedded database has no Citus: give the coordinator's address"), "{error}");
    let status = output_of(db(&data_dir, &["status", "--json"])).await;
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!((&status["runs"], &status["partitions"]["unit"]), (&1.into(), &"day".into()), "nothing was changed");
}

/// `distribute` brings the schema up to date first.
#[tokio::test]
async fn role_without_rights_on_settings_learns_whether_citus_is_installed() {
    let database = TestDatabase::empty();
    let url = database.url();
    psql(&url, "create role distributor login; grant create on schema public to distributor").await;
    let owner_url = url.replace("//postgres@", "//distributor@");
    let command = db(&folder(), &["distribute", "--database-url", &owner_url]);
    let rejected = output_of(command).await;
    let error = text(&rejected.stderr);
    let available = psql(&url, "select count(*) from pg_available_extensions where name = 'citus'").await == "1";
    let reason = if available { "Citus is installed but not loaded" } else { "the server has no Citus: install it" };
    assert!(error.contains(&format!("the tables cannot be distributed: {reason}")), "{error}");
}

#[tokio::test]
async fn status_error_without_schema_names_the_remedy() {
    let database = TestDatabase::empty();
    let rejected = output_of(db(&folder(), &["status", "--database-url", &database.url()])).await;
    assert_eq!(rejected.status.code(), Some(1));
    let error = text(&rejected.stderr);
    assert!(error.contains("the schema of the database has version 0"), "{error}");
    assert!(error.contains("start `thunder serve` once"), "{error}");
}

#[tokio::test]
async fn commands_that_read_runs_create_no_database() {
    let data_dir = folder().join("typo");
    for arguments in [
        &["db", "status"][..],
        &["db", "distribute", "--dry-run"],
        &["runs"],
        &["export", "x"],
        &["fork", "x", "--at", "1"],
        &["replay", "x", "--verify"],
    ] {
        let mut command = thunder();
        command.args(arguments).arg("--data-dir").arg(&data_dir);
        if matches!(arguments[0], "fork" | "replay") {
            command.arg("-m").arg(model());
        }
        let output = output_of(command).await;
        let expected = format!("thunder: no database in {}: choose", data_dir.display());
        assert!(!output.status.success() && text(&output.stderr).contains(&expected), "{arguments:?}: {output:?}");
        assert!(!data_dir.exists(), "{arguments:?}");
    }
}
