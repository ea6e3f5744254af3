//! Uploaded mods, by version, which mods are switched off, and the versions of files that runs have used.

use super::rows::clean;
use super::{Error, Store};
use chrono::{DateTime, NaiveDate, Utc};
use serde_json::Value;
use sqlx::postgres::PgConnection;
use sqlx::types::Json;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Versions that are kept of a name; older ones go.
const MOST_VERSIONS: i64 = 100;
/// Channel for changes of mods.
pub(super) const MODS_CHANNEL: &str = "thunder_mods";
/// Interval of lookups without a notification, for databases that deliver none.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(30);
/// Delay of each answer after the store has closed.
const CLOSED_DELAY: Duration = Duration::from_secs(1);

/// A version of a mod: an uploaded one, or a file's that a run has used.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct ModVersion {
    /// Its name.
    pub name: String,
    /// SHA-256 of its source, hexadecimal.
    pub hash: String,
    /// What was sent.
    #[sqlx(json)]
    pub upload: Value,
    /// When.
    pub created_at: DateTime<Utc>,
    /// The label of the key that sent it; the name of the file.
    pub created_by: Option<String>,
    /// Whether it is a file of a server's own, and not uploaded.
    pub from_file: bool,
}

/// Whether a mod is switched on, and which version of it runs take.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ModState {
    /// Its name.
    pub name: String,
    /// `None` for a mod that is not uploaded.
    pub hash: Option<String>,
    /// Whether runs can name it.
    pub enabled: bool,
}

