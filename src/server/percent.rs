//! Percent-encoding in addresses and file names.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// All but RFC 3986's unreserved characters.
const COMPONENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const PATH: &AsciiSet = &COMPONENT.remove(b'/');
const FILE_NAME: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// Encodes a text as a value in a query or as one segment of a path.
pub(crate) fn encode_component(text: &str) -> String {
    utf8_percent_encode(text, COMPONENT).to_string()
}

/// Encodes a text like [`encode_component`], but keeps the separators of paths.
pub(crate) fn encode_path(text: &str) -> String {
    utf8_percent_encode(text, PATH).to_string()
}

/// Encodes a text as a file name without dots.
pub(crate) fn encode_file_name(text: &str) -> String {
    utf8_percent_encode(text, FILE_NAME).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_characters_are_encoded() {
        let text = "a b&c=\"é\"/-._~";
        assert_eq!(encode_component(text), "a%20b%26c%3D%22%C3%A9%22%2F-._~");
        assert_eq!(encode_path(text), "a%20b%26c%3D%22%C3%A9%22/-._~");
        assert_eq!(encode_file_name(text), "a%20b%26c%3D%22%C3%A9%22%2F-%2E_%7E");
    }
}
