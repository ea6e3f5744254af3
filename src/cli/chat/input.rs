//! Input of messages: a terminal with line editing and history, or a pipe with one message per line.

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

/// Maximum lines of history.
const MAX_HISTORY_LINES: usize = 2000;

/// User input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A message or a command.
    Text(String),
    /// Input that is not UTF-8.
    Unreadable,
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the end of the pipe.
    End,
}

/// A reader of messages.
pub struct InputReader {
    /// `None` for a pipe, and while a line is being read.
    editor: Option<Box<Editor<Rules, FileHistory>>>,
    terminal: bool,
    history: PathBuf,
    /// Text that was typed while no line was being read.
    typed_ahead: String,
}

impl InputReader {
    /// Creates a reader of the terminal, with its history in the file `history`. If standard input or standard output is not
    /// a terminal, creates a reader of a pipe.
    pub fn new(history: PathBuf) -> anyhow::Result<Self> {
        let terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
        let editor = if terminal {
            let config = Config::builder().max_history_size(MAX_HISTORY_LINES)?.history_ignore_space(true).build();
            let mut editor = Editor::with_config(config)?;
            editor.set_helper(Some(Rules));
            // The file does not exist before the first use.
            let _ = editor.load_history(&history);
            Some(Box::new(editor))
        } else {
            None
        };
        Ok(Self { editor, terminal, history, typed_ahead: String::new() })
    }

    /// Returns true if the input is a terminal.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Returns the columns and rows of the terminal.
    pub fn size(&mut self) -> Option<(usize, usize)> {
        let (columns, rows) = self.editor.as_mut()?.dimensions()?;
        Some((usize::from(columns), usize::from(rows)))
    }

    /// Stores text that was typed while no line was being read. The next line begins with it.
    pub fn type_ahead(&mut self, text: &str) {
        self.typed_ahead.push_str(text);
    }

    /// Reads the next input; `remember` adds it to the history.
    pub async fn read(&mut self, prompt: String, remember: bool) -> anyhow::Result<Input> {
        let (editor, history) = (self.editor.take(), self.history.clone());
        let typed_ahead = std::mem::take(&mut self.typed_ahead);
        let read = move || match editor {
            Some(mut editor) => {
                let line = editor.readline_with_initial(&prompt, (&typed_ahead, ""));
                if let (Ok(line), true) = (&line, remember)
                    && !line.trim().is_empty()
                {
                    let _ = editor.add_history_entry(line.as_str());
                    let _ = history.parent().map(std::fs::create_dir_all);
                    // If the file cannot be written, the history is limited to this conversation.
                    let _ = editor.append_history(&history);
                }
                (Some(editor), line.map(Some))
            }
            None => (None, read_piped(&mut io::stdin().lock()).map_err(ReadlineError::Io)),
        };
        let (editor, line) = tokio::task::spawn_blocking(read).await?;
        self.editor = editor;
        match line {
            Ok(Some(line)) => Ok(Input::Text(join_lines(&line))),
            Ok(None) | Err(ReadlineError::Eof) => Ok(Input::End),
            Err(ReadlineError::Interrupted) => Ok(Input::Interrupted),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => Ok(Input::Unreadable),
            Err(error) => Err(error.into()),
        }
    }
}

/// Reads the next message of a pipe: one line, or several with `"""` or a trailing backslash.
fn read_piped(lines: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut text = String::new();
    loop {
        let mut line = Vec::new();
        if lines.read_until(b'\n', &mut line)? == 0 {
            return Ok((!text.is_empty()).then_some(text));
        }
        text.push_str(std::str::from_utf8(&line).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?);
        let trimmed = text.trim_end_matches(['\n', '\r']);
        if !needs_more_lines(trimmed) {
            return Ok(Some(trimmed.to_owned()));
        }
    }
}

/// Returns true if more lines belong to the message.
fn needs_more_lines(text: &str) -> bool {
    text.ends_with('\\') || text.matches("\"\"\"").count() % 2 == 1
}

/// Removes the line markers of a message of several lines.
fn join_lines(text: &str) -> String {
    let text = text.trim();
    let block = text.strip_prefix("\"\"\"").and_then(|rest| rest.strip_suffix("\"\"\""));
    match block {
        Some(block) => block.trim_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n"),
    }
}

/// The line editor's rules for messages of several lines and for completion of commands.
struct Rules;

impl Validator for Rules {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let more = needs_more_lines(context.input());
        Ok(if more { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for Rules {
    type Candidate = String;
    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let prefix = &line[..at];
        let names = command::HELP.lines().filter_map(|line| line.split_whitespace().next());
        let mut names: Vec<String> = names
            .filter(|name| name.starts_with('/') && name.starts_with(prefix))
            .map(|name| format!("{name} "))
            .collect();
        names.dedup();
        Ok((0, if prefix.is_empty() { Vec::new() } else { names }))
    }
}

impl Hinter for Rules {
    type Hint = String;
}

impl Highlighter for Rules {}
impl Helper for Rules {}

#[cfg(test)]
mod tests {
    use super::{join_lines, read_piped};

    #[test]
    fn pipe_has_one_message_per_line_unless_a_line_continues() {
        let mut lines = b"\xff\n".as_slice();
        assert_eq!(read_piped(&mut lines).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
        assert_eq!(read_piped(&mut lines).unwrap(), None, "the input has ended");
        let mut lines = "one\ntwo\\\nlines\n\"\"\"\na\n\nb\n\"\"\"\n\nlast".as_bytes();
        let mut messages = Vec::new();
        while let Some(message) = read_piped(&mut lines).unwrap() {
            messages.push(join_lines(&message));
        }
        assert_eq!(messages, ["one", "two\nlines", "a\n\nb", "", "last"]);
    }
}
