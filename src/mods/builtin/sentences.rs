//! Where sentences end, character by character.

/// What is known of a text so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sentences {
    /// Sentences that are complete.
    pub count: usize,
    /// Behind a mark that ends a sentence if a space follows.
    pending: Option<usize>,
    /// Letters of the word that is being written.
    letters: usize,
    /// What the line has been so far.
    line: Line,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Empty,
    /// As the number of an item is.
    Digits,
    Other,
}

impl Sentences {
    /// Takes the character that begins at the byte `at`. When that shows that a sentence has ended, says before which byte.
    pub fn push(&mut self, c: char, at: usize) -> Option<usize> {
        let behind = at + c.len_utf8();
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
                Some(behind)
            }
            '.' if self.pending.is_none() && (single_letter || numbered) => None,
            '.' | '!' | '?' | '…' => {
                self.pending = Some(behind);
                None
            }
            '"' | '\'' | ')' | ']' | '”' | '’' | '»' | '*' if self.pending.is_some() => {
                self.pending = Some(behind);
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
    use super::Sentences;

    fn split(text: &str) -> Vec<&str> {
        let mut sentences = Sentences::default();
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
    fn sentences_end_where_people_end_them() {
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
