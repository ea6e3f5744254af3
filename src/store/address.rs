//! Addresses of the database: its hosts, one of which accepts writes, and detection of a pooler in front of them.

use super::Error;
use super::pool::{PgConnection, Statements};
use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::timeout;

/// Maximum time for a connection to one of several hosts.
const HOST_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time for a connection to the only host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum duration of the search for a pooler. A pooler without a free server connection does not answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of times that the search for a pooler queries the server process of each connection.
const PROBE_COUNT: usize = 4;

/// The hosts of the database, with and without a pooler in between.
#[derive(Debug)]
pub struct Addresses {
    hosts: Arc<Hosts>,
    direct: Option<Hosts>,
    statements: Statements,
}

impl Addresses {
    /// Returns the address of the embedded server.
    pub fn embedded(options: PgConnectOptions) -> Self {
        Self { hosts: Arc::new(Hosts::new(vec![options])), direct: None, statements: Statements::Named }
    }

    /// Parses the addresses, and connects to find out whether a pooler is in front of the database.
    ///
    /// # Errors
    /// An address is invalid, or no host answers.
    pub async fn connect(url: &str, direct_url: Option<&str>) -> Result<Self, Error> {
        let hosts = Hosts::parse(url)?;
        let direct = direct_url.map(Hosts::parse).transpose()?;
        let pooled = hosts.is_pooled_by_transaction().await.map_err(|error| match error.into() {
            Error::Unavailable(error @ sqlx::Error::Database(_))
            | Error::Privilege(error)
            | Error::Database(error @ sqlx::Error::Database(_)) => {
                Error::ConnectionRejected { addresses: hosts.to_string(), error }
            }
            Error::Unavailable(error) => Error::NoServer { addresses: hosts.to_string(), error },
            other => other,
        })?;
        let statements = match pooled {
            true => Statements::InTransaction,
            false if hosts.uses_unnamed_statements => Statements::Unnamed,
            false => Statements::Named,
        };
        if statements == Statements::InTransaction {
            tracing::info!("the database is reached through a pooler in transaction mode");
        }
        Ok(Self { hosts: Arc::new(hosts), direct, statements })
    }

    /// Returns the hosts for ordinary connections.
    pub fn hosts(&self) -> Arc<Hosts> {
        Arc::clone(&self.hosts)
    }

    /// Returns the kind of prepared statements that ordinary connections can use.
    pub fn statements(&self) -> Statements {
        self.statements
    }

    /// Returns true if ordinary connections use a Unix socket.
    pub fn is_local(&self) -> bool {
        let options = self.hosts.current();
        options.get_socket().is_some() || options.get_host().starts_with('/')
    }

    /// Opens a connection that bypasses the pooler, if a direct address is configured.
    pub async fn direct(&self) -> Result<PgConnection, sqlx::Error> {
        let statements = match &self.direct {
            Some(hosts) if !hosts.uses_unnamed_statements => Statements::Named,
            Some(_) => Statements::Unnamed,
            None => self.statements,
        };
        Ok(PgConnection::dedicated(self.direct_hosts().connect().await?, statements))
    }

    /// Opens a connection that receives notifications. Returns `None` if the only address is that of a pooler in transaction
    /// mode, which does not forward them.
    pub async fn listener(&self, application_name: &str) -> Result<Option<PgListener>, sqlx::Error> {
        if self.direct.is_none() && self.statements == Statements::InTransaction {
            return Ok(None);
        }
        let hosts = self.direct_hosts();
        if hosts.is_multi_host() {
            hosts.connect().await?.close().await?;
        }
        let options = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
        let pool =
            options.acquire_timeout(HOST_TIMEOUT).connect_lazy_with(hosts.current().application_name(application_name));
        PgListener::connect_with(&pool).await.map(Some)
    }

    fn direct_hosts(&self) -> &Hosts {
        self.direct.as_ref().unwrap_or(&self.hosts)
    }
}

/// Hosts of one database, one of which accepts writes.
#[derive(Debug)]
pub struct Hosts {
    options: Vec<PgConnectOptions>,
    /// Index of the host that last accepted writes.
    current: AtomicUsize,
    /// True if the address disables named statements.
    uses_unnamed_statements: bool,
}

impl Hosts {
    fn new(options: Vec<PgConnectOptions>) -> Self {
        let with_defaults = |options: PgConnectOptions| options.application_name("thunder").extra_float_digits(None);
        let options = options.into_iter().map(with_defaults).collect();
        Self { options, current: AtomicUsize::new(0), uses_unnamed_statements: false }
    }

