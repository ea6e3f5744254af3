//! The configuration file: flags by their long names, with lower precedence than the command line and the environment.

use super::llama_server::{replace_spelling, skip_flags};
use super::precedence::{conflict, flag_source};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Folder and file name below the user's configuration folder and below `/etc`.
const FILE: &str = "thunder/thunder.toml";

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("configuration file {}: {problem}", file.display())]
pub(super) struct ConfigFileError {
    file: PathBuf,
    problem: InvalidConfig,
}

#[derive(Debug, thiserror::Error)]
enum InvalidConfig {
    #[error("cannot be read: {0}; check the path of --config-file or THUNDER_CONFIG_FILE")]
    Read(#[from] std::io::Error),
    #[error("{0}; permit this account to read the file, or set THUNDER_CONFIG_FILE to another file, or to nothing")]
    Permission(String),
    #[error("invalid TOML: {0}")]
    Syntax(#[from] toml::de::Error),
    #[error("'{0}' is not a flag of any command; `thunder config` lists the flags of `thunder serve`")]
    UnknownFlag(String),
    #[error("'{flag}' is not a flag of `thunder {command}`; `thunder {command} --help` lists its flags")]
    UnknownFlagOfCommand { command: String, flag: String },
    #[error("'{flag}' must be {expected}, got {found}")]
    Type { flag: String, found: &'static str, expected: &'static str },
}

/// The flags that a file sets.
#[derive(Debug)]
pub(super) struct ConfigFile {
    path: PathBuf,
    /// An error if this account may not read the user's or the machine's file.
    table: Result<Table, String>,
}

impl ConfigFile {
    /// Reads the file that `--config-file` or `THUNDER_CONFIG_FILE` names, else the user's, else the machine's. An empty
    /// name means no file.
    pub fn read(name: Option<&OsStr>) -> Result<Option<Self>, ConfigFileError> {
        let path = match name {
            Some(path) if path.is_empty() => return Ok(None),
            Some(path) => path.into(),
            None => match default_paths().into_iter().find(|path| path.is_file()) {
                Some(path) => path,
                None => return Ok(None),
            },
        };
        let table = match std::fs::read_to_string(&path) {
            Ok(text) => text.parse().map(Ok).map_err(InvalidConfig::from),
            // The file of a service contains secrets, and most commands do not need it.
            Err(error) if name.is_none() && error.kind() == ErrorKind::PermissionDenied => Ok(Err(error.to_string())),
            Err(error) => Err(error.into()),
        };
        match table {
            Ok(table) => Ok(Some(Self { path, table })),
            Err(problem) => Err(ConfigFileError { file: path, problem }),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the file sets a flag for all commands or for this one.
    pub fn sets(&self, command: &str, flag: &Arg) -> bool {
        let own = self.table.iter().filter_map(|table| table.get(command)?.as_table());
        self.table.iter().chain(own).flat_map(Table::keys).any(|key| is_named(flag, key))
    }

    /// Returns the command line with the file's flags for the command that it selects. Flags that the command line or the
    /// environment sets are left out, and flags that conflict with these.
    pub fn add_to(
        &self,
        words: &[OsString],
        root: &Command,
        matches: &ArgMatches,
    ) -> Result<Vec<OsString>, ConfigFileError> {
        self.flags(root, matches)
            .map(|(at, flags)| {
                let at = at.map_or(words.len(), |names| end_of_command(words, &names));
                words[..at].iter().chain(&flags).chain(&words[at..]).cloned().collect()
            })
            .map_err(|problem| ConfigFileError { file: self.path.clone(), problem })
    }

    /// Returns the names of the selected command and the flags that the file sets for it.
    fn flags(
        &self,
        root: &Command,
        matches: &ArgMatches,
    ) -> Result<(Option<Vec<String>>, Vec<OsString>), InvalidConfig> {
        let (mut command, mut matches, mut names) = (root, matches, Vec::new());
        while let Some((name, inner)) = matches.subcommand() {
            let Some(found) = command.find_subcommand(name) else { break };
            (command, matches) = (found, inner);
            names.push(name.to_owned());
        }
        let table = match (&self.table, &names[..]) {
            (Ok(table), _) => table,
            (Err(error), [name]) if ["serve", "doctor", "config"].contains(&name.as_str()) => {
                return Err(InvalidConfig::Permission(error.clone()));
            }
            (Err(error), _) => {
                eprintln!("thunder: not using the configuration file {}: {error}", self.path.display());
                return Ok((None, Vec::new()));
            }
        };
        let mut shared = Table::new();
        for (key, value) in table {
            match (value, root.find_subcommand(key)) {
                (Value::Table(own), Some(owner)) => {
                    if let Some(flag) = own.keys().find(|flag| find_flag(root, owner, flag).is_none()) {
                        let (command, flag) = (key.clone(), flag.clone());
                        return Err(InvalidConfig::UnknownFlagOfCommand { command, flag });
                    }
                }
                _ if !has_flag(root, key) => return Err(InvalidConfig::UnknownFlag(key.clone())),
                _ => drop(shared.insert(key.clone(), value.clone())),
            }
        }
        // The tables of the command, the more explicit one first. `thunder doctor` checks what `thunder serve` would do.
        let own = match &names[..] {
            [name] if name == "doctor" => vec!["doctor", "serve"],
            [name] => vec![name.as_str()],
            _ => Vec::new(),
        };
        let own = own.into_iter().filter_map(|name| table.get(name)?.as_table());
        let known = command.get_arguments().chain(root.get_arguments().filter(|flag| flag.is_global_set()));
        // A flag with the value false overrides only itself.
        let mut set: Vec<(&Arg, bool)> =
            known.filter(|flag| is_set(matches, flag)).map(|flag| (flag, is_false(matches, flag))).collect();
        let mut flags = Vec::new();
        for table in own.chain([&shared]) {
            let (mut added, mut words) = (Vec::new(), Vec::new());
            for (key, value) in table {
                let Some(flag) = find_flag(root, command, key) else { continue };
                let overrides = |&(other, is_false): &(&Arg, bool)| {
                    other.get_id() == flag.get_id() || !is_false && conflict(command, other, flag)
                };
                if !set.iter().any(overrides) {
                    add(&mut words, flag, key, value)?;
                    added.push((flag, value.as_bool() == Some(false)));
                }
            }
            set.extend(added);
            flags.splice(0..0, words);
        }
        Ok(((!names.is_empty()).then_some(names), flags))
    }
}

/// Returns the paths of the user's and of the machine's configuration file.
fn default_paths() -> Vec<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let user = folder("XDG_CONFIG_HOME").or_else(|| folder("HOME").map(|home| home.join(".config")));
    user.into_iter().chain([PathBuf::from("/etc")]).map(|folder| folder.join(FILE)).collect()
}

/// Returns true if a command or one of its subcommands has the flag.
fn has_flag(command: &Command, name: &str) -> bool {
    flag_named(command, name).is_some() || command.get_subcommands().any(|inner| has_flag(inner, name))
}

fn flag_named<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    command.get_arguments().filter(|flag| flag.get_long() != Some("help")).find(|flag| is_named(flag, key))
}

fn is_named(flag: &Arg, key: &str) -> bool {
    let word = flag_word(key);
    let name = word.split_once('=').map_or(&*word, |(name, _)| name).trim_start_matches("--");
    flag.get_long() == Some(name) || flag.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}

/// Returns the flag of a key as the command line accepts it: with its value for a spelling such as `no-slots`.
fn flag_word(key: &str) -> String {
    replace_spelling(format!("--{key}").into()).to_string_lossy().into_owned()
}

/// Returns the flag of a command, or of all commands.
fn find_flag<'a>(root: &'a Command, command: &'a Command, name: &str) -> Option<&'a Arg> {
    flag_named(command, name).or_else(|| flag_named(root, name).filter(|flag| flag.is_global_set()))
}

/// Returns true if the command line or the environment sets a flag.
fn is_set(matches: &ArgMatches, flag: &Arg) -> bool {
    matches!(flag_source(matches, flag), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

/// Returns true if a flag without a value is set to false.
fn is_false(matches: &ArgMatches, flag: &Arg) -> bool {
    let value = matches.try_get_one::<bool>(flag.get_id().as_str());
    !flag.get_action().takes_values() && matches!(value, Ok(Some(false)))
}

fn add(flags: &mut Vec<OsString>, flag: &Arg, key: &str, value: &Value) -> Result<(), InvalidConfig> {
    let invalid = |expected| InvalidConfig::Type { flag: key.to_owned(), found: value.type_str(), expected };
    let word = flag_word(key);
    if !flag.get_action().takes_values() || word.contains('=') {
        let is_set = value.as_bool().ok_or_else(|| invalid("true or false"))?;
        flags.extend(is_set.then(|| word.into()));
        return Ok(());
    }
    let to_text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Some(value.to_string()),
        _ => None,
    };
    let values = match value {
        Value::Array(values) => values.iter().map(to_text).collect(),
        single => to_text(single).map(|text| vec![text]),
    };
    let values = values.ok_or_else(|| invalid("a string, a number, true or false, or a list of these"))?;
    // A flag with a fixed number of values takes all of them at once, other flags are repeated.
    if values.len() > 1 && flag.get_num_args() == Some(values.len().into()) {
        flags.push(word.into());
        flags.extend(values.into_iter().map(OsString::from));
    } else {
        flags.extend(values.into_iter().map(|text| format!("{word}={text}").into()));
    }
    Ok(())
}

/// Returns the index after the name of the selected command.
fn end_of_command(words: &[OsString], names: &[String]) -> usize {
    names.iter().fold(1, |from, name| {
        let from = skip_flags(words, from).min(words.len());
        let found = words[from..].iter().position(|word| word.to_str() == Some(name));
        found.map_or(from, |offset| from + offset + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::ConfigFile;
    use crate::cli::Cli;
    use clap::CommandFactory;
    use std::ffi::OsString;

    fn read(text: &str, line: &str) -> Result<Vec<String>, String> {
        let file = ConfigFile { path: "test.toml".into(), table: Ok(text.parse().unwrap()) };
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let command = Cli::command();
        let matches = command.clone().try_get_matches_from(&words).unwrap();
        let added = file.add_to(&words, &command, &matches).map_err(|error| error.to_string())?;
        command.try_get_matches_from(&added).map_err(|error| error.to_string())?;
        Ok(added.into_iter().map(|word| word.into_string().unwrap()).collect())
    }

    #[test]
    fn flags_apply_to_the_commands_that_have_them() {
        let file = "port = 8080\nalias = ['a', 'b']\nmlock = true\nno-mmap = false\n[run]\nmax-tokens = 7\n";
        let line = |line| read(file, line).unwrap().join(" ");
        assert_eq!(line("thunder serve"), "thunder serve --alias=a --alias=b --mlock --port=8080");
        assert_eq!(line("thunder run hi"), "thunder run --alias=a --alias=b --mlock --max-tokens=7 hi");
        assert_eq!(line("thunder db status"), "thunder db status");
    }

    #[test]
    fn command_line_and_command_table_override_shared_flags() {
        let file = "threads = 2\nctx-size = 512\n[serve]\nthreads = 3\n";
        let line = |line| read(file, line).unwrap().join(" ");
        assert_eq!(line("thunder serve"), "thunder serve --ctx-size=512 --threads=3");
        assert_eq!(line("thunder serve -t 4 -c 64"), "thunder serve -t 4 -c 64");
        assert_eq!(line("thunder --log info run hi"), "thunder --log info run --ctx-size=512 --threads=2 hi");
        let named_like_a_command = line("thunder --config-file serve --log=info serve");
        let expected = "thunder --config-file serve --log=info serve --ctx-size=512 --threads=3";
        assert_eq!(named_like_a_command, expected);
    }

    #[test]
    fn flags_of_all_commands_apply() {
        let line = |file, line| read(file, line).unwrap().join(" ");
        let file = "log = 'debug'\n[serve]\nlog = 'info'\nlog-format = 'json'\n";
        assert_eq!(line(file, "thunder run hi"), "thunder run --log=debug hi");
        assert_eq!(line(file, "thunder db status"), "thunder db status --log=debug");
        assert_eq!(line(file, "thunder serve"), "thunder serve --log=info --log-format=json");
        assert_eq!(line(file, "thunder --log warn serve"), "thunder --log warn serve --log-format=json");
    }

    #[test]
    fn false_overrides_only_the_flag_itself() {
        let line = |file| read(file, "thunder serve").unwrap().join(" ");
        assert_eq!(line("model = 'a'\n[serve]\nno-model = false\n"), "thunder serve --model=a");
        assert_eq!(line("model = 'a'\n[serve]\nno-model = true\n"), "thunder serve --no-model");
        assert_eq!(line("no-model = true\n[serve]\nno-model = false\n"), "thunder serve");
    }

    #[test]
    fn doctor_checks_the_flags_of_serve() {
        let file = "port = 1\n[serve]\nport = 2\nmlock = true\nlist-devices = true\n[doctor]\nhost = 'a'\n";
        assert_eq!(read(file, "thunder doctor").unwrap().join(" "), "thunder doctor --mlock --port=2 --host=a");
        let added = read(file, "thunder doctor --port 3").unwrap().join(" ");
        assert_eq!(added, "thunder doctor --mlock --host=a --port 3");
    }

    #[test]
    fn conflicting_flags_of_the_file_are_overridden() {
        let line = |file, line| read(file, line).unwrap().join(" ");
        let file = "hf-repo = 'user/model'\nhf-file = 'a.gguf'\n[serve]\nmodel = 'b.gguf'\n[run]\nsystem = 'Hi'\n";
        assert_eq!(line(file, "thunder run hi -m c.gguf --raw"), "thunder run hi -m c.gguf --raw");
        assert_eq!(line(file, "thunder run hi --model-url x"), "thunder run --system=Hi hi --model-url x");
        assert_eq!(line(file, "thunder serve"), "thunder serve --model=b.gguf");
        assert_eq!(line(file, "thunder serve --no-model"), "thunder serve --no-model");
        let file = "listen = ['127.0.0.1:1']\n[serve]\nmetrics = true\n";
        assert_eq!(line(file, "thunder serve --host ::1"), "thunder serve --metrics=true --host ::1");
        let pull = line("hf-repo = 'user/model'", "thunder models pull user/other");
        assert_eq!(pull, "thunder models pull user/other");
        for file in ["model = 'a'\nmodel-url = 'b'", "listen = '127.0.0.1:1'\nport = 2"] {
            let error = read(file, "thunder serve").unwrap_err();
            assert!(error.contains("cannot be used with"), "{error}");
        }
    }

    #[test]
    fn list_sets_all_values_of_a_flag() {
        let added = read("control-vector-layer-range = [1, 5]", "thunder run hi").unwrap();
        assert_eq!(added.join(" "), "thunder run --control-vector-layer-range 1 5 hi");
        let error = read("control-vector-layer-range = [1, 5, 6]", "thunder run hi").unwrap_err();
        assert!(error.contains("2 values required"), "{error}");
    }

    #[test]
    fn keys_may_have_the_spellings_of_llama_server() {
        let line = |file| read(file, "thunder serve").map(|words| words.join(" "));
        let file =
            "ctx_size = 512\nno-slots = true\nspec_default = false\n[serve]\nno_kv_offload = true\nno-webui = true";
        let words = "thunder serve --ctx-size=512 --slots=off --no-ui --kv-offload=off";
        assert_eq!(line(file).as_deref(), Ok(words));
        assert_eq!(line("no-slots = true\n[serve]\nno-slots = false").as_deref(), Ok("thunder serve"));
        let error = line("no-slots = 'off'").unwrap_err();
        assert!(error.contains("'no-slots' must be true or false, got string"), "{error}");
    }

    #[test]
    fn unreadable_file_of_the_machine_ends_only_commands_that_need_it() {
        let file = ConfigFile { path: "test.toml".into(), table: Err("Permission denied".into()) };
        let command = Cli::command();
        let added = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let matches = command.clone().try_get_matches_from(&words).unwrap();
            file.add_to(&words, &command, &matches).map_err(|error| error.to_string())
        };
        for line in ["thunder serve", "thunder doctor --port 1", "thunder config"] {
            let error = added(line).unwrap_err();
            assert!(error.contains("test.toml: Permission denied") && error.contains("THUNDER_CONFIG_FILE"), "{error}");
        }
        for line in ["thunder completions bash", "thunder run hi", "thunder db status"] {
            assert_eq!(added(line).unwrap().join(" ".as_ref()), line);
        }
    }

    #[test]
    fn clients_accept_all_keys_of_the_server() {
        let added = read("api-key = ['a', 'b']", "thunder run hi").unwrap();
        assert_eq!(added.join(" "), "thunder run --api-key=a --api-key=b hi");
    }

    #[test]
    fn data_flags_reach_nested_commands() {
        let added = read("database-url = 'postgres://db/thunder'", "thunder db distribute --dry-run").unwrap();
        assert_eq!(added.join(" "), "thunder db distribute --database-url=postgres://db/thunder --dry-run");
    }

    #[test]
    fn error_of_an_invalid_file_names_the_flag() {
        for (file, expected) in [
            ("prot = 1", "'prot' is not a flag of any command"),
            ("[serve]\nmax-tokens = 1", "'max-tokens' is not a flag of `thunder serve`"),
            ("[nothing]\nx = 1", "'nothing' is not a flag of any command"),
            ("mlock = 'yes'", "'mlock' must be true or false, got string"),
            ("port = 2026-01-01", "'port' must be a string, a number, true or false, or a list of these, got datetime"),
            ("port = 'high'", "invalid value 'high' for '--port <PORT>'"),
        ] {
            let error = read(file, "thunder serve").unwrap_err();
            assert!(error.contains(expected), "{file}: {error}");
        }
    }
}
