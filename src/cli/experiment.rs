use super::client::{ErrorResponse, Server, ServerArgs};
use super::output;
use super::printer::escape_control_characters;
use super::progress::{Progress, TaskProgress};
use super::signals::EndSignals;
use super::table::{format_table, shorten};
use anyhow::{Context, bail};
use reqwest::{Method, StatusCode};
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Minimum time between two requests for the progress.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(300);
/// Maximum time between two requests for the progress.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum time in which requests for the progress fail, for example while the server restarts.
const MAX_OUTAGE: Duration = Duration::from_mins(1);
/// Maximum duration of a request for the progress.
const POLL_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum columns of a value in the table.
const MAX_COLUMNS: usize = 36;

/// Maximum printed errors of the scorer.
const MAX_ERRORS: usize = 5;

/// Names of the table's columns.
const COLUMNS: [&str; 9] = ["CELL", "PROMPT", "MODS", "PARAMETERS", "SEED", "STATE", "TOKENS", "SCORE", "ANSWER"];

/// Run an experiment: a grid of prompts, mods, parameters and seeds
///
/// The file has the fields of POST /api/v1/experiments; without a name, the experiment has that of the file. It runs on a
/// running server. Ctrl-C cancels it. The exit code is 1 if a cell failed or its scorer did.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Definition of the experiment
    #[arg(value_name = "FILE.toml")]
    file: PathBuf,
    /// File for the cells as comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// File for the cells in the format Parquet
    #[arg(long, value_name = "FILE")]
    parquet: Option<PathBuf>,
    /// Result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs an experiment and prints its cells.