    /// Parses `postgres://user:password@host:port,host:port/name?…`.
    fn parse(url: &str) -> Result<Self, Error> {
        let invalid = |reason: String| Error::Address { url: without_password(url), reason };
        let scheme = ["postgres://", "postgresql://"].into_iter().find(|scheme| url.starts_with(scheme));
        let Some(scheme) = scheme else { return Err(invalid("it does not begin with postgres://".to_owned())) };
        let rest = &url[scheme.len()..];
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (user, hosts) = authority.rsplit_once('@').map_or(("", authority), |(user, hosts)| (user, hosts));
        let (mut parameters, mut uses_unnamed_statements) = (Vec::new(), false);
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            match parameter.split_once('=').unwrap_or((parameter, "")) {
                ("target_session_attrs", "read-write" | "primary") => {}
                ("target_session_attrs", other) => {
                    let reason = format!("target_session_attrs is '{other}', but Thunder needs read-write");
                    return Err(invalid(reason));
                }
                ("statement_cache_capacity" | "statement-cache-capacity", capacity) => {
                    uses_unnamed_statements = capacity == "0";
                    parameters.push(format!("statement-cache-capacity={capacity}"));
                }
                _ => parameters.push(parameter.to_owned()),
            }
        }
        let user = if user.is_empty() { String::new() } else { format!("{user}@") };
        let options = hosts.split(',').map(|host| {
            let url = format!("{scheme}{user}{host}{path}?{}", parameters.join("&"));
            PgConnectOptions::from_str(&url).map_err(|error| invalid(error.to_string()))
        });
        Ok(Self { uses_unnamed_statements, ..Self::new(options.collect::<Result<_, _>>()?) })
    }

    /// Returns true if there are several hosts.
    pub fn is_multi_host(&self) -> bool {
        self.options.len() > 1
    }

    /// Returns the options of the host that last accepted writes.
    pub fn current(&self) -> PgConnectOptions {
        self.options[self.current.load(Ordering::Relaxed)].clone()
    }

    /// Connects to the first host that accepts writes, beginning with the last one known to accept them.
    pub async fn connect(&self) -> Result<sqlx::PgConnection, sqlx::Error> {
        self.connect_within(CONNECT_TIMEOUT).await
    }

    async fn connect_within(&self, time: Duration) -> Result<sqlx::PgConnection, sqlx::Error> {
        if !self.is_multi_host() {
            return with_timeout(time, sqlx::PgConnection::connect_with(&self.options[0])).await;
        }
        let first = self.current.load(Ordering::Relaxed);
        let mut failure = sqlx::Error::PoolTimedOut;
        for host in (0..self.options.len()).map(|step| (first + step) % self.options.len()) {
            match with_timeout(HOST_TIMEOUT, connect_to_write(&self.options[host])).await {
                Ok(connection) => {
                    if self.current.swap(host, Ordering::Relaxed) != host {
                        tracing::info!(host = self.options[host].get_host(), "another database host accepts writes");
                    }
                    return Ok(connection);
                }
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Returns true if two connections share a server process, or if a connection changes to another one.
    async fn is_pooled_by_transaction(&self) -> Result<bool, sqlx::Error> {
        let mut first = self.connect().await?;
        let process = server_process(&mut first).await?;
        let probe = async {
            let mut second = self.connect().await?;
            let other = server_process(&mut second).await?;
            let mut changes = process == other;
            for _ in 0..PROBE_COUNT {
                changes |= server_process(&mut first).await? != process || server_process(&mut second).await? != other;
            }
            second.close().await?;
            Ok(changes)
        };
        // A pooler in session mode does not answer if this connection uses its only server connection.
        let changes = timeout(PROBE_TIMEOUT, probe).await.unwrap_or(Ok(false));
        first.close().await?;
        changes
    }
}

/// Formats hosts and ports, without user names and passwords.
impl fmt::Display for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, options) in self.options.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match options.get_socket() {
                Some(socket) => write!(f, "{comma}{}", socket.display())?,
                None => write!(f, "{comma}{}:{}", options.get_host(), options.get_port())?,
            }
        }
        Ok(())
    }
}

