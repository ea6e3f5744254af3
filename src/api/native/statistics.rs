//! `/api/v1/stats`: statistics of runs.

use crate::events::{Scope, system};
use crate::server::extract::Query;
use crate::server::{ApiError, App, Problem};
use crate::store::{MAX_STATISTICS_DAYS, Statistics, StatisticsQuery, StatisticsUnit};
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;

/// Query parameters of the statistics: the runs to count.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct StatisticsParams {
    /// Number of days in UTC, including today, 1 to 3650; default: since the first run.
    #[param(minimum = 1, maximum = 3650)]
    days: Option<u32>,
    /// Length of a time step; default: `hour` for up to 7 days, else `day`.
    unit: Option<StatisticsUnit>,
    /// Only runs of the model with this name.
    model: Option<String>,
    /// Only runs with this mod, except in `mods`.
    #[serde(rename = "mod")]
    #[param(rename = "mod")]
    used_mod: Option<String>,
}

/// Returns statistics of ended runs by time step, model and mod. A run belongs to the hour in which the server received it.
/// The runs of a past day, or of a past hour with 200 or more runs, are counted once, so the counts include runs that were
/// deleted later.
#[utoipa::path(get, path = "/api/v1/stats", tag = "runs", params(StatisticsParams), responses(
    (status = 200, body = Statistics), (status = 400, body = Problem, description = "The query is invalid")))]
pub async fn show(
    State(app): State<App>,
    scope: Scope,
    Query(params): Query<StatisticsParams>,
) -> Result<Json<Statistics>, ApiError> {
    let StatisticsParams { days, unit, model, used_mod } = params;
    if let Some(days) = days.filter(|days| !(1..=MAX_STATISTICS_DAYS).contains(days)) {
        let detail = format!("`days` must be an integer from 1 to {MAX_STATISTICS_DAYS}, got {days}");
        return Err(ApiError::invalid("days", detail));
    }
    let mut query = StatisticsQuery::last_days(days, system::now().date_naive());
    query.unit = unit.unwrap_or(query.unit);
    query.model = model;
    query.used_mod = used_mod;
    Ok(Json(app.store()?.statistics(&scope, &query, system::now().date_naive()).await?))
}
