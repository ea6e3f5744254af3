//! The flags that the help of a command lists.

use clap::Command;

/// Minimum number of flags of a command whose short help is shortened.
const MIN_FLAGS: usize = 40;

/// Flags of the shared groups that most users need: the short help of a command with many flags lists these and its own.
const COMMON_FLAGS: [&str; 20] = [
    "server",
    "server_ca",
    "model",
    "hf_repo",
    "ctx_size",
    "parallel",
    "threads",
    "attention",
    "gpu_layers",
    "mmproj",
    "lora",
    "mods_dir",
    "models_dir",
    "data_dir",
    "database_url",
    "listen",
    "host",
    "port",
    "api_keys",
    "allow_mod_upload",
];

/// Flags of the engine that only a server needs: for several slots, idle times, clients and APIs.
const SERVER_FLAGS: [&str; 12] = [
    "parallel",
    "kv_unified",
    "slot_prompt_similarity",
    "session_memory",
    "tags",
    "allow_image_urls",
    "image_url_hosts",
    "embedding",
    "reranking",
    "pooling",
    "classifier_head",
    "mod_idle",
];

/// Flags that remove old runs.
const RETENTION_FLAGS: [&str; 2] = ["keep_days", "keep_size"];

/// Commands that open the database but remove no runs.
const COMMANDS_WITHOUT_RETENTION: [&str; 5] = ["export", "ingest", "runs", "test", "status"];

/// Hides the flags without an effect in a command. The command accepts them, because one configuration file or a copied
/// command line can be for several commands.
pub fn hide_flags_without_effect(command: Command) -> Command {
    let command = command.mut_subcommands(hide_flags_without_effect);
    let has = |id: &str| command.get_arguments().any(|flag| flag.get_id() == id);
    let (has_server, has_retention) = (has("listen"), !COMMANDS_WITHOUT_RETENTION.contains(&command.get_name()));
    command.mut_args(|flag| {
        let id = flag.get_id().as_str();
        let is_hidden = !has_server && SERVER_FLAGS.contains(&id) || !has_retention && RETENTION_FLAGS.contains(&id);
        if is_hidden { flag.hide(true) } else { flag }
    })
}

/// Removes the flags that few users need from the short help (`-h`) of the commands with many flags.
pub fn shorten_help(command: Command) -> Command {
    shorten(command, "")
}

fn shorten(command: Command, parent: &str) -> Command {
    let path = format!("{parent}{}", command.get_name());
    let command = command.mut_subcommands(|inner| shorten(inner, &format!("{path} ")));
    if command.get_arguments().count() < MIN_FLAGS {
        return command;
    }
    let command = command.mut_args(|flag| {
        // The flags of the command itself have no heading.
        let is_rare = flag.get_help_heading().is_some() && !COMMON_FLAGS.contains(&flag.get_id().as_str());
        flag.hide_short_help(is_rare)
    });
    let note = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let separator = if note.is_empty() { "" } else { "\n\n" };
    command.after_help(format!("{note}{separator}More flags: `{path} --help`")).after_long_help(note)
}

#[cfg(test)]
mod tests {
    use super::{COMMON_FLAGS, RETENTION_FLAGS, SERVER_FLAGS, hide_flags_without_effect, shorten_help};
    use crate::cli::Cli;
    use clap::{CommandFactory, Parser};

    /// Returns the help that a command line prints.
    fn help(line: &str) -> String {
        let command = shorten_help(hide_flags_without_effect(Cli::command()));
        command.try_get_matches_from(line.split(' ')).unwrap_err().to_string()
    }

    #[test]
    fn short_help_has_common_flags_and_those_of_the_command() {
        for command in ["run", "chat", "replay", "fork", "mods test", "serve", "doctor"] {
            let text = help(&format!("thunder {command} -h"));
            assert!(text.lines().count() < 120, "{text}");
            assert!(text.ends_with(&format!("\nMore flags: `thunder {command} --help`\n")), "{text}");
            assert!(text.contains("--model <") && !text.contains("--rope-scaling"), "{text}");
            let long = help(&format!("thunder {command} --help"));
            assert!(long.contains("--rope-scaling") && !long.contains("More flags"), "{long}");
        }
        for flag in ["-h", "--help"] {
            let text = help(&format!("thunder serve {flag}"));
            assert!(text.contains("These flags of llama-server work, too"), "{text}");
        }
        assert!(help("thunder run -h").contains("--max-tokens"));
        assert!(help("thunder models pull -h").contains("--hf-file"), "a short list of flags is complete");
    }

    #[test]
    fn help_omits_flags_without_effect_and_the_command_accepts_them() {
        for command in ["run", "chat", "replay", "fork", "mods test"] {
            let text = help(&format!("thunder {command} --help"));
            assert!(text.contains("--mod-timeout") && !text.contains("--allow-image-urls"), "{text}");
        }
        assert!(help("thunder serve --help").contains("--allow-image-urls"));
        for command in ["export", "ingest", "runs"] {
            let text = help(&format!("thunder {command} --help"));
            assert!(text.contains("--data-dir") && !text.contains("--keep-days"), "{text}");
        }
        assert!(help("thunder run --help").contains("--keep-days"));
        Cli::try_parse_from("thunder export x --keep-days 1".split(' ')).unwrap();
        Cli::try_parse_from("thunder run x --allow-image-urls".split(' ')).unwrap();
    }

    #[test]
    fn listed_flags_exist() {
        let command = Cli::command();
        let flags = |name: &str| -> Vec<String> {
            let flags = command.find_subcommand(name).unwrap().get_arguments();
            flags.map(|flag| flag.get_id().to_string()).collect()
        };
        let all = [flags("serve"), flags("run")].concat();
        for id in COMMON_FLAGS.iter().chain(&SERVER_FLAGS).chain(&RETENTION_FLAGS) {
            assert!(all.iter().any(|flag| flag == id), "{id}");
        }
    }
}
