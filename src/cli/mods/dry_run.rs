//! Executes dry runs of a mod on recorded runs, and prints their reports.

use crate::cli::output::print_line;
use crate::config::EngineConfig;
use crate::model::Model;
use crate::model::llama::ModelOptions;
use crate::mods::{ModFactory, ReplayLimits};
use crate::server::mods::{DryRunOptions, DryRunReport, dry_run};
use crate::trace::document::Document;
use anyhow::Context;
use serde_json::Value;
use std::path::Path;

/// Prints a report as text.
pub fn print(report: &DryRunReport) -> std::io::Result<()> {
    let note = if report.recorded { "" } else { "; the recorded run did not use the mod" };
    let effects = report.events.iter().filter(|reply| reply.has_effect()).count();
    let logs: usize = report.events.iter().map(|reply| reply.logs.len()).sum();
    let (run, calls) = (&report.run, report.calls);
    print_line(format_args!("{run}: {calls} calls, {effects} with an effect, {logs} log lines{note}"))?;
    for reply in report.events.iter().filter(|reply| reply.has_effect() || !reply.logs.is_empty()) {
        print_line(format_args!("  step {:4}  {:11}  {}", reply.step, reply.event, reply.now))?;
        for line in &reply.logs {
            print_line(format_args!("      {line}"))?;
        }
    }
    let Some(found) = &report.difference else { return print_line("  no difference from the recording") };
    let (step, event, order) = (found.step, &found.event, found.sequence_order);
    print_line(format_args!("  first difference at step {step} ({event}, event {order}):"))?;
    print_line(format_args!("    recorded: {}", found.recorded))?;
    print_line(format_args!("    now:      {}", found.now))
}

/// Calls one worker of the mod with the events of all runs, one run after the other. `path` is the model's file.
pub fn dry_run_all(
    path: &Path,
    config: &EngineConfig,
    factory: &dyn ModFactory,
    mod_config: Option<&Value>,
    runs: &[(String, Document)],
) -> anyhow::Result<Vec<DryRunReport>> {
    let model = Model::load(path, &ModelOptions::default(), |_| true)?;
    let limits = ReplayLimits { context: config.slot_context(model.card().context_train) as usize, max_tokens: None };
    let dry_run = |(name, run): &(String, Document)| {
        let options = DryRunOptions { run: name, config: mod_config, limits, deadline: None };
        let report = dry_run(&model, factory, run, options);
        report.map_err(anyhow::Error::msg).with_context(|| name.clone())
    };
    runs.iter().map(dry_run).collect()
}
