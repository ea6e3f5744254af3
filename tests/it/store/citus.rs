//! Errors and nodes of Citus, simulated with a single PostgreSQL, and a real cluster if Citus is installed.

use super::{Data, LiveRun, document, psql};
use crate::harness::thunder;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::events::{RunStatus, Scope, system};
use thunder::recording::RecorderHandle;
use thunder::store::{AttentionParts, Database, Error, IngestError, NewFeedback, Retention, RunQuery, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

/// Fails every statement that changes `runs`, as the coordinator does when a node is lost within a transaction.
const LOSE_NODE: &str = "
    create table message (text text);
    insert into message values ('failure on connection marked as essential: worker:5432');
    create function lose_node() returns trigger language plpgsql as $$
    begin
        raise exception '%', (select text from message) using errcode = 'XX000';
    end $$;
    create trigger lose_node before insert or update on runs for each row execute function lose_node()";

#[tokio::test]
async fn node_lost_within_transaction_rejects_documents_and_spools_runs() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, LOSE_NODE).await;
    for text in ["server closed the connection unexpectedly", "postmaster was shut down, exiting", "no space in here"] {
        let error = store.ingest(&Scope::All, None, document("lost", 3)).await.unwrap_err();
        assert!(matches!(error, IngestError::Unavailable { .. }), "{error}");
        psql(&url, &format!("update message set text = '{text}'")).await;
    }
    let error = store.ingest(&Scope::All, None, document("lost", 3)).await.unwrap_err();
    assert!(
        matches!(error, IngestError::Database(_)),
        "an internal error of another kind does not mean that a node is lost: {error}"
    );
    psql(&url, "update message set text = 'server closed the connection unexpectedly'").await;
    let mut run = LiveRun::new("spooled");
    store.start_recorder();
    let RecorderHandle { signals, .. } = store.recorder();
    for signal in run.all(3) {
        signals.send(signal).await.unwrap();
    }
    let spooled =
        async || data.spool_files().iter().any(|path| std::fs::metadata(path).is_ok_and(|file| file.len() > 0));
    wait_until("the run is in the spool file", spooled).await;
    psql(&url, "drop function lose_node cascade").await;
    let is_done =
        async || store.find(&Scope::All, "spooled").await.unwrap().is_some_and(|run| run.status == RunStatus::Done);
    wait_until("the run is stored", is_done).await;
    assert!(store.ingest(&Scope::All, None, document("lost", 3)).await.unwrap().created);
    store.close().await;
}

