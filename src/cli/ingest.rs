use super::client::ServerArgs;
use super::export::server_unless_database;
use super::given_flags::GivenFlags;
use super::output;
use super::startup;
use crate::config::flags::DataFlags;
use crate::events::Scope;
use crate::trace::document::Document;
use anyhow::{Context, bail};
use reqwest::Method;
use std::io::Read;
use std::process::ExitCode;

/// Record traces of other engines: check each file, then send it to the running server or store it in the database
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files with documents for POST /ingest; - reads one document from standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<String>,
    /// Validation only; nothing is recorded
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    data: DataFlags,
}

/// Checks all files, then records them. If one file is invalid, none is recorded.
pub async fn ingest(args: Args, given: GivenFlags) -> anyhow::Result<ExitCode> {
    let mut documents = Vec::new();
    let mut invalid = 0;
    for name in &args.files {
        let payload = read(name)?;
        match Document::parse(&payload) {
            Ok(document) => documents.push((name, payload, document)),
            Err(error) => {
                eprintln!("thunder: {name}: {error}");
                invalid += 1;
            }
        }
    }
    if invalid > 0 {
        bail!("{invalid} of {} files are not valid documents; nothing was recorded", args.files.len());
    }
    if args.check {
        for (name, _, document) in &documents {
            let (id, events) = (&document.request.request_id, document.events.len());
            output::print_line(format_args!("{name}: run {id} with {events} events"))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(server) = server_unless_database(&args.server, &given).await? {
        for (name, payload, document) in documents {
            let request = server.request(Method::POST, "/ingest").header("content-type", "application/json");
            server.send(request.body(payload)).await.with_context(|| name.clone())?;
            output::print_line(server.replay(&document.request.request_id))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let store = startup::open_database(&given.data(args.data).config()?).await?;
    let mut result = Ok(ExitCode::SUCCESS);
    for (name, _, document) in documents {
        let ingested = store.ingest(&Scope::All, None, document).await.map_err(anyhow::Error::from);
        if let Err(error) = ingested.and_then(|ingested| Ok(output::print_line(ingested.run_id)?)) {
            result = Err(error.context(name.clone()));
            break;
        }
    }
    store.close().await;
    result
}

fn read(name: &str) -> anyhow::Result<Vec<u8>> {
    if name == "-" {
        let mut payload = Vec::new();
        std::io::stdin().read_to_end(&mut payload).context("cannot read standard input")?;
        return Ok(payload);
    }
    std::fs::read(name).with_context(|| format!("cannot read {name}"))
}
