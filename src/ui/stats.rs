//! The statistics page: charts by time, and tables by model and by mod. It needs no script.

mod calls;

use super::error;
use super::shell::{Shell, render, runs_href};
use crate::config::SecurityConfig;
use crate::events::{Scope, system};
use crate::server::{App, encode_component};
use crate::store::{
    GroupStatistics, MAX_STATISTICS_DAYS, ModStatistics, ModelStatistics, Statistics, StatisticsQuery, StatisticsUnit,
    TimeStep,
};
use askama::Template;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use calls::CallTimeView;
use chrono::{DateTime, Duration, Utc};
use serde::Deserialize;

/// Height of a chart in its own units.
const HEIGHT: f64 = 100.0;
/// Width of a time step in a chart's own units.
const STEP: f64 = 10.0;
/// The selectable time spans in days; the last one is everything.
const SPANS: [(&str, Option<u32>); 4] = [("Today", Some(1)), ("7 days", Some(7)), ("30 days", Some(30)), ("All", None)];

#[derive(Template)]
#[template(path = "stats.html")]
struct StatsPage {
    shell: Shell,
    spans: Vec<Span>,
    model: String,
    used_mod: String,
    days: String,
    /// Names that the form offers.
    models: Vec<String>,
    mods: Vec<String>,
    total: GroupView,
    reasons: Vec<Reason>,
    charts: Vec<Chart>,
    steps: Vec<NamedGroup>,
    by_model: Vec<NamedGroup>,
    by_mod: Vec<ModView>,
    call_charts: Vec<Chart>,
    calls: Vec<CallTimeView>,
    curl_chat: String,
}

struct Span {
    name: &'static str,
    href: String,
    current: bool,
}

/// A bar chart over time.
struct Chart {
    title: String,
    note: String,
    /// The largest value with its unit.
    max: String,
    width: f64,
    from: String,
    until: String,
    bars: Vec<Bar>,
}

struct Bar {
    x: f64,
    y: f64,
    height: f64,
    /// A second value, drawn over the first one.
    part_y: f64,
    part_height: f64,
    href: String,
    title: String,
}

/// Number of runs that ended for a reason.
struct Reason {
    name: &'static str,
    runs: i64,
    percent: String,
    href: String,
}

/// Statistics as text.
struct GroupView {
    runs: i64,
    failed: i64,
    tokens: i64,
    rate: String,
    first_token: String,
    cached: String,
    backtracked: i64,
    forced: i64,
    errors: i64,
}

struct NamedGroup {
    name: String,
    href: String,
    group: GroupView,
}

struct ModView {
    name: String,
    href: String,
    with: GroupView,
    without: GroupView,
}

/// Query parameters of the page.
#[derive(Debug, Default, Deserialize)]
pub(super) struct StatsParams {
    days: Option<String>,
    #[serde(default)]
    model: String,
    #[serde(default, rename = "mod")]
    used_mod: String,
}

/// `GET /stats`: renders statistics.
pub(super) async fn page(
    State(app): State<App>,
    scope: Scope,
    Query(params): Query<StatsParams>,
    headers: HeaderMap,
) -> Response {
    let store = match app.store() {
        Ok(store) => store,
        Err(error) => return error::render(&headers, &error),
    };
    let days = match params.days.as_deref() {
        None => Some(7),
        Some(text) => text.parse().ok().filter(|days| (1..=MAX_STATISTICS_DAYS).contains(days)),
    };
    let now = system::now();
    let named = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    let mut query = StatisticsQuery::last_days(days, now.date_naive());
    query.model = named(&params.model);
    query.used_mod = named(&params.used_mod);
    match store.statistics(&scope, &query, now.date_naive()).await {
        Ok(statistics) => {
            let credentials = app.credentials();
            render(StatusCode::OK, &StatsPage::new(&headers, &credentials.security, &query, days, &statistics, now))
        }
        Err(error) => error::render(&headers, &error.into()),
    }
}

