//! Migration of the schema, and creation of partitions in advance.
//!
//! refinery applies the missing migrations, each in one transaction with its row in the history. [`MigrationConnection`] is its
//! driver for sqlx. An advisory lock makes servers that start at the same time wait for each other, because refinery takes
//! no lock. Migrations are never edited after a release.

use super::Error;
use super::address::Addresses;
use super::error::{OWNER_HINT, is_missing_privilege, message};
use super::pool::{PgConnection, PgPool};
use super::script::statements;
use crate::events::system;
use chrono::{DateTime, NaiveDate};
use refinery_core::error::Kind;
use refinery_core::traits::r#async::{AsyncQuery, AsyncTransaction};
use refinery_core::{AsyncMigrate, Migration, Runner};
use sqlx::{Connection as _, QueryBuilder, Row};
use std::time::SystemTime;

/// Number of days with partitions created in advance, including today. More than one, so that partitions exist even if
/// the database is unavailable at midnight.
const DAYS_AHEAD: i32 = 3;

const MIGRATIONS: &[(&str, &str)] = &[
    ("V1__runs", include_str!("../../migrations/V1__runs.sql")),
    ("V2__retention", include_str!("../../migrations/V2__retention.sql")),
    ("V3__feedback", include_str!("../../migrations/V3__feedback.sql")),
    ("V4__mods", include_str!("../../migrations/V4__mods.sql")),
    ("V5__mod_origins", include_str!("../../migrations/V5__mod_origins.sql")),
    ("V6__responses", include_str!("../../migrations/V6__responses.sql")),
    ("V7__list_indexes", include_str!("../../migrations/V7__list_indexes.sql")),
    ("V8__request_extras", include_str!("../../migrations/V8__request_extras.sql")),
    ("V9__owners", include_str!("../../migrations/V9__owners.sql")),
    ("V11__servers", include_str!("../../migrations/V11__servers.sql")),
    ("V12__citus", include_str!("../../migrations/V12__citus.sql")),
    ("V13__filters", include_str!("../../migrations/V13__filters.sql")),
    ("V14__end_cause", include_str!("../../migrations/V14__end_cause.sql")),
    ("V15__parents", include_str!("../../migrations/V15__parents.sql")),
    ("V16__head_rows", include_str!("../../migrations/V16__head_rows.sql")),
    ("V17__tags", include_str!("../../migrations/V17__tags.sql")),
    ("V18__statistics", include_str!("../../migrations/V18__statistics.sql")),
    ("V19__experiments", include_str!("../../migrations/V19__experiments.sql")),
    ("V20__run_list", include_str!("../../migrations/V20__run_list.sql")),
    ("V21__notes", include_str!("../../migrations/V21__notes.sql")),
    ("V22__mod_call_time", include_str!("../../migrations/V22__mod_call_time.sql")),
    ("V23__images", include_str!("../../migrations/V23__images.sql")),
    ("V24__statistics_by_day", include_str!("../../migrations/V24__statistics_by_day.sql")),
    ("V25__removed_runs", include_str!("../../migrations/V25__removed_runs.sql")),
    ("V26__counted_runs", include_str!("../../migrations/V26__counted_runs.sql")),
];

/// Applies the missing migrations; several processes may call it at the same time. For an existing database, where this
/// can take a while, `progress` receives their names.
pub async fn migrate(
    addresses: &Addresses,
    connection: &mut PgConnection,
    progress: &impl Fn(&str),
) -> Result<(), Error> {
    if is_current(connection).await? {
        return Ok(());
    }
    // The lock belongs to a transaction on a dedicated connection: through a pooler, a session lock could end up on another
    // client's server connection.
    let mut locked = addresses.direct().await?;
    locked.begin().await?;
    sqlx::raw_sql("select pg_advisory_xact_lock(7237120550100)").execute(&mut locked).await?;
    let mut connection = addresses.direct().await?;
    let result = apply(&mut connection, progress).await;
    connection.close().await?;
    locked.end("rollback").await?;
    locked.close().await?;
    result
}

/// Creates the partitions of the given day and of the days after it; see [`DAYS_AHEAD`].
pub async fn make_partitions(pool: &PgPool, today: NaiveDate) -> Result<i32, sqlx::Error> {
    sqlx::query_scalar("select make_partitions($1, $2)").bind(today).bind(DAYS_AHEAD).fetch_one(pool).await
}

async fn apply(connection: &mut PgConnection, progress: &impl Fn(&str)) -> Result<(), Error> {
    let applied = applied_migrations(connection).await?;
    known_version(&applied)?;
    let missing_migrations = missing_migrations(&applied);
    if !missing_migrations.is_empty() {
        progress(&format!("bringing the database up to date: {}", missing_migrations.join(", ")));
    }
    let migrations = MIGRATIONS
        .iter()
        .map(|(name, sql)| Migration::unapplied(name, sql))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| Error::Migration(error.to_string()))?;
    Runner::new(&migrations)
        .run_async(&mut MigrationConnection(connection))
        .await
        .map_err(|error| Error::Migration(describe(&error)))?;
    Ok(())
}

/// A row of refinery's history.
#[derive(sqlx::FromRow)]
struct AppliedMigration {
    version: i32,
    name: String,
    checksum: String,
}

