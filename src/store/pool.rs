//! Connections, transactions and their pool, used by all statements of the store.
//!
//! They wrap sqlx's types and adapt to poolers: a pooler in transaction mode assigns each transaction another server
//! connection, so statements have no names there, and each runs in a transaction. With several hosts, connections use the
//! host that accepts writes.

use super::address::{Hosts, accepts_writes, with_timeout};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgPoolOptions, PgQueryResult, PgRow, PgStatement, PgTypeInfo, Postgres};
use sqlx::{Connection as _, Database, Describe, Either, Error, Execute, Executor, SqlStr};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Maximum time for the return of a connection to the pool. After it the connection is closed.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// The kind of prepared statements that a connection can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statements {
    /// Named: prepared once for each connection.
    Named,
    /// Unnamed: prepared for each use.
    Unnamed,
    /// Unnamed, each in a transaction: a pooler may change the server connection after every transaction.
    InTransaction,
}

/// A pool of connections.
#[derive(Debug, Clone)]
pub struct PgPool {
    pool: sqlx::PgPool,
    hosts: Arc<Hosts>,
    statements: Statements,
    acquire_timeout: Duration,
    response_timeout: Duration,
}

impl PgPool {
    /// Creates a pool of up to `connections` connections, which are opened on demand. The time for a response is not limited.
    pub fn new(hosts: Arc<Hosts>, statements: Statements, connections: u32, acquire_timeout: Duration) -> Self {
        let is_multi_host = hosts.is_multi_host();
        let mut options = PgPoolOptions::new().max_connections(connections).acquire_timeout(acquire_timeout);
        options = options.after_connect(move |connection, _| {
            Box::pin(async move {
                if is_multi_host && !accepts_writes(connection).await? {
                    return Err(Error::Io(std::io::Error::other("the host does not accept writes")));
                }
                if statements == Statements::Named {
                    // A generic plan cannot exclude partitions. Poolers reject this setting as a startup option.
                    sqlx::raw_sql("set plan_cache_mode = force_custom_plan").execute(&mut *connection).await?;
                    // The server ends a statement after its connection was closed. Not every platform supports it.
                    let _ = sqlx::raw_sql("set client_connection_check_interval = '5s'").execute(connection).await;
                }
                Ok(())
            })
        });
        if is_multi_host {
            // Instead of sqlx's ping, because the host may have become a standby.
            options = options.test_before_acquire(false);
            options = options.before_acquire(|connection, _| Box::pin(accepts_writes(connection)));
        }
        let pool = options.connect_lazy_with(hosts.current());
        Self { pool, hosts, statements, acquire_timeout, response_timeout: Duration::MAX }
    }

    /// Returns the same pool with a maximum time for each response of the database. A host that has vanished never responds.
    pub fn with_response_timeout(&self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self.clone() }
    }

    /// Takes a connection out of the pool. Dropping it returns it to the pool.
    pub async fn acquire(&self) -> Result<PgConnection, Error> {
        let connection = Some(self.acquire_raw().await?);
        let raw = Raw::Pooled(Pooled { connection, in_transaction: false, rolls_back: false });
        Ok(PgConnection { raw, statements: self.statements, response_timeout: self.response_timeout })
    }

    /// Begins a transaction.
    pub async fn begin(&self) -> Result<Transaction, Error> {
        self.begin_with("begin").await
    }

    /// Begins a transaction with this statement.
    pub async fn begin_with(&self, statement: &'static str) -> Result<Transaction, Error> {
        let mut connection = self.acquire().await?;
        if let Raw::Pooled(pooled) = &mut connection.raw {
            pooled.rolls_back = true;
        }
        connection.begin_with(statement).await?;
        Ok(Transaction(connection))
    }

    /// Begins a transaction that may contain a COPY. Dropping it without a commit or rollback closes the connection.
    pub async fn begin_for_copy(&self) -> Result<Transaction, Error> {
        let mut connection = self.acquire().await?;
        connection.begin().await?;
        Ok(Transaction(connection))
    }

    /// Closes all connections.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    async fn acquire_raw(&self) -> Result<PoolConnection<Postgres>, Error> {
        if !self.hosts.is_multi_host() {
            return self.pool.acquire().await;
        }
        self.pool.set_connect_options(self.hosts.current());
        if let Ok(Ok(connection)) = timeout(self.acquire_timeout / 2, self.pool.acquire()).await {
            return Ok(connection);
        }
        self.hosts.connect().await?.close().await?;
        self.pool.set_connect_options(self.hosts.current());
        self.pool.acquire().await
    }
}

