//! Division of texts at markers, so that two texts are compared marker by marker: `</a>` and `</b>` have no common
//! prefix.

/// Divides a text into markers (`<…>`, `[WORD]`), whitespace, and other text.
pub(super) fn segments(text: &str) -> Vec<&str> {
    let mut segments = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (segment, after) = rest.split_at(first_segment_len(rest));
        segments.push(segment);
        rest = after;
    }
    segments
}

/// Returns true if a segment is a marker.
pub(super) fn is_marker(segment: &str) -> bool {
    segment.len() > 2 && (segment.starts_with('<') || segment.starts_with('['))
}

/// Returns the length of the first segment of a text.
fn first_segment_len(text: &str) -> usize {
    let first = text.chars().next().unwrap_or_default();
    match first {
        '<' => tag_len(text),
        '[' => bracketed_word_len(text).unwrap_or(1),
        ']' => 1,
        c if c.is_whitespace() => text.len() - text.trim_start().len(),
        _ => text.find(|c: char| c.is_whitespace() || matches!(c, '<' | '[' | ']')).unwrap_or(text.len()),
    }
}

fn tag_len(text: &str) -> usize {
    let next = text[1..].find('<').map_or(text.len(), |next| next + 1);
    let end = text.find('>').map_or(next, |end| (end + 1).min(next));
    // Kimi K3 writes its tags as three tokens: `<|open|>name<|sep|>`.
    if matches!(&text[..end], "<|open|>" | "<|close|>") {
        return text.find("<|sep|>").map_or(text.len(), |sep| sep + "<|sep|>".len());
    }
    end
}

fn bracketed_word_len(text: &str) -> Option<usize> {
    let end = text.find(']')?;
    let word = &text[1..end];
    let is_word =
        word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase() || matches!(byte, b'_' | b'/' | b' '));
    is_word.then_some(end + 1)
}

/// Returns the length in bytes of the segments at the start that two texts have in common.
pub(super) fn common_start(a: &str, b: &str) -> usize {
    segments(a).iter().zip(segments(b)).take_while(|(a, b)| **a == *b).map(|(a, _)| a.len()).sum()
}

/// Returns the length in bytes of the segments at the end that two texts have in common.
pub(super) fn common_end(a: &str, b: &str) -> usize {
    let (a, b) = (segments(a), segments(b));
    a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).map(|(a, _)| a.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::{common_end, common_start, segments};

    #[test]
    fn text_is_divided_at_its_markers() {
        assert_eq!(
            segments("\n<a b=\"c\">d [X_Y]{[1]} </a"),
            ["\n", "<a b=\"c\">", "d", " ", "[X_Y]", "{", "[", "1", "]", "}", " ", "</a"]
        );
        assert_eq!(segments("]<]ns[>[<a>"), ["]", "<]ns[>", "[", "<a>"]);
        assert_eq!(segments("<|open|>call x<|sep|>y<|close|>z"), ["<|open|>call x<|sep|>", "y", "<|close|>z"]);
        assert_eq!(common_start("</a>\n</b>", "</a>\n<c>"), 5);
        assert_eq!(common_end("<a>\n<c>", "<b>\n<c>"), 4);
        for odd in ["<", "[", "]", "<<", "é<é>é"] {
            assert_eq!(segments(odd).concat(), odd);
        }
    }
}
