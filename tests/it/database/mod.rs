//! The same checks ([`checks`]) for several kinds of connection: direct, over TLS, through pgbouncer, and to an
//! external database. `THUNDER_TEST_DATABASE_URL` is the address of the external database. If it is the address of a
//! pooler, `THUNDER_TEST_DATABASE_DIRECT_URL` is the address of the database itself.

mod checks;
mod pooler;
mod target;

use super::harness::postgres::Postgres;
use super::harness::{Server, certificate, folder};
use pooler::Pooler;
use serde_json::json;
use sqlx::{Connection, PgConnection};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use target::Target;
use thunder::events::Scope;
use thunder::store::{Database, Store};
use thunder::trace::document::Document;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Maximum time for an event, also while other tests use all cores.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Groups of checks whose statements TLS and a pooler in session mode do not change.
const READS: &[&str] = &["filters", "reading"];

/// Runs the checks of all groups but the skipped ones on a server with this database. The checks themselves connect to
/// `test_url`.
async fn check(name: &str, url: &str, direct_url: Option<&str>, test_url: &str, skipped_groups: &[&str]) {
    let mods = folder();
    for (name, source) in target::MODS {
        std::fs::write(mods.join(name).with_extension("py"), source).unwrap();
    }
    let mods = mods.display().to_string();
    let mut arguments = vec!["--attention", "on", "--mods-dir", &mods, "--database-url", url];
    if let Some(direct_url) = direct_url {
        arguments.extend(["--database-direct-url", direct_url]);
    }
    let server = Server::start(&arguments);
    server.wait_ready().await;
    let target = Target::new(server, test_url);
    let failed = checks::run(&target, skipped_groups).await;
    assert!(failed.is_empty(), "{name}: {} checks fail:\n{}", failed.len(), failed.join("\n"));
    assert_eq!(target.server.stop("TERM").await, Some(0), "{}", target.server.log());
}

#[tokio::test]
async fn every_check_passes_on_a_direct_connection() {
    let url = Postgres::shared().empty_database("direct");
    check("direct", &url, None, &url, &[]).await;
}

#[tokio::test]
async fn checks_of_writes_pass_over_tls() {
    let url = Postgres::shared().empty_database("tls");
    let url = format!("{url}?sslmode=verify-full&sslrootcert={}", certificate("authority.pem"));
    check("TLS", &url, None, &url, READS).await;
}

#[tokio::test]
async fn checks_of_writes_pass_through_pgbouncer_in_session_mode() {
    let postgres = Postgres::shared();
    let Some(pooler) = Pooler::start(postgres, "session") else { return };
    let test_url = postgres.empty_database("sessions");
    check("pgbouncer, session mode", &pooler.url("sessions"), None, &test_url, READS).await;
}

#[tokio::test]
async fn every_check_passes_through_pgbouncer_in_transaction_mode() {
    let postgres = Postgres::shared();
    let Some(pooler) = Pooler::start(postgres, "transaction") else { return };
    let test_url = postgres.empty_database("transactions");
    check("pgbouncer, transaction mode", &pooler.url("transactions"), None, &test_url, &[]).await;
}