/// Waits until a condition is met.
async fn wait_until(expected: &str, is_met: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !is_met().await {
        assert!(begun.elapsed() < Duration::from_mins(1), "timeout: {expected}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn error_for_worker_node_names_the_coordinator() {
    let data = Data::new();
    let store = data.open().await;
    psql(
        &data.url(),
        "set allow_system_table_mods = on; create table pg_catalog.pg_dist_local_group as select 3 as groupid;
        create table pg_catalog.pg_dist_node as select 0 as groupid, 'first'::text as nodename, 5432 as nodeport",
    )
    .await;
    store.close().await;
    let error = data.try_open().await.err().unwrap();
    assert!(matches!(error, Error::WorkerNode { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "the database is on a worker node of a Citus cluster; give the address of the coordinator, first:5432, instead"
    );
}

/// A certificate that the server sends without a check.
#[derive(Debug)]
struct UncheckedCertificate(Arc<CertifiedKey>);

impl ResolvesServerCert for UncheckedCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

#[tokio::test]
async fn error_for_certificate_of_version_1_names_the_remedy() {
    let file = |name: &str| format!("{}/fixtures/tls/{name}", env!("CARGO_MANIFEST_DIR"));
    let chain = vec![CertificateDer::from_pem_file(file("version1.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(file("version1.key")).unwrap();
    let key = ring::sign::any_supported_type(&key).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(UncheckedCertificate(Arc::new(CertifiedKey::new(chain, key)))));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // The client requests TLS, and the server accepts.
        let mut request = [0; 8];
        stream.read_exact(&mut request).await.unwrap();
        stream.write_all(b"S").await.unwrap();
        TlsAcceptor::from(Arc::new(config)).accept(stream).await.is_err()
    });
    let url = format!("postgres://someone@127.0.0.1:{port}/thunder?sslmode=require");
    let data_dir = Data::folder().0.clone();
    let error = Store::open(Database::Url { url, direct_url: None, data_dir }, |_| {}).await.err().unwrap().to_string();
    assert!(error.contains("UnsupportedCertVersion"), "{error}");
    assert!(error.contains("version 3 is needed: create one with `openssl req -x509"), "{error}");
    assert!(server.await.unwrap(), "the client must reject the certificate");
}

/// A cluster of a coordinator and two workers, stopped when the test ends.
struct Cluster(std::path::PathBuf);

impl Cluster {
    /// Starts a cluster; `None` if Citus is not installed.
    async fn start() -> Option<(Self, String)> {
        // The user of PostgreSQL must have access to this folder.
        let folder = std::env::temp_dir().join(format!("thunder-citus-{}", std::process::id()));
        let output = script(&["start", folder.to_str().unwrap()]).await;
        if output.status.code() == Some(3) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim());
            return None;
        }
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let url = String::from_utf8(output.stdout).unwrap().lines().last().unwrap().to_owned();
        Some((Self(folder), url))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = std::process::Command::new(SCRIPT).arg("stop").arg(&self.0).output();
    }
}

/// Statements that undo the migrations after version 12. Citus executes one at a time.
const UNDO_MIGRATIONS: [&str; 17] = [
    "drop index runs_user",
    "drop index runs_surface",
    "drop index runs_error_count",
    "drop index runs_backtracked",
    "drop index runs_forced",
    "drop index runs_mod_sets",
    "drop index runs_displaced",
    "alter table runs drop column metadata, drop column labels, drop column final_tokens, drop column final_actions,
        drop column end_cause, drop column parent_run, drop column parent_event, drop column parent_step,
        drop column parent_change, drop column deletion, drop column user_notes, drop column mod_call_names,
        drop column mod_call_counts, drop column mod_call_us, drop column mod_call_max_us",
    "drop table run_stats, first_token_stats, run_stats_days, mod_call_stats",
    "drop table run_stats_by_day, first_token_stats_by_day, mod_call_stats_by_day, run_stats_hours",
    "drop table experiment_cells, experiments, saved_filters, run_images, images, removed_runs, removed_days,
        counted_runs",
    "drop function remove_images, sum_statistics, lock_runs, lock_days",
    "alter table attention drop column head_rows",
    "drop function mod_sets",
    "drop function mod_set",
    "drop function is_displaced",
    "delete from refinery_schema_history where version > 12",
];

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/citus.sh");

async fn script(arguments: &[&str]) -> std::process::Output {
    tokio::process::Command::new(SCRIPT).args(arguments).output().await.unwrap()
}

/// Runs `thunder` on a database; returns its output.
async fn thunder_on(url: &str, data: &Data, arguments: &[&str]) -> String {
    let mut command = tokio::process::Command::from(thunder());
    let output =
        command.args(arguments).args(["--database-url", url, "--data-dir"]).arg(&data.0).output().await.unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn schema_is_distributed_over_citus_and_runs_are_stored() {
    let Some((cluster, url)) = Cluster::start().await else { return };
    let data = Data::folder();
    let database = || Database::Url { url: url.clone(), direct_url: None, data_dir: data.0.clone() };
    let store = Store::open(database(), |_| {}).await.unwrap();
    let before = store.ingest(&Scope::All, None, document("before", 3)).await.unwrap().run_id;
    let feedback = NewFeedback { rating: 1.0, text: None, position: None, user_label: None };
    store.add_feedback(&Scope::All, before, &feedback, system::now()).await.unwrap().unwrap();

    let sql = thunder_on(&url, &data, &["db", "distribute", "--dry-run", "--shards", "4"]).await;
    assert!(sql.contains("create_distributed_table('runs', 'run_id', colocate_with => 'none', shard_count => 4)"));
    let distributed = thunder_on(&url, &data, &["db", "distribute", "--shards", "4", "--partitions", "month"]).await;
    assert!(distributed.ends_with("all tables are distributed\n"), "{distributed}");
    let repeated = thunder_on(&url, &data, &["db", "distribute"]).await;
    assert!(!repeated.contains("[1/") && repeated.ends_with("all tables are distributed\n"), "{repeated}");
    let status = thunder_on(&url, &data, &["db", "status", "--json"]).await;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let nodes = status["citus"]["nodes"].as_array().unwrap();
    assert!(nodes.len() == 3 && nodes.iter().all(|node| node["is_reachable"] == true), "{status}");
    let table = |name: &str| status["tables"].as_array().unwrap().iter().find(|table| table["name"] == name).unwrap();
    for name in ["runs", "feedback", "events", "mod_calls", "mod_logs", "actions", "attention", "run_columns"] {
        assert_eq!((&table(name)["placement"], &table(name)["shards"]), (&"distributed".into(), &4.into()), "{name}");
    }
    assert_eq!(table("run_keys")["placement"], "reference");
    assert_eq!(status["partitions"]["unit"], "month");

    // The migrations after the one for Citus also apply to distributed tables.
    for statement in UNDO_MIGRATIONS {
        psql(&url, statement).await;
    }
    Store::open(database(), |_| {}).await.unwrap().close().await;

    // The store that was open during the migrations still works, and has the earlier data.
    assert_eq!(store.document(&Scope::All, before).await.unwrap().unwrap().events.len(), 10);
    assert_eq!(store.feedback(&Scope::All, before).await.unwrap().len(), 1);
    let after = store.ingest(&Scope::All, None, document("after", 3)).await.unwrap().run_id;
    assert!(
        !store.ingest(&Scope::All, None, document("after", 3)).await.unwrap().created,
        "the same document is one run"
    );
    assert!(matches!(store.ingest(&Scope::All, None, document("after", 4)).await, Err(IngestError::Conflict { .. })));
    let mut live = LiveRun::new("live");
    store.start_recorder();
    let RecorderHandle { signals, .. } = store.recorder();
    for signal in live.all(3) {
        signals.send(signal).await.unwrap();
    }
    let is_done =
        async || store.find(&Scope::All, "live").await.unwrap().is_some_and(|run| run.status == RunStatus::Done);
    wait_until("the run is stored", is_done).await;
    for (q, expected) in [
        ("", vec!["live", "after", "before"]),
        ("model:GEMINI", vec!["after", "before"]),
        ("model:nobody", vec![]),
        ("-model:gemini", vec!["live"]),
        ("mod:watch -model:gemini", vec!["live"]),
        ("\"sky sky\" surface:openai", vec!["live"]),
        ("w2 w3", vec!["after", "before"]),
        ("request:bef", vec!["before"]),
        ("tokens>2 before:today", vec!["after", "before"]),
        ("error>0", vec![]),
    ] {
        let page = store.runs(&Scope::All, &RunQuery { q: q.into(), ..RunQuery::default() }).await.unwrap();
        assert_eq!(page.runs.into_iter().map(|run| run.request_id).collect::<Vec<_>>(), expected, "{q}");
    }
    assert!(store.columns(&Scope::All, after).await.unwrap().is_some());
    assert_eq!(
        store.attention_range(&Scope::All, live.run_id(), 0..100, AttentionParts::default()).await.unwrap().len(),
        3
    );
    assert!(store.delete(&Scope::All, after).await.unwrap());
    assert!(store.damaged_links().await.unwrap().is_empty());

    // A past month is dropped, and the size includes the shards.
    let old = "insert into events (run_id, sequence_order, event_type, step) select first_run_id('2026-01-05'), 1, 'Added', 1";
    psql(&url, "select make_partitions('2026-01-05', 1)").await;
    psql(&url, old).await;
    let sizes = psql(&url, "select min(bytes) > 4 * 6 * 8192 from partition_days where day <> '2026-01-05'").await;
    assert_eq!(sizes, "t");
    let today = system::now().date_naive();
    let dropped = store.prune(Retention { days: None, bytes: Some(0) }, today).await.unwrap();
    assert_eq!(dropped, [("2026-01-05".parse().unwrap(), 0)]);
    assert_eq!(psql(&url, "select count(*) from events where event_type = 'Added' and step = 1").await, "2");
    assert!(store.find(&Scope::All, "before").await.unwrap().is_some(), "the current month must stay");

    // While a worker is unavailable, its documents are rejected without partial rows.
    let folder = cluster.0.to_str().unwrap();
    assert!(script(&["node", folder, "worker2", "kill"]).await.status.success());
    let error = store.ingest(&Scope::All, None, document("while-down", 3)).await;
    assert!(matches!(error, Err(IngestError::Unavailable { .. })), "{error:?}");
    let status = thunder_on(&url, &data, &["db", "status"]).await;
    assert!(status.contains("a node with runs is unreachable"), "{status}");
    assert_eq!(status.lines().filter(|line| line.contains(" worker ") && line.contains(" unreachable ")).count(), 1);
    assert!(script(&["node", folder, "worker2", "start"]).await.status.success());
    let is_stored =
        async || store.ingest(&Scope::All, None, document("while-down", 3)).await.is_ok_and(|stored| stored.created);
    wait_until("the document is stored", is_stored).await;
    assert!(store.damaged_links().await.unwrap().is_empty());
    store.close().await;

    let worker = script(&["node", folder, "worker1", "url"]).await;
    let worker = String::from_utf8(worker.stdout).unwrap().trim().to_owned();
    let error = Store::open(Database::Url { url: worker, direct_url: None, data_dir: data.0.clone() }, |_| {})
        .await
        .err()
        .unwrap();
    assert!(matches!(&error, Error::WorkerNode { coordinator: Some(_) }), "{error}");
}
