//! Experiments: grids of runs, with the run and the score of each cell.

mod cells;

use super::scope::{owned, owners};
use super::text::clean;
use super::{Error, Store};
use crate::events::{Scope, Tenant};
pub use cells::{CellOutcome, CellRecord, CellState, ExperimentCell};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::FromRow;
use utoipa::ToSchema;
use uuid::Uuid;

/// Maximum experiments of a list.
pub const MAX_LISTED_EXPERIMENTS: usize = 200;

/// State of an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExperimentState {
    /// Cells are being run.
    Running,
    /// All cells have ended.
    Done,
    /// A client cancelled it.
    Cancelled,
    /// Its server ended, or a run could not be started, before all cells had ended.
    Interrupted,
}

impl ExperimentState {
    /// All states.
    const ALL: [Self; 4] = [Self::Running, Self::Done, Self::Cancelled, Self::Interrupted];

    /// Returns the name used in the database.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Interrupted => "interrupted",
        }
    }
}

impl TryFrom<String> for ExperimentState {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let state = Self::ALL.into_iter().find(|state| state.as_str() == name);
        state.ok_or_else(|| format!("unknown state of an experiment '{name}'"))
    }
}

/// An experiment to store.
#[derive(Debug, Clone)]
pub struct NewExperiment<'a> {
    /// Its id.
    pub id: Uuid,
    /// Its owner.
    pub owner: Option<&'a Tenant>,
    /// Its name.
    pub name: &'a str,
    /// Its definition as JSON.
    pub definition: &'a str,
    /// Number of its cells.
    pub cells: i32,
}

/// A stored experiment.
#[derive(Debug, Clone, PartialEq, Serialize, FromRow, ToSchema)]
pub struct Experiment {
    /// Its id, a `UUIDv7`.
    #[schema(value_type = String)]
    pub experiment_id: Uuid,
    /// Its name.
    pub name: String,
    /// Time of its creation.
    pub created_at: DateTime<Utc>,
    /// Its state.
    #[sqlx(try_from = "String")]
    pub state: ExperimentState,
    /// Number of its cells.
    pub cells: i32,
    /// Number of its cells that have ended.
    pub ended: i64,
    /// Mean score of its cells; null without scores.
    pub mean_score: Option<f64>,
    /// Its owner.
    #[serde(skip)]
    pub owner: Option<String>,
    /// The server that runs it.
    #[serde(skip)]
    pub server_id: Uuid,
    /// Its definition as JSON; empty in a list.
    #[serde(skip)]
    pub definition: String,
}

/// SQL that reads experiments. A running experiment is interrupted if its server is no longer in the list of servers.
macro_rules! select_experiments {
    ($definition:literal, $rest:literal) => {
        concat!(
            "select experiment_id, name, created_at, cells, owner, server_id, progress.ended, progress.mean_score, ",
            $definition,
            " as definition,
                case when state = 'running' and not exists
                    (select 1 from servers where servers.server_id = experiments.server_id)
                then 'interrupted' else state end as state
            from experiments cross join lateral
                (select count(*) filter (where experiment_cells.ended) as ended, avg(score) as mean_score
                from experiment_cells where experiment_cells.experiment_id = experiments.experiment_id) progress
            where ",
            owned!(1),
            $rest
        )
    };
}

impl Store {
    /// Stores an experiment that this server runs.
    ///
    /// # Errors
    /// The database failed.
    pub async fn add_experiment(&self, new: &NewExperiment<'_>, now: DateTime<Utc>) -> Result<(), Error> {
        sqlx::query(
            "insert into experiments (experiment_id, created_at, owner, name, definition, cells, server_id, state)
            values ($1, $2, $3, $4, $5::json, $6, $7, 'running')",
        )
        .bind(new.id)
        .bind(now)
        .bind(new.owner.map(Tenant::as_str))
        .bind(clean(new.name))
        .bind(new.definition)
        .bind(new.cells)
        .bind(self.inner.server_id)
        .execute(&self.inner.pool)
        .await?;
        Ok(())
    }

