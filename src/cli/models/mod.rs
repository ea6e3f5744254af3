//! `thunder models`: downloads models and lists those in the cache.

mod list;
mod pull;

use clap::Subcommand;
use std::process::ExitCode;

/// Download models and list the downloaded ones
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(list::Args),
    Pull(Box<pull::Args>),
}

/// Runs one of the commands.
pub async fn models(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::List(_) => list::list(),
        Command::Pull(args) => pull::pull(*args).await,
    }
}
