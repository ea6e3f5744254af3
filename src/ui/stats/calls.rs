//! Durations of mod calls: a chart by time for each mod, and a table by mod and model.

use super::{Bar, Chart, HEIGHT, RunFilter, STEP, TimeAxis};
use crate::store::{CallTime, CallTimeStep, ModCallStatistics, Statistics};
use crate::ui::shell;

/// Maximum number of charts, each of one mod. The table has all mods.
const MAX_CHARTS: usize = 6;

/// A row of the table: a mod in all runs, or in the runs of a model.
pub(super) struct CallTimeView {
    /// True for a row of all models.
    pub(super) is_total: bool,
    pub(super) name: String,
    /// Empty for runs without a model name.
    pub(super) href: String,
    pub(super) calls: i64,
    pub(super) total: String,
    pub(super) mean: String,
    pub(super) max: String,
}

impl CallTimeView {
    fn new(is_total: bool, name: String, href: String, time: &CallTime) -> Self {
        let [total, mean, max] = [time.total_ms, time.mean_ms, time.max_ms].map(duration_of_ms);
        Self { is_total, name, href, calls: time.calls, total, mean, max }
    }
}

/// Returns the rows of the table: each mod, followed by its models.
pub(super) fn rows(mods: &[ModCallStatistics], filter: &RunFilter<'_>) -> Vec<CallTimeView> {
    let rows_of = |one: &ModCallStatistics| {
        let filter = RunFilter { used_mod: &one.name, ..*filter };
        let mut rows = vec![CallTimeView::new(true, one.name.clone(), filter.href(""), &one.time)];
        for model in &one.models {
            let is_named = !model.model.is_empty();
            let name = if is_named { model.model.clone() } else { "unnamed model".to_owned() };
            let href = if is_named { RunFilter { model: &model.model, ..filter }.href("") } else { String::new() };
            rows.push(CallTimeView::new(false, name, href, &model.time));
        }
        rows
    };
    mods.iter().flat_map(rows_of).collect()
}

/// Returns the charts of the mods with the largest total durations.
pub(super) fn charts(statistics: &Statistics, filter: &RunFilter<'_>, axis: &TimeAxis) -> Vec<Chart> {
    let chart = |one: &ModCallStatistics| {
        let filter = RunFilter { used_mod: &one.name, ..*filter };
        let max = one.steps.iter().map(|step| step.time.total_ms).fold(0.0, f64::max);
        let bar = |step: &CallTimeStep| {
            let CallTime { calls, total_ms, mean_ms, max_ms } = step.time;
            let height = if max > 0.0 { total_ms / max * HEIGHT } else { 0.0 };
            let [total, mean, slowest] = [total_ms, mean_ms, max_ms].map(duration_of_ms);
            let text = format!("total {total}, calls {calls}, mean {mean}, slowest {slowest}");
            Bar {
                x: axis.index(step.at) * STEP,
                y: HEIGHT - height,
                height,
                part_y: HEIGHT,
                part_height: 0.0,
                href: filter.step_href(step.at, axis.unit),
                title: format!("{}: {text}", axis.label(step.at)),
            }
        };
        Chart {
            title: one.name.clone(),
            note: format!("{} in {} calls", duration_of_ms(one.time.total_ms), one.time.calls),
            max: duration_of_ms(max),
            width: axis.width(),
            from: axis.label(axis.from),
            until: axis.label(axis.now),
            bars: one.steps.iter().map(bar).collect(),
        }
    };
    statistics.mod_calls.iter().take(MAX_CHARTS).map(chart).collect()
}

fn duration_of_ms(ms: f64) -> String {
    shell::duration(ms * 1e3)
}
