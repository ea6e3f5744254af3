use super::client::{Server, error_message, run_id_of};
use super::events::Events;
use super::given_flags::GivenFlags;
use super::numbers::finite;
use super::output;
use super::printer::{Printer, escape_control_characters};
use super::run_target::{DatabaseUse, ReplayAddress, RunTargetArgs};
use super::signals::{EndSignals, Interrupted};
use crate::events::{FinishReason, ModFailures};
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
/// `usage`, the mods with failed calls, `mod_failures`, and the address of its replay, `replay`, which is null if the run
/// was not recorded.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Prompt; - reads it from standard input
    prompt: String,
    /// Mod by name, as a Python file or as a package folder like `./pack`; repeatable
    #[arg(long = "mod", value_name = "NAME|FILE.py")]
    mods: Vec<String>,
    /// Seed of the random generator; the same seed gives the same answer
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// Maximum tokens of the answer; -1 for as many as fit into the context
    #[arg(long, short = 'n', value_name = "N", alias = "n-predict", default_value_t = 512, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1..))]
    max_tokens: i32,
    /// Sampling temperature; 0 always takes the most probable token; default: 0.8
    #[arg(long, value_name = "T", alias = "temp", allow_negative_numbers = true, value_parser = finite)]
    temperature: Option<f64>,
    /// Number of most probable tokens to sample from; 0 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<i32>,
    /// Cumulative probability of the most probable tokens to sample from, 0 to 1
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = finite)]
    top_p: Option<f64>,
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
struct Outcome {
    run_id: Option<String>,
    printer: Printer,
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
    mod_failures: Vec<ModFailures>,
    replay: Option<String>,
}

impl Outcome {
    const fn new(printer: Printer) -> Self {
        Self { run_id: None, printer, finish_reason: None, usage: None, timings: Value::Null }
    }

    fn mod_failures(&self) -> Vec<ModFailures> {
        Vec::deserialize(&self.timings["mod_failures"]).unwrap_or_default()
    }
}

/// Runs the prompt.
pub async fn run(args: Args, given: GivenFlags, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    let attention = !args.no_attention && args.target.engine.captures_attention();
    let open = args.target.open(&args.mods, DatabaseUse::LeaveToServer, &given);
    let (mut target, names) = signals.run_until_signal(open).await??;
    let attention = attention && target.can_record_attention();
    let mut outcome = Outcome::new(if args.json { Printer::silent() } else { Printer::new(!names.is_empty()) });
    let finished = signals
        .run_until_signal(async {
            let streamed = stream(target.server(), &args, &names, attention, &mut outcome).await;
            (streamed, target.record(outcome.run_id.as_deref()).await)
        })
        .await;
    let (streamed, replay, code) = match finished {
        Ok((streamed, replay)) => (streamed, replay, ExitCode::SUCCESS),
        Err(Interrupted(code)) => {
            outcome.finish_reason.get_or_insert_with(|| FinishReason::Cancelled.as_str().to_owned());
            // Fails if the terminal has been closed.
            let _ = outcome.printer.end();
            // The engine cancels the run when the connection closes, and records it.
            (Ok(()), Ok(outcome.run_id.as_deref().map(|run_id| target.replay(run_id))), code)
        }
    };
    let is_recorded = signals.run_until_signal(Box::pin(target.close())).await?;
    streamed?;
    let replay = replay?.filter(|_| is_recorded);
    if args.json {
        let mod_failures = outcome.mod_failures();
        let Outcome { run_id, printer, finish_reason, usage, .. } = outcome;
        let replay = replay.map(|replay| replay.url);
        let run = RunOutput { run_id, text: printer.into_text(), finish_reason, usage, mod_failures, replay };
        output::print_line(serde_json::to_string(&run)?)?;
    } else {
        report(&outcome, args.max_tokens, replay);
    }
    Ok(code)
}

fn report(outcome: &Outcome, max_tokens: i32, replay: Option<ReplayAddress>) {
    let timings = &outcome.timings;
    if let (Some(count), Some(speed)) = (timings["predicted_n"].as_u64(), timings["predicted_per_second"].as_f64()) {
        let reason = outcome.finish_reason.as_deref().unwrap_or("?");
        let detail = match timings["message"].as_str() {
            Some(message) => format!(": {message}"),
            // Any other limit has a message.
            None if reason == "length" && max_tokens >= 0 => {
                format!(": the limit of {max_tokens} tokens is reached (--max-tokens)")
            }
            None => String::new(),
        };
        let line = format!("{count} tokens, {speed:.1} tokens/s, ended by {reason}{detail}");
        eprintln!("{}", escape_control_characters(&line));
    }
    for ModFailures { mod_name, calls, failed, message } in outcome.mod_failures() {
        let line = format!("{mod_name}: {failed} of {calls} calls failed: {message}");
        eprintln!("{}", escape_control_characters(&line));
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
    outcome.run_id = run_id_of(&response);
    let mut events = Events::new(response);
    while let Some(chunk) = events.next().await? {
        apply_chunk(&chunk, outcome)?;
    }
    Ok(outcome.printer.end()?)
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

fn apply_chunk(chunk: &Value, outcome: &mut Outcome) -> anyhow::Result<()> {
    let printer = &mut outcome.printer;
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

#[cfg(test)]
mod tests {
    use super::Args;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn negative_numbers_are_values_of_flags() {
        let args = Line::parse_from(["thunder", "Hello!", "-n", "-1", "--temperature", "-1", "--top-k", "-1"]).args;
        assert_eq!((args.max_tokens, args.temperature, args.top_k), (-1, Some(-1.0), Some(-1)));
        for number in [["-n", "-2"], ["--temperature", "nan"], ["--top-p", "inf"]] {
            assert!(Line::try_parse_from(["thunder", "Hello!", number[0], number[1]]).is_err(), "{number:?}");
        }
    }
}
