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
            database: database.into_iter().next(),
        }
    }

    /// Returns the flags of the database. `--data-dir` on the command line selects the embedded database, so it overrides a
    /// database URL of the environment or the configuration file.
    pub fn data(&self, flags: DataFlags) -> DataFlags {
        if self.selects_data_dir { DataFlags { database_url: None, database_direct_url: None, ..flags } } else { flags }
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
