//! The command line: one file a command.
//!
//! [`main`] reads the words and the environment once; every command gets a validated configuration. Results go to
//! standard output, everything else to standard error.

mod chat;
mod client;
mod events;
mod export;
mod ingest;
mod local;
mod place;
mod printer;
mod progress;
mod run;
mod serve;
mod startup;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Runs language models, lets mods step into every token, and replays what happened.
#[derive(Debug, Parser)]
#[command(name = "thunder", version, max_term_width = 110)]
pub struct Cli {
    /// What to log, e.g. info, debug, or thunder=debug,warn
    #[arg(long, global = true, env = "THUNDER_LOG", value_name = "FILTER", help_heading = "Logging")]
    log: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Args),
    Run(run::Args),
    Chat(chat::Args),
    Ingest(ingest::Args),
    Export(export::Args),
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let matches = match Cli::command().try_get_matches_from(spelled_out(std::env::args_os())) {
        Ok(matches) => matches,
        Err(error) => error.exit(),
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    log(&cli);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.into()),
    };
    let result = runtime.block_on(async {
        match cli.command {
            Command::Serve(args) => serve::serve(args).await,
            Command::Run(args) => run::run(args, |id| said(&matches, "run", id)).await,
            Command::Chat(args) => chat::chat(args, |id| said(&matches, "chat", id)).await,
            Command::Ingest(args) => ingest::ingest(args).await,
            Command::Export(args) => export::export(args).await,
        }
    });
    // A blocking task that hangs, e.g. a read of standard input, must not keep the program.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(error) => failed(&error),
    }
}

/// Whether a flag of a command stood on the command line.
fn said(matches: &clap::ArgMatches, command: &str, id: &str) -> bool {
    let source = matches.subcommand_matches(command).and_then(|said| said.value_source(id));
    source == Some(clap::parser::ValueSource::CommandLine)
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("thunder: {error:#}");
    ExitCode::FAILURE
}

/// llama-server's flags of one dash and several letters, which clap would read as several flags.
fn spelled_out(words: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut text_follows = false;
    words.map(move |word| {
        text_follows |= word == "--";
        match word.to_str() {
            Some("-np") if !text_follows => "--parallel".into(),
            Some("-ub") if !text_follows => "--ubatch-size".into(),
            Some("-ngl") if !text_follows => "--gpu-layers".into(),
            Some("-sm") if !text_follows => "--split-mode".into(),
            Some("-ts") if !text_follows => "--tensor-split".into(),
            Some("-mg") if !text_follows => "--main-gpu".into(),
            Some("-tb") if !text_follows => "--threads-batch".into(),
            Some("--no-models-autoload") if !text_follows => "--models-autoload=off".into(),
            _ => word,
        }
    })
}

fn log(cli: &Cli) {
    let default = match cli.command {
        Command::Serve(_) => "info,llama-cpp-2=warn,sqlx=warn,refinery_core=warn",
        _ => "warn,llama-cpp-2=error",
    };
    let filter = cli.log.as_deref().filter(|filter| !filter.is_empty()).unwrap_or(default);
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|error| {
        eprintln!("thunder: the log filter '{filter}' is not one ({error}); '{default}' is used");
        EnvFilter::new(default)
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}

#[cfg(test)]
mod tests {
    use super::{Cli, spelled_out};
    use clap::{CommandFactory, Parser};

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn llama_servers_spellings_are_understood() {
        let line = [
            "thunder",
            "serve",
            "--port",
            "8080",
            "-c",
            "4096",
            "-np",
            "2",
            "-t",
            "1",
            "-b",
            "64",
            "-ub",
            "32",
            "-ngl",
            "9",
            "-tb",
            "2",
            "-sm",
            "row",
            "-ts",
            "3,1",
            "-mg",
            "1",
            "--no-models-autoload",
            "-a",
            "x,y",
        ];
        assert!(Cli::try_parse_from(spelled_out(line.iter().map(Into::into))).is_ok());
    }

    #[test]
    fn every_flag_of_the_server_can_be_set_by_environment() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        for flag in serve.get_arguments().filter(|flag| !matches!(flag.get_id().as_str(), "help" | "version")) {
            assert!(flag.get_env().is_some(), "{} has no environment variable", flag.get_id());
        }
    }
}