/// A connection, pooled or dedicated, with or without a transaction.
#[derive(Debug)]
pub struct PgConnection {
    raw: Raw,
    statements: Statements,
    response_timeout: Duration,
}

#[derive(Debug)]
enum Raw {
    Pooled(Pooled),
    Dedicated { connection: Box<sqlx::PgConnection>, in_transaction: bool },
}

/// A connection of the pool.
#[derive(Debug)]
struct Pooled {
    /// `None` only while it is dropped.
    connection: Option<PoolConnection<Postgres>>,
    in_transaction: bool,
    /// True if an open transaction is rolled back when the connection is dropped, for example because its future was
    /// cancelled. False if the connection is closed instead of returned then.
    rolls_back: bool,
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        if !self.in_transaction {
            // sqlx itself would wait for the response to a cancelled statement, or to its ping, without a limit.
            tokio::spawn(timeout(RETURN_TIMEOUT, connection.return_to_pool()));
            return;
        }
        connection.close_on_drop();
        if self.rolls_back {
            tokio::spawn(timeout(RETURN_TIMEOUT, async move {
                if sqlx::raw_sql("rollback").execute(&mut *connection).await.is_ok() {
                    connection.return_to_pool().await;
                }
            }));
        }
    }
}

impl PgConnection {
    /// Wraps a connection that does not belong to a pool. The time for a response is not limited.
    pub fn dedicated(connection: sqlx::PgConnection, statements: Statements) -> Self {
        let raw = Raw::Dedicated { connection: Box::new(connection), in_transaction: false };
        Self { raw, statements, response_timeout: Duration::MAX }
    }

    /// Closes a dedicated connection; a pooled one returns to the pool.
    pub async fn close(self) -> Result<(), Error> {
        match self.raw {
            Raw::Dedicated { connection, .. } => connection.close().await,
            Raw::Pooled(_) => Ok(()),
        }
    }

    /// Begins a transaction. It ends with [`PgConnection::end`], or when the connection closes.
    pub async fn begin(&mut self) -> Result<(), Error> {
        self.begin_with("begin").await
    }

    async fn begin_with(&mut self, statement: &'static str) -> Result<(), Error> {
        // Before the response, because the future may be cancelled while it waits.
        self.set_in_transaction(true);
        self.execute_raw(statement).await
    }

    /// Ends the transaction with `commit` or `rollback`.
    pub async fn end(&mut self, statement: &'static str) -> Result<(), Error> {
        self.execute_raw(statement).await?;
        self.set_in_transaction(false);
        Ok(())
    }

    async fn execute_raw(&mut self, statement: &'static str) -> Result<(), Error> {
        with_timeout(self.response_timeout, sqlx::raw_sql(statement).execute(self.raw())).await.map(drop)
    }

    fn is_in_transaction(&self) -> bool {
        match &self.raw {
            Raw::Pooled(Pooled { in_transaction, .. }) | Raw::Dedicated { in_transaction, .. } => *in_transaction,
        }
    }

    fn set_in_transaction(&mut self, value: bool) {
        match &mut self.raw {
            Raw::Pooled(Pooled { in_transaction, .. }) | Raw::Dedicated { in_transaction, .. } => {
                *in_transaction = value;
            }
        }
    }

    /// Returns sqlx's connection, whose responses have no time limit.
    pub fn raw(&mut self) -> &mut sqlx::PgConnection {
        match &mut self.raw {
            Raw::Pooled(pooled) => pooled.connection.as_mut().expect("the connection is taken only when it is dropped"),
            Raw::Dedicated { connection, .. } => connection,
        }
    }

