//! Scopes as conditions of SQL statements. Every read or change of a run on behalf of a client uses them.

use super::pool::PgConnection;
use crate::events::{RunId, Scope, Tenant};
use sqlx::{Postgres, QueryBuilder};

/// The condition of a statement for [`owners`] as parameter `$number`, on the column `owner`.
macro_rules! owned {
    ($number:literal) => {
        // Indexes of `owner` can be used, unlike with an expression of it.
        concat!(
            "($",
            $number,
            "::text[] is null or owner = any($",
            $number,
            ") or owner is null and '' = any($",
            $number,
            "))"
        )
    };
}

/// The condition of [`owned`] on the table `runs`, without deleted runs.
macro_rules! visible {
    ($number:literal) => {
        concat!("deletion is null and ", crate::store::scope::owned!($number))
    };
}

pub(super) use {owned, visible};

/// Returns the owners in a scope as the parameter of a condition, or `None` for all owners. The empty text, which is not a
/// valid tenant, stands for runs without an owner.
pub(super) fn owners(scope: &Scope) -> Option<Vec<&str>> {
    match scope {
        Scope::All => None,
        Scope::Owned { tenant, includes_unowned } => {
            let unowned = includes_unowned.then_some("");
            Some(tenant.as_ref().map(Tenant::as_str).into_iter().chain(unowned).collect())
        }
    }
}

/// Appends ` and …` with the condition of a scope, in a form that can use the index of owners.
pub(super) fn push_owned(sql: &mut QueryBuilder<Postgres>, scope: &Scope) {
    let Scope::Owned { tenant, includes_unowned } = scope else { return };
    sql.push(" and (");
    match tenant {
        Some(tenant) => drop(sql.push("owner = ").push_bind(tenant.as_str().to_owned())),
        None => drop(sql.push("false")),
    }
    if *includes_unowned {
        sql.push(" or owner is null");
    }
    sql.push(")");
}

/// Owner condition of a statement whose index returns runs in list order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Owner {
    /// All owners in the scope, without a condition of its own.
    InScope,
    /// A tenant.
    Tenant(String),
    /// No owner.
    Unowned,
}

/// Returns the owners in a scope, one entry each.
pub(super) fn owner_branches(scope: &Scope) -> Vec<Owner> {
    let Scope::Owned { tenant, includes_unowned } = scope else { return vec![Owner::InScope] };
    let tenant = tenant.as_ref().map(|tenant| Owner::Tenant(tenant.as_str().to_owned()));
    let unowned = includes_unowned.then_some(Owner::Unowned);
    tenant.into_iter().chain(unowned).collect()
}

/// Appends ` and …` for the runs of an owner. Returns the columns that precede `run_id` in the order of their index.
pub(super) fn push_owner(sql: &mut QueryBuilder<Postgres>, owner: &Owner) -> &'static str {
    match owner {
        Owner::InScope => return "",
        Owner::Tenant(tenant) => drop(sql.push(" and owner = ").push_bind(tenant.clone())),
        Owner::Unowned => drop(sql.push(" and owner is null")),
    }
    "owner desc, "
}

/// Returns true if the run is in the scope. Needs no query for a scope of all runs.
pub(super) async fn covers(connection: &mut PgConnection, scope: &Scope, run_id: RunId) -> Result<bool, sqlx::Error> {
    if *scope == Scope::All {
        return Ok(true);
    }
    is_visible(connection, scope, run_id).await
}

/// Returns true if the run is in the scope and not deleted.
pub(super) async fn is_visible(
    connection: &mut PgConnection,
    scope: &Scope,
    run_id: RunId,
) -> Result<bool, sqlx::Error> {
    let found: Option<i32> = sqlx::query_scalar(concat!("select 1 from runs where run_id = $1 and ", visible!(2)))
        .bind(run_id.0)
        .bind(owners(scope))
        .fetch_optional(connection)
        .await?;
    Ok(found.is_some())
}
