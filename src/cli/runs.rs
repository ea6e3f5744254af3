use super::client::{Server, ServerArgs};
use super::export::server_unless_database;
use super::given_flags::GivenFlags;
use super::table::{format_table, shorten, terminal_columns};
use super::{output, startup};
use crate::config::flags::DataFlags;
use crate::events::Scope;
use crate::store::{MAX_PAGE_RUNS, RunQuery, Store};
use anyhow::{Context, bail};
use reqwest::Method;
use serde_json::Value;
use std::process::ExitCode;

/// Names of the table's columns.
const COLUMNS: [&str; 7] = ["RUN", "STARTED (UTC)", "STATUS", "MODEL", "MODS", "TOKENS", "TEXT"];

/// Maximum columns of the model and of the mods.
const MAX_COLUMNS: usize = 24;

/// List recorded runs, newest first
///
/// The list comes from the server of --server, else from a server at 127.0.0.1:6767, else from the database. With a flag of
/// the database on the command line, such as --data-dir, it always comes from that database. TEXT is the beginning of the
/// prompt, or of the answer of a run without a prompt.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Filter as in the dashboard, e.g. "status:failed after:7d"; default: all runs
    #[arg(default_value = "", hide_default_value = true)]
    filter: String,
    /// Maximum number of runs
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Runs as JSON, with the fields of GET /api/v1/runs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    data: DataFlags,
}

/// Prints the list.
pub async fn runs(args: Args, given: GivenFlags) -> anyhow::Result<ExitCode> {
    let limit = args.limit as usize;
    let mut runs = if let Some(server) = server_unless_database(&args.server, &given).await? {
        fetch(&server, &args.filter, limit).await?
    } else {
        let store = startup::open_existing_database(&given.data(args.data).config()?).await?;
        let found = read(&store, args.filter, limit).await;
        store.close().await;
        found?
    };
    runs.truncate(limit);
    if args.json {
        output::print_line(Value::from(runs))?;
    } else {
        output::print(table(&runs, terminal_columns()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns at least `limit` runs, if there are that many, from a server.
async fn fetch(server: &Server, filter: &str, limit: usize) -> anyhow::Result<Vec<Value>> {
    let page_limit = limit.min(MAX_PAGE_RUNS as usize).to_string();
    // Only the query of this URL is used.
    let first = reqwest::Url::parse_with_params("http://server", [("q", filter), ("limit", page_limit.as_str())])?;
    let mut next = first.query().map(|query| format!("?{query}"));
    let mut runs = Vec::new();
    while let Some(query) = next.filter(|_| runs.len() < limit) {
        let response = server.send(server.request(Method::GET, &format!("/api/v1/runs{query}"))).await?;
        let mut page: Value = response.json().await.context("the server's response is not JSON")?;
        let Some(found) = page["runs"].as_array_mut() else { bail!("the server's response has no runs") };
        runs.append(found);
        next = page["meta"]["next"].as_str().map(str::to_owned);
    }
    Ok(runs)
}

/// Returns at least `limit` runs, if there are that many, from the database.
async fn read(store: &Store, filter: String, limit: usize) -> anyhow::Result<Vec<Value>> {
    let mut query = RunQuery { q: filter, before: None, limit: MAX_PAGE_RUNS.min(limit as u32) };
    let mut runs = Vec::new();
    loop {
        let page = store.runs(&Scope::All, &query).await?;
        for run in page.runs {
            runs.push(serde_json::to_value(run)?);
        }
        query.before = page.next;
        if query.before.is_none() || runs.len() >= limit {
            return Ok(runs);
        }
    }
}

/// Returns the table of the runs, with lines of at most `columns` columns.
fn table(runs: &[Value], columns: Option<usize>) -> String {
    let rows: Vec<_> = std::iter::once(COLUMNS.map(str::to_owned)).chain(runs.iter().map(row)).collect();
    let table = format_table(&rows, 0);
    match columns {
        Some(columns) => table.lines().map(|line| shorten(line, columns) + "\n").collect(),
        None => table,
    }
}

fn row(run: &Value) -> [String; COLUMNS.len()] {
    let text = |name: &str| run[name].as_str().unwrap_or_default();
    let mods: Vec<&str> = run["mods"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let preview = if text("prompt_preview").is_empty() { text("output_preview") } else { text("prompt_preview") };
    [
        text("run_id").to_owned(),
        text("created_at").chars().take(16).collect::<String>().replace('T', " "),
        text("status").to_owned(),
        shorten(text("model"), MAX_COLUMNS),
        shorten(&mods.join(", "), MAX_COLUMNS),
        run["completion_tokens"].to_string(),
        shorten(preview, usize::MAX),
    ]
}

#[cfg(test)]
mod tests {
    use super::table;
    use serde_json::json;

    #[test]
    fn lines_fit_the_terminal() {
        let run = json!({
            "run_id": "01936d3a-7c4e-7d31-8c7d-0d9a5e1b2f60", "created_at": "2026-01-02T03:04:05.678Z", "status": "done",
            "model": "demo", "mods": ["a", "b"], "completion_tokens": 5, "prompt_preview": "Why is\nthe sky blue?",
            "output_preview": "Because",
        });
        let mut ingested = run.clone();
        ingested["model"] = json!(null);
        ingested["mods"] = json!([]);
        ingested["prompt_preview"] = json!("");
        let text = table(&[run, ingested], None);
        let expected = "\
            RUN                                   STARTED (UTC)     STATUS  MODEL  MODS  TOKENS  TEXT\n\
            01936d3a-7c4e-7d31-8c7d-0d9a5e1b2f60  2026-01-02 03:04  done    demo   a, b  5       Why is the sky blue?\n\
            01936d3a-7c4e-7d31-8c7d-0d9a5e1b2f60  2026-01-02 03:04  done                 5       Because\n";
        assert_eq!(text, expected);
        let runs = [json!({"run_id": "0", "completion_tokens": 12, "prompt_preview": "x".repeat(99)})];
        let expected = format!("0{}12      {}…", " ".repeat(40), "x".repeat(10));
        assert_eq!(table(&runs, Some(60)).lines().last(), Some(expected.as_str()));
    }
}
