use super::client::{Server, error_message, run_id_of};
use super::events::Events;
use super::given_flags::GivenFlags;
use super::output;
use super::printer::Printer;
use super::run_target::{DatabaseUse, ReplayAddress, RunTargetArgs};
use super::signals::EndSignals;
use anyhow::{Context, bail};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Run one prompt, stream the answer, record the run and print the address of its replay
///
/// Runs on the server of --server, else on a server at 127.0.0.1:6767, else in this process. With a mod given as a file, or
/// a flag of the engine or the database on the command line, such as --model, --ctx-size or --data-dir, it always runs in
/// this process. The run is then recorded in the database that the flags select. If that is the default database and a
/// running server uses it, the run is sent to that server.
///
/// With --json, prints the finished run as one JSON object instead of the text: its `run_id`, `text`, `finish_reason`,
/// `usage` and the address of its replay, `replay`, which is null if the run was not recorded.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Prompt; - reads it from standard input
    prompt: String,
    /// Mod by name or as a Python file; repeatable
    #[arg(long = "mod", value_name = "NAME|FILE.py")]
    mods: Vec<String>,
    /// Seed of the random generator; the same seed gives the same answer
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// Maximum tokens of the answer
    #[arg(long, short = 'n', value_name = "N", alias = "n-predict", default_value_t = 512)]
    max_tokens: u32,
    /// Sampling temperature; 0 always takes the most probable token; default: 0.8
    #[arg(long, value_name = "T", alias = "temp")]
    temperature: Option<f32>,
    /// Number of most probable tokens to sample from; 0 for all
    #[arg(long, value_name = "K")]
    top_k: Option<i32>,
    /// Cumulative probability of the most probable tokens to sample from, 0 to 1
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Stop string; repeatable
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Prompt continued as plain text, without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// No attention capture
    #[arg(long)]
    no_attention: bool,
    /// Result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: RunTargetArgs,
}

/// An answer with its metadata.
#[derive(Default)]
struct Outcome {
    run_id: Option<String>,
    text: String,
    finish_reason: Option<String>,
    usage: Option<Usage>,
    timings: Value,
}

/// Token counts of a run, in OpenAI's format.
#[derive(Clone, Copy, Deserialize, Serialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
}

/// A finished run, for `--json`.
#[derive(Serialize)]
struct RunOutput {
    run_id: Option<String>,
    text: String,
    finish_reason: Option<String>,
    usage: Option<Usage>,
    replay: Option<String>,
}

/// Runs the prompt.
pub async fn run(args: Args, given: GivenFlags, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    let attention = !args.no_attention && args.target.engine.captures_attention();
    let open = args.target.open(&args.mods, DatabaseUse::LeaveToServer, &given);
    let (mut target, names) = signals.run_until_signal(open).await??;
    let finished = signals
        .run_until_signal(async {
            let (attention, mut outcome) = (attention && target.can_record_attention(), Outcome::default());
            let streamed = stream(target.server(), &args, &names, attention, &mut outcome).await;
            let replay = target.record(outcome.run_id.as_deref()).await;
            (streamed, outcome, replay)
        })
        .await;
    signals.run_until_signal(Box::pin(target.close())).await?;
    let (streamed, outcome, replay) = finished?;
    streamed?;
    let replay = replay?;
    if args.json {
        let Outcome { run_id, text, finish_reason, usage, .. } = outcome;
        let replay = replay.map(|replay| replay.url);
        let run = RunOutput { run_id, text, finish_reason, usage, replay };
        output::print_line(serde_json::to_string(&run)?)?;
    } else {
        report(&outcome, args.max_tokens, replay);
    }
    Ok(ExitCode::SUCCESS)
}

fn report(outcome: &Outcome, max_tokens: u32, replay: Option<ReplayAddress>) {
    let timings = &outcome.timings;
    if let (Some(count), Some(speed)) = (timings["predicted_n"].as_u64(), timings["predicted_per_second"].as_f64()) {
        let reason = outcome.finish_reason.as_deref().unwrap_or("?");
        let detail = match timings["message"].as_str() {
            Some(message) => format!(": {message}"),
            None if reason == "length" && count >= u64::from(max_tokens) => {
                format!(": the limit of {max_tokens} tokens is reached (--max-tokens)")
            }
            None if reason == "length" => ": the context is full".to_owned(),
            None => String::new(),
        };
        eprintln!("{count} tokens, {speed:.1} tokens/s, ended by {reason}{detail}");
    }
    match replay {
        Some(replay) => eprintln!("replay: {replay}"),
        None => eprintln!("the run was not recorded"),
    }
}

async fn stream(
    server: &Server,
    args: &Args,
    mods: &[String],
    attention: bool,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    let (path, body) = request(args, mods, attention).await?;
    let response = server.send(server.request(Method::POST, path).json(&body)).await?;
    let mut printer = if args.json { Printer::silent() } else { Printer::new(!mods.is_empty()) };
    outcome.run_id = run_id_of(&response);
    let mut events = Events::new(response);
    while let Some(chunk) = events.next().await? {
        apply_chunk(&chunk, &mut printer, outcome)?;
    }
    printer.end()?;
    outcome.text = printer.into_text();
    Ok(())
}

async fn request(args: &Args, mods: &[String], attention: bool) -> anyhow::Result<(&'static str, Value)> {
    let prompt = match args.prompt.as_str() {
        "-" => {
            let read = || std::io::read_to_string(std::io::stdin());
            tokio::task::spawn_blocking(read).await?.context("cannot read the prompt from standard input")?
        }
        prompt => prompt.to_owned(),
    };
    let mut body = json!({
        "stream": true,
        "stream_options": { "include_usage": true },
        "mods": mods,
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "stop": args.stop,
        "attention": attention,
    });
    if args.raw {
        body["prompt"] = prompt.into();
        return Ok(("/v1/completions", body));
    }
    let system = args.system.as_ref().map(|text| json!({ "role": "system", "content": text }));
    let messages: Vec<Value> = system.into_iter().chain([json!({ "role": "user", "content": prompt })]).collect();
    body["messages"] = messages.into();
    // Reasoning is part of the text, so that a user can read it while it streams.
    body["reasoning_format"] = "none".into();
    Ok(("/v1/chat/completions", body))
}

fn apply_chunk(chunk: &Value, printer: &mut Printer, outcome: &mut Outcome) -> anyhow::Result<()> {
    if chunk.get("error").is_some() {
        printer.end()?;
        bail!("{}", error_message(&chunk.to_string()).unwrap_or_else(|| "the run failed".into()));
    }
    if let Some(chars) = chunk.pointer("/thunder/retract/chars").and_then(Value::as_u64) {
        printer.retract(chars as usize)?;
    }
    let choice = &chunk["choices"][0];
    if let Some(text) = choice["delta"]["content"].as_str().or_else(|| choice["text"].as_str()) {
        printer.append(text)?;
    }
    for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        let name = function["name"].as_str().map(|name| format!("\ncalls {name} "));
        printer.append(&format!(
            "{}{}",
            name.unwrap_or_default(),
            function["arguments"].as_str().unwrap_or_default()
        ))?;
    }
    if let Some(reason) = choice["finish_reason"].as_str() {
        outcome.finish_reason = Some(reason.to_owned());
    }
    outcome.usage = Usage::deserialize(&chunk["usage"]).ok().or(outcome.usage);
    if chunk["timings"].is_object() {
        outcome.timings = chunk["timings"].clone();
    }
    Ok(())
}
