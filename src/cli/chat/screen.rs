//! Display of an answer on a terminal or in a pipe.

use crate::cli::output::write;
use crate::cli::printer::escape_control_characters;
use std::io::IsTerminal;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// A display of answers.
///
/// A terminal shows text immediately and erases text that a mod retracts. A pipe receives only the final text: if a mod
/// may retract some of it, text is written at the end of the answer.
#[derive(Debug)]
pub struct Screen {
    terminal: bool,
    colors: bool,
    /// True if text is written only at the end of the answer.
    hold: bool,
    /// Columns and rows of the terminal.
    size: (usize, usize),
    thinking: String,
    /// The answer so far, without retracted text.
    text: String,
}

impl Screen {
    /// Creates a display on standard output.
    pub fn new() -> Self {
        let terminal = std::io::stdout().is_terminal();
        let colors = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { terminal, colors, hold: false, size: (80, 24), thinking: String::new(), text: String::new() }
    }

    /// Sets the columns and rows of the terminal, if they are known.
    pub fn resize(&mut self, size: Option<(usize, usize)>) {
        self.size = size.unwrap_or(self.size);
    }

    /// Begins a new answer. `may_retract` is true if the run has mods.
    pub fn begin(&mut self, may_retract: bool) {
        self.hold = may_retract && !self.terminal;
        self.thinking.clear();
        self.text.clear();
    }

    /// Shows reasoning of the model.
    pub fn think(&mut self, text: &str) -> std::io::Result<()> {
        if !self.terminal {
            return Ok(());
        }
        self.thinking.push_str(text);
        let text = escape_control_characters(text);
        write(if self.colors { format!("{DIM}{text}{PLAIN}") } else { text })
    }

    /// Appends text to the answer.
    pub fn append(&mut self, text: &str) -> std::io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if self.text.is_empty() && !self.thinking.is_empty() && self.terminal {
            write(if self.thinking.ends_with('\n') { "\n" } else { "\n\n" })?;
        }
        self.text.push_str(text);
        if self.hold {
            return Ok(());
        }
        if self.terminal { write(escape_control_characters(text)) } else { write(text) }
    }

    /// Removes the last `chars` characters of the answer.
    pub fn retract(&mut self, chars: usize) -> std::io::Result<()> {
        let before = escape_control_characters(&self.text);
        let keep = match chars {
            0 => self.text.len(),
            _ => self.text.char_indices().rev().nth(chars - 1).map_or(0, |(at, _)| at),
        };
        self.text.truncate(keep);
        if self.terminal { write(erasure(&before, &escape_control_characters(&self.text), self.size)) } else { Ok(()) }
    }

    /// Ends the answer.
    pub fn end(&mut self) -> std::io::Result<()> {
        if self.hold {
            write(&self.text)?;
        }
        let last = if self.text.is_empty() && self.terminal { &self.thinking } else { &self.text };
        if last.ends_with('\n') { Ok(()) } else { write("\n") }
    }

    /// Returns the answer so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the reasoning so far.
    pub fn thinking(&self) -> &str {
        &self.thinking
    }

    /// Shows a message of the program on standard error.
    pub fn note(&self, text: &str) {
        let text = escape_control_characters(text);
        let terminal = std::io::stderr().is_terminal();
        let text = if terminal && self.terminal { wrap(&text, self.size.0) } else { text };
        if self.colors && terminal {
            eprintln!("{DIM}{text}{PLAIN}");
        } else {
            eprintln!("{text}");
        }
    }
}

/// Wraps text between words so that lines have up to `columns` columns, except for longer words. Continuation lines of a
/// two-column list are indented to the second column.
fn wrap(text: &str, columns: usize) -> String {
    let lines: Vec<String> = text.lines().map(|line| wrap_line(line, columns)).collect();
    lines.join("\n")
}

