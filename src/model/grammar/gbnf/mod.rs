//! llama.cpp's grammar format.

use super::Error;
use crate::model::Vocabulary;

/// Translates a grammar to llguidance's Lark.
///
/// # Errors
/// [`Error`], with line and column.
pub fn to_lark(_source: &str, _vocabulary: &Vocabulary) -> Result<String, Error> {
    Err(Error::unsupported("this grammar format is not read yet"))
}
