//! Precedence of the sources of flags: the command line, then the environment, then the configuration file. A flag also
//! overrides the flags of the later sources that it conflicts with.

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, Id};
use std::ffi::OsString;

/// Parses a command line. Returns it with the definition that was used: it does not read variables of flags that conflict
/// with a flag on the command line.
pub(super) fn parse(command: Command, words: &[OsString]) -> (Command, Result<ArgMatches, clap::Error>) {
    let parsed = command.clone().try_get_matches_from(words);
    if !parsed.as_ref().is_err_and(|error| error.kind() == ErrorKind::ArgumentConflict) {
        return (command, parsed);
    }
    let command = match command.clone().ignore_errors(true).try_get_matches_from(words) {
        Ok(matches) => without_overridden_variables(command, &matches),
        Err(_) => command,
    };
    let parsed = command.clone().try_get_matches_from(words);
    (command, parsed)
}

fn without_overridden_variables(command: Command, matches: &ArgMatches) -> Command {
    if let Some((name, inner)) = matches.subcommand() {
        return command.mut_subcommand(name, |subcommand| without_overridden_variables(subcommand, inner));
    }
    let with_source = |source| command.get_arguments().filter(move |flag| flag_source(matches, flag) == Some(source));
    let is_overridden =
        |flag: &&Arg| with_source(ValueSource::CommandLine).any(|given| conflict(&command, given, flag));
    let overridden: Vec<Id> =
        with_source(ValueSource::EnvVariable).filter(is_overridden).map(|flag| flag.get_id().clone()).collect();
    overridden.into_iter().fold(command, |command, id| command.mut_arg(id, |flag| flag.env(None::<&str>)))
}

/// Returns the source of a flag's value.
pub(super) fn flag_source(matches: &ArgMatches, flag: &Arg) -> Option<ValueSource> {
    let id = flag.get_id().as_str();
    // `value_source` panics for a flag that the command does not have.
    matches.try_contains_id(id).ok().and_then(|_| matches.value_source(id))
}

/// Returns true if two flags of a command conflict.
pub(super) fn conflict(command: &Command, one: &Arg, other: &Arg) -> bool {
    let names = |flag: &Arg, other: &Arg| {
        command.get_arg_conflicts_with(flag).into_iter().any(|found| found.get_id() == other.get_id())
    };
    names(one, other) || names(other, one)
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use clap::CommandFactory;
    use std::ffi::OsString;

    /// Parses a command line with a variable, which is set, for a flag of the command at `path`.
    fn parse_with_variable(id: &str, path: &[&str], line: &str) -> Result<clap::ArgMatches, String> {
        fn with_variable(command: clap::Command, id: &str, path: &[&str]) -> clap::Command {
            match path {
                [] => command.mut_arg(id, |flag| flag.env("PATH")),
                [name, rest @ ..] => command.mut_subcommand(name, |inner| with_variable(inner, id, rest)),
            }
        }
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let (_, parsed) = super::parse(with_variable(Cli::command(), id, path), &words);
        let matches = parsed.map_err(|error| error.to_string())?;
        Ok(path.iter().fold(matches, |mut matches, _| matches.remove_subcommand().unwrap().1))
    }

    /// Returns the values of `--hf-repo`, whose variable is set.
    fn parse(path: &[&str], line: &str) -> Result<Vec<String>, String> {
        let matches = parse_with_variable("hf_repo", path, line)?;
        Ok(matches.get_raw("hf_repo").into_iter().flatten().map(|value| value.to_str().unwrap().to_owned()).collect())
    }

    #[test]
    fn command_line_overrides_variables_of_conflicting_flags() {
        let variable = std::env::var("PATH").unwrap();
        assert_eq!(parse(&["run"], "thunder run hi"), Ok(vec![variable.clone()]));
        assert_eq!(parse(&["run"], "thunder run hi -t 2"), Ok(vec![variable]));
        assert_eq!(parse(&["run"], "thunder run hi --model a.gguf"), Ok(vec![]));
        assert_eq!(parse(&["run"], "thunder run hi --model-url http://a/a.gguf"), Ok(vec![]));
        assert_eq!(parse(&["models", "pull"], "thunder models pull user/model"), Ok(vec![]));
        assert_eq!(parse(&["run"], "thunder run hi --hf-repo user/model"), Ok(vec!["user/model".to_owned()]));
        let error = parse(&["run"], "thunder run hi --model a.gguf --model-url http://a/a.gguf").unwrap_err();
        assert!(error.contains("cannot be used with"), "{error}");
    }
}
