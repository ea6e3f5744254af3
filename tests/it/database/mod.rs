//! One list of checks ([`checks`]) on every way to a database: direct, over TLS, through pgbouncer, and on an outside
//! database that `THUNDER_TEST_DATABASE_URL` names, with `THUNDER_TEST_DATABASE_DIRECT_URL` where a pooler is between.

mod checks;
mod pooler;

use super::harness::postgres::Postgres;
use super::harness::{Server, certificate, folder};
use checks::Target;
use pooler::Pooler;

/// Runs every check on a server that records into this database. The checks' own statements use `test_url`.
async fn check(name: &str, url: &str, direct_url: Option<&str>, test_url: &str) {
    let mods = folder();
    for (name, source) in checks::MODS {
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
    let failed = checks::run(&target).await;
    assert!(failed.is_empty(), "{name}: {} of {} checks fail:\n{}", failed.len(), checks::COUNT, failed.join("\n"));
    assert_eq!(target.server.stop("TERM").await, Some(0), "{}", target.server.log());
}

#[tokio::test]
async fn every_check_passes_on_a_direct_connection() {
    let url = Postgres::shared().empty_database("direct");
    check("direct", &url, None, &url).await;
}

#[tokio::test]
async fn every_check_passes_over_tls() {
    let url = Postgres::shared().empty_database("tls");
    let url = format!("{url}?sslmode=verify-full&sslrootcert={}", certificate("authority.pem"));
    check("TLS", &url, None, &url).await;
}

#[tokio::test]
async fn every_check_passes_through_pgbouncer_by_session() {
    let postgres = Postgres::shared();
    let Some(pooler) = Pooler::start(postgres, "session") else { return };
    let test_url = postgres.empty_database("sessions");
    check("pgbouncer, session mode", &pooler.url("sessions"), None, &test_url).await;
}

#[tokio::test]
async fn every_check_passes_through_pgbouncer_by_transaction() {
    let postgres = Postgres::shared();
    let Some(pooler) = Pooler::start(postgres, "transaction") else { return };
    let test_url = postgres.empty_database("transactions");
    check("pgbouncer, transaction mode", &pooler.url("transactions"), None, &test_url).await;
}

#[tokio::test]
async fn every_check_passes_on_an_outside_database() {
    let Ok(url) = std::env::var("THUNDER_TEST_DATABASE_URL") else {
        return eprintln!("skipped: THUNDER_TEST_DATABASE_URL names no database");
    };
    let direct_url = std::env::var("THUNDER_TEST_DATABASE_DIRECT_URL").ok();
    check("outside", &url, direct_url.as_deref(), direct_url.as_deref().unwrap_or(&url)).await;
}