/// Waits for the result for up to `time`.
pub async fn with_timeout<T>(
    time: Duration,
    result: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    timeout(time, result).await.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

async fn connect_to_write(options: &PgConnectOptions) -> Result<sqlx::PgConnection, sqlx::Error> {
    let mut connection = sqlx::PgConnection::connect_with(options).await?;
    if accepts_writes(&mut connection).await? {
        return Ok(connection);
    }
    connection.close().await?;
    Err(io::Error::other(format!("host {}:{} does not accept writes", options.get_host(), options.get_port())).into())
}

/// Returns true if the server accepts writes.
pub async fn accepts_writes(connection: &mut sqlx::PgConnection) -> Result<bool, sqlx::Error> {
    fetch_text(
        connection,
        "select (current_setting('transaction_read_only') = 'off' and not pg_is_in_recovery())::text",
    )
    .await
    .map(|answer| answer == "true")
}

async fn server_process(connection: &mut sqlx::PgConnection) -> Result<String, sqlx::Error> {
    fetch_text(connection, "select pg_backend_pid()::text").await
}

/// Returns the text that a query selects, without a prepared statement.
async fn fetch_text(connection: &mut sqlx::PgConnection, sql: &'static str) -> Result<String, sqlx::Error> {
    use sqlx::Row;
    sqlx::raw_sql(sql).fetch_one(connection).await?.try_get(0)
}

/// Returns the address for messages: without its password and its parameters, one of which may be a password.
pub fn without_password(url: &str) -> String {
    let is_scheme = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let Some((scheme, rest)) = url.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) else {
        return "…".to_owned();
    };
    let (authority, after) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if after.contains('@') {
        // It may end a password that contains an unescaped `/`, `?` or `#`.
        return format!("{scheme}://…");
    }
    let path = after.split(['?', '#']).next().unwrap_or_default();
    match authority.rsplit_once('@') {
        Some((user, hosts)) => format!("{scheme}://{}:…@{hosts}{path}", user.split(':').next().unwrap_or_default()),
        None => format!("{scheme}://{authority}{path}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_shows_no_password() {
        assert_eq!(without_password("postgres://me:se@cret@host/db"), "postgres://me:…@host/db");
        for (url, shown) in [
            ("postgres://host/db", "postgres://host/db"),
            ("postgres://host?password=secret", "postgres://host"),
            ("postgres://me:secret@one:5433,two/db?sslmode=disable", "postgres://me:…@one:5433,two/db"),
            ("postgres://host/db?user=me&password=secret@1", "postgres://…"),
            ("postgres://me:secret/1@host/db", "postgres://…"),
            ("postgres://me:x@secret?1@host/db", "postgres://…"),
            ("host=db password=secret://1", "…"),
        ] {
            assert_eq!(without_password(url), shown, "{url}");
        }
        let url = "postgres://db/t?user=u&password=secret&target_session_attrs=any";
        let error = Hosts::parse(url).unwrap_err().to_string();
        assert!(!error.contains("secret") && error.contains("'postgres://db/t'"), "{error}");
        let error = Hosts::parse("mysql://me:secret@host/db").unwrap_err().to_string();
        assert!(!error.contains("secret") && error.contains("postgres://"), "{error}");
    }

    #[tokio::test]
    async fn host_that_never_answers_times_out() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let hosts = Hosts::parse(&format!("postgres://me@127.0.0.1:{port}/db")).unwrap();
        let failure = hosts.connect_within(Duration::from_millis(100)).await.unwrap_err();
        assert!(matches!(&failure, sqlx::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut), "{failure}");
    }

    #[test]
    fn address_names_several_hosts() {
        let hosts = Hosts::parse(
            "postgres://me:a%2Cb@one:5433,two,[::1]:6432/db?target_session_attrs=read-write&sslmode=disable",
        )
        .unwrap();
        let named: Vec<_> = hosts.options.iter().map(|host| (host.get_host().to_owned(), host.get_port())).collect();
        assert_eq!(named, [("one".to_owned(), 5433), ("two".to_owned(), 5432), ("[::1]".to_owned(), 6432)]);
        assert!(hosts.options.iter().all(|host| host.get_database() == Some("db") && host.get_username() == "me"));
        assert!(!hosts.uses_unnamed_statements && hosts.is_multi_host());
        let error = Hosts::parse("postgres://one,two/db?target_session_attrs=any").unwrap_err().to_string();
        assert!(error.contains("'any'") && error.contains("read-write"), "{error}");
    }

    #[test]
    fn address_without_statement_cache_uses_unnamed_statements() {
        for name in ["statement_cache_capacity", "statement-cache-capacity"] {
            let hosts = Hosts::parse(&format!("postgres:///db?host=/run/pg&{name}=0")).unwrap();
            assert!(hosts.uses_unnamed_statements && !hosts.is_multi_host(), "{name}");
        }
        assert!(!Hosts::parse("postgres://one/db?statement_cache_capacity=20").unwrap().uses_unnamed_statements);
    }
}
