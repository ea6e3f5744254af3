//! Executes dry runs of a mod on recorded runs, and prints their reports.

use crate::model::Model;
use crate::model::llama::ModelOptions;
use crate::mods::ModFactory;
use crate::server::mods::{DryRunReport, dry_run};
use crate::trace::document::Document;
use anyhow::Context;
use serde_json::Value;
use std::path::Path;

/// Prints a report as text.
pub fn print(report: &DryRunReport) {
    let note = if report.recorded { "" } else { "; the recorded run did not use the mod" };
    let effects = report.events.iter().filter(|reply| reply.has_effect());
    println!("{}: {} calls, {} with an effect{note}", report.run, report.calls, effects.clone().count());
    for reply in effects {
        println!("  step {:4}  {:11}  {}", reply.step, reply.event, reply.now);
        for line in &reply.logs {
            println!("      {line}");
        }
    }
    match &report.difference {
        None => println!("  no difference from the recording"),
        Some(found) => {
            println!("  first difference at step {} ({}, event {}):", found.step, found.event, found.sequence_order);
            println!("    recorded: {}", found.recorded);
            println!("    now:      {}", found.now);
        }
    }
}

/// Calls one worker of the mod with the events of all runs, one run after the other.
pub fn dry_run_all(
    path: &Path,
    factory: &dyn ModFactory,
    config: Option<&Value>,
    runs: &[(String, Document)],
) -> anyhow::Result<Vec<DryRunReport>> {
    let model = Model::load(path, &ModelOptions::default(), |_| true)?;
    let dry_run = |(name, run): &(String, Document)| {
        dry_run(&model, factory, config, name, run, None).map_err(anyhow::Error::msg).with_context(|| name.clone())
    };
    runs.iter().map(dry_run).collect()
}