impl StatsPage {
    fn new(
        headers: &HeaderMap,
        security: &SecurityConfig,
        query: &StatisticsQuery,
        days: Option<u32>,
        statistics: &Statistics,
        now: DateTime<Utc>,
    ) -> Self {
        let (model, used_mod) = (query.model.clone().unwrap_or_default(), query.used_mod.clone().unwrap_or_default());
        let filter = RunFilter { model: &model, used_mod: &used_mod, from: query.from.map(|_| statistics.from) };
        let axis = TimeAxis { from: statistics.from, now, unit: statistics.unit };
        let span = |days: Option<u32>| days.map_or("all".to_owned(), |days| days.to_string());
        let mut models: Vec<String> = statistics.models.iter().map(|one| one.model.clone()).collect();
        let mut mods: Vec<String> = statistics.mods.iter().map(|one| one.name.clone()).collect();
        for (names, chosen) in [(&mut models, &model), (&mut mods, &used_mod)] {
            names.retain(|name| !name.is_empty() && name != chosen);
            names.sort();
        }
        Self {
            shell: Shell::new(headers, "stats"),
            spans: SPANS
                .into_iter()
                .map(|(name, one)| Span {
                    name,
                    href: format!(
                        "/stats?days={}&model={}&mod={}",
                        span(one),
                        encode_component(&model),
                        encode_component(&used_mod)
                    ),
                    current: one == days,
                })
                .collect(),
            days: span(days),
            models,
            mods,
            total: GroupView::new(&statistics.total),
            reasons: reasons(&statistics.total, &filter),
            charts: charts(statistics, &filter, &axis),
            call_charts: calls::charts(statistics, &filter, &axis),
            calls: calls::rows(&statistics.mod_calls, &filter),
            steps: statistics
                .steps
                .iter()
                .rev()
                .map(|step| NamedGroup::from_step(step, statistics.unit, &filter))
                .collect(),
            by_model: statistics.models.iter().map(|one| NamedGroup::from_model(one, &filter)).collect(),
            by_mod: statistics.mods.iter().map(|one| ModView::new(one, &filter)).collect(),
            curl_chat: super::shell::curl_chat(headers, security, None),
            model,
            used_mod,
        }
    }
}

/// The runs that the page counts, as a filter of the run list.
#[derive(Clone, Copy)]
struct RunFilter<'a> {
    model: &'a str,
    used_mod: &'a str,
    from: Option<DateTime<Utc>>,
}

impl RunFilter<'_> {
    /// Returns the URL of the runs, with a further term.
    fn href(&self, term: &str) -> String {
        let from = self.from.map(|from| format!("after:{}", time(from)));
        let named = |field: &str, name: &str| (!name.is_empty()).then(|| format!("{field}:{}", quoted(name)));
        let terms = [from, named("model", self.model), named("mod", self.used_mod)];
        let terms: Vec<String> =
            terms.into_iter().flatten().chain((!term.is_empty()).then(|| term.to_owned())).collect();
        runs_href(&terms.join(" "))
    }

    /// Returns the URL of the runs of a time step.
    fn step_href(&self, at: DateTime<Utc>, unit: StatisticsUnit) -> String {
        Self { from: Some(at), ..*self }.href(&format!("before:{}", time(at + length(unit))))
    }
}

/// The time axis of the charts.
struct TimeAxis {
    from: DateTime<Utc>,
    now: DateTime<Utc>,
    unit: StatisticsUnit,
}

impl TimeAxis {
    /// Returns the number of time steps before a time.
    fn index(&self, at: DateTime<Utc>) -> f64 {
        ((at - self.from).num_seconds() / length(self.unit).num_seconds()) as f64
    }

    /// Returns the width of a chart in its own units.
    fn width(&self) -> f64 {
        (self.index(self.now) + 1.0).max(1.0) * STEP
    }

    fn label(&self, at: DateTime<Utc>) -> String {
        label(at, self.unit)
    }
}

/// Returns a text as a value of the filter language.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', " "))
}

