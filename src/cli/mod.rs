//! The command line, with one module per command.
//!
//! [`main`] parses the arguments, the environment and the configuration file, and runs the selected command with its flags.
//! Results go to standard output, everything else to standard error.

#[macro_use]
mod output;

mod chat;
mod client;
mod completions;
mod config;
mod config_file;
mod db;
mod doctor;
mod events;
mod experiment;
mod export;
mod fork;
mod given_flags;
mod help;
mod hub;
mod ingest;
mod llama_server;
mod local;
mod logging;
mod man;
mod mod_source;
mod mod_worker;
mod models;
mod mods;
mod numbers;
mod precedence;
mod printer;
mod probe;
mod progress;
mod replace_file;
mod replay;
mod run;
mod run_target;
mod runs;
mod serve;
mod signals;
mod startup;
mod table;
mod trust;
mod variables;

use crate::model::llama::wait_for_end_of_use;
use crate::mods::python::remove_worker_dirs;
use crate::store::Store;
use anyhow::Context as _;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use config_file::ConfigFile;
use given_flags::GivenFlags;
use logging::LogFormat;
use signals::{EndSignals, Interrupted};
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

/// Maximum time for the load of a model to be cancelled at the end of the program.
const LLAMA_TIMEOUT: Duration = Duration::from_secs(10);

/// An LLM engine with mods at every token, recording and replay
#[derive(Debug, Parser)]
#[command(name = "thunder", version, max_term_width = 110)]
pub struct Cli {
    /// Log filter, e.g. info, debug, or thunder=debug,warn
    #[arg(long, global = true, env = "THUNDER_LOG", value_name = "FILTER", help_heading = "Logging")]
    log: Option<String>,
    /// Format of log lines: text, or a JSON object per line
    #[arg(
        long,
        global = true,
        env = "THUNDER_LOG_FORMAT",
        value_name = "text|json",
        default_value = "text",
        help_heading = "Logging"
    )]
    log_format: LogFormat,
    /// Configuration file: flags by their long names; an empty name means no file; default:
    /// ~/.config/thunder/thunder.toml, else /etc/thunder/thunder.toml
    #[arg(long, global = true, env = "THUNDER_CONFIG_FILE", value_name = "FILE", help_heading = "Configuration")]
    config_file: Option<OsString>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<serve::Args>),
    Run(run::Args),
    Chat(chat::Args),
    Runs(runs::Args),
    Ingest(ingest::Args),
    Export(export::Args),
    Db(db::Args),
    Models(models::Args),
    Mods(Box<mods::Args>),
    Replay(Box<replay::Args>),
    Fork(Box<fork::Args>),
    Experiment(experiment::Args),
    Config(config::Args),
    Doctor(Box<doctor::Args>),
    Completions(completions::Args),
    Man(man::Args),
    #[command(hide = true)]
    Probe(probe::Args),
    #[command(hide = true, name = crate::mods::python::sandbox::COMMAND)]
    ModWorker(mod_worker::Args),
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let translated = match llama_server::command_line(std::env::args_os()) {
        Ok(translated) => translated,
        Err(refused) => {
            eprintln!("thunder: {refused}");
            return ExitCode::from(2);
        }
    };
    let (command, given) = match precedence::parse(command(), &translated.words) {
        (command, Ok(given)) => (command, given),
        (command, Err(error)) => variables::named_in_error(error, &command, &translated.words).exit(),
    };
    let mut cli = match Cli::from_arg_matches(&given) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    // Must run while there is only one thread, because the process restricts itself and then executes Python.
    if let Command::ModWorker(args) = &cli.command {
        return mod_worker::run_worker(args);
    }
    // The configuration file may set the log, which also receives the errors of the file.
    let file = with_file(&mut cli, &command, &translated.words, &given);
    let log_flags = if let Command::Serve(args) = &cli.command { Some(args.log()) } else { None };
    if let Err(error) = logging::init(cli.log.as_deref(), cli.log_format, log_flags) {
        return failed(&error);
    }
    let file = match file {
        Ok(file) => file,
        Err(error) => return failed(&error),
    };
    if let Command::Serve(_) | Command::Doctor(_) = &cli.command {
        let unread = llama_server::ignored_variable_notes(std::env::vars_os());
        translated.notes.iter().chain(&unread).for_each(|note| tracing::warn!("{note}"));
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.into()),
    };
    let result = runtime.block_on(async {
        let result = Box::pin(execute(cli.command, &given, file.as_ref())).await;
        // PostgreSQL must stop even if the command fails.
        Store::stop_servers().await;
        result
    });
    // The exit does not wait for blocking tasks, such as a read of standard input.
    runtime.shutdown_background();
    let code = match result {
        Ok(code) => code,
        Err(error) => failed(&variables::with_sources(error, &command, &given, file.as_ref())),
    };
    wait_for_end_of_use(LLAMA_TIMEOUT);
    remove_worker_dirs();
    code
}

/// Returns the definition of the command line, which includes llama-server's environment variables.
fn command() -> clap::Command {
    let command = help::shorten_help(documented_command());
    variables::without_empty(llama_server::with_environment(command, variables::is_set))
}

