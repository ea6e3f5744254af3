//! Commands that control the program instead of the model.

use serde_json::Value;
use std::path::PathBuf;

/// The commands, for `/help`.
pub const HELP: &str = "\
/help                    this list
/system [TEXT]           show or set the system message; - removes it
/mods [on NAME [JSON]]   list mods, or enable one with its configuration
/mods off [NAME]         disable one mod, or all
/tools [FILE.json]       list the model's tools, or load their definitions from a file
/tools off               remove all tools
/params [NAME [VALUE]]   show or set request parameters, e.g. /params temperature 0.2; - removes one
/regenerate              generate the last answer again
/reset                   clear the messages; keep system message, mods, tools and parameters
/save FILE               save the conversation, and its KV state in FILE.ses1
/restore FILE            load a saved conversation
/replay                  show the address of the last answer's replay
/quit                    quit, like Ctrl-D

\"\"\" begins and ends a message of several lines; a \\ at the end of a line continues it on the next.
Esc or Ctrl-C stops an answer; the text received so far stays in the conversation.";

/// A command of the user.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatCommand {
    /// Shows the commands.
    Help,
    /// Shows the system message.
    ShowSystem,
    /// Sets the system message.
    SetSystem(String),
    /// Removes the system message.
    RemoveSystem,
    /// Lists mods.
    Mods,
    /// Enables a mod.
    ModOn(String, Value),
    /// Disables one mod, or all.
    ModOff(Option<String>),
    /// Lists tools.
    Tools,
    /// Loads tools from a file.
    ToolsFrom(PathBuf),
    /// Removes all tools.
    ToolsOff,
    /// Lists parameters.
    Parameters,
    /// Shows a parameter.
    ShowParameter(String),
    /// Sets a parameter.
    SetParameter(String, Value),
    /// Removes a parameter.
    RemoveParameter(String),
    /// Generates the last answer again.
    Regenerate,
    /// Clears the messages.
    Reset,
    /// Saves the conversation.
    Save(PathBuf),
    /// Loads a saved conversation.
    Restore(PathBuf),
    /// Shows the address of the last answer's replay.
    Replay,
    /// Ends the program.
    Quit,
}

/// Parses a line. Returns `None` for a message, and an error for an unknown or malformed command.
pub fn parse(line: &str) -> Option<Result<ChatCommand, String>> {
    let rest = line.strip_prefix('/')?;
    // "//" begins a message with a slash, and a path such as /etc/hosts is a message, too.
    let (name, argument) = match rest.split_once(char::is_whitespace) {
        Some((name, argument)) => (name, argument.trim()),
        None => (rest, ""),
    };
    if name.is_empty() || !name.chars().all(char::is_alphabetic) {
        return None;
    }
    Some(command(name, argument))
}

fn command(name: &str, argument: &str) -> Result<ChatCommand, String> {
    let file = || match argument {
        "" => Err(format!("/{name} takes a file")),
        path => Ok(PathBuf::from(path)),
    };
    match name {
        "help" => Ok(ChatCommand::Help),
        "system" => Ok(match argument {
            "" => ChatCommand::ShowSystem,
            "-" => ChatCommand::RemoveSystem,
            text => ChatCommand::SetSystem(text.to_owned()),
        }),
        "mods" => mods(argument),
        "tools" => Ok(match argument {
            "" => ChatCommand::Tools,
            "off" => ChatCommand::ToolsOff,
            file => ChatCommand::ToolsFrom(file.into()),
        }),
        "params" => Ok(match argument.split_once(char::is_whitespace) {
            _ if argument.is_empty() => ChatCommand::Parameters,
            None => ChatCommand::ShowParameter(argument.to_owned()),
            Some((name, value)) if value.trim() == "-" => ChatCommand::RemoveParameter(name.to_owned()),
            Some((name, value)) => ChatCommand::SetParameter(name.to_owned(), parse_value(value.trim())),
        }),
        "regenerate" => Ok(ChatCommand::Regenerate),
        "reset" => Ok(ChatCommand::Reset),
        "save" => file().map(ChatCommand::Save),
        "restore" => file().map(ChatCommand::Restore),
        "replay" => Ok(ChatCommand::Replay),
        "quit" | "exit" => Ok(ChatCommand::Quit),
        other => {
            Err(format!("unknown command /{other}; /help lists the commands, and // begins a message with a slash"))
        }
    }
}

fn mods(argument: &str) -> Result<ChatCommand, String> {
    let (word, rest) = argument.split_once(char::is_whitespace).unwrap_or((argument, ""));
    let rest = rest.trim();
    match (word, rest) {
        ("", _) => Ok(ChatCommand::Mods),
        ("off", "") => Ok(ChatCommand::ModOff(None)),
        ("off", name) => Ok(ChatCommand::ModOff(Some(name.to_owned()))),
        ("on", rest) if !rest.is_empty() => {
            let (name, config) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let config = match config.trim() {
                "" => Value::Null,
                text => serde_json::from_str(text)
                    .map_err(|error| format!("the configuration of {name} is not JSON: {error}"))?,
            };
            Ok(ChatCommand::ModOn(name.to_owned(), config))
        }
        _ => Err("/mods takes no argument, on NAME [JSON], or off [NAME]".into()),
    }
}

/// Parses a value as JSON, else as text.
fn parse_value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

#[cfg(test)]
mod tests {
    use super::{ChatCommand, parse};
    use serde_json::{Value, json};

    #[test]
    fn commands_differ_from_messages() {
        let parsed = |line: &str| parse(line).map(|command| command.unwrap());
        assert_eq!(parsed("Hello /help"), None);
        assert_eq!(parsed("//quit is a message"), None);
        assert_eq!(parsed("/etc/hosts"), None);
        assert_eq!(parsed("/"), None);
        assert_eq!(parsed("/help"), Some(ChatCommand::Help));
        assert_eq!(parsed("/system  Be short. "), Some(ChatCommand::SetSystem("Be short.".into())));
        assert_eq!(parsed("/system"), Some(ChatCommand::ShowSystem));
        assert_eq!(parsed("/system -"), Some(ChatCommand::RemoveSystem));
        assert_eq!(parsed("/mods"), Some(ChatCommand::Mods));
        let on = ChatCommand::ModOn("ban-phrases".into(), json!({"phrases": ["a b"]}));
        assert_eq!(parsed(r#"/mods on ban-phrases {"phrases": ["a b"]}"#), Some(on));
        assert_eq!(parsed("/mods on log-top"), Some(ChatCommand::ModOn("log-top".into(), Value::Null)));
        assert_eq!(parsed("/mods off"), Some(ChatCommand::ModOff(None)));
        assert_eq!(
            parsed("/params temperature 0.2"),
            Some(ChatCommand::SetParameter("temperature".into(), json!(0.2)))
        );
        assert_eq!(parsed("/params stop END"), Some(ChatCommand::SetParameter("stop".into(), json!("END"))));
        assert_eq!(parsed("/params stop"), Some(ChatCommand::ShowParameter("stop".into())));
        assert_eq!(parsed("/params stop -"), Some(ChatCommand::RemoveParameter("stop".into())));
        assert_eq!(parsed("/save a b.json"), Some(ChatCommand::Save("a b.json".into())));
    }

    #[test]
    fn malformed_command_error_names_the_correct_form() {
        let error = |line: &str| parse(line).unwrap().unwrap_err();
        assert!(error("/frobnicate").contains("/help"));
        assert!(error("/save").contains("takes a file"));
        assert!(error("/mods on log-top {").contains("not JSON"));
        assert!(error("/mods maybe").contains("on NAME"));
    }
}
