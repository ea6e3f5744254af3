//! Scopes as conditions of statements. Every read or change of a run on behalf of a client passes through here.

use crate::events::{RunId, Scope};
use sqlx::postgres::PgConnection;
use sqlx::{Postgres, QueryBuilder};

/// The condition of a statement for [`owners`] as parameter `$number`, on the column `owner`.
macro_rules! owned {
    ($number:literal) => {
        concat!("($", $number, "::text[] is null or coalesce(owner, '') = any($", $number, "))")
    };
}

pub(super) use owned;

/// Returns the owners that a scope covers, as the parameter of a condition: the empty text stands for no owner, which no
/// tenant is called; `None` for all owners.
pub(super) fn owners(scope: &Scope) -> Option<Vec<&str>> {
    match scope {
        Scope::All => None,
        Scope::Owned { by, or_unowned } => {
            let unowned = or_unowned.then_some("");
            Some(by.as_ref().map(|tenant| tenant.as_str()).into_iter().chain(unowned).collect())
        }
    }
}

/// Appends ` and …` for the runs that a scope covers, in a form for which the index of owners serves.
pub(super) fn push_owned(sql: &mut QueryBuilder<Postgres>, scope: &Scope) {
    let Scope::Owned { by, or_unowned } = scope else { return };
    sql.push(" and (");
    match by {
        Some(tenant) => drop(sql.push("owner = ").push_bind(tenant.as_str().to_owned())),
        None => drop(sql.push("false")),
    }
    if *or_unowned {
        sql.push(" or owner is null");
    }
    sql.push(")");
}

/// Returns true if the scope covers the run. The database is asked only if the scope has limits.
pub(super) async fn covers(connection: &mut PgConnection, scope: &Scope, run_id: RunId) -> Result<bool, sqlx::Error> {
    if *scope == Scope::All {
        return Ok(true);
    }
    let found: Option<i32> = sqlx::query_scalar(concat!("select 1 from runs where run_id = $1 and ", owned!(2)))
        .bind(run_id.0)
        .bind(owners(scope))
        .fetch_optional(connection)
        .await?;
    Ok(found.is_some())
}
