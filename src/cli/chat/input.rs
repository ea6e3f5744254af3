//! Where messages come from: a person at a terminal, with line editing and history, or a pipe, one message a line.

use super::command;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Editor, Helper};
use std::io::{self, BufRead, ErrorKind, IsTerminal};
use std::path::PathBuf;

/// Lines of history that are kept.
const HISTORY: usize = 2000;

/// What was entered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A message or a command.
    Text(String),
    /// Something that is no text: it is not UTF-8.
    Unreadable,
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the end of the pipe.
    End,
}

/// Reads messages.
pub struct Reader {
    /// `None` for a pipe, and while a line is being read.
    editor: Option<Box<Editor<Rules, FileHistory>>>,
    terminal: bool,
    history: PathBuf,
    /// What was typed before it was asked for.
    ahead: String,
}

impl Reader {
    /// Reads from the terminal, with the history in that file, or from standard input where that is no terminal.
    pub fn new(history: PathBuf) -> anyhow::Result<Self> {
        let terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
        let editor = if terminal {
            let config = Config::builder().max_history_size(HISTORY)?.history_ignore_space(true).build();
            let mut editor = Editor::with_config(config)?;
            editor.set_helper(Some(Rules));
            // The first time there is none.
            let _ = editor.load_history(&history);
            Some(Box::new(editor))
        } else {
            None
        };
        Ok(Self { editor, terminal, history, ahead: String::new() })
    }

    /// Whether a person types.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Columns and rows of the terminal.
    pub fn size(&mut self) -> Option<(usize, usize)> {
        let (columns, rows) = self.editor.as_mut()?.dimensions()?;
        Some((usize::from(columns), usize::from(rows)))
    }

    /// Keeps what was typed while nothing was asked for; it is the beginning of the next line.
    pub fn type_ahead(&mut self, text: &str) {
        self.ahead.push_str(text);
    }

    /// Reads the next message; `remember` puts it into the history.
    pub async fn read(&mut self, prompt: String, remember: bool) -> anyhow::Result<Input> {
        let (editor, history) = (self.editor.take(), self.history.clone());
        let ahead = std::mem::take(&mut self.ahead);
        let read = move || match editor {
            Some(mut editor) => {
                let line = editor.readline_with_initial(&prompt, (&ahead, ""));
                if let (Ok(line), true) = (&line, remember)
                    && !line.trim().is_empty()
                {
                    let _ = editor.add_history_entry(line.as_str());
                    let _ = history.parent().map(std::fs::create_dir_all);
                    // Without a place to write it the history is that of this conversation.
                    let _ = editor.append_history(&history);
                }
                (Some(editor), line.map(Some))
            }
            None => (None, piped(&mut io::stdin().lock()).map_err(ReadlineError::Io)),
        };
        let (editor, line) = tokio::task::spawn_blocking(read).await?;
        self.editor = editor;
        match line {
            Ok(Some(line)) => Ok(Input::Text(joined(&line))),
            Ok(None) | Err(ReadlineError::Eof) => Ok(Input::End),
            Err(ReadlineError::Interrupted) => Ok(Input::Interrupted),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => Ok(Input::Unreadable),
            Err(error) => Err(error.into()),
        }
    }
}

/// The next message of a pipe: a line, or several where the first says so.
fn piped(lines: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut text = String::new();
    loop {
        let mut line = Vec::new();
        if lines.read_until(b'\n', &mut line)? == 0 {
            return Ok((!text.is_empty()).then_some(text));
        }
        text.push_str(std::str::from_utf8(&line).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?);
        let bare = text.trim_end_matches(['\n', '\r']);
        if !unfinished(bare) {
            return Ok(Some(bare.to_owned()));
        }
    }
}

/// Whether more lines belong to the message.
fn unfinished(text: &str) -> bool {
    text.ends_with('\\') || text.matches("\"\"\"").count() % 2 == 1
}

/// The message without the marks of its several lines.
fn joined(text: &str) -> String {
    let text = text.trim();
    let block = text.strip_prefix("\"\"\"").and_then(|rest| rest.strip_suffix("\"\"\""));
    match block {
        Some(block) => block.trim_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n"),
    }
}

/// Multi-line messages, and completion of commands.
struct Rules;

impl Validator for Rules {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let more = unfinished(context.input());
        Ok(if more { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for Rules {
    type Candidate = String;
    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let begun = &line[..at];
        let names = command::HELP.lines().filter_map(|line| line.split_whitespace().next());
        let mut fitting: Vec<String> = names
            .filter(|name| name.starts_with('/') && name.starts_with(begun))
            .map(|name| format!("{name} "))
            .collect();
        fitting.dedup();
        Ok((0, if begun.is_empty() { Vec::new() } else { fitting }))
    }
}

impl Hinter for Rules {
    type Hint = String;
}

impl Highlighter for Rules {}
impl Helper for Rules {}

#[cfg(test)]
mod tests {
    use super::{joined, piped};

    #[test]
    fn a_pipe_has_a_message_a_line_unless_a_line_goes_on() {
        let mut lines = b"\xff\n".as_slice();
        assert_eq!(piped(&mut lines).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
        assert_eq!(piped(&mut lines).unwrap(), None, "the line is over");
        let mut lines = "one\ntwo\\\nlines\n\"\"\"\na\n\nb\n\"\"\"\n\nlast".as_bytes();
        let mut messages = Vec::new();
        while let Some(message) = piped(&mut lines).unwrap() {
            messages.push(joined(&message));
        }
        assert_eq!(messages, ["one", "two\nlines", "a\n\nb", "", "last"]);
    }
}