fn time(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn length(unit: StatisticsUnit) -> Duration {
    match unit {
        StatisticsUnit::Hour => Duration::hours(1),
        StatisticsUnit::Day => Duration::days(1),
    }
}

fn label(at: DateTime<Utc>, unit: StatisticsUnit) -> String {
    match unit {
        StatisticsUnit::Hour => at.format("%-d %b, %H:00 UTC").to_string(),
        StatisticsUnit::Day => at.format("%-d %b %Y").to_string(),
    }
}

fn reasons(total: &GroupStatistics, filter: &RunFilter<'_>) -> Vec<Reason> {
    let counts = &total.counts;
    let percent = |runs: i64| format!("{:.1}%", runs as f64 * 100.0 / counts.runs.max(1) as f64);
    [
        ("end of the answer", counts.finish_stop, String::new()),
        ("limit", counts.finish_length, String::new()),
        ("tool calls", counts.finish_tool_calls, String::new()),
        ("cancelled", counts.cancelled, filter.href("status:cancelled")),
        ("failed", counts.failed, filter.href("status:failed")),
        ("interrupted", counts.interrupted, filter.href("status:interrupted")),
    ]
    .into_iter()
    .map(|(name, runs, href)| Reason { name, runs, percent: percent(runs), href })
    .collect()
}

/// Returns the charts of the page.
fn charts(statistics: &Statistics, filter: &RunFilter<'_>, axis: &TimeAxis) -> Vec<Chart> {
    type Values = fn(&GroupStatistics) -> (f64, f64, String);
    let all: [(&str, &str, &str, Values); 4] = [
        ("Runs", "lower part: failed", "", |one| {
            let (runs, failed) = (one.counts.runs, one.counts.failed);
            (runs as f64, failed as f64, format!("{runs} runs, {failed} failed"))
        }),
        ("Tokens", "", "", |one| {
            let tokens = one.counts.completion_tokens;
            (tokens as f64, 0.0, format!("{tokens} tokens"))
        }),
        ("Tokens per second of a run", "", " tok/s", |one| {
            let rate = one.tokens_per_second.unwrap_or(0.0);
            (rate, 0.0, format!("{rate:.1} tok/s"))
        }),
        ("Time to first token", "95th percentile; lower part: median", " ms", |one| {
            let (p50, p95) = (one.first_token_ms_p50.unwrap_or(0.0), one.first_token_ms_p95.unwrap_or(0.0));
            (p95, p50, format!("median {p50:.0} ms, 95% within {p95:.0} ms"))
        }),
    ];
    all.into_iter()
        .map(|(title, note, unit, values)| {
            let max = statistics.steps.iter().map(|one| values(&one.statistics).0).fold(0.0, f64::max);
            let scaled = |value: f64| if max > 0.0 { value / max * HEIGHT } else { 0.0 };
            let bar = |one: &TimeStep| {
                let (value, part, text) = values(&one.statistics);
                let (height, part_height) = (scaled(value), scaled(part));
                Bar {
                    x: axis.index(one.at) * STEP,
                    y: HEIGHT - height,
                    height,
                    part_y: HEIGHT - part_height,
                    part_height,
                    href: filter.step_href(one.at, statistics.unit),
                    title: format!("{}: {text}", axis.label(one.at)),
                }
            };
            Chart {
                title: title.to_owned(),
                note: note.to_owned(),
                max: format!("{max:.0}{unit}"),
                width: axis.width(),
                from: axis.label(axis.from),
                until: axis.label(axis.now),
                bars: statistics.steps.iter().map(bar).collect(),
            }
        })
        .collect()
}

impl GroupView {
    fn new(group: &GroupStatistics) -> Self {
        let counts = &group.counts;
        let first_token = match (group.first_token_ms_p50, group.first_token_ms_p95) {
            (Some(p50), Some(p95)) => format!("{p50:.0} / {p95:.0} ms"),
            _ => "–".to_owned(),
        };
        let cached = counts.cached_tokens as f64 * 100.0 / counts.prompt_tokens.max(1) as f64;
        Self {
            runs: counts.runs,
            failed: counts.failed,
            tokens: counts.completion_tokens,
            rate: group.tokens_per_second.map_or("–".to_owned(), |rate| format!("{rate:.1}")),
            first_token,
            cached: format!("{cached:.0}%"),
            backtracked: counts.backtracked,
            forced: counts.forced,
            errors: counts.errors,
        }
    }
}

impl NamedGroup {
    fn from_step(step: &TimeStep, unit: StatisticsUnit, filter: &RunFilter<'_>) -> Self {
        Self {
            name: label(step.at, unit),
            href: filter.step_href(step.at, unit),
            group: GroupView::new(&step.statistics),
        }
    }

    fn from_model(one: &ModelStatistics, filter: &RunFilter<'_>) -> Self {
        let is_named = !one.model.is_empty();
        Self {
            name: if is_named { one.model.clone() } else { "unnamed model".to_owned() },
            href: if is_named { RunFilter { model: &one.model, ..*filter }.href("") } else { String::new() },
            group: GroupView::new(&one.statistics),
        }
    }
}

impl ModView {
    fn new(one: &ModStatistics, filter: &RunFilter<'_>) -> Self {
        Self {
            name: one.name.clone(),
            href: RunFilter { used_mod: &one.name, ..*filter }.href(""),
            with: GroupView::new(&one.with),
            without: GroupView::new(&one.without),
        }
    }
}
