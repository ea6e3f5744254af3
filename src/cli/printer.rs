//! An answer on its way to the terminal.

use std::io::{IsTerminal, Write};

/// Prints an answer while it comes.
///
/// On a terminal text appears at once, and what a mod takes back is struck out visibly; control characters, which
/// could change the terminal, are shown and not sent. In a pipe only the final answer appears, so text is held back
/// where a mod may take some of it back.
pub struct Printer {
    terminal: bool,
    /// Whether text must wait for the end.
    hold: bool,
    text: String,
}

impl Printer {
    /// A printer to standard output; `may_retract` when the run has mods.
    pub fn new(may_retract: bool) -> Self {
        let terminal = std::io::stdout().is_terminal();
        Self { terminal, hold: may_retract && !terminal, text: String::new() }
    }

    /// Text was appended to the answer.
    pub fn append(&mut self, text: &str) -> std::io::Result<()> {
        self.text.push_str(text);
        if self.hold {
            return Ok(());
        }
        self.write(text)
    }

    /// The last `chars` characters are void.
    pub fn retract(&mut self, chars: usize) -> std::io::Result<()> {
        let keep = self.text.char_indices().rev().nth(chars.saturating_sub(1)).map_or(0, |(at, _)| at);
        let void = self.text.split_off(keep);
        if self.terminal {
            // Struck through and dim: what was on the screen stays, and is seen to be void.
            let last_line = self.text.rsplit('\n').next().unwrap_or_default().to_owned();
            self.write_raw(&format!("\n\x1b[2m⟲ took back \x1b[9m{}\x1b[0m\n", shown(&void).replace('\n', "⏎")))?;
            self.write(&last_line)?;
        }
        Ok(())
    }

    /// The answer is complete.
    pub fn end(&mut self) -> std::io::Result<()> {
        if self.hold {
            let text = std::mem::take(&mut self.text);
            self.write(&text)?;
            self.text = text;
        }
        if !self.text.ends_with('\n') {
            self.write_raw("\n")?;
        }
        Ok(())
    }

    fn write(&self, text: &str) -> std::io::Result<()> {
        if self.terminal { self.write_raw(&shown(text)) } else { self.write_raw(text) }
    }

    #[expect(clippy::unused_self, reason = "the printer owns standard output")]
    fn write_raw(&self, text: &str) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

/// Text that cannot move the cursor or change colours: control characters become their pictures.
pub fn shown(text: &str) -> String {
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
    use super::{Printer, shown};

    #[test]
    fn text_cannot_change_the_terminal() {
        assert_eq!(shown("a\x1b[31mb\n\u{202e}c"), "a␛[31mb\n\u{fffd}c");
    }

    #[test]
    fn what_is_taken_back_is_gone() {
        let mut printer = Printer { terminal: false, hold: true, text: "grün is".into() };
        printer.retract(4).unwrap();
        assert_eq!(printer.text, "grü");
        printer.retract(99).unwrap();
        assert_eq!(printer.text, "");
        printer.append("x").unwrap();
        printer.retract(0).unwrap();
    }
}
