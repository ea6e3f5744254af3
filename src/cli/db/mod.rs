//! `thunder db`: administration of the database.

mod distribute;
mod status;

use super::progress::Progress;
use super::startup;
use crate::config::DataConfig;
use crate::store::Database;
use crate::store::admin::Admin;
use clap::Subcommand;
use std::process::ExitCode;

/// Show the status of the database, or distribute it over the nodes of Citus
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Status(status::Args),
    Distribute(distribute::Args),
}

/// Runs one of the commands.
pub async fn db(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Status(args) => status::status(args).await,
        Command::Distribute(args) => distribute::distribute(args).await,
    }
}

/// Connects to the configured database, which must exist.
async fn open(config: &DataConfig) -> anyhow::Result<Admin> {
    let database = startup::database(config);
    database.check_exists()?;
    connect(database).await
}

/// Connects to a database and shows the progress. Creates the embedded database if it does not exist.
pub(super) async fn connect(database: Database) -> anyhow::Result<Admin> {
    let progress = Progress::new(None);
    let task = progress.task();
    task.begin("opening the database");
    let admin = Admin::open(database, |step| task.begin(step)).await;
    progress.end();
    Ok(admin?)
}
