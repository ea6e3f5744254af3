//! `thunder mods`: creates, checks, tests and registers mods.

mod check;
mod dry_run;
mod list;
mod new;
mod push;
mod source;
mod test;

use clap::Subcommand;
use std::process::ExitCode;

/// Create, check, test and register mods
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
    Test(Box<test::Args>),
}

/// Runs one of the commands. Exit codes: 0 success, 1 a problem of the mod, 2 the command could not run. `is_given` returns
/// true for flags given on the command line.
pub async fn mods(args: Args, is_given: impl Fn(&str) -> bool) -> anyhow::Result<ExitCode> {
    let done = match args.command {
        Command::New(args) => new::new(&args),
        Command::Check(args) => check::check(args).await,
        Command::List(args) => list::list(args, is_given).await,
        Command::Push(args) => push::push(args).await,
        Command::Test(args) => test::test(*args, is_given).await,
    };
    done.or_else(|error| {
        eprintln!("thunder: {error:#}");
        Ok(ExitCode::from(2))
    })
}
