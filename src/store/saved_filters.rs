//! Filters of the run list that a tenant has named.

use super::filter::Filter;
use super::text::clean;
use super::{Error, Store};
use crate::events::Tenant;
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::FromRow;
use utoipa::ToSchema;

/// Maximum saved filters of a tenant.
pub const MAX_SAVED_FILTERS: usize = 50;

/// A named filter of the run list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, FromRow, ToSchema)]
pub struct SavedFilter {
    /// Its name.
    pub name: String,
    /// The filter.
    pub q: String,
    /// Time at which it was saved.
    pub created_at: DateTime<Utc>,
}

/// Returns the value of `saved_filters.owner`.
fn owner(tenant: Option<&Tenant>) -> String {
    tenant.map(|tenant| clean(tenant.as_str()).into_owned()).unwrap_or_default()
}

impl Store {
    /// Saves a filter; it replaces an earlier one with the same name. Returns `None` if the tenant has
    /// [`MAX_SAVED_FILTERS`] others.
    ///
    /// # Errors
    /// [`Error::BadFilter`], or the database failed.
    pub async fn save_filter(
        &self,
        tenant: Option<&Tenant>,
        name: &str,
        q: &str,
        now: DateTime<Utc>,
    ) -> Result<Option<SavedFilter>, Error> {
        Filter::parse(q, now)?;
        let saved = sqlx::query_as(
            "insert into saved_filters (owner, name, q, created_at)
            select $1, $2, $3, $4
            where (select count(*) from saved_filters where owner = $1 and name <> $2) < $5
            on conflict (owner, name) do update set q = excluded.q, created_at = excluded.created_at
            returning name, q, created_at",
        );
        let saved = saved.bind(owner(tenant)).bind(clean(name)).bind(clean(q)).bind(now);
        Ok(saved.bind(MAX_SAVED_FILTERS as i64).fetch_optional(&self.inner.pool).await?)
    }

    /// Returns the filters of a tenant by name.
    ///
    /// # Errors
    /// The database failed.
    pub async fn saved_filters(&self, tenant: Option<&Tenant>) -> Result<Vec<SavedFilter>, Error> {
        let select = "select name, q, created_at from saved_filters where owner = $1 order by name";
        Ok(sqlx::query_as(select).bind(owner(tenant)).fetch_all(&self.inner.pool).await?)
    }

    /// Removes a filter. Returns false if the tenant has none with that name.
    ///
    /// # Errors
    /// The database failed.
    pub async fn remove_filter(&self, tenant: Option<&Tenant>, name: &str) -> Result<bool, Error> {
        let remove = sqlx::query("delete from saved_filters where owner = $1 and name = $2");
        let removed = remove.bind(owner(tenant)).bind(clean(name)).execute(&self.inner.pool).await?;
        Ok(removed.rows_affected() > 0)
    }
}
