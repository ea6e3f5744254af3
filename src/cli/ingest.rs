use super::client::ServerArgs;
use super::progress::Progress;
use super::startup;
use crate::config::DataConfig;
use crate::config::flags::DataFlags;
use crate::events::Scope;
use crate::store::RecorderChannel;
use crate::trace::document::Document;
use anyhow::{Context, bail};
use reqwest::Method;
use std::io::Read;
use std::process::ExitCode;

/// Record traces of other engines: check each file, then send it to the running server or store it in the database
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files with payloads of POST /ingest; - reads one payload from standard input
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
pub async fn ingest(args: Args) -> anyhow::Result<ExitCode> {
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
        bail!("{invalid} of {} files are not valid payloads; nothing was recorded", args.files.len());
    }
    if args.check {
        for (name, _, document) in &documents {
            println!("{name}: run {} with {} events", document.request.request_id, document.events.len());
        }
        return Ok(ExitCode::SUCCESS);
    }
    let own_database = args.data.data_dir.is_some();
    let server = if own_database { None } else { args.server.find().await? };
    if let Some(server) = server {
        for (name, payload, document) in documents {
            let request = server.request(Method::POST, "/ingest").header("content-type", "application/json");
            server.send(request.body(payload)).await.with_context(|| name.clone())?;
            println!("{}", server.replay(&document.request.request_id));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let progress = Progress::new(None);
    let store = startup::open_store(&DataConfig::try_from(args.data)?, RecorderChannel::new(), &progress).await;
    progress.end();
    let store = store?;
    let mut result = Ok(ExitCode::SUCCESS);
    for (name, _, document) in documents {
        match store.ingest(&Scope::All, None, document).await {
            Ok(ingested) => println!("{}", ingested.run_id),
            Err(error) => {
                result = Err(error).with_context(|| name.clone());
                break;
            }
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