pub async fn experiment(args: Args, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    let definition = read(&args.file)?;
    let server = signals.run_until_signal(args.server.require()).await??;
    for file in [&args.csv, &args.parquet].into_iter().flatten() {
        check_writable(file).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let created = server.send(server.request(Method::POST, "/api/v1/experiments").json(&definition)).await?;
    let created: Value = created.json().await.context("the server's response is not JSON")?;
    let id = created["experiment_id"].as_str().context("the server's response has no experiment_id")?;
    let address = format!("{}/experiments/{id}", server.base());
    eprintln!("experiment: {address}");
    let path = format!("/api/v1/experiments/{id}");
    let last_cell = created["cells"].as_u64().unwrap_or(1).saturating_sub(1);
    let progress = Progress::new(None);
    let ended = signals.run_until_signal(wait(&server, &path, last_cell, &progress.task(), MIN_POLL_INTERVAL)).await;
    progress.end();
    match ended {
        Ok(ended) => ended.with_context(|| format!("the experiment may still run: {address}"))?,
        Err(interrupted) if cancel(&server, &path, last_cell).await? => {
            eprintln!("thunder: the experiment was cancelled; the dashboard can resume it");
            return Err(interrupted.into());
        }
        Err(_) => {}
    }
    let experiment = load(&server, &path).await?;
    if args.json {
        output::print_line(&experiment)?;
    } else {
        output::print(table(&experiment))?;
    }
    let counts = &experiment["summary"]["counts"];
    let errors = score_errors(&experiment);
    errors.iter().take(MAX_ERRORS).for_each(|error| eprintln!("thunder: {error}"));
    if errors.len() > MAX_ERRORS {
        eprintln!("thunder: {} more cells could not be scored", errors.len() - MAX_ERRORS);
    }
    if experiment["state"] == "interrupted" {
        eprintln!("thunder: the experiment was interrupted; the dashboard can resume it");
    }
    let done = counts["done"].as_u64() == experiment["cells"].as_u64() && experiment["state"] == "done";
    eprintln!("{}", outcome(&experiment));
    for (file, name) in [(&args.csv, "cells.csv"), (&args.parquet, "cells.parquet")] {
        let Some(file) = file else { continue };
        let cells = server.send(server.request(Method::GET, &format!("{path}/{name}"))).await?.bytes().await?;
        std::fs::write(file, cells).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(if done && errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Opens a file for writing and leaves it as it was, so that a file that cannot be written is an error now, not after hours.
fn check_writable(file: &Path) -> std::io::Result<()> {
    match std::fs::metadata(file) {
        // The reader of a pipe would receive its end.
        Ok(existing) if !existing.is_file() => Ok(()),
        Ok(_) => File::options().append(true).open(file).map(drop),
        // A link whose target will be created.
        Err(_) if file.is_symlink() => Ok(()),
        Err(_) => {
            File::create_new(file)?;
            std::fs::remove_file(file)
        }
    }
}

/// Reads a definition. Without a name, it gets that of the file.
fn read(file: &Path) -> anyhow::Result<Value> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let table: toml::Table = toml::from_str(&text).with_context(|| format!("{} is not TOML", file.display()))?;
    let mut definition = serde_json::to_value(table)?;
    if definition.get("name").is_none() {
        let name = file.file_stem().map(|name| name.to_string_lossy().into_owned());
        definition["name"] = name.context("the file has no name")?.into();
    }
    Ok(definition)
}

/// Waits until an experiment is no longer running. A response from the last cell on has only one cell.
///
/// The interval of requests grows with the time, because each of them counts all cells.
async fn wait(
    server: &Server,
    path: &str,
    last_cell: u64,
    progress: &TaskProgress,
    min_interval: Duration,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut failing_since = None;
    loop {
        let interval = poll_interval(begun.elapsed()).max(min_interval);
        let experiment = match page(server, path, last_cell).await {
            Ok(experiment) => experiment,
            Err(error) if is_permanent(&error) => return Err(error),
            Err(error) => {
                if failing_since.get_or_insert_with(Instant::now).elapsed() > MAX_OUTAGE {
                    return Err(error);
                }
                tokio::time::sleep(interval).await;
                continue;
            }
        };
        failing_since = None;
        if experiment["state"] != "running" {
            return Ok(());
        }
        let number = |name: &str| experiment[name].as_f64().unwrap_or(0.0);
        let step = format!("{} of {} cells", experiment["ended"], experiment["cells"]);
        progress.advance(&step, (number("ended") / number("cells").max(1.0)) as f32);
        tokio::time::sleep(interval).await;
    }
}

/// Returns the time until the next request for the progress of an experiment that has run for `elapsed`.
fn poll_interval(elapsed: Duration) -> Duration {
    (elapsed / 20).min(MAX_POLL_INTERVAL)
}

/// Returns true for an error that another attempt would repeat, such as a rejected key or a removed experiment.
fn is_permanent(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ErrorResponse>().is_some_and(|response| {
        response.status.is_client_error()
            && ![StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&response.status)
    })
}

/// Cancels an experiment. Returns false if it is done already.
async fn cancel(server: &Server, path: &str, last_cell: u64) -> anyhow::Result<bool> {
    match server.send(server.request(Method::POST, &format!("{path}/cancel"))).await {
        Ok(_) => Ok(true),
        Err(_) if page(server, path, last_cell).await?["state"] == "done" => Ok(false),
        Err(error) => Err(error),
    }
}

async fn page(server: &Server, path: &str, from: u64) -> anyhow::Result<Value> {
    let request = server.request(Method::GET, &format!("{path}?from={from}")).timeout(POLL_TIMEOUT);
    let answer = server.send(request).await?;
    answer.json().await.context("the server's response is not JSON")
}

/// Returns an experiment with all of its cells.
async fn load(server: &Server, path: &str) -> anyhow::Result<Value> {
    let mut experiment = page(server, path, 0).await?;
    while let Some(from) = experiment["next"].as_u64() {
        let mut next = page(server, path, from).await?;
        let (Some(grid), Some(more)) = (experiment["grid"].as_array_mut(), next["grid"].as_array_mut()) else {
            bail!("the server's response has no grid");
        };
        grid.append(more);
        experiment["next"] = next["next"].take();
    }
    Ok(experiment)
}

/// Returns the counts and the mean score in one line, then the mean score of each list of mods with each set of parameters,
/// with its standard error.
fn outcome(experiment: &Value) -> String {
    let counts = experiment["summary"]["counts"].as_object().into_iter().flatten();
    let counts: Vec<String> =
        counts.filter(|(_, count)| **count != 0).map(|(state, count)| format!("{count} {state}")).collect();
    let score = experiment["mean_score"].as_f64().map(|score| format!("; mean score {score:.2}")).unwrap_or_default();
    let mut lines = vec![format!("{} cells: {}{score}", experiment["cells"], counts.join(", "))];
    let variants = experiment["summary"]["variants"].as_array().into_iter().flatten();
    lines.extend(variants.filter_map(|variant| variant_line(&experiment["definition"], variant)));
    lines.join("\n")
}

/// Returns mods, parameters and mean score of a variant with its standard error; `None` without a score.
fn variant_line(definition: &Value, variant: &Value) -> Option<String> {
    let score = variant["mean_score"].as_f64()?;
    let error = variant["score_standard_error"].as_f64().map(|error| format!(" ± {error:.2}")).unwrap_or_default();
    let index = |name: &str| variant[name].as_u64().map_or(usize::MAX, |index| index as usize);
    let mods = short(&mods(&definition["mods"][index("mods")]));
    let parameters = short(&parameters(&definition["parameters"][index("parameters")]));
    Some(format!("mods {mods}; parameters {parameters}: mean score {score:.2}{error}"))
}

/// Returns the number of a cell as text. The API counts cells from 0, the dashboard and this program from 1.
fn displayed_number(cell: &Value) -> String {
    cell["cell"].as_u64().map(|number| (number + 1).to_string()).unwrap_or_default()
}

/// Returns the errors of the scorer.
fn score_errors(experiment: &Value) -> Vec<String> {
    let error = |cell: &Value| {
        let message = escape_control_characters(cell["score_error"].as_str()?);
        Some(format!("cell {} could not be scored: {message}", displayed_number(cell)))
    };
    experiment["grid"].as_array().into_iter().flatten().filter_map(error).collect()
}

/// Returns the table of the cells. Columns without different values are omitted, except the last ones.
fn table(experiment: &Value) -> String {
    let rows: Vec<[String; COLUMNS.len()]> =
        experiment["grid"].as_array().into_iter().flatten().map(|cell| row(&experiment["definition"], cell)).collect();
    let shown = |column: usize| match COLUMNS[column] {
        "CELL" | "STATE" | "TOKENS" | "ANSWER" => true,
        "SCORE" => rows.iter().any(|row| !row[column].is_empty()),
        _ => rows.iter().any(|row| row[column] != rows[0][column]),
    };
    let columns: Vec<usize> = (0..COLUMNS.len()).filter(|column| shown(*column)).collect();
    let head = COLUMNS.map(str::to_owned);
    let shown = std::iter::once(&head).chain(&rows);
    let shown = shown.map(|row| columns.iter().map(|column| row[*column].clone()).collect());
    format_table(&shown.collect::<Vec<Vec<String>>>(), 0)
}

fn row(definition: &Value, cell: &Value) -> [String; COLUMNS.len()] {
    let index = |name: &str| cell[name].as_u64().map_or(usize::MAX, |index| index as usize);
    let number = |value: &Value| if value.is_null() { String::new() } else { value.to_string() };
    let answer = cell["error"].as_str().or(cell["output_preview"].as_str()).unwrap_or_default();
    [
        displayed_number(cell),
        short(definition["prompts"][index("prompt")].as_str().unwrap_or_default()),
        short(&mods(&definition["mods"][index("mods")])),
        short(&parameters(&definition["parameters"][index("parameters")])),
        cell["seed"].to_string(),
        cell["state"].as_str().unwrap_or_default().to_owned(),
        number(&cell["completion_tokens"]),
        number(&cell["score"]),
        short(answer),
    ]
}

/// Returns a list of mods as text.
fn mods(mods: &Value) -> String {
    let label = |one: &Value| match one["name"].as_str().or(one.as_str()) {
        Some(name) if one["config"].is_object() => format!("{name} {}", one["config"]),
        Some(name) => name.to_owned(),
        None => one.to_string(),
    };
    let all: Vec<String> = mods.as_array().into_iter().flatten().map(label).collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

/// Returns a set of parameters as text.
fn parameters(set: &Value) -> String {
    let all: Vec<String> =
        set.as_object().into_iter().flatten().map(|(name, value)| format!("{name}={value}")).collect();
    if all.is_empty() { "default".to_owned() } else { all.join(" ") }
}

/// Shortens a value of the table.
fn short(text: &str) -> String {
    shorten(text, MAX_COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::extract::Query;
    use axum::routing::{get, post};
    use serde_json::json;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn experiment() -> Value {
        let cell = |cell: u32, mods: u32, state: &str, score: Value| {
            json!({"prompt": 0, "mods": mods, "parameters": 0, "seed": 1, "cell": cell, "state": state,
                "completion_tokens": 6, "score": score, "output_preview": "a\nb \u{1b}[31m", "error": null})
        };
        json!({
            "cells": 2, "state": "done", "mean_score": 0.5,
            "definition": {"prompts": ["Hello"], "mods": [[], [{"name": "a", "config": {"x": 1}}, "b"]], "parameters": [{}]},
            "summary": {"counts": {"pending": 0, "done": 1, "failed": 1}, "variants": [
                {"mods": 0, "parameters": 0, "mean_score": 0.5, "score_standard_error": 0.25},
                {"mods": 1, "parameters": 0, "mean_score": null, "score_standard_error": null}]},
            "grid": [cell(0, 0, "done", json!(1.0)), cell(1, 1, "failed", Value::Null)],
        })
    }

    #[test]
    fn table_has_columns_that_differ() {
        let expected = "CELL  MODS          STATE   TOKENS  SCORE  ANSWER\n\
                        1     none          done    6       1.0    a b ␛[31m\n\
                        2     a {\"x\":1}, b  failed  6              a b ␛[31m\n";
        assert_eq!(table(&experiment()), expected);
        let expected = "2 cells: 1 done, 1 failed; mean score 0.50\n\
                        mods none; parameters default: mean score 0.50 ± 0.25";
        assert_eq!(outcome(&experiment()), expected);
    }

    #[tokio::test]
    async fn state_is_read_with_one_cell_and_a_done_experiment_is_not_cancelled() {
        let polls = Arc::new(AtomicU32::new(0));
        let show = move |Query(query): Query<Value>| async move {
            match polls.fetch_add(1, Ordering::Relaxed) {
                0 => Err(StatusCode::SERVICE_UNAVAILABLE),
                1 => Ok(axum::Json(json!({"state": "running"}))),
                _ if query == json!({"from": "7"}) => Ok(axum::Json(json!({"state": "done"}))),
                _ => Err(StatusCode::NOT_FOUND),
            }
        };
        let router = Router::new().route("/x", get(show)).route("/x/cancel", post(|| async { StatusCode::CONFLICT }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server::new(format!("http://{}", listener.local_addr().unwrap()), None).unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        wait(&server, "/x", 7, &Progress::new(None).task(), Duration::ZERO).await.unwrap();
        let removed = wait(&server, "/removed", 7, &Progress::new(None).task(), Duration::ZERO).await.unwrap_err();
        assert_eq!(removed.downcast_ref::<ErrorResponse>().unwrap().status, StatusCode::NOT_FOUND);
        assert!(!cancel(&server, "/x", 7).await.unwrap());
        assert!(cancel(&server, "/x", 0).await.is_err());
    }

    #[test]
    fn long_experiment_is_polled_less_often() {
        assert_eq!(poll_interval(Duration::from_secs(2)), Duration::from_millis(100));
        assert_eq!(poll_interval(Duration::from_secs(40)), Duration::from_secs(2));
        assert_eq!(poll_interval(Duration::from_hours(1)), MAX_POLL_INTERVAL);
    }

    #[test]
    fn cell_without_run_has_no_tokens() {
        let mut experiment = experiment();
        let cell = json!({"prompt": 0, "mods": 0, "parameters": 0, "seed": 1, "cell": 2, "state": "pending",
            "completion_tokens": null, "score": null, "output_preview": "", "error": null});
        experiment["grid"].as_array_mut().unwrap().push(cell);
        assert!(table(&experiment).ends_with("\n3     none          pending\n"), "{}", table(&experiment));
    }
}
