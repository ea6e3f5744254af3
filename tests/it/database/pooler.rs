//! pgbouncer between a server and its database.

use crate::harness::postgres::{Postgres, as_postgres, start_program, wait_for_port};
use crate::harness::{folder, free_port};
use std::path::Path;

/// pgbouncer in front of a PostgreSQL server.
pub struct Pooler {
    port: u16,
}

impl Pooler {
    /// Starts pgbouncer in this mode. Returns `None`, and prints the reason, if it is not installed.
    pub fn start(postgres: &Postgres, mode: &str) -> Option<Self> {
        let Some(pgbouncer) = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/opt/homebrew/bin/pgbouncer"]
            .into_iter()
            .find(|path| Path::new(path).exists())
        else {
            eprintln!("skipped: pgbouncer is not installed");
            return None;
        };
        let (port, folder) = (free_port(), folder());
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\ndefault_pool_size = 60\n",
            postgres.port
        );
        std::fs::write(folder.join("pgbouncer.ini"), settings).unwrap();
        let mut command = as_postgres(Path::new(pgbouncer));
        command.arg(folder.join("pgbouncer.ini"));
        let log = folder.join("pgbouncer.log");
        start_program(command, &log);
        wait_for_port(port, &log);
        Some(Self { port })
    }

    /// Returns the address of a database through the pooler.
    pub fn url(&self, name: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{name}", self.port)
    }
}