impl Store {
    /// Keeps a version, which is from now on the one that runs take; whether it is switched on stays as it was. The same
    /// source again is the same version, with its first date.
    ///
    /// # Errors
    /// The database failed.
    pub async fn save_mod(&self, version: &ModVersion) -> Result<(), Error> {
        let mut transaction = self.inner.pool.begin().await?;
        sqlx::query(
            "insert into mod_versions (name, hash, upload, created_at, created_by, origin)
            values ($1, $2, $3, $4, $5, 'uploaded')
            on conflict (name, hash) do update set upload = excluded.upload, origin = 'uploaded', used_on = null
                where mod_versions.origin = 'file'",
        )
        .bind(&version.name)
        .bind(&version.hash)
        .bind(Json(&version.upload))
        .bind(version.created_at)
        .bind(version.created_by.as_deref().map(clean))
        .execute(&mut *transaction)
        .await?;
        sqlx::query(
            "insert into mods (name, hash, enabled, changed_at, changed_by) values ($1, $2, true, $3, $4)
            on conflict (name) do update set hash = excluded.hash, changed_at = excluded.changed_at,
                changed_by = excluded.changed_by",
        )
        .bind(&version.name)
        .bind(&version.hash)
        .bind(version.created_at)
        .bind(version.created_by.as_deref().map(clean))
        .execute(&mut *transaction)
        .await?;
        forget_old_versions(&mut transaction, &version.name, &version.hash).await?;
        tell(&mut transaction).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Keeps a version of a file that a run has used, and the last day on which one did. The same source again is the
    /// same version, with its first date.
    ///
    /// # Errors
    /// The database failed.
    pub async fn keep_used_mod(&self, version: &ModVersion, day: NaiveDate) -> Result<(), Error> {
        let name = clean(&version.name);
        let mut transaction = self.inner.pool.begin().await?;
        sqlx::query(
            "insert into mod_versions (name, hash, upload, created_at, created_by, origin, used_on)
            values ($1, $2, $3, $4, $5, 'file', $6)
            on conflict (name, hash) do update set used_on = greatest(mod_versions.used_on, excluded.used_on)
                where mod_versions.origin = 'file'",
        )
        .bind(&*name)
        .bind(&version.hash)
        .bind(Json(&version.upload))
        .bind(version.created_at)
        .bind(version.created_by.as_deref().map(clean))
        .bind(day)
        .execute(&mut *transaction)
        .await?;
        forget_old_versions(&mut transaction, &name, &version.hash).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// The version of an uploaded mod that runs take.
    ///
    /// # Errors
    /// The database failed.
    pub async fn uploaded_mod(&self, name: &str) -> Result<Option<ModVersion>, Error> {
        let version = sqlx::query_as(
            "select v.name, v.hash, v.upload, v.created_at, v.created_by, v.origin = 'file' as from_file
            from mods m join mod_versions v on v.name = m.name and v.hash = m.hash where m.name = $1",
        );
        Ok(version.bind(clean(name)).fetch_optional(&self.inner.pool).await?)
    }

    /// All versions that are kept of a mod, newest first; also of one that was removed.
    ///
    /// # Errors
    /// The database failed.
    pub async fn mod_versions(&self, name: &str) -> Result<Vec<ModVersion>, Error> {
        let versions = sqlx::query_as(
            "select name, hash, upload, created_at, created_by, origin = 'file' as from_file
            from mod_versions where name = $1 order by created_at desc, hash",
        );
        Ok(versions.bind(clean(name)).fetch_all(&self.inner.pool).await?)
    }

    /// What is known of mods beyond their source, by name.
    ///
    /// # Errors
    /// The database failed.
    pub async fn mod_states(&self) -> Result<Vec<ModState>, Error> {
        let states = sqlx::query_as("select name, hash, enabled from mods order by name");
        Ok(states.fetch_all(&self.inner.pool).await?)
    }

    /// Notes that a mod is switched on or off.
    ///
    /// # Errors
    /// The database failed.
    pub async fn enable_mod(
        &self,
        name: &str,
        enabled: bool,
        at: DateTime<Utc>,
        by: Option<&str>,
    ) -> Result<(), Error> {
        let mut transaction = self.inner.pool.begin().await?;
        sqlx::query(
            "insert into mods (name, enabled, changed_at, changed_by) values ($1, $2, $3, $4)
            on conflict (name) do update set enabled = excluded.enabled, changed_at = excluded.changed_at,
                changed_by = excluded.changed_by",
        )
        .bind(clean(name))
        .bind(enabled)
        .bind(at)
        .bind(by.map(clean))
        .execute(&mut *transaction)
        .await?;
        tell(&mut transaction).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Forgets that there is such a mod; its versions stay, for the runs that ran with them.
    ///
    /// # Errors
    /// The database failed.
    pub async fn remove_mod(&self, name: &str) -> Result<(), Error> {
        let mut transaction = self.inner.pool.begin().await?;
        sqlx::query("delete from mods where name = $1").bind(clean(name)).execute(&mut *transaction).await?;
        tell(&mut transaction).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// The changes of mods that this server, or another one on the database, makes from now on.
    #[must_use]
    pub fn mod_changes(&self) -> ModChanges {
        ModChanges(self.inner.mods.subscribe())
    }
}

/// Changes of mods.
pub struct ModChanges(watch::Receiver<()>);

impl ModChanges {
    /// Returns when something may have changed: also when a notification may have been missed, and now and then in any case.
    pub async fn next(&mut self) {
        if let Ok(Err(_)) = timeout(LOOKUP_INTERVAL, self.0.changed()).await {
            // The store has closed: nothing changes any more, and nobody may look without a pause.
            sleep(CLOSED_DELAY).await;
        }
    }
}

/// Tells every server on the database once the transaction is done.
async fn tell(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("select pg_notify($1, '')").bind(MODS_CHANNEL).execute(connection).await?;
    Ok(())
}

/// Removes the oldest versions of a name where there are too many; never the one that was just kept, nor the one that
/// runs take.
async fn forget_old_versions(connection: &mut PgConnection, name: &str, kept: &str) -> Result<(), sqlx::Error> {
    sqlx::query(
        "delete from mod_versions where name = $1 and hash <> $2
            and hash is distinct from (select hash from mods where name = $1)
            and hash not in (select hash from mod_versions where name = $1 order by created_at desc, hash limit $3)",
    )
    .bind(name)
    .bind(kept)
    .bind(MOST_VERSIONS)
    .execute(connection)
    .await?;
    Ok(())
}
