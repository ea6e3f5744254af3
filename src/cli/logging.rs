//! The log, and the messages that are also lines for the user: steps of the start, and the error that ends a command.
//!
//! These messages are plain lines on standard error. If the server logs JSON to standard error, they are events of the log
//! instead; if it logs to a file, they are events of the file, too.

use crate::config::flags::{LogFlags, OnOffAuto};
use anyhow::Context as _;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::fmt::Display;
use std::fs::File;
use std::io::{IsTerminal as _, stderr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// Levels of libraries in the log of the server. Their other messages are of no use to its users.
const SERVER_LIBRARIES: &[(&str, LevelFilter)] = &[
    ("llama-cpp-2", LevelFilter::WARN),
    ("sqlx", LevelFilter::WARN),
    ("refinery_core", LevelFilter::WARN),
    ("rustls", LevelFilter::ERROR),
    ("rustls_platform_verifier", LevelFilter::WARN),
];

/// Levels of libraries in the log of the other commands.
const COMMAND_LIBRARIES: &[(&str, LevelFilter)] = &[
    ("llama-cpp-2", LevelFilter::ERROR),
    ("sqlx", LevelFilter::WARN),
    ("refinery_core", LevelFilter::WARN),
    ("rustls_platform_verifier", LevelFilter::OFF),
];

/// The log of the server; empty until [`init`], and for other commands.
static LOG: OnceLock<Log> = OnceLock::new();

struct Log {
    format: LogFormat,
    /// `None` for standard error.
    file: Option<LogFile>,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// The file of `--log-file`.
struct LogFile {
    path: PathBuf,
    file: Mutex<Arc<File>>,
}

impl LogFile {
    fn open(path: &Path) -> anyhow::Result<Self> {
        Ok(Self { path: path.to_owned(), file: Mutex::new(open(path)?) })
    }

    fn current(&self) -> Arc<File> {
        Arc::clone(&self.file.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn reopen(&self) -> anyhow::Result<()> {
        let opened = open(&self.path)?;
        *self.file.lock().unwrap_or_else(PoisonError::into_inner) = opened;
        Ok(())
    }
}

fn open(path: &Path) -> anyhow::Result<Arc<File>> {
    // Opening a FIFO would otherwise wait for a reader, and block all signals. Writes wait as usual.
    let opened = File::options().create(true).append(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
    let opened = opened.and_then(|file| {
        fcntl(&file, FcntlArg::F_SETFL(OFlag::O_APPEND))?;
        Ok(file)
    });
    opened.map(Arc::new).with_context(|| format!("cannot write to the file {} of --log-file", path.display()))
}

/// Starts the log. `flags` are those of the server; other commands log less by default.
pub fn init(filter: Option<&str>, format: LogFormat, flags: Option<&LogFlags>) -> anyhow::Result<()> {
    let (level, libraries) = if flags.is_some() { ("info", SERVER_LIBRARIES) } else { ("warn", COMMAND_LIBRARIES) };
    let default = match flags.and_then(LogFlags::log_filter) {
        // llama-server's flags apply to all messages.
        Some(level) => EnvFilter::try_new(level)?,
        None => parse_filter(level, libraries)?,
    };
    let given = filter.filter(|filter| !filter.is_empty());
    let (filter, invalid) = match given.map(|filter| parse_filter(filter, libraries)) {
        None => (default, None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (default, Some(error)),
    };
    let file = flags.and_then(|flags| flags.log_file.as_deref()).map(LogFile::open).transpose()?;
    let log = flags.map(|_| LOG.get_or_init(|| Log { format, file }));
    let file = log.and_then(|log| log.file.as_ref());
    let terminal = file.is_none() && stderr().is_terminal();
    let colors = flags.and_then(|flags| flags.log_colors).and_then(OnOffAuto::as_bool).unwrap_or(terminal);
    let writer = match file {
        None => BoxMakeWriter::new(stderr),
        Some(file) => BoxMakeWriter::new(move || file.current()),
    };
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    match format {
        LogFormat::Text => subscriber.with_ansi(colors).init(),
        LogFormat::Json => subscriber.json().flatten_event(true).with_span_list(false).with_current_span(false).init(),
    }
    if let Some(error) = invalid {
        let filter = given.unwrap_or_default();
        tracing::warn!(
            "the log filter '{filter}' is invalid ({error}); expected a filter such as info or thunder=debug,warn; using the default"
        );
    }
    Ok(())
}

/// Parses a filter. A library that it does not name has its level of `libraries`, unless all others have a lower one.
fn parse_filter(filter: &str, libraries: &[(&str, LevelFilter)]) -> Result<EnvFilter, ParseError> {
    let directives = filter.split(',').map(str::trim).filter(|directive| !directive.is_empty());
    let mut levels = directives.clone().filter_map(|directive| directive.parse().ok());
    let level = levels.next_back().unwrap_or(LevelFilter::OFF);
    let lowered = libraries.iter().filter(|(_, library_level)| *library_level < level);
    let mut all: Vec<String> = lowered.map(|(name, level)| format!("{name}={level}")).collect();
    // A later directive for a library replaces an earlier one.
    all.extend(directives.map(str::to_owned));
    EnvFilter::try_new(all.join(","))
}

/// Returns true if the server logs JSON lines to standard error.
pub fn is_json_on_stderr() -> bool {
    LOG.get().is_some_and(|log| log.file.is_none() && log.format == LogFormat::Json)
}

/// Returns true if messages for the user are events of the log.
fn has_messages() -> bool {
    LOG.get().is_some_and(|log| log.file.is_some() || log.format == LogFormat::Json)
}

/// Reports a step of the start or the end of a command to the user.
pub fn report(message: impl Display) {
    let is_logged = has_messages() && tracing::enabled!(target: "thunder", Level::INFO);
    if is_logged {
        tracing::info!(target: "thunder", "{message}");
    }
    print_line(message, is_logged);
}

/// Reports the error that ends a command.
pub fn report_error(message: impl Display) {
    let is_logged = has_messages() && tracing::enabled!(target: "thunder", Level::ERROR);
    if is_logged {
        tracing::error!(target: "thunder", "{message}");
    }
    print_line(message, is_logged);
}

/// Prints a message as a plain line, unless standard error has it as an event. The filter must not hide the address of the
/// server or the reason why a command fails.
fn print_line(message: impl Display, is_logged: bool) {
    if !(is_logged && is_json_on_stderr()) {
        eprintln!("thunder: {message}");
    }
}

/// Opens the log file again, because a log rotation may have renamed it. Keeps the previous one if that fails.
pub fn reopen_file() {
    let Some(file) = LOG.get().and_then(|log| log.file.as_ref()) else { return };
    match file.reopen() {
        Ok(()) => tracing::info!("log file reopened"),
        Err(error) => tracing::warn!("{error:#}; the log continues in the previous file"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directives(filter: &str) -> Vec<String> {
        let filter = parse_filter(filter, SERVER_LIBRARIES).unwrap().to_string();
        let mut directives: Vec<String> = filter.split(',').map(str::to_owned).collect();
        directives.sort();
        directives
    }

    #[test]
    fn filter_keeps_levels_of_libraries_that_it_does_not_name() {
        let expected = ["info", "llama-cpp-2=warn", "refinery_core=warn", "rustls=error"];
        let expected = [&expected[..], &["rustls_platform_verifier=warn", "sqlx=warn", "thunder::access=off"]].concat();
        assert_eq!(directives("info,thunder::access=off"), expected);
        let named = directives("debug,llama-cpp-2=debug,sqlx=trace");
        assert!(
            named.contains(&"llama-cpp-2=debug".to_owned()) && named.contains(&"sqlx=trace".to_owned()),
            "{named:?}"
        );
        assert_eq!(named.iter().filter(|directive| directive.starts_with("llama-cpp-2")).count(), 1, "{named:?}");
    }

    #[test]
    fn filter_may_have_spaces_between_directives() {
        assert_eq!(directives(" thunder=debug , info"), directives("thunder=debug,info"));
        assert!(directives("thunder=debug, info").contains(&"sqlx=warn".to_owned()));
    }

    #[test]
    fn filter_raises_no_level_of_a_library() {
        assert_eq!(directives("off"), ["off"]);
        assert_eq!(directives("error"), ["error"]);
        assert_eq!(directives("thunder=debug"), ["thunder=debug"]);
        assert_eq!(directives("warn"), ["rustls=error", "warn"]);
    }
}
