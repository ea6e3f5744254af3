//! `thunder mods`: creates, checks, tests, registers and removes mods.

mod change;
mod check;
mod dry_run;
mod list;
mod new;
mod push;
mod test;

use super::given_flags::GivenFlags;
use change::Change;
use clap::Subcommand;
use std::process::ExitCode;

/// Create, check, test, register and remove mods
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    New(new::Args),
    Check(check::Args),
    List(list::Args),
    Push(push::Args),
    /// Enable a disabled mod of a server
    Enable(change::Args),
    /// Disable a mod of a server: requests that name it are rejected
    Disable(change::Args),
    /// Remove an uploaded mod from a server; its versions are kept for the runs that used them
    Remove(change::Args),
    Test(Box<test::Args>),
}

/// Runs one of the commands. Exit codes: 0 success, 1 a problem of the mod, 2 the command could not run.
pub async fn mods(args: Args, given: GivenFlags) -> anyhow::Result<ExitCode> {
    let done = match args.command {
        Command::New(args) => new::new(&args),
        Command::Check(args) => check::check(args).await,
        Command::List(args) => list::list(args, &given).await,
        Command::Push(args) => push::push(args).await,
        Command::Enable(args) => change::change(args, Change::Enable).await,
        Command::Disable(args) => change::change(args, Change::Disable).await,
        Command::Remove(args) => change::change(args, Change::Remove).await,
        Command::Test(args) => test::test(*args, &given).await,
    };
    done.or_else(|error| {
        eprintln!("thunder: {error:#}");
        Ok(ExitCode::from(2))
    })
}
