//! Versions of uploaded mods, disabled mods, and the versions of mod files that runs have used.

use super::pool::PgConnection;
use super::text::clean;
use super::{Error, Store};
use chrono::{DateTime, NaiveDate, Utc};
use serde_json::Value;
use sqlx::types::Json;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Maximum stored versions of a mod. Older ones are deleted.
const MAX_VERSIONS: i64 = 100;
/// PostgreSQL's notification channel for changes of mods.
pub(super) const MODS_CHANNEL: &str = "thunder_mods";
/// Maximum time between two lookups, for databases that deliver no notifications.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(30);
/// Delay of [`ModChanges::next`] after the store has closed.
const CLOSED_DELAY: Duration = Duration::from_secs(1);

/// An uploaded version of a mod, or a version of a mod file that a run has used.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct ModVersion {
    /// Name of the mod.
    pub name: String,
    /// SHA-256 in hexadecimal, of the source and of the module and entrypoint that the upload names.
    pub hash: String,
    /// The uploaded source and metadata.
    #[sqlx(json)]
    pub upload: Value,
    /// Time of the upload, or of the first use of a file.
    pub created_at: DateTime<Utc>,
    /// The label of the key that uploaded it, or the name of the file.
    pub created_by: Option<String>,
    /// True for a file in a server's mods directory, false for an upload.
    pub from_file: bool,
}

/// A [`ModVersion`] without its source.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ModVersionInfo {
    /// SHA-256 in hexadecimal, as in [`ModVersion::hash`].
    pub hash: String,
    /// Time of the upload, or of the first use of a file.
    pub created_at: DateTime<Utc>,
    /// The label of the key that uploaded it, or the name of the file.
    pub created_by: Option<String>,
    /// True for a file in a server's mods directory, false for an upload.
    pub from_file: bool,
}

/// The current version of a mod, and its enabled state.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ModState {
    /// Name of the mod.
    pub name: String,
    /// Hash of the current version; `None` for a mod that was not uploaded.
    pub hash: Option<String>,
    /// True if runs can use it.
    pub enabled: bool,
}

impl Store {
    /// Stores a version and makes it the current one. The enabled state does not change. Storing the same version again
    /// keeps its date and updates its metadata, which other servers read when they start. The hashes of earlier releases
    /// cover only the source: if a stored version with the same hash has another entrypoint, it is kept, because runs have
    /// used it.
    ///
    /// # Errors
    /// The database failed.
    pub async fn save_mod(&self, version: &ModVersion) -> Result<(), Error> {
        let mut transaction = self.inner.pool.begin().await?;
        sqlx::query(
            "insert into mod_versions (name, hash, upload, created_at, created_by, origin)
            values ($1, $2, $3, $4, $5, 'uploaded')
            on conflict (name, hash) do update set upload = excluded.upload, origin = 'uploaded', used_on = null
                where mod_versions.origin = 'file'
                    or (mod_versions.upload ->> 'module', mod_versions.upload ->> 'entrypoint')
                        is not distinct from (excluded.upload ->> 'module', excluded.upload ->> 'entrypoint')",
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
        delete_old_versions(&mut transaction, &version.name, &version.hash).await?;
        notify(&mut transaction).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Stores a version of a file that a run has used, with the last day of use. Storing the same source again keeps
    /// the existing version with its date.
    ///
    /// # Errors
    /// The database failed.
    pub async fn save_used_mod(&self, version: &ModVersion, day: NaiveDate) -> Result<(), Error> {
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
        delete_old_versions(&mut transaction, &name, &version.hash).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Returns the current version of an uploaded mod.
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

    /// Returns all stored versions of a mod without their sources, newest first. Works for removed mods, too.
    ///
    /// # Errors
    /// The database failed.
    pub async fn mod_versions(&self, name: &str) -> Result<Vec<ModVersionInfo>, Error> {
        let versions = sqlx::query_as(
            "select hash, created_at, created_by, origin = 'file' as from_file
            from mod_versions where name = $1 order by created_at desc, hash",
        );
        Ok(versions.bind(clean(name)).fetch_all(&self.inner.pool).await?)
    }

    /// Returns a stored version of a mod. Works for removed mods, too.
    ///
    /// # Errors
    /// The database failed.
    pub async fn mod_version(&self, name: &str, hash: &str) -> Result<Option<ModVersion>, Error> {
        let version = sqlx::query_as(
            "select name, hash, upload, created_at, created_by, origin = 'file' as from_file
            from mod_versions where name = $1 and hash = $2",
        );
        Ok(version.bind(clean(name)).bind(clean(hash)).fetch_optional(&self.inner.pool).await?)
    }

    /// Returns the state of a mod.
    ///
    /// # Errors
    /// The database failed.
    pub async fn mod_state(&self, name: &str) -> Result<Option<ModState>, Error> {
        let state = sqlx::query_as("select name, hash, enabled from mods where name = $1");
        Ok(state.bind(clean(name)).fetch_optional(&self.inner.pool).await?)
    }

    /// Returns the states of all mods, ordered by name.
    ///
    /// # Errors
    /// The database failed.
    pub async fn mod_states(&self) -> Result<Vec<ModState>, Error> {
        let states = sqlx::query_as("select name, hash, enabled from mods order by name");
        Ok(states.fetch_all(&self.inner.pool).await?)
    }

    /// Enables or disables a mod.
    ///
    /// # Errors
    /// The database failed.
    pub async fn set_mod_enabled(
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
        notify(&mut transaction).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Removes a mod. Its versions remain, for the runs that used them.
    ///
    /// # Errors
    /// The database failed.
    pub async fn remove_mod(&self, name: &str) -> Result<(), Error> {
        let mut transaction = self.inner.pool.begin().await?;
        sqlx::query("delete from mods where name = $1").bind(clean(name)).execute(&mut *transaction).await?;
        notify(&mut transaction).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Subscribes to changes of mods by this server and all others on the database.
    #[must_use]
    pub fn mod_changes(&self) -> ModChanges {
        ModChanges(self.inner.mods.subscribe())
    }
}

/// A subscription to changes of mods.
pub struct ModChanges(watch::Receiver<()>);

impl ModChanges {
    /// Returns when mods may have changed: after a notification, or after [`LOOKUP_INTERVAL`] without one.
    pub async fn next(&mut self) {
        if let Ok(Err(_)) = timeout(LOOKUP_INTERVAL, self.0.changed()).await {
            // The store has closed. The delay keeps a caller in a loop from spinning.
            sleep(CLOSED_DELAY).await;
        }
    }
}

/// Notifies all servers on the database when the transaction commits.
async fn notify(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("select pg_notify($1, '')").bind(MODS_CHANNEL).execute(connection).await?;
    Ok(())
}

/// Deletes the oldest versions of a mod beyond [`MAX_VERSIONS`], except the version just stored and the current one.
async fn delete_old_versions(connection: &mut PgConnection, name: &str, kept: &str) -> Result<(), sqlx::Error> {
    sqlx::query(
        "delete from mod_versions where name = $1 and hash <> $2
            and hash is distinct from (select hash from mods where name = $1)
            and hash not in (select hash from mod_versions where name = $1 order by created_at desc, hash limit $3)",
    )
    .bind(name)
    .bind(kept)
    .bind(MAX_VERSIONS)
    .execute(connection)
    .await?;
    Ok(())
}