    /// Returns the newest experiments in the scope, newest first.
    ///
    /// # Errors
    /// The database failed.
    pub async fn experiments(&self, scope: &Scope) -> Result<Vec<Experiment>, Error> {
        let read = select_experiments!("''", " order by experiment_id desc limit $2");
        Ok(sqlx::query_as(read)
            .bind(owners(scope))
            .bind(MAX_LISTED_EXPERIMENTS as i64)
            .fetch_all(&self.inner.pool)
            .await?)
    }

    /// Returns an experiment in the scope.
    ///
    /// # Errors
    /// The database failed.
    pub async fn experiment(&self, scope: &Scope, id: Uuid) -> Result<Option<Experiment>, Error> {
        let read = select_experiments!("definition::text", " and experiment_id = $2");
        Ok(sqlx::query_as(read).bind(owners(scope)).bind(id).fetch_optional(&self.inner.pool).await?)
    }

    /// Cancels a running experiment of any server. Returns false if it is not running or does not exist.
    ///
    /// # Errors
    /// The database failed.
    pub async fn cancel_experiment(&self, id: Uuid) -> Result<bool, Error> {
        let cancel = "update experiments set state = $2 where experiment_id = $1 and state = 'running'";
        let cancel = sqlx::query(cancel).bind(id).bind(ExperimentState::Cancelled.as_str());
        Ok(cancel.execute(&self.inner.pool).await?.rows_affected() > 0)
    }

    /// Marks an experiment as done. Returns false if this server no longer runs it.
    ///
    /// # Errors
    /// The database failed.
    pub async fn complete_experiment(&self, id: Uuid) -> Result<bool, Error> {
        let complete = sqlx::query(
            "update experiments set state = $2 where experiment_id = $1 and state = 'running' and server_id = $3",
        );
        let complete = complete.bind(id).bind(ExperimentState::Done.as_str()).bind(self.inner.server_id);
        Ok(complete.execute(&self.inner.pool).await?.rows_affected() > 0)
    }

    /// Ends the execution of a running experiment on this server. It is then interrupted, and any server can resume it.
    ///
    /// # Errors
    /// The database failed.
    pub async fn release_experiment(&self, id: Uuid) -> Result<(), Error> {
        let release =
            "update experiments set server_id = $3 where experiment_id = $1 and state = 'running' and server_id = $2";
        let release = sqlx::query(release).bind(id).bind(self.inner.server_id).bind(Uuid::nil());
        release.execute(&self.inner.pool).await?;
        Ok(())
    }

    /// Returns true if an experiment is running and this server runs it. A client can cancel it through any server, and
    /// then resume it on another one.
    ///
    /// # Errors
    /// The database failed.
    pub async fn is_executor(&self, experiment: Uuid) -> Result<bool, Error> {
        let is_executor = sqlx::query_scalar(
            "select exists (select 1 from experiments where experiment_id = $1 and state = 'running' and server_id = $2)",
        );
        Ok(is_executor.bind(experiment).bind(self.inner.server_id).fetch_one(&self.inner.pool).await?)
    }

    /// Makes this server run an experiment again. Returns false if another server resumed or removed it since it was read.
    ///
    /// # Errors
    /// The database failed.
    pub async fn resume_experiment(&self, read: &Experiment) -> Result<bool, Error> {
        // The stored state of an interrupted experiment is still `running`.
        let stored = match read.state {
            ExperimentState::Interrupted => ExperimentState::Running,
            state => state,
        };
        // Cells without a run that have not ended are those that could not be started.
        let resume = sqlx::query(
            "with resumed as (
                update experiments set state = 'running', server_id = $2
                where experiment_id = $1 and server_id = $3 and state = $4 returning experiment_id
            ), restarted as (
                delete from experiment_cells using resumed
                where experiment_cells.experiment_id = resumed.experiment_id and not ended and run_id is null
            )
            select from resumed",
        );
        let resume = resume.bind(read.experiment_id).bind(self.inner.server_id).bind(read.server_id);
        let resumed = resume.bind(stored.as_str()).execute(&self.inner.pool).await?;
        Ok(resumed.rows_affected() > 0)
    }

    /// Removes an experiment. Its runs remain.
    ///
    /// # Errors
    /// The database failed.
    pub async fn remove_experiment(&self, id: Uuid) -> Result<(), Error> {
        let remove = sqlx::query("delete from experiments where experiment_id = $1");
        remove.bind(id).execute(&self.inner.pool).await?;
        Ok(())
    }
}