    async fn run<'q, E: Execute<'q, Postgres> + 'q>(&mut self, query: E) -> Result<Vec<QueryOutput>, Error> {
        let limit = self.response_timeout;
        if self.is_in_transaction() || self.statements != Statements::InTransaction {
            return limited(self.raw().fetch_many(Unnamed(query)), limit).try_collect().await;
        }
        self.begin().await?;
        let steps = limited(self.raw().fetch_many(Unnamed(query)), limit).try_collect().await;
        if matches!(steps, Err(Error::Io(_))) {
            // The database would not respond to `rollback` either. The transaction is open, so the connection is closed.
            return steps;
        }
        self.end(if steps.is_ok() { "commit" } else { "rollback" }).await?;
        steps
    }
}

/// Limits the time for each response of a statement.
fn limited<'e, T: Send + 'e>(
    responses: BoxStream<'e, Result<T, Error>>,
    limit: Duration,
) -> BoxStream<'e, Result<T, Error>> {
    let next = move |mut responses: BoxStream<'e, Result<T, Error>>| async move {
        Ok(with_timeout(limit, responses.try_next()).await?.map(|response| (response, responses)))
    };
    stream::try_unfold(responses, next).boxed()
}

/// A transaction. Dropping it without a commit undoes it: one of [`PgPool::begin_for_copy`] closes the connection, others roll
/// back.
#[derive(Debug)]
pub struct Transaction(PgConnection);

impl Transaction {
    /// Commits the transaction.
    pub async fn commit(mut self) -> Result<(), Error> {
        self.0.end("commit").await
    }

    /// Rolls the transaction back.
    pub async fn rollback(mut self) -> Result<(), Error> {
        self.0.end("rollback").await
    }
}

impl Deref for Transaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

type QueryOutput = Either<PgQueryResult, PgRow>;

/// A query that is prepared as an unnamed statement.
struct Unnamed<E>(E);

impl<'q, E: Execute<'q, Postgres>> Execute<'q, Postgres> for Unnamed<E> {
    fn sql(self) -> SqlStr {
        self.0.sql()
    }

    fn statement(&self) -> Option<&PgStatement> {
        self.0.statement()
    }

    fn take_arguments(
        &mut self,
    ) -> Result<Option<<Postgres as Database>::Arguments>, Box<dyn std::error::Error + Send + Sync>> {
        self.0.take_arguments()
    }

    fn persistent(&self) -> bool {
        false
    }
}

impl<'c> Executor<'c> for &'c mut PgConnection {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<QueryOutput, Error>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        if self.statements == Statements::Named {
            let limit = self.response_timeout;
            return limited(self.raw().fetch_many(query), limit);
        }
        let steps = stream::once(async move { self.run(query).await });
        steps.map_ok(|steps| stream::iter(steps.into_iter().map(Ok))).try_flatten().boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, Result<Option<PgRow>, Error>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        if self.statements == Statements::Named {
            return Box::pin(with_timeout(self.response_timeout, self.raw().fetch_optional(query)));
        }
        Box::pin(async move { Ok(self.run(query).await?.into_iter().find_map(Either::right)) })
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, Result<PgStatement, Error>>
    where
        'c: 'e,
    {
        Box::pin(with_timeout(self.response_timeout, self.raw().prepare_with(sql, parameters)))
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, Result<Describe<Postgres>, Error>>
    where
        'c: 'e,
    {
        self.raw().describe(sql)
    }
}

impl<'p> Executor<'p> for &'p PgPool {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<QueryOutput, Error>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let steps =
            stream::once(
                async move { self.acquire().await?.fetch_many(query).try_collect::<Vec<QueryOutput>>().await },
            );
        steps.map_ok(|steps| stream::iter(steps.into_iter().map(Ok))).try_flatten().boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, Result<Option<PgRow>, Error>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        Box::pin(async move { self.acquire().await?.fetch_optional(query).await })
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, Result<PgStatement, Error>>
    where
        'p: 'e,
    {
        Box::pin(async move { self.acquire().await?.prepare_with(sql, parameters).await })
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, Result<Describe<Postgres>, Error>>
    where
        'p: 'e,
    {
        Box::pin(async move { self.acquire().await?.describe(sql).await })
    }
}
