//! Translation of llama-server's command lines and environment variables to the form that clap parses.

mod foreign;
mod names;

use clap::Command;
use foreign::{FOREIGN_FLAGS, FlagTreatment, ForeignFlag, Values};
use names::{SPELLINGS, VARIABLES};
use std::ffi::{OsStr, OsString};

/// A translated command line with notes for the log.
#[derive(Debug, Default)]
pub(super) struct CommandLine {
    /// Arguments for clap.
    pub words: Vec<OsString>,
    /// One note per flag without effect.
    pub notes: Vec<String>,
}

/// A rejected flag with its remedy.
#[derive(Debug, thiserror::Error)]
#[error("{flag} is a flag of llama-server that Thunder does not support; {remedy}")]
pub(super) struct UnsupportedFlag {
    flag: String,
    remedy: &'static str,
}

/// Translates a command line. For `serve` and `doctor`, flags that only llama-server has are removed.
pub(super) fn command_line(words: impl Iterator<Item = OsString>) -> Result<CommandLine, UnsupportedFlag> {
    let words: Vec<OsString> = replace_spellings(words).collect();
    let Some(command) = find_server_command(&words) else { return Ok(CommandLine { words, notes: Vec::new() }) };
    let mut translated = CommandLine { words: words[..=command].to_vec(), notes: Vec::new() };
    let mut rest = words[command + 1..].iter().peekable();
    while let Some(word) = rest.next() {
        if word == "--" {
            translated.words.push(word.clone());
            translated.words.extend(rest.by_ref().cloned());
            break;
        }
        let text = word.to_string_lossy();
        let (name, has_value) = match text.split_once('=') {
            Some((name, _)) if name.starts_with("--") => (name, true),
            _ => (&*text, false),
        };
        let Some(foreign) = FOREIGN_FLAGS.iter().find(|foreign| foreign.names.contains(&name)) else {
            translated.words.push(word.clone());
            continue;
        };
        let values = match foreign.values {
            _ if has_value => 0,
            Values::None => 0,
            Values::Optional => usize::from(rest.peek().is_some_and(|next| !next.to_string_lossy().starts_with('-'))),
            Values::One => 1,
        };
        for _ in 0..values {
            rest.next();
        }
        match foreign.treatment {
            FlagTreatment::Silent => {}
            FlagTreatment::NoEffect(reason) => translated.notes.push(format!("{name} has no effect: {reason}")),
            FlagTreatment::Refused(remedy) => return Err(UnsupportedFlag { flag: name.to_owned(), remedy }),
        }
    }
    Ok(translated)
}

/// Returns the index of the command, if it takes the flags of a server.
fn find_server_command(words: &[OsString]) -> Option<usize> {
    let at = skip_flags(words, 1);
    ["serve", "doctor"].iter().any(|command| words.get(at).is_some_and(|word| word == *command)).then_some(at)
}

/// Returns the index of the first word from `at` on that does not begin with `--` and is not the value of a flag that all
/// commands have.
pub(super) fn skip_flags(words: &[OsString], mut at: usize) -> usize {
    while let Some(word) = words.get(at).filter(|word| word.to_string_lossy().starts_with("--")) {
        let has_value = ["--log", "--log-format", "--config-file"].iter().any(|flag| word == *flag);
        at += if has_value { 2 } else { 1 };
    }
    at
}

/// Returns notes about llama-server's environment variables that are set but ignored. `set` has names and values.
pub(super) fn ignored_variable_notes(set: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let set = set.filter(|(_, value)| !value.is_empty());
    let texts = set.filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())));
    let of_llama_server = texts.filter(|(name, _)| name.starts_with("LLAMA_ARG_"));
    let mut notes: Vec<String> = of_llama_server.filter_map(|(name, value)| note(&name, &value)).collect();
    notes.sort();
    notes
}

