//! The range of run ids that the times of a filter select.

use crate::store::uuid_v7::first_id_at;
use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Postgres, QueryBuilder};
use uuid::Uuid;

/// Minimum difference between the time in a run's id and the start of the run for a displaced run, such as one that was
/// ingested later.
const MIN_DISPLACEMENT: TimeDelta = TimeDelta::hours(1);

/// The run ids that `after:` and `before:` select. They do not include displaced runs, whose ids contain another time than
/// that of their start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::store) struct IdRange {
    pub(in crate::store) from: Option<Uuid>,
    pub(in crate::store) until: Option<Uuid>,
}

impl IdRange {
    /// Excludes ids of runs that began before `time`.
    pub fn begin_after(&mut self, time: DateTime<Utc>) {
        self.from = self.from.max(time.checked_sub_signed(MIN_DISPLACEMENT).map(first_id_at));
    }

    /// Excludes ids of runs that began after `time`.
    pub fn end_before(&mut self, time: DateTime<Utc>) {
        let end = time.checked_add_signed(MIN_DISPLACEMENT).map_or(Uuid::max(), first_id_at);
        self.until = Some(self.until.map_or(end, |until| until.min(end)));
    }

    /// Appends ` and …` with the condition for displaced runs with other ids.
    pub fn push_displaced(self, query: &mut QueryBuilder<Postgres>) {
        query.push(" and is_displaced(run_id, created_at) and (false");
        if let Some(from) = self.from {
            query.push(" or run_id < ").push_bind(from);
        }
        if let Some(until) = self.until {
            query.push(" or run_id >= ").push_bind(until);
        }
        query.push(")");
    }

    /// Appends ` and …` with the condition for ids in the range.
    pub fn push_inside(self, query: &mut QueryBuilder<Postgres>) {
        if let Some(from) = self.from {
            query.push(" and run_id >= ").push_bind(from);
        }
        if let Some(until) = self.until {
            query.push(" and run_id < ").push_bind(until);
        }
    }
}
