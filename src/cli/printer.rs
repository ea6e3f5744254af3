//! Display of an answer by `thunder run`.

use super::output;
use std::io::IsTerminal;

/// A printer of a streamed answer.
///
/// A terminal shows text immediately and shows retracted text struck through. Control characters, which could change the
/// terminal, are replaced by visible symbols. A pipe receives only the final text: if a mod may retract some of it, text
/// is written at the end.
pub struct Printer {
    display: Display,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Display {
    Terminal,
    /// Text is written immediately.
    Pipe,
    /// Text is written at the end of the answer.
    PipeAtEnd,
    /// Nothing is written.
    None,
}

impl Printer {
    /// Creates a printer to standard output. `may_retract` is true if the run has mods.
    pub fn new(may_retract: bool) -> Self {
        let display = match (std::io::stdout().is_terminal(), may_retract) {
            (true, _) => Display::Terminal,
            (false, false) => Display::Pipe,
            (false, true) => Display::PipeAtEnd,
        };
        Self { display, text: String::new() }
    }

    /// Creates a printer that only collects the text.
    pub const fn silent() -> Self {
        Self { display: Display::None, text: String::new() }
    }

    /// Appends text to the answer.
    pub fn append(&mut self, text: &str) -> std::io::Result<()> {
        self.text.push_str(text);
        match self.display {
            Display::Terminal | Display::Pipe => self.write(text),
            Display::PipeAtEnd | Display::None => Ok(()),
        }
    }

    /// Retracts the last `chars` characters.
    pub fn retract(&mut self, chars: usize) -> std::io::Result<()> {
        let Some(before_last) = chars.checked_sub(1) else { return Ok(()) };
        let keep = self.text.char_indices().rev().nth(before_last).map_or(0, |(at, _)| at);
        let retracted = self.text.split_off(keep);
        if self.display == Display::Terminal {
            // The retracted text stays on the screen and is repeated dim and struck through.
            let last_line = self.text.rsplit('\n').next().unwrap_or_default().to_owned();
            output::print(format!(
                "\n\x1b[2m⟲ retracted \x1b[9m{}\x1b[0m\n",
                escape_control_characters(&retracted).replace('\n', "⏎")
            ))?;
            self.write(&last_line)?;
        }
        Ok(())
    }

    /// Ends the answer; a second call has no effect.
    pub fn end(&mut self) -> std::io::Result<()> {
        match std::mem::replace(&mut self.display, Display::None) {
            Display::None => return Ok(()),
            Display::PipeAtEnd => output::print(&self.text)?,
            Display::Terminal | Display::Pipe => {}
        }
        if self.text.ends_with('\n') { Ok(()) } else { output::print("\n") }
    }

    /// Returns the answer without retracted text.
    pub fn into_text(self) -> String {
        self.text
    }

    fn write(&self, text: &str) -> std::io::Result<()> {
        if self.display == Display::Terminal {
            output::print(escape_control_characters(text))
        } else {
            output::print(text)
        }
    }
}

/// Replaces control characters by visible symbols, so that text cannot move the cursor or change colors.
pub fn escape_control_characters(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' => c,
            '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}'),
            '\u{7f}'..='\u{9f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '\u{fffd}',
            _ => c,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Display, Printer, escape_control_characters};

    #[test]
    fn text_cannot_change_the_terminal() {
        assert_eq!(escape_control_characters("a\x1b[31mb\n\u{202e}c"), "a␛[31mb\n\u{fffd}c");
    }

    #[test]
    fn retracted_text_is_removed() {
        let mut printer = Printer { display: Display::PipeAtEnd, text: "grün is".into() };
        printer.retract(4).unwrap();
        assert_eq!(printer.text, "grü");
        printer.retract(99).unwrap();
        assert_eq!(printer.text, "");
        printer.append("x").unwrap();
        printer.retract(0).unwrap();
        assert_eq!(printer.text, "x");
    }
}
