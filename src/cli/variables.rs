//! Environment variables of flags: empty ones count as unset. Errors name the variable or the configuration file that sets
//! the invalid value.

use super::config_file::ConfigFile;
use super::precedence::flag_source;
use crate::config::ConfigError;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use std::ffi::{OsStr, OsString};

/// Flags of a server that reject an empty variable: without their value, the server would be open or would not encrypt.
const SECURITY_FLAGS: [&str; 6] =
    ["api_keys", "api_key_file", "admin_keys", "mod_keys", "ingest_keys", "ssl_cert_file"];

/// Makes empty variables count as unset: compose files set them with `VARIABLE=${VALUE:-}`. An empty name of the
/// configuration file means no file.
pub(super) fn without_empty(command: Command) -> Command {
    let is_server = command.get_arguments().any(|flag| flag.get_id() == "listen");
    let is_unset = |flag: &Arg| {
        let id = flag.get_id().as_str();
        let value = flag.get_env().and_then(std::env::var_os);
        let is_read = id == "config_file" || (is_server && SECURITY_FLAGS.contains(&id));
        !is_read && value.is_some_and(|value| value.is_empty())
    };
    command.mut_args(|flag| if is_unset(&flag) { flag.env(None::<&str>) } else { flag }).mut_subcommands(without_empty)
}

/// Returns true if a variable counts as set for the flag of a server with an id.
pub(super) fn is_set(id: &str, variable: &OsStr) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() || SECURITY_FLAGS.contains(&id))
}

/// Names the variables that set the flags of an error, because the user may not know the flags.
pub(super) fn named_in_error(mut error: clap::Error, command: &Command, words: &[OsString]) -> clap::Error {
    for kind in [ContextKind::InvalidArg, ContextKind::PriorArg] {
        if let Some(ContextValue::String(flag)) = error.get(kind)
            && let Some(variable) = variable_of(flag, command, words)
        {
            let named = format!("{variable} ({flag})");
            error.insert(kind, ContextValue::String(named));
        }
    }
    error
}

/// Adds to an error of the configuration which variables or file set its flags. `matches` holds the flags without those of
/// the file.
pub(super) fn with_sources(
    error: anyhow::Error,
    mut command: &Command,
    mut matches: &ArgMatches,
    file: Option<&ConfigFile>,
) -> anyhow::Error {
    if !error.is::<ConfigError>() {
        return error;
    }
    let mut name = "";
    while let Some((next, inner)) = matches.subcommand()
        && let Some(found) = command.find_subcommand(next)
    {
        (name, command, matches) = (next, found, inner);
    }
    let message = error.to_string();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let named: Vec<&str> = message.split(|c| !is_name(c)).filter_map(|word| word.strip_prefix("--")).collect();
    let flags = command.get_arguments().filter_map(|flag| Some((flag, flag.get_long()?)));
    let sources = flags.filter(|(_, long)| named.contains(long)).filter_map(|(flag, long)| {
        let source = match flag_source(matches, flag) {
            Some(ValueSource::CommandLine) => return None,
            Some(ValueSource::EnvVariable) => flag.get_env()?.to_string_lossy().into_owned(),
            _ => file.filter(|file| file.sets(name, flag))?.path().display().to_string(),
        };
        Some(format!("--{long} is set by {source}"))
    });
    let sources: Vec<String> = sources.collect();
    if sources.is_empty() { error } else { anyhow::anyhow!("{message} ({})", sources.join(", ")) }
}

/// Returns the variable that sets a flag, which is named as in clap's errors, if the error does not occur without it.
fn variable_of(flag: &str, command: &Command, words: &[OsString]) -> Option<String> {
    let name = flag.split([' ', '[', '=']).next()?.strip_prefix("--")?;
    let mut variable = None;
    let without = without_variable(command.clone(), name, &mut variable);
    let is_about_flag = |error: clap::Error| {
        let kinds = [ContextKind::InvalidArg, ContextKind::PriorArg];
        kinds.iter().any(|kind| matches!(error.get(*kind), Some(ContextValue::String(text)) if text == flag))
    };
    let is_given = without.try_get_matches_from(words).err().is_some_and(is_about_flag);
    variable.filter(|_| !is_given)
}

/// Makes no command read the variable of a flag. Sets `variable` to its name if it is set.
fn without_variable(command: Command, name: &str, variable: &mut Option<String>) -> Command {
    let mut found = None;
    let command = command.mut_args(|flag| {
        if flag.get_long() != Some(name) {
            return flag;
        }
        let set = flag.get_env().filter(|name| std::env::var_os(name).is_some());
        found = set.map(|name| name.to_string_lossy().into_owned()).or(found.take());
        flag.env(None::<&str>)
    });
    *variable = variable.take().or(found);
    command.mut_subcommands(|subcommand| without_variable(subcommand, name, variable))
}