fn note(name: &str, value: &str) -> Option<String> {
    if VARIABLES.iter().any(|(_, llama_variable)| *llama_variable == name) {
        return None;
    }
    if let Some(ForeignFlag { names: [first, ..], treatment, .. }) =
        FOREIGN_FLAGS.iter().find(|foreign| foreign.variables.contains(&name))
    {
        return match treatment {
            FlagTreatment::Silent if ["0", "false", "off", "disabled"].contains(&value) => {
                negative_note(&format!("{name}={value}"), first)
            }
            FlagTreatment::Silent => None,
            FlagTreatment::NoEffect(reason) => Some(format!("{name} has no effect: {reason}")),
            FlagTreatment::Refused(remedy) => {
                Some(format!("{name} has no effect, because {first} is not supported; {remedy}"))
            }
        };
    }
    let positive = name.replacen("LLAMA_ARG_NO_", "LLAMA_ARG_", 1);
    if VARIABLES.iter().any(|(_, llama_variable)| *llama_variable == positive) {
        return Some(format!("{name} has no effect; use {positive}=0"));
    }
    Some(format!("{name} has no effect: unknown variable; thunder serve --help lists the supported variables"))
}

/// Returns the note about a variable that disables what a flag enables: that about the negative flag, e.g. `--no-jinja`.
fn negative_note(variable: &str, flag: &str) -> Option<String> {
    let negative = flag.replacen("--", "--no-", 1);
    if SPELLINGS.iter().any(|(_, supported)| *supported == negative) {
        return Some(format!("{variable} has no effect; use {negative}"));
    }
    match FOREIGN_FLAGS.iter().find(|foreign| foreign.names.contains(&negative.as_str()))?.treatment {
        FlagTreatment::NoEffect(reason) => Some(format!("{variable} has no effect: {reason}")),
        FlagTreatment::Silent | FlagTreatment::Refused(_) => None,
    }
}

/// Returns the arguments in clap's form.
fn replace_spellings(words: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut text_follows = false;
    words.map(move |word| {
        text_follows |= word == "--";
        if text_follows { word } else { replace_spelling(word) }
    })
}

/// Returns an argument in clap's form.
pub(super) fn replace_spelling(word: OsString) -> OsString {
    let word = with_dashes(word);
    let spelling = SPELLINGS.iter().find(|(short, _)| word == *short);
    spelling.map_or(word, |(_, long)| long.into())
}

/// Replaces `_` by `-` in the name of a long flag: `--ctx_size=512` becomes `--ctx-size=512`.
fn with_dashes(word: OsString) -> OsString {
    let Some(flag) = word.to_str().filter(|word| word.starts_with("--") && word.contains('_')) else { return word };
    let (name, value) = flag.split_at(flag.find('=').unwrap_or(flag.len()));
    format!("{}{value}", name.replace('_', "-")).into()
}

