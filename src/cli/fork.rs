use super::export::run_path;
use super::given_flags::GivenFlags;
use super::numbers::finite;
use super::output;
use super::printer::escape_control_characters;
use super::run_target::{self, DatabaseUse, RunTarget, RunTargetArgs};
use super::signals::EndSignals;
use anyhow::{Context, bail};
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::process::ExitCode;

/// Continue a recorded run from one of its steps, with or without a change
///
/// The new runs keep the tokens before the step, the position of the random generator and the states of the mods. Without a
/// change the run is repeated. It runs on the same server or process as `thunder run` would. An engine in this process reads
/// the run from the database; while a server uses an embedded database, no other process can open it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run id or `request_id`
    #[arg(value_name = "RUN")]
    run: String,
    /// First step that the fork generates again, from 1
    #[arg(long, value_name = "STEP", required_unless_present = "event", conflicts_with = "event")]
    at: Option<i32>,
    /// Event of that step, by `sequence_order`
    #[arg(long, value_name = "EVENT")]
    event: Option<i32>,
    /// Token id to append at this step instead of a sampled token
    #[arg(long, value_name = "ID", conflicts_with = "text")]
    token: Option<i32>,
    /// Text to append at this step instead of a sampled token
    #[arg(long)]
    text: Option<String>,
    /// Mod from this step on, instead of the run's mods; repeatable
    #[arg(long = "mod", value_name = "NAME")]
    mods: Vec<String>,
    /// No mods from this step on
    #[arg(long, conflicts_with = "mods")]
    no_mods: bool,
    /// Sampling parameter to change at this step, e.g. temperature=0.2; repeatable
    #[arg(long = "set", value_name = "NAME=VALUE")]
    sampling: Vec<String>,
    /// Control vector from this step on, instead of the run's vectors, e.g. happy:0.5 or happy:0.5:10-20 with its scale and
    /// layers; repeatable
    #[arg(long, value_name = "NAME:SCALE")]
    steering: Vec<String>,
    /// No control vectors from this step on
    #[arg(long, conflicts_with = "steering")]
    no_steering: bool,
    /// Seed of the first new run, or "continue" to continue the random numbers of the recorded run; default: continue for one run, random seeds for several
    #[arg(long)]
    seed: Option<String>,
    /// Number of new runs, 1 to 64
    #[arg(short, long, default_value_t = 1)]
    n: u32,
    /// Result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: RunTargetArgs,
}

/// Forks a run and prints the answers.
pub async fn fork(args: Args, given: GivenFlags, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    let body = body(&args)?;
    let open = args.target.open(&args.mods, DatabaseUse::Open, &given);
    let (target, _) = signals.run_until_signal(open).await??;
    let outcome = signals.run_until_signal(start(&target, &args, &body)).await;
    signals.run_until_signal(Box::pin(target.close())).await?;
    outcome??;
    Ok(ExitCode::SUCCESS)
}

/// Builds the request.
fn body(args: &Args) -> anyhow::Result<Value> {
    if let Some(file) = args.mods.iter().find(|name| run_target::is_path(name)) {
        bail!("--mod takes the name of a mod here, got '{file}'");
    }
    let mut body =
        json!({ "at": args.at.map_or_else(|| json!({ "event": args.event }), |step| json!({ "step": step })) });
    body["n"] = args.n.into();
    if let Some(token) = args.token {
        body["token"] = token.into();
    }
    if let Some(text) = &args.text {
        body["text"] = text.as_str().into();
    }
    if args.no_mods || !args.mods.is_empty() {
        body["mods"] = json!(args.mods);
    }
    if !args.sampling.is_empty() {
        body["sampling"] = args.sampling.iter().map(|pair| parameter(pair)).collect::<Result<Map<_, _>, _>>()?.into();
    }
    if args.no_steering || !args.steering.is_empty() {
        body["steering"] = args.steering.iter().map(|vector| control_vector(vector)).collect::<Result<_, _>>()?;
    }
    match args.seed.as_deref() {
        None => {}
        Some("continue") => body["seed"] = "continue".into(),
        Some(seed) => {
            let number: u32 =
                seed.parse().with_context(|| format!("--seed takes an integer or \"continue\", got '{seed}'"))?;
            body["seed"] = number.into();
        }
    }
    Ok(body)
}

fn parameter(pair: &str) -> anyhow::Result<(String, Value)> {
    let (name, value) = pair.split_once('=').with_context(|| format!("--set takes NAME=VALUE, got '{pair}'"))?;
    Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
}

/// Parses `NAME`, `NAME:SCALE` or `NAME:SCALE:FIRST-LAST`.
fn control_vector(text: &str) -> anyhow::Result<Value> {
    let invalid = || format!("--steering takes NAME:SCALE or NAME:SCALE:FIRST-LAST, got '{text}'");
    let mut parts = text.split(':');
    let mut vector = json!({ "name": parts.next() });
    if let Some(scale) = parts.next() {
        vector["scale"] = finite(scale).ok().with_context(invalid)?.into();
    }
    if let Some(layers) = parts.next() {
        let (first, last) = layers.split_once('-').with_context(invalid)?;
        vector["layers"] =
            json!([first.parse::<u32>().with_context(invalid)?, last.parse::<u32>().with_context(invalid)?]);
    }
    if parts.next().is_some() {
        bail!(invalid());
    }
    Ok(vector)
}

/// Starts the runs, waits for their ends and prints them.
async fn start(target: &RunTarget, args: &Args, body: &Value) -> anyhow::Result<()> {
    let server = target.server();
    let path = format!("{}/forks", run_path(&args.run)?);
    let answer = server.send(server.request(Method::POST, &path).json(body)).await?;
    let mut answer: Value = answer.json().await.context("the server's response is not JSON")?;
    for run in answer["runs"].as_array_mut().context("the server's response has no runs")? {
        let id = run["run_id"].as_str().context("the server's response has no run_id")?.to_owned();
        let summary = run_target::wait_until_ended(server, &id).await?;
        if !args.json {
            let preview = escape_control_characters(summary["output_preview"].as_str().unwrap_or_default());
            output::print_line(format_args!("{id}  {preview}"))?;
            eprintln!("replay: {}", target.replay(&id));
        }
        run["run"] = summary;
    }
    if args.json {
        output::print_line(answer)?;
    }
    Ok(())
}
