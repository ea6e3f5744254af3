//! What a person can say to the program instead of the model.

use serde_json::Value;
use std::path::PathBuf;

/// The commands, for `/help`.
pub const HELP: &str = "\
/help                    this list
/system [TEXT]           what the system says before everything; without TEXT shows it, - removes it
/mods [on NAME [JSON]]   mods that there are; turns one on, with its configuration
/mods off [NAME]         turns one off, or all
/tools [FILE.json]       tools that the model may call; takes their definitions from a file
/tools off               no more tools
/params [NAME [VALUE]]   parameters of requests, e.g. /params temperature 0.2, or model NAME; - removes one
/regenerate              another answer to the last message
/reset                   begins anew; system, mods, tools and parameters stay
/save FILE               keeps the conversation, and its KV state in FILE.ses1
/restore FILE            goes on with a kept one
/replay                  where the last answer can be replayed
/quit                    leaves, as Ctrl-D does

\"\"\" begins and ends a message of several lines; a \\ at the end of a line goes on with it on the next.
Esc or Ctrl-C stops an answer; what it said so far stays in the conversation.";

/// A command.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Shows the commands.
    Help,
    /// Shows the system's text, sets it, or removes it.
    System(Option<String>),
    /// Lists mods.
    Mods,
    /// Turns a mod on.
    ModOn(String, Value),
    /// Turns a mod off, or all.
    ModOff(Option<String>),
    /// Lists tools.
    Tools,
    /// Takes tools from a file.
    ToolsFrom(PathBuf),
    /// No more tools.
    ToolsOff,
    /// Lists parameters.
    Parameters,
    /// Sets a parameter; `None` removes it.
    Parameter(String, Option<Value>),
    /// Another answer.
    Regenerate,
    /// Begins anew.
    Reset,
    /// Keeps the conversation.
    Save(PathBuf),
    /// Goes on with a kept one.
    Restore(PathBuf),
    /// Where the last answer can be replayed.
    Replay,
    /// Leaves.
    Quit,
}

/// The command in a line; `None` when the line is a message, an error when it begins like a command and is none.
pub fn parse(line: &str) -> Option<Result<Command, String>> {
    let rest = line.strip_prefix('/')?;
    // "//" begins a message with a slash, and a path like /etc/hosts is no command either.
    let (name, argument) = match rest.split_once(char::is_whitespace) {
        Some((name, argument)) => (name, argument.trim()),
        None => (rest, ""),
    };
    if name.is_empty() || !name.chars().all(char::is_alphabetic) {
        return None;
    }
    Some(command(name, argument))
}

fn command(name: &str, argument: &str) -> Result<Command, String> {
    let given = (!argument.is_empty()).then(|| argument.to_owned());
    let file = || given.clone().map(PathBuf::from).ok_or_else(|| format!("/{name} takes a file"));
    match name {
        "help" => Ok(Command::Help),
        "system" => Ok(Command::System(given)),
        "mods" => mods(argument),
        "tools" => Ok(match argument {
            "" => Command::Tools,
            "off" => Command::ToolsOff,
            file => Command::ToolsFrom(file.into()),
        }),
        "params" => Ok(match argument.split_once(char::is_whitespace) {
            _ if argument.is_empty() => Command::Parameters,
            None => Command::Parameter(argument.to_owned(), Some(Value::Null)),
            Some((name, value)) => Command::Parameter(name.to_owned(), read(value.trim())),
        }),
        "regenerate" => Ok(Command::Regenerate),
        "reset" => Ok(Command::Reset),
        "save" => file().map(Command::Save),
        "restore" => file().map(Command::Restore),
        "replay" => Ok(Command::Replay),
        "quit" | "exit" => Ok(Command::Quit),
        other => Err(format!("there is no command /{other}; /help lists them, and a message may begin with //")),
    }
}

fn mods(argument: &str) -> Result<Command, String> {
    let (word, rest) = argument.split_once(char::is_whitespace).unwrap_or((argument, ""));
    let rest = rest.trim();
    match (word, rest) {
        ("", _) => Ok(Command::Mods),
        ("off", "") => Ok(Command::ModOff(None)),
        ("off", name) => Ok(Command::ModOff(Some(name.to_owned()))),
        ("on", rest) if !rest.is_empty() => {
            let (name, config) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let config = match config.trim() {
                "" => Value::Null,
                text => serde_json::from_str(text)
                    .map_err(|error| format!("the configuration of {name} is not JSON: {error}"))?,
            };
            Ok(Command::ModOn(name.to_owned(), config))
        }
        _ => Err("/mods takes nothing, on NAME [JSON], or off [NAME]".into()),
    }
}

/// A value as JSON, or as the text that it is; - for none.
fn read(text: &str) -> Option<Value> {
    (text != "-").then(|| serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)))
}

#[cfg(test)]
mod tests {
    use super::{Command, parse};
    use serde_json::{Value, json};

    #[test]
    fn commands_are_told_from_messages() {
        let said = |line: &str| parse(line).map(|command| command.unwrap());
        assert_eq!(said("Hello /help"), None);
        assert_eq!(said("//quit is a message"), None);
        assert_eq!(said("/etc/hosts"), None);
        assert_eq!(said("/"), None);
        assert_eq!(said("/help"), Some(Command::Help));
        assert_eq!(said("/system  Be short. "), Some(Command::System(Some("Be short.".into()))));
        assert_eq!(said("/mods"), Some(Command::Mods));
        let on = Command::ModOn("ban-phrases".into(), json!({"phrases": ["a b"]}));
        assert_eq!(said(r#"/mods on ban-phrases {"phrases": ["a b"]}"#), Some(on));
        assert_eq!(said("/mods on log-top"), Some(Command::ModOn("log-top".into(), Value::Null)));
        assert_eq!(said("/mods off"), Some(Command::ModOff(None)));
        assert_eq!(said("/params temperature 0.2"), Some(Command::Parameter("temperature".into(), Some(json!(0.2)))));
        assert_eq!(said("/params stop END"), Some(Command::Parameter("stop".into(), Some(json!("END")))));
        assert_eq!(said("/params stop -"), Some(Command::Parameter("stop".into(), None)));
        assert_eq!(said("/save a b.json"), Some(Command::Save("a b.json".into())));
    }

    #[test]
    fn what_is_no_command_says_what_would_be_one() {
        let wrong = |line: &str| parse(line).unwrap().unwrap_err();
        assert!(wrong("/frobnicate").contains("/help"));
        assert!(wrong("/save").contains("takes a file"));
        assert!(wrong("/mods on log-top {").contains("not JSON"));
        assert!(wrong("/mods maybe").contains("on NAME"));
    }
}
