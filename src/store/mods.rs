//! Uploaded mods, by version, and which mods are switched off.

use super::rows::clean;
use super::{Error, Store};
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::types::Json;

/// Versions that are kept of a name; older ones go.
const MOST_VERSIONS: i64 = 100;

/// A version of an uploaded mod.
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
    /// The label of the key that sent it.
    pub created_by: Option<String>,
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
            "insert into mod_versions (name, hash, upload, created_at, created_by) values ($1, $2, $3, $4, $5)
            on conflict do nothing",
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
        sqlx::query(
            "delete from mod_versions where name = $1 and hash <> $2 and hash not in
                (select hash from mod_versions where name = $1 order by created_at desc, hash limit $3)",
        )
        .bind(&version.name)
        .bind(&version.hash)
        .bind(MOST_VERSIONS)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// The version of each uploaded mod that runs take, by name.
    ///
    /// # Errors
    /// The database failed.
    pub async fn uploaded_mods(&self) -> Result<Vec<ModVersion>, Error> {
        let versions = sqlx::query_as(
            "select v.name, v.hash, v.upload, v.created_at, v.created_by
            from mods m join mod_versions v on v.name = m.name and v.hash = m.hash order by v.name",
        );
        Ok(versions.fetch_all(&self.inner.pool).await?)
    }

    /// All versions of an uploaded mod, newest first; also of one that was removed.
    ///
    /// # Errors
    /// The database failed.
    pub async fn mod_versions(&self, name: &str) -> Result<Vec<ModVersion>, Error> {
        let versions = sqlx::query_as(
            "select name, hash, upload, created_at, created_by from mod_versions where name = $1
            order by created_at desc, hash",
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
        sqlx::query(
            "insert into mods (name, enabled, changed_at, changed_by) values ($1, $2, $3, $4)
            on conflict (name) do update set enabled = excluded.enabled, changed_at = excluded.changed_at,
                changed_by = excluded.changed_by",
        )
        .bind(clean(name))
        .bind(enabled)
        .bind(at)
        .bind(by.map(clean))
        .execute(&self.inner.pool)
        .await?;
        Ok(())
    }

    /// Forgets that there is such a mod; its versions stay, for the runs that ran with them.
    ///
    /// # Errors
    /// The database failed.
    pub async fn remove_mod(&self, name: &str) -> Result<(), Error> {
        sqlx::query("delete from mods where name = $1").bind(clean(name)).execute(&self.inner.pool).await?;
        Ok(())
    }
}