#[tokio::test]
async fn store_moves_to_the_host_that_accepts_writes() {
    let first = tokio::task::spawn_blocking(Postgres::start).await.unwrap();
    let second = tokio::task::spawn_blocking(Postgres::start).await.unwrap();
    for postgres in [&first, &second] {
        let url = postgres.empty_database("failover");
        open(&url, "prepare").await.close().await;
    }
    let accept_writes = async |postgres: &Postgres, accepts: bool| {
        let mut connection =
            PgConnection::connect(&format!("postgres://postgres@localhost:{}/postgres", postgres.port)).await.unwrap();
        let setting = if accepts {
            "alter system set default_transaction_read_only = off"
        } else {
            "alter system set default_transaction_read_only = on"
        };
        sqlx::raw_sql(setting).execute(&mut connection).await.unwrap();
        sqlx::raw_sql("select pg_reload_conf()").execute(&mut connection).await.unwrap();
        // The server applies its settings after the answer.
        loop {
            let read_only: String =
                sqlx::query_scalar("show default_transaction_read_only").fetch_one(&mut connection).await.unwrap();
            if (read_only == "off") == accepts {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        connection.close().await.unwrap();
    };
    accept_writes(&first, false).await;
    let url = format!(
        "postgres://postgres@localhost:{},localhost:{}/failover?target_session_attrs=read-write",
        first.port, second.port
    );
    let store = open(&url, "failover").await;
    store.ingest(&Scope::All, None, document("before")).await.unwrap();
    // The first host becomes the one that accepts writes, and the second one stops.
    accept_writes(&first, true).await;
    second.stop();
    let moved = async || -> Result<bool, String> {
        store.ingest(&Scope::All, None, document("after")).await.map_err(|error| error.to_string())?;
        let found = async |id| store.find(&Scope::All, id).await.map_err(|error| error.to_string());
        Ok(found("after").await?.is_some() && found("before").await?.is_none())
    };
    let begun = Instant::now();
    loop {
        let result = moved().await;
        if matches!(result, Ok(true)) {
            break;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "{result:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    store.close().await;
}

#[tokio::test]
async fn heartbeats_continue_after_a_lookup_that_never_ends() {
    let postgres = Postgres::shared();
    let url = postgres.empty_database("hung");
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy_url = format!("postgres://postgres@{}/hung?sslmode=disable", proxy.local_addr().unwrap());
    let (is_lookup_hung, port) = (Arc::new(AtomicBool::new(false)), postgres.port);
    let is_hung = Arc::clone(&is_lookup_hung);
    tokio::spawn(async move {
        while let Ok((client, _)) = proxy.accept().await {
            let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            let is_hung = Arc::clone(&is_hung);
            tokio::spawn(async move {
                let mut bytes = vec![0; 64 * 1024];
                while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
                    // The first lookup of missed changes gets no answer.
                    let is_lookup = String::from_utf8_lossy(&bytes[..count]).contains("select clock_timestamp()");
                    if is_lookup && !is_hung.swap(true, Ordering::Relaxed) {
                        std::future::pending::<()>().await;
                    }
                    if to_server.write_all(&bytes[..count]).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    let store = open(&proxy_url, "hung").await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let heartbeat_count = async |connection: &mut PgConnection| -> i64 {
        sqlx::query_scalar("select heartbeat from servers").fetch_one(connection).await.unwrap()
    };
    let begun = Instant::now();
    while heartbeat_count(&mut connection).await == 0 {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "the server sends no heartbeats");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(is_lookup_hung.load(Ordering::Relaxed), "no lookup hung");
    store.close().await;
}

#[tokio::test]
async fn error_for_role_without_tables_names_the_remedy() {
    let url = Postgres::shared().empty_database("owned");
    open(&url, "owner").await.close().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("create role reader login; grant select on all tables in schema public to reader")
        .execute(&mut connection)
        .await
        .unwrap();
    let database = Database::Url { url: url.replace("postgres@", "reader@"), direct_url: None, data_dir: folder() };
    let error = Store::open(database, |_| {}).await.err().unwrap().to_string();
    assert!(error.contains("must own its tables") && error.contains("reassign owned by"), "{error}");
}

async fn open(url: &str, name: &str) -> Store {
    let data_dir = folder().join(name);
    Store::open(Database::Url { url: url.to_owned(), direct_url: None, data_dir }, |_| {}).await.unwrap()
}

fn document(request_id: &str) -> Document {
    let body = json!({"request": {"request_id": request_id}, "events": []});
    Document::parse(&serde_json::to_vec(&body).unwrap()).unwrap()
}

#[tokio::test]
async fn every_check_passes_on_an_external_database() {
    let Ok(url) = std::env::var("THUNDER_TEST_DATABASE_URL") else {
        return eprintln!("skipped: THUNDER_TEST_DATABASE_URL names no database");
    };
    let direct_url = std::env::var("THUNDER_TEST_DATABASE_DIRECT_URL").ok();
    check("external", &url, direct_url.as_deref(), direct_url.as_deref().unwrap_or(&url), &[]).await;
}