/// Makes the commands `serve` and `doctor` read llama-server's environment variables for flags whose own variable is not
/// set. `is_set` returns true if a variable is set for the flag with an id.
pub(super) fn with_environment(command: Command, is_set: impl Fn(&str, &OsStr) -> bool) -> Command {
    let with_variables = |command: Command| {
        // As in llama-server, the last one of a repeated flag applies, so that scripts can append their own flags.
        let command = command.args_override_self(true);
        VARIABLES.iter().filter(|(id, llama_variable)| is_set(id, llama_variable.as_ref())).fold(
            command,
            |command, &(id, llama_variable)| {
                let own_variable = command.get_arguments().find(|flag| flag.get_id() == id).map(clap::Arg::get_env);
                match own_variable {
                    Some(own) if !own.is_some_and(|name| is_set(id, name)) => {
                        command.mut_arg(id, |flag| flag.env(llama_variable))
                    }
                    _ => command,
                }
            },
        )
    };
    command.mut_subcommand("serve", with_variables).mut_subcommand("doctor", with_variables)
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::foreign::{FOREIGN_FLAGS, Values};
    use super::{SPELLINGS, VARIABLES, command_line, ignored_variable_notes, with_environment};
    use crate::config::LoadMode;
    use clap::{CommandFactory, Parser};
    use std::ffi::OsString;

    /// llama-server's flags: spellings, value, environment variable.
    const LLAMA_SERVER_FLAGS: &str = include_str!("flags.txt");

    fn translated(line: &str) -> Result<(Result<Cli, clap::Error>, Vec<String>), String> {
        let words = ["thunder", "serve"].into_iter().chain(line.split_whitespace()).map(OsString::from);
        let translated = command_line(words).map_err(|refused| refused.to_string())?;
        Ok((Cli::try_parse_from(translated.words), translated.notes))
    }

    #[test]
    fn llama_server_command_line_is_translated() {
        let line = "--port 8080 -c 4096 -np 2 -t 1 -b 64 -ub 32 -ngl 9 -fa on --no-slots --metrics --jinja --temp 0.2 --top-k 1 \
                    -n -1 -s 7 --no-warmup --no-webui -lv 2 --samplers top_k;top_p --mirostat 2 -tb 2 -sm row -ts 3,1 -mg 1 \
                    --no-models-autoload -a x,y --mlock -rea off --no-prefill-assistant --prio 2 --poll 0 -fit off -ctxcp 4 \
                    --no-mmproj --no-cache-idle-slots -e -nkvo -C ff -l 5+1 -r USER: --rope-scaling yarn";
        let (parsed, notes) = translated(line).unwrap();
        assert!(parsed.is_ok(), "{parsed:?}");
        let noted: Vec<&str> = notes.iter().map(|note| note.split(' ').next().unwrap()).collect();
        assert_eq!(noted, ["-fit", "-ctxcp", "--no-cache-idle-slots"]);
    }

    #[test]
    fn underscores_in_flag_names_are_dashes() {
        let line = "thunder serve --ctx_size 512 --no_slots --api_prefix=/a_b --parameter x_y=1 -- --c_d";
        let words = command_line(line.split(' ').map(OsString::from)).unwrap().words;
        let expected = "thunder serve --ctx-size 512 --slots=off --api-prefix=/a_b --parameter x_y=1 -- --c_d";
        assert_eq!(words, expected.split(' ').map(OsString::from).collect::<Vec<_>>());
    }

    #[test]
    fn all_flags_of_llama_server_are_known() {
        for row in LLAMA_SERVER_FLAGS.lines().filter(|row| !row.starts_with('#')) {
            let [names, value, variable] = row.split('|').collect::<Vec<_>>()[..] else { panic!("{row}") };
            for name in names.split(' ') {
                match translated(&format!("{name} {value}")) {
                    Err(hint) => assert!(hint.contains(name) && hint.contains("; "), "{hint}"),
                    Ok((Err(error), _)) => panic!("{row}: {error}"),
                    Ok((Ok(_), notes)) => assert!(notes.len() <= 1, "{row}: {notes:?}"),
                }
            }
            if variable.starts_with("LLAMA_ARG_") {
                let notes = ignored_variable_notes(std::iter::once((variable.into(), "1".into())));
                assert!(!notes.iter().any(|note| note.contains("unknown variable")), "{row}: {notes:?}");
            }
        }
    }

    #[test]
    fn every_foreign_flag_is_or_was_one_of_llama_server() {
        const REMOVED: &[&str] = &["--no-agent", "-no-ag"];
        for foreign in FOREIGN_FLAGS {
            for name in foreign.names {
                let known_row = LLAMA_SERVER_FLAGS
                    .lines()
                    .find(|row| row.split('|').next().unwrap().split(' ').any(|one| one == *name));
                let Some(row) = known_row else {
                    assert!(REMOVED.contains(name), "{name}");
                    continue;
                };
                let values = row.split('|').nth(1).unwrap().split_whitespace().count();
                let value_count = match foreign.values {
                    Values::None => 0,
                    Values::Optional | Values::One => 1,
                };
                assert_eq!(values, value_count, "{row}");
            }
        }
    }

    #[test]
    fn removed_flag_takes_its_value_and_other_commands_are_unchanged() {
        let words = |line: &str| line.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let rest = |line| command_line(words(line).into_iter()).unwrap().words;
        assert_eq!(rest("thunder --log info serve -devd none --metrics"), words("thunder --log info serve --metrics"));
        assert_eq!(rest("thunder serve --fit --metrics"), words("thunder serve --metrics"));
        assert_eq!(rest("thunder serve --draft-p-split=5 -- --jinja"), words("thunder serve -- --jinja"));
        assert_eq!(rest("thunder doctor --jinja --timeout 5 --metrics"), words("thunder doctor --metrics"));
        assert_eq!(rest("thunder run --ui"), words("thunder run --ui"));
    }

    #[test]
    fn rejected_flag_names_the_remedy() {
        let refused = translated("-dr someone/model").unwrap_err();
        assert!(refused.contains("-dr") && refused.contains("--model"), "{refused}");
    }

    #[test]
    fn ignored_variables_are_reported() {
        let notes_of = |name: &str, value: &str| ignored_variable_notes(std::iter::once((name.into(), value.into())));
        let notes = |name| notes_of(name, "1");
        assert_eq!(notes("LLAMA_ARG_CTX_SIZE"), [""; 0]);
        assert_eq!(notes("PATH"), [""; 0]);
        assert_eq!(notes("LLAMA_ARG_JINJA"), [""; 0]);
        for (name, word) in [
            ("LLAMA_ARG_DRAFT_MAX", "speculative"),
            ("LLAMA_ARG_DOCKER_REPO", "--hf-repo"),
            ("LLAMA_ARG_NO_KV_OFFLOAD", "LLAMA_ARG_KV_OFFLOAD=0"),
            ("LLAMA_ARG_NOT_KNOWN", "unknown variable"),
        ] {
            let notes = notes(name);
            assert!(notes.len() == 1 && notes[0].contains(name) && notes[0].contains(word), "{notes:?}");
        }
        assert_eq!(notes_of("LLAMA_ARG_UI", "0"), ["LLAMA_ARG_UI=0 has no effect; use --no-ui"]);
        for (name, word) in [("LLAMA_ARG_JINJA", "always rendered"), ("LLAMA_ARG_CONT_BATCHING", "--parallel 1")] {
            assert!(notes_of(name, "false")[0].contains(word), "{name}");
        }
        assert_eq!(notes_of("LLAMA_ARG_PERF", "0"), [""; 0]);
    }

    #[test]
    fn unknown_flag_error_suggests_a_similar_flag() {
        let error = Cli::try_parse_from(["thunder", "serve", "--metrisc"]).unwrap_err().to_string();
        assert!(error.contains("--metrics"), "{error}");
    }

    #[test]
    fn last_of_a_repeated_flag_applies() {
        let command = with_environment(Cli::command(), |_, _| false);
        let line = "thunder serve --port 1 --jinja --port 2 --jinja --api-key a --api-key b --slots --no-slots";
        let words = command_line(line.split(' ').map(OsString::from)).unwrap().words;
        let matches = command.try_get_matches_from(words).unwrap();
        let serve = matches.subcommand_matches("serve").unwrap();
        assert_eq!(serve.get_one::<u16>("port"), Some(&2));
        assert_eq!(serve.get_raw("api_keys").unwrap().count(), 2);
    }

    #[test]
    fn last_flag_for_the_loading_of_weights_applies() {
        let mode = |flags: &str| {
            let line = format!("thunder serve {flags}");
            let words = command_line(line.split_whitespace().map(OsString::from)).unwrap().words;
            let matches = with_environment(Cli::command(), |_, _| false).try_get_matches_from(words).unwrap();
            matches.subcommand_matches("serve").unwrap().get_one::<LoadMode>("load_mode").copied()
        };
        assert_eq!(mode(""), None);
        assert_eq!(mode("--no-mmap"), Some(LoadMode::None));
        assert_eq!(mode("--no-mmap --mmap"), Some(LoadMode::Auto));
        assert_eq!(mode("--load-mode mlock --no-mmap"), Some(LoadMode::None));
    }

    #[test]
    fn variable_of_llama_server_applies_unless_thunders_own_is_set() {
        let env = |set: &[&str]| {
            let command = with_environment(Cli::command(), |_, name| set.iter().any(|set| name == *set));
            let variable = |name: &str| {
                let flags = command.find_subcommand(name).unwrap().get_arguments();
                let variable = flags.filter(|flag| flag.get_id() == "ctx_size").find_map(clap::Arg::get_env);
                variable.unwrap().to_str().unwrap().to_owned()
            };
            assert_eq!(variable("serve"), variable("doctor"));
            variable("serve")
        };
        assert_eq!(env(&[]), "THUNDER_CTX_SIZE");
        assert_eq!(env(&["LLAMA_ARG_CTX_SIZE"]), "LLAMA_ARG_CTX_SIZE");
        assert_eq!(env(&["LLAMA_ARG_CTX_SIZE", "THUNDER_CTX_SIZE"]), "THUNDER_CTX_SIZE");
    }

    #[test]
    fn spellings_are_unique() {
        let first_duplicate = |mut names: Vec<&str>| {
            names.sort_unstable();
            names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0].to_owned())
        };
        assert_eq!(first_duplicate(SPELLINGS.iter().map(|(short, _)| *short).collect()), None);
        assert_eq!(first_duplicate(VARIABLES.iter().map(|(id, _)| *id).collect()), None);
    }
}
