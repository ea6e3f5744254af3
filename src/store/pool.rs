//! Connections, transactions and their pool, used by all statements of the store.
//!
//! They wrap sqlx's types and adapt to poolers: a pooler in transaction mode assigns each transaction another server
//! connection, so statements have no names there, and each runs in a transaction. With several hosts, connections use the
//! host that accepts writes.

use super::address::{Hosts, accepts_writes};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgPoolOptions, PgQueryResult, PgRow, PgStatement, PgTypeInfo, Postgres};
use sqlx::{Connection as _, Database, Describe, Either, Error, Execute, Executor, SqlStr};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

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
}

impl PgPool {
    /// Creates a pool of up to `connections` connections, which are opened on demand.
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
                    sqlx::raw_sql("set plan_cache_mode = force_custom_plan").execute(connection).await?;
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
        Self { pool, hosts, statements, acquire_timeout }
    }

    /// Takes a connection out of the pool. Dropping it returns it to the pool.
    pub async fn acquire(&self) -> Result<PgConnection, Error> {
        let pooled = Pooled { connection: self.acquire_raw().await?, in_transaction: false };
        Ok(PgConnection { raw: Raw::Pooled(pooled), statements: self.statements })
    }

    /// Begins a transaction.
    pub async fn begin(&self) -> Result<Transaction, Error> {
        self.begin_with("begin").await
    }

    /// Begins a transaction with this statement.
    pub async fn begin_with(&self, statement: &'static str) -> Result<Transaction, Error> {
        let connection = self.acquire_raw().await?;
        let begin = sqlx::Transaction::begin(connection, Some(SqlStr::from_static(statement)));
        // A task of its own, because the caller may be cancelled: sqlx 0.9.0 does not roll back a transaction if `begin` is
        // cancelled before its response, and the connection would return to the pool inside the transaction
        // (https://github.com/transact-rs/sqlx/issues/4393).
        let transaction = tokio::spawn(begin).await.map_err(|error| Error::Io(std::io::Error::other(error)))??;
        Ok(Transaction(PgConnection { raw: Raw::Transaction(transaction), statements: self.statements }))
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
}

#[derive(Debug)]
enum Raw {
    Pooled(Pooled),
    Dedicated { connection: Box<sqlx::PgConnection>, in_transaction: bool },
    Transaction(sqlx::Transaction<'static, Postgres>),
}

/// A connection of the pool. It is closed instead of returned if a transaction is open, for example because its future was
/// cancelled.
#[derive(Debug)]
struct Pooled {
    connection: PoolConnection<Postgres>,
    in_transaction: bool,
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if self.in_transaction {
            self.connection.close_on_drop();
        }
    }
}

impl PgConnection {
    /// Wraps a connection that does not belong to a pool.
    pub fn dedicated(connection: sqlx::PgConnection, statements: Statements) -> Self {
        Self { raw: Raw::Dedicated { connection: Box::new(connection), in_transaction: false }, statements }
    }

    /// Closes a dedicated connection; a pooled one returns to the pool.
    pub async fn close(self) -> Result<(), Error> {
        match self.raw {
            Raw::Dedicated { connection, .. } => connection.close().await,
            Raw::Pooled(_) | Raw::Transaction(_) => Ok(()),
        }
    }

    /// Begins a transaction. It ends with [`PgConnection::end`], or when the connection closes.
    pub async fn begin(&mut self) -> Result<(), Error> {
        self.set_in_transaction(true);
        sqlx::raw_sql("begin").execute(self.raw()).await?;
        Ok(())
    }

    /// Ends the transaction with `commit` or `rollback`.
    pub async fn end(&mut self, statement: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(statement).execute(self.raw()).await?;
        self.set_in_transaction(false);
        Ok(())
    }

    fn is_in_transaction(&self) -> bool {
        match &self.raw {
            Raw::Pooled(Pooled { in_transaction, .. }) | Raw::Dedicated { in_transaction, .. } => *in_transaction,
            Raw::Transaction(_) => true,
        }
    }

    fn set_in_transaction(&mut self, value: bool) {
        match &mut self.raw {
            Raw::Pooled(Pooled { in_transaction, .. }) | Raw::Dedicated { in_transaction, .. } => {
                *in_transaction = value;
            }
            Raw::Transaction(_) => {}
        }
    }

    /// Returns sqlx's connection.
    pub fn raw(&mut self) -> &mut sqlx::PgConnection {
        match &mut self.raw {
            Raw::Pooled(Pooled { connection, .. }) => connection,
            Raw::Dedicated { connection, .. } => connection,
            Raw::Transaction(transaction) => transaction,
        }
    }

    async fn run<'q, E: Execute<'q, Postgres> + 'q>(&mut self, query: E) -> Result<Vec<QueryOutput>, Error> {
        if self.is_in_transaction() || self.statements != Statements::InTransaction {
            return self.raw().fetch_many(Unnamed(query)).try_collect().await;
        }
        self.begin().await?;
        let steps = self.raw().fetch_many(Unnamed(query)).try_collect().await;
        self.end(if steps.is_ok() { "commit" } else { "rollback" }).await?;
        steps
    }
}

/// A transaction; dropping it without a commit rolls it back.
#[derive(Debug)]
pub struct Transaction(PgConnection);

impl Transaction {
    /// Commits the transaction.
    pub async fn commit(self) -> Result<(), Error> {
        match self.0.raw {
            Raw::Transaction(transaction) => transaction.commit().await,
            Raw::Pooled(_) | Raw::Dedicated { .. } => Ok(()),
        }
    }

    /// Rolls the transaction back.
    pub async fn rollback(self) -> Result<(), Error> {
        match self.0.raw {
            Raw::Transaction(transaction) => transaction.rollback().await,
            Raw::Pooled(_) | Raw::Dedicated { .. } => Ok(()),
        }
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
            return self.raw().fetch_many(query);
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
            return self.raw().fetch_optional(query);
        }
        Box::pin(async move { Ok(self.run(query).await?.into_iter().find_map(Either::right)) })
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, Result<PgStatement, Error>>
    where
        'c: 'e,
    {
        self.raw().prepare_with(sql, parameters)
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
