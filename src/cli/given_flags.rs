//! The flags that determine where a command runs. Only the command line counts: the environment and the configuration file
//! do not change the choice.

use super::client::ServerArgs;
use super::precedence::flag_source;
use crate::config::flags::{DataFlags, EngineFlags};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command};

/// The flags of the command line that determine where a command runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GivenFlags {
    /// True if `--server` is given.
    pub server: bool,
    /// The first flag of an engine in this process, e.g. `--model`.
    pub engine: Option<String>,
    /// The first flag of the database, e.g. `--data-dir`.
    pub database: Option<String>,
    /// True if `--data-dir` is given without the URL of a database.
    pub selects_data_dir: bool,
    /// The flags that `thunder serve` needs for the same database, each after a space; the URL, which can contain a
    /// password, as a placeholder.
    pub serve_flags: String,
}

impl GivenFlags {
    /// Finds the flags of the selected command that are given on the command line.
    pub fn new(matches: &ArgMatches) -> Self {
        if let Some((_, inner)) = matches.subcommand() {
            return Self::new(inner);
        }
        let database = given::<DataFlags>(matches);
        let names_url = database.iter().any(|flag| flag.starts_with("--database-"));
        Self {
            server: given::<ServerArgs>(matches).iter().any(|flag| flag == "--server"),
            engine: given::<EngineFlags>(matches).into_iter().next(),
            selects_data_dir: !names_url && database.iter().any(|flag| flag == "--data-dir"),
            serve_flags: database.iter().filter_map(|flag| serve_flag(matches, flag)).collect(),
            database: database.into_iter().next(),
        }
    }

    /// Returns the flags of the database. `--data-dir` on the command line selects the embedded database, so it overrides a
    /// database URL of the environment or the configuration file.
    pub fn data(&self, flags: DataFlags) -> DataFlags {
        if self.selects_data_dir { DataFlags { database_url: None, database_direct_url: None, ..flags } } else { flags }
    }
}

/// Returns a flag of the database as `thunder serve` needs it, after a space; `None` for a flag that does not select the
/// database.
fn serve_flag(matches: &ArgMatches, flag: &str) -> Option<String> {
    match flag {
        "--data-dir" => {
            let dir = matches.get_raw("data_dir")?.next()?.to_string_lossy();
            let is_plain = |c: char| c.is_alphanumeric() || "/._-+@%:,=".contains(c);
            let dir =
                if dir.chars().all(is_plain) { dir.into_owned() } else { format!("'{}'", dir.replace('\'', r"'\''")) };
            Some(format!(" --data-dir {dir}"))
        }
        "--database-url" => Some(" --database-url URL".to_owned()),
        _ => None,
    }
}

/// Returns the flags of a group that are given on the command line.
fn given<A: Args>(matches: &ArgMatches) -> Vec<String> {
    let group = A::augment_args(Command::new("group"));
    let given = group.get_arguments().filter(|flag| flag_source(matches, flag) == Some(ValueSource::CommandLine));
    given.filter_map(Arg::get_long).map(|name| format!("--{name}")).collect()
}

#[cfg(test)]
mod tests {
    use super::GivenFlags;
    use crate::cli::Cli;
    use crate::config::flags::{DataFlags, default_flags};
    use clap::CommandFactory;

    fn given(line: &str) -> GivenFlags {
        GivenFlags::new(&Cli::command().try_get_matches_from(line.split(' ')).unwrap())
    }

    #[test]
    fn every_flag_of_the_engine_and_the_database_is_found() {
        assert_eq!(given("thunder run hi --seed 3 --api-key a"), GivenFlags::default());
        assert_eq!(given("thunder chat --ctx-size 512").engine.as_deref(), Some("--ctx-size"));
        assert_eq!(given("thunder fork x --at 1 --lora a.gguf").engine.as_deref(), Some("--lora"));
        assert_eq!(given("thunder mods list --mods-dir m").engine.as_deref(), Some("--mods-dir"));
        let both = given("thunder replay x --verify --server http://a --keep-days 1");
        assert_eq!((both.server, both.database.as_deref()), (true, Some("--keep-days")));
    }

    #[test]
    fn serve_needs_the_flags_that_select_the_database() {
        let flags = |line| given(line).serve_flags;
        assert_eq!(flags("thunder run hi --data-dir d3 --keep-days 1"), " --data-dir d3");
        assert_eq!(flags("thunder fork x --at 1 --data-dir it's"), r" --data-dir 'it'\''s'");
        assert_eq!(flags("thunder chat --database-url postgres://me:secret@a/b"), " --database-url URL");
        assert_eq!(flags("thunder run hi"), "");
    }

    #[test]
    fn data_directory_overrides_a_database_url_of_the_environment() {
        let url = |line| {
            let url = Some("postgres://a/b".to_owned());
            given(line).data(DataFlags { database_url: url, ..default_flags() }).database_url
        };
        assert_eq!(url("thunder ingest a.json --data-dir x"), None);
        assert!(url("thunder ingest a.json").is_some());
        assert!(url("thunder ingest a.json --data-dir x --database-url postgres://a/b").is_some());
    }
}
