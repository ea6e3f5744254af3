use super::given_flags::GivenFlags;
use super::output;
use super::run_target::{self, DatabaseUse, FinishedRun, ReplayAddress, RunTarget, RunTargetArgs};
use super::signals::{EndSignals, Interrupted};
use crate::trace::difference::{self, Difference, DifferenceKind};
use crate::trace::document::Document;
use anyhow::{Context, bail};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

/// Run a recorded run again with the same model, seed, parameters and mods, and print the first difference
///
/// Exit codes: 0 no difference, 1 a difference, 2 the run cannot be repeated, with the reason. It runs on the same server
/// or process as `thunder run` would.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run id, `request_id`, or a file of `thunder export`
    #[arg(value_name = "RUN")]
    run: String,
    /// Comparison of the new run with the recorded one; required
    #[arg(long, required = true)]
    verify: bool,
    /// Python file or package folder with a mod of the run; repeatable
    #[arg(long = "mod", value_name = "FILE.py")]
    mods: Vec<String>,
    /// Current versions of the mods, even if the run used others
    #[arg(long)]
    any_version: bool,
    /// Result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: RunTargetArgs,
}

/// The result of a repeated run.
struct Outcome {
    new_run: String,
    events: usize,
    replay: anyhow::Result<ReplayAddress>,
    difference: Option<Difference>,
}

/// Repeats a run.
pub async fn replay(args: Args, given: GivenFlags, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    match verify(&args, &given, &mut signals).await {
        Ok(outcome) => {
            let is_same = outcome.difference.is_none();
            if args.json {
                let new_run = &outcome.new_run;
                output::print_line(
                    json!({ "same": is_same, "run": args.run, "again": new_run, "difference": outcome.difference }),
                )?;
            } else {
                print_outcome(&args.run, &outcome)?;
            }
            if let Err(error) = &outcome.replay {
                eprintln!("thunder: {}", super::with_causes(error));
            }
            Ok(ExitCode::from(u8::from(!is_same)))
        }
        Err(error) if error.is::<Interrupted>() => Err(error),
        Err(error) => {
            eprintln!("thunder: {}", super::with_causes(&error));
            Ok(ExitCode::from(2))
        }
    }
}

fn print_outcome(run: &str, outcome: &Outcome) -> std::io::Result<()> {
    output::print_line(match &outcome.difference {
        None => format!("{run}: the new run does not differ, in {} events", outcome.events),
        Some(Difference { step, sequence_order, recorded, now, .. }) => format!(
            "{run}: the new run differs, first at step {step} (event {sequence_order}):\n  recorded: {recorded}\n  now:      {now}"
        ),
    })?;
    if let Ok(replay) = &outcome.replay {
        eprintln!("replay of the new run: {replay}");
    }
    Ok(())
}

async fn verify(args: &Args, given: &GivenFlags, signals: &mut EndSignals) -> anyhow::Result<Outcome> {
    if let Some(name) = args.mods.iter().find(|name| !run_target::is_path(name)) {
        bail!(
            "--mod takes a Python file or a package folder here, got '{name}'; mods that the server knows need no flag"
        );
    }
    let is_file = Path::new(&args.run).is_file();
    let database = if is_file { DatabaseUse::LeaveToServer } else { DatabaseUse::ReadOrLeaveToServer };
    let open = args.target.open(&args.mods, database, given);
    let (mut target, _) = signals.run_until_signal(open).await??;
    let outcome = signals.run_until_signal(rerun(&mut target, args)).await;
    signals.run_until_signal(Box::pin(target.close())).await?;
    outcome?
}

async fn rerun(target: &mut RunTarget, args: &Args) -> anyhow::Result<Outcome> {
    let (recorded, summary) = if Path::new(&args.run).is_file() {
        let bytes = std::fs::read(&args.run).with_context(|| format!("cannot read {}", args.run))?;
        (Document::parse(&bytes).with_context(|| args.run.clone())?, Value::Null)
    } else {
        run_target::fetch_finished(target.archive(), &args.run).await?
    };
    let first = recorded.events.first().and_then(|event| event.measured.as_ref());
    let prompt = first.and_then(|measured| measured.prompt.as_ref());
    let prompt = prompt
        .context("the run cannot be repeated: its prompt is not recorded, because it comes from another engine")?;
    let body = json!({ "prompt": prompt, "any_version": args.any_version });
    let server = target.server().clone();
    let answer = server.send(server.request(Method::POST, "/api/v1/reruns").json(&body)).await?;
    let answer: Value = answer.json().await.context("the server's response is not JSON")?;
    let new_run = answer["run_id"].as_str().context("the server's response has no run_id")?.to_owned();
    let FinishedRun { document: now, replay } = target.finish(&new_run).await?;
    // A run that was cancelled or interrupted has no finish reason to compare with.
    let is_complete = !matches!(summary["status"].as_str(), Some("cancelled" | "interrupted"));
    let difference =
        difference::find_first(&recorded, &now, is_complete).or_else(|| compare_ends(&summary, &answer, &recorded));
    Ok(Outcome { new_run, events: recorded.events.len(), replay, difference })
}

/// Returns the difference of two runs with the same tokens and different finish reasons.
fn compare_ends(summary: &Value, answer: &Value, recorded: &Document) -> Option<Difference> {
    let (recorded_end, now) = (summary["finish_reason"].as_str()?, answer["finish_reason"].as_str()?);
    let last = recorded.events.last()?;
    (recorded_end != now && recorded_end != "cancelled").then(|| Difference {
        kind: DifferenceKind::End,
        sequence_order: last.sequence_order,
        step: last.step,
        recorded: format!("ended by {recorded_end}"),
        now: format!("ended by {now}"),
    })
}
