//! Detection of sentence ends, character by character.

/// Detector of sentence ends, with its state after a text.
#[derive(Debug, Clone, Copy, Default)]
pub struct SentenceDetector {
    /// Number of complete sentences.
    pub count: usize,
    /// Position after a mark that ends a sentence if a space follows.
    pending: Option<usize>,
    /// Letters of the current word.
    letters: usize,
    /// Content of the current line so far.
    line: Line,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Empty,
    /// Only digits, such as the number of a list item.
    Digits,
    Other,
}

impl SentenceDetector {
    /// Processes the character at byte `at`. If it shows that a sentence has ended, returns the end of the sentence.
    pub fn push(&mut self, c: char, at: usize) -> Option<usize> {
        let end_of_char = at + c.len_utf8();
        let single_letter = self.letters == 1;
        let numbered = self.line == Line::Digits;
        self.letters = if c.is_alphabetic() { self.letters + 1 } else { 0 };
        self.line = match (c, self.line) {
            ('\n', _) => Line::Empty,
            (c, line) if c.is_whitespace() => line,
            (c, Line::Empty | Line::Digits) if c.is_ascii_digit() => Line::Digits,
            _ => Line::Other,
        };
        match c {
            '。' | '！' | '？' => {
                self.pending = None;
                self.count += 1;
                Some(end_of_char)
            }
            '.' if self.pending.is_none() && (single_letter || numbered) => None,
            '.' | '!' | '?' | '…' => {
                self.pending = Some(end_of_char);
                None
            }
            '"' | '\'' | ')' | ']' | '”' | '’' | '»' | '*' if self.pending.is_some() => {
                self.pending = Some(end_of_char);
                None
            }
            c if c.is_whitespace() => {
                let end = self.pending.take()?;
                self.count += 1;
                Some(end)
            }
            _ => {
                self.pending = None;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SentenceDetector;

    fn split(text: &str) -> Vec<&str> {
        let mut sentences = SentenceDetector::default();
        let mut from = 0;
        let ends = text.char_indices().filter_map(|(at, c)| sentences.push(c, at));
        ends.map(|end| {
            let sentence = text[from..end].trim_start();
            from = end;
            sentence
        })
        .collect()
    }

    #[test]
    fn sentence_ends_are_detected() {
        assert_eq!(split("Hello there. How are you? Fine"), ["Hello there.", "How are you?"]);
        assert_eq!(
            split("It is 3.14, e.g. here, at docs.rs. \"Yes!\" he said.\n"),
            ["It is 3.14, e.g. here, at docs.rs.", "\"Yes!\"", "he said."]
        );
        assert_eq!(split("Well... no?! Yes"), ["Well...", "no?!"]);
        assert_eq!(split("1. First thing.\n2. Second thing.\n"), ["1. First thing.", "2. Second thing."]);
        assert_eq!(split("你好。再见！"), ["你好。", "再见！"]);
        assert_eq!(split("No end."), [""; 0]);
    }
}