fn wrap_line(line: &str, columns: usize) -> String {
    if line.width() <= columns {
        return line.to_owned();
    }
    let second = line.find("  ").map_or(0, |gap| line.len() - line[gap..].trim_start().len());
    let indent = if second < columns / 2 { line[..second].width() } else { 0 };
    let (mut lines, mut row, mut is_first) = (String::new(), line[..second].to_owned(), true);
    for word in line[second..].split(' ') {
        if !is_first && row.width() + 1 + word.width() > columns {
            lines.push_str(row.trim_end());
            lines.push('\n');
            row = " ".repeat(indent);
        } else if !is_first {
            row.push(' ');
        }
        row.push_str(word);
        is_first = false;
    }
    lines + &row
}

/// Returns the terminal output that changes the shown text `before` to its prefix `after`.
fn erasure(before: &str, after: &str, (columns, rows): (usize, usize)) -> String {
    let (old_row, _) = last_row(before, columns);
    let (new_row, start) = last_row(after, columns);
    let up = old_row - new_row.min(old_row);
    if up >= rows {
        // The text has scrolled off the screen and cannot be erased, so a marker is shown.
        return format!("\n⟲\n{}", &after[start..]);
    }
    let up = if up > 0 { format!("\x1b[{up}A") } else { String::new() };
    format!("\r{up}\x1b[J{}", &after[start..])
}

/// Returns the screen row of the text's end, counted from its beginning, and the offset in the text where that row begins.
fn last_row(text: &str, columns: usize) -> (usize, usize) {
    let columns = columns.max(2);
    let (mut row, mut column, mut start) = (0, 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '\n' => {
                (row, column, start) = (row + 1, 0, at + 1);
            }
            '\t' => column = (column / 8 * 8 + 8).min(columns - 1),
            _ => {
                let width = c.width().unwrap_or(0);
                // A terminal moves to the next row only when another character is written.
                if column + width > columns {
                    (row, column, start) = (row + 1, 0, at);
                }
                column += width;
            }
        }
    }
    (row, start)
}

#[cfg(test)]
mod tests {
    use super::{Screen, erasure, last_row, wrap};

    #[test]
    fn last_row_matches_a_terminal() {
        assert_eq!(last_row("", 10), (0, 0));
        assert_eq!(last_row("0123456789", 10), (0, 0));
        assert_eq!(last_row("0123456789a", 10), (1, 10));
        assert_eq!(last_row("ab\ncd", 10), (1, 3));
        // Wide characters take two columns and are never cut.
        assert_eq!(last_row("012345678日", 10), (1, 9));
        assert_eq!(last_row("e\u{301}e\u{301}", 2), (0, 0));
    }

    #[test]
    fn notes_wrap_between_words() {
        assert_eq!(wrap("short", 10), "short");
        assert_eq!(wrap("one two three four", 9), "one two\nthree\nfour");
        assert_eq!(wrap("/a  one two three\nfour", 12), "/a  one two\n    three\nfour");
        assert_eq!(wrap("averyveryverylongword and", 8), "averyveryverylongword\nand");
        assert_eq!(wrap("日本 日本", 6), "日本\n日本");
    }

    #[test]
    fn retracted_text_is_erased() {
        assert_eq!(erasure("Hello world", "Hello", (80, 24)), "\r\x1b[JHello");
        assert_eq!(erasure("ab\ncd\nef", "ab\nc", (80, 24)), "\r\x1b[1A\x1b[Jc");
        assert_eq!(erasure("0123456789abc", "01234", (10, 24)), "\r\x1b[1A\x1b[J01234");
        assert_eq!(erasure("a\nb\nc\nd", "a", (80, 3)), "\n⟲\na");
    }

    #[test]
    fn pipe_receives_only_final_text() {
        let mut screen = Screen {
            terminal: false,
            colors: false,
            hold: true,
            size: (80, 24),
            thinking: String::new(),
            text: String::new(),
        };
        screen.append("grün is").unwrap();
        screen.retract(4).unwrap();
        assert_eq!(screen.text(), "grü");
        screen.retract(0).unwrap();
        screen.retract(99).unwrap();
        assert_eq!(screen.text(), "");
    }
}
