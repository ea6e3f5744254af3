//! Errors and nodes of Citus, as far as a single PostgreSQL can show them. `tests/citus.sh` starts a real cluster.

use super::{Data, Live, document, psql};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::events::{Recorder, RunStatus};
use thunder::store::{Database, Error, IngestError, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

/// Fails every statement that changes `runs`, as the coordinator does when a worker is lost within a transaction.
const LOSE_NODE: &str = "
    create function lose_node() returns trigger language plpgsql as $$
    begin
        raise exception 'failure on connection marked as essential: worker:5432' using errcode = 'XX000';
    end $$;
    create trigger lose_node before insert or update on runs for each row execute function lose_node()";

#[tokio::test]
async fn node_lost_within_transaction_refuses_documents_and_spools_runs() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    psql(&url, LOSE_NODE).await;
    let refused = store.ingest(document("lost", 3)).await.unwrap_err();
    assert!(matches!(refused, IngestError::Unavailable { .. }), "{refused}");
    let mut run = Live::new("spooled");
    let (Recorder { signals, .. }, _) = store.recorder();
    for signal in run.all(3) {
        signals.send(signal).await.unwrap();
    }
    let spooled =
        async || data.spool_files().iter().any(|path| std::fs::metadata(path).is_ok_and(|file| file.len() > 0));
    wait_until("the run is in the spool file", spooled).await;
    psql(&url, "drop function lose_node cascade").await;
    let is_done = async || store.find("spooled").await.unwrap().is_some_and(|run| run.status == RunStatus::Done);
    wait_until("the run is stored", is_done).await;
    assert!(store.ingest(document("lost", 3)).await.unwrap().created);
    store.close().await;
}

async fn wait_until(expected: &str, holds: impl AsyncFn() -> bool) {
    let begin = Instant::now();
    while !holds().await {
        assert!(begin.elapsed() < Duration::from_mins(1), "{expected}: not within a minute");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn worker_node_is_refused_with_the_address_of_the_coordinator() {
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

/// A server's certificate that is not checked before it is sent.
#[derive(Debug)]
struct Unchecked(Arc<CertifiedKey>);

impl ResolvesServerCert for Unchecked {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

#[tokio::test]
async fn certificate_of_version_1_is_named_with_a_remedy() {
    let file = |name: &str| format!("{}/fixtures/tls/{name}", env!("CARGO_MANIFEST_DIR"));
    let chain = vec![CertificateDer::from_pem_file(file("version1.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(file("version1.key")).unwrap();
    let key = ring::sign::any_supported_type(&key).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Unchecked(Arc::new(CertifiedKey::new(chain, key)))));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // PostgreSQL's request for TLS, and the answer that it begins.
        let mut request = [0; 8];
        stream.read_exact(&mut request).await.unwrap();
        stream.write_all(b"S").await.unwrap();
        TlsAcceptor::from(Arc::new(config)).accept(stream).await.is_err()
    });
    let url = format!("postgres://someone@127.0.0.1:{port}/thunder?sslmode=require");
    let data_dir = Data::new().0.clone();
    let error = Store::open(Database::Url { url, data_dir }, |_| {}).await.err().unwrap().to_string();
    assert!(error.contains("UnsupportedCertVersion"), "{error}");
    assert!(error.contains("version 3 is needed: make one with `openssl req -x509"), "{error}");
    assert!(server.await.unwrap(), "the client has refused the certificate");
}
