use super::client::{Server, ServerArgs, path_with_name};
use super::given_flags::GivenFlags;
use super::output;
use super::startup;
use crate::config::DataConfig;
use crate::config::flags::DataFlags;
use crate::events::Scope;
use crate::trace::document::Document;
use anyhow::{Context, bail};
use reqwest::Method;
use std::path::PathBuf;
use std::process::ExitCode;

/// Export a recorded run as a document for `ingest`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Run id or `request_id`
    #[arg(value_name = "ID")]
    id: String,
    /// Output file; default: standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    data: DataFlags,
}

/// Exports a run.
pub async fn export(args: Args, given: GivenFlags) -> anyhow::Result<ExitCode> {
    let document = document(&args.id, &args.server, args.data, &given).await?;
    let payload = document.write();
    match args.output {
        Some(path) => {
            std::fs::write(&path, payload).with_context(|| format!("cannot write {}", path.display()))?;
            eprintln!("{}: run {} with {} events", path.display(), document.request.request_id, document.events.len());
        }
        None => output::print(&payload)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a recorded run, from the server that [`server_unless_database`] returns, else from the database.
pub async fn document(id: &str, server: &ServerArgs, data: DataFlags, given: &GivenFlags) -> anyhow::Result<Document> {
    match server_unless_database(server, given).await? {
        Some(server) => {
            let bytes = server.send(server.request(Method::GET, &run_path(id)?)).await?.bytes().await?;
            Document::parse(&bytes).context("the server's response is not a run")
        }
        None => from_database(id, given.data(data).config()?).await,
    }
}

/// Returns the named or running server, or `None` if the command line selects a database.
pub async fn server_unless_database(server: &ServerArgs, given: &GivenFlags) -> anyhow::Result<Option<Server>> {
    server.find_unless(given.database.as_deref(), given).await
}

/// Returns the path of a run in the API.
pub fn run_path(id: &str) -> anyhow::Result<String> {
    path_with_name("/api/v1/runs", id)
}

async fn from_database(id: &str, config: DataConfig) -> anyhow::Result<Document> {
    let store = startup::open_existing_database(&config).await?;
    let found = async {
        let Some(run) = store.find(&Scope::All, id).await? else { bail!("there is no run '{id}'") };
        store.document(&Scope::All, run.run_id).await?.with_context(|| format!("there is no run '{id}'"))
    }
    .await;
    store.close().await;
    found
}
