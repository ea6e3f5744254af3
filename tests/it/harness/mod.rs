//! The real program, with the tiny model, a database of the shared PostgreSQL server and a port that the system
//! chooses.
//!
//! [`server`] is shared; a test that changes or stops its server starts its own with [`Server::start`].

pub mod cleanup;
mod commands;
mod error_table;
pub mod postgres;
pub mod redaction;
mod requests;
mod runs;
mod server;
mod sse;

pub use cleanup::{assert_no_postgres, folder};
pub use commands::{client_command, output_of, text};
pub use error_table::{ErrorTable, message_of};
pub use postgres::{psql, wait_for_psql};
pub use requests::{read_until_closed, websocket_handshake, with_fields};
pub use runs::{recorded_items, run_start};
pub use server::{Server, server};
pub use sse::{SseEvent, SseReader};

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, LazyLock};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Mods of the shared server besides the built-in ones.
pub const MODS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/mods");

/// Returns the path of the model of all tests; its weights are random.
pub fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf")
}

/// Returns the program with a clean environment, so that a developer's settings do not affect tests.
pub fn thunder() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thunder"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        ["LLAMA_", "HF_"].iter().any(|prefix| name.starts_with(prefix))
            || name.starts_with("THUNDER_") && name != "THUNDER_PG_BIN"
            || name == "DATABASE_URL"
    }) {
        command.env_remove(name);
    }
    command.env("THUNDER_CONFIG_FILE", "").env("PATH", &*PATH);
    command
}

/// `PATH` with the folder of the interpreter first: `python3` may be a slow script that looks for it (pyenv).
static PATH: LazyLock<OsString> = LazyLock::new(|| {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable or '', end='')"]).output();
    let interpreter = output.ok().and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
    match Path::new(&interpreter).parent() {
        Some(folder) => {
            let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path));
            std::env::join_paths(folders).unwrap()
        }
        None => path,
    }
});

/// Returns false for SIGHUP if the tests run under nohup: programs inherit that the signal is ignored.
pub fn can_receive(signal: &str) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    signal != "HUP" || ignored.is_none_or(|mask| mask & 1 == 0)
}

/// Returns the path of a file in `fixtures/tls`.
pub fn certificate(name: &str) -> String {
    format!("{}/fixtures/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns a builder of a client that trusts only the tests' certificate authority.
pub fn client() -> reqwest::ClientBuilder {
    // An error means that a provider is already installed.
    let _ = ring::default_provider().install_default();
    let authority = std::fs::read(certificate("authority.pem")).unwrap();
    reqwest::Client::builder().tls_certs_only([reqwest::Certificate::from_pem(&authority).unwrap()])
}

/// Returns the settings of TLS connections that trust only the tests' certificate authority.
pub fn client_tls() -> ClientConfig {
    let mut roots = RootCertStore::empty();
    let authority = thunder::config::certificates("", certificate("authority.pem").as_ref()).unwrap();
    roots.add_parsable_certificates(authority);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots).with_no_client_auth()
}

/// Returns a client without connection reuse: each test has its own runtime, and pooled connections would end with it.
pub fn http() -> reqwest::Client {
    client().pool_max_idle_per_host(0).build().unwrap()
}

/// Returns a port for a program that cannot report a port chosen by the system.
///
/// The system does not assign ports of this range by itself, and no port is returned twice.
pub fn free_port() -> u16 {
    const RANGE: u16 = 20_000;
    /// Test processes that run at the same time have similar ids. This factor gives them distant first ports.
    const SPACING: u32 = 97;
    static NEXT: LazyLock<AtomicU16> =
        LazyLock::new(|| AtomicU16::new((std::process::id().wrapping_mul(SPACING) % u32::from(RANGE)) as u16));
    loop {
        let port = 10_000 + NEXT.fetch_add(1, Ordering::Relaxed) % RANGE;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