/// Returns the applied migrations, oldest first; none for a new database.
async fn applied_migrations(connection: &mut PgConnection) -> Result<Vec<AppliedMigration>, sqlx::Error> {
    let is_new: bool =
        sqlx::query_scalar("select to_regclass('refinery_schema_history') is null").fetch_one(&mut *connection).await?;
    if is_new {
        return Ok(Vec::new());
    }
    sqlx::query_as(
        "select version, name::text as name, checksum::text as checksum from refinery_schema_history order by version",
    )
    .fetch_all(connection)
    .await
}

/// Returns true if exactly the known migrations were applied, with the same text. Nothing needs to be locked then.
async fn is_current(connection: &mut PgConnection) -> Result<bool, Error> {
    let applied = applied_migrations(connection).await?;
    Ok(applied.len() == MIGRATIONS.len()
        && applied.iter().zip(MIGRATIONS).all(|(applied, (file, sql))| {
            Migration::unapplied(file, sql).is_ok_and(|known| {
                // The type of versions depends on a feature of refinery.
                i64::from(known.version()) == i64::from(applied.version)
                    && known.name() == applied.name
                    && known.checksum().to_string() == applied.checksum
            })
        }))
}

/// Returns the version of the schema, 0 for a new database. Rejects the schema of a later release, because this release
/// could misinterpret its rows.
fn known_version(applied: &[AppliedMigration]) -> Result<i32, Error> {
    let (found, known) = (applied.last().map_or(0, |migration| migration.version), newest_version());
    if found > known { Err(Error::NewerSchema { found, known }) } else { Ok(found) }
}

/// Returns the version of the schema, or an error for one that is newer than this release or must be migrated first.
pub async fn check_current(connection: &mut PgConnection) -> Result<i32, Error> {
    let found = known_version(&applied_migrations(connection).await?)?;
    let needed = newest_version();
    if found < needed { Err(Error::OldSchema { found, needed }) } else { Ok(found) }
}

/// Returns the newest schema version that this release knows.
fn newest_version() -> i32 {
    let versions = MIGRATIONS.iter().filter_map(|(name, _)| name.strip_prefix('V')?.split('_').next()?.parse().ok());
    versions.max().unwrap_or(0)
}

/// Returns the names of the migrations that an existing database lacks; none for a new database.
fn missing_migrations(applied: &[AppliedMigration]) -> Vec<&'static str> {
    let applied: Vec<String> =
        applied.iter().map(|migration| format!("V{}__{}", migration.version, migration.name)).collect();
    let names = MIGRATIONS.iter().map(|(name, _)| *name);
    names.filter(|name| !applied.is_empty() && applied.iter().all(|applied| applied != name)).collect()
}

/// Returns the message of refinery with that of the database.
fn describe(error: &refinery_core::Error) -> String {
    let Kind::Connection(step, cause) = error.kind() else { return error.to_string() };
    match cause.downcast_ref::<sqlx::Error>() {
        None => format!("{step}: {cause}"),
        Some(cause) if is_missing_privilege(cause) => format!("{step}: {}; {OWNER_HINT}", message(cause)),
        Some(cause) => format!("{step}: {}", message(cause)),
    }
}

/// A statement of V16 that Citus rejects for distributed tables. Without it, PostgreSQL tries to compress the values.
const UNSUPPORTED_BY_CITUS: &str = "alter table attention alter column head_rows set storage external";

struct MigrationConnection<'c>(&'c mut PgConnection);

impl AsyncTransaction for MigrationConnection<'_> {
    type Error = sqlx::Error;

    async fn execute<'a, T: Iterator<Item = &'a str> + Send + 'a>(
        &'a mut self,
        queries: T,
    ) -> Result<usize, sqlx::Error> {
        let mut transaction = self.0.raw().begin().await?;
        let mut count = 0;
        // A transaction of Citus that changes tables must neither access several shards in parallel nor access the
        // coordinator's own shards locally. Without Citus these settings have no effect.
        sqlx::raw_sql(
            "select set_config('citus.multi_shard_modify_mode', 'sequential', true),
                set_config('citus.enable_local_execution', 'off', true)",
        )
        .execute(&mut *transaction)
        .await?;
        for query in queries {
            // Citus forwards statements to its nodes, which accept one statement at a time.
            for statement in statements(query) {
                if statement.ends_with(UNSUPPORTED_BY_CITUS) {
                    let is_distributed: bool =
                        sqlx::query_scalar("select is_distributed('attention')").fetch_one(&mut *transaction).await?;
                    if is_distributed {
                        continue;
                    }
                }
                // refinery composes its statements at run time.
                let sql = QueryBuilder::<sqlx::Postgres>::new(statement).into_sql();
                sqlx::raw_sql(sql).execute(&mut *transaction).await?;
            }
            count += 1;
        }
        transaction.commit().await?;
        Ok(count)
    }
}

impl AsyncQuery<Vec<Migration>> for MigrationConnection<'_> {
    async fn query<'a>(&'a mut self, query: &'a str) -> Result<Vec<Migration>, sqlx::Error> {
        let rows = sqlx::raw_sql(QueryBuilder::<sqlx::Postgres>::new(query).into_sql()).fetch_all(self.0.raw()).await?;
        rows.iter()
            .map(|row| {
                let applied_on: String = row.try_get("applied_on")?;
                let applied_on = DateTime::parse_from_rfc3339(&applied_on).map_or_else(|_| system::now(), Into::into);
                let checksum: String = row.try_get("checksum")?;
                let checksum = checksum.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
                let at = SystemTime::from(applied_on);
                Ok(Migration::applied(row.try_get("version")?, row.try_get("name")?, at.into(), checksum))
            })
            .collect()
    }
}

impl AsyncMigrate for MigrationConnection<'_> {}