/// Returns the definition of the command line for completions and manual pages.
fn documented_command() -> clap::Command {
    help::hide_flags_without_effect(Cli::command())
}

/// Reads the configuration file, and parses the command line again with its flags.
fn with_file(
    cli: &mut Cli,
    command: &clap::Command,
    words: &[OsString],
    given: &clap::ArgMatches,
) -> anyhow::Result<Option<ConfigFile>> {
    if matches!(cli.command, Command::Probe(_)) {
        return Ok(None);
    }
    let Some(file) = ConfigFile::read(cli.config_file.as_deref())? else { return Ok(None) };
    let words = file.add_to(words, command, given)?;
    let parsed = command.clone().try_get_matches_from(words).and_then(|matches| Cli::from_arg_matches(&matches));
    *cli = parsed.with_context(|| format!("configuration file {}", file.path().display()))?;
    Ok(Some(file))
}

/// Runs a command until it ends or a signal ends it. `matches` holds the flags without those of the configuration file.
async fn execute(command: Command, matches: &clap::ArgMatches, file: Option<&ConfigFile>) -> anyhow::Result<ExitCode> {
    let given = GivenFlags::new(matches);
    match command {
        Command::Serve(args) => Box::pin(serve::serve(*args, EndSignals::new()?)).await,
        Command::Run(args) => Box::pin(run::run(args, given, EndSignals::new()?)).await,
        Command::Chat(args) => Box::pin(chat::chat(args, given, EndSignals::new()?)).await,
        Command::Replay(args) => Box::pin(replay::replay(*args, given, EndSignals::new()?)).await,
        Command::Fork(args) => Box::pin(fork::fork(*args, given, EndSignals::new()?)).await,
        Command::Experiment(args) => Box::pin(experiment::experiment(args, EndSignals::new()?)).await,
        Command::Runs(args) => until_signal(runs::runs(args, given)).await,
        Command::Ingest(args) => until_signal(ingest::ingest(args, given)).await,
        Command::Export(args) => until_signal(export::export(args, given)).await,
        Command::Db(args) => until_signal(db::db(args)).await,
        Command::Models(args) => until_signal(models::models(args)).await,
        Command::Mods(args) => until_signal(mods::mods(*args, given)).await,
        Command::Config(_) => config::config(file),
        Command::Doctor(args) => until_signal(doctor::doctor(*args)).await,
        Command::Completions(args) => completions::completions(&args),
        Command::Man(args) => man::man(&args),
        Command::Probe(args) => Ok(probe::probe(&args)),
        Command::ModWorker(args) => Ok(mod_worker::run_worker(&args)),
    }
}

/// Runs a command that can be cancelled at any point. It runs in its own task, because it may wait for standard input.
async fn until_signal(
    command: impl Future<Output = anyhow::Result<ExitCode>> + Send + 'static,
) -> anyhow::Result<ExitCode> {
    let mut task = tokio::spawn(command);
    match EndSignals::new()?.run_until_signal(&mut task).await {
        Ok(finished) => finished?,
        Err(interrupted) => {
            task.abort();
            Err(interrupted.into())
        }
    }
}

/// Reports the error of a command, unless a signal has ended it. Returns the exit code.
fn failed(error: &anyhow::Error) -> ExitCode {
    if let Some(Interrupted(code)) = error.downcast_ref() {
        return *code;
    }
    logging::report_error(with_causes(error));
    ExitCode::FAILURE
}

/// Returns the error and its causes without repeating causes that a message already contains.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::CommandFactory;

    #[test]
    fn cause_is_printed_once() {
        let inner = std::io::Error::other("connection refused");
        let error = anyhow::Error::new(inner).context("no answer: connection refused").context("cannot start");
        assert_eq!(super::with_causes(&error), "cannot start: no answer: connection refused");
    }

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_of_values_says_more_than_their_names() {
        let command = Cli::command();
        for flag in command.find_subcommand("serve").unwrap().get_arguments() {
            for value in flag.get_possible_values() {
                let help = value.get_help().map(|help| help.to_string().to_lowercase());
                assert_ne!(help.as_deref(), Some(value.get_name()), "--{}", flag.get_id());
            }
        }
    }

    #[test]
    fn every_flag_of_the_server_can_be_set_by_environment() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        // Flags that print something and exit need no environment variable.
        let prints = |flag: &&clap::Arg| matches!(flag.get_id().as_str(), "help" | "version" | "list_devices");
        for flag in serve.get_arguments().filter(|flag| !prints(flag)) {
            // Hidden flags exist for scripts written for llama-server.
            if flag.is_hide_set() {
                continue;
            }
            assert!(flag.get_env().is_some(), "{} has no environment variable", flag.get_id());
            // A plain bool accepts only true and false, and users write 1.
            let is_bool = format!("{:?}", flag.get_value_parser()) == "ValueParser::bool";
            assert!(!is_bool, "{} cannot be enabled with 1", flag.get_id());
        }
    }
}
