//! The binary first paint of a replay: the fold's rows as typed columns that a browser reads without copying.
//!
//! Magic `RUNC`, u16 version, u16 flags, u32 rows, u32 events, u32 sections, then a table of `{u32 id, u32 offset, u32
//! length}`; sections begin at multiples of 8 bytes and are little-endian. `ui/assets/replay/columns.js` reads it.

use super::fold::{EventPoint, Fold, Mark, Row};

/// What a file of columns holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Columns {
    /// Token instances; `logprob` and `entropy` as the format rounds them.
    pub rows: Vec<Row>,
    /// Actions, exceptions, log lines.
    pub marks: Vec<Mark>,
    /// The time line.
    pub events: Vec<EventPoint>,
}

/// Why bytes are not columns.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Another format or another version.
    #[error("not columns of version 1")]
    Format,
    /// A section is missing, lies outside of the bytes or has the wrong length.
    #[error("section {0} of the columns is damaged")]
    Section(u32),
}

/// Codes the fold as it stands.
#[must_use]
pub fn encode(_fold: &Fold) -> Vec<u8> {
    todo!()
}

/// Reads what [`encode`] wrote.
///
/// # Errors
/// The bytes are damaged or something else.
pub fn decode(_bytes: &[u8]) -> Result<Columns, Error> {
    todo!()
}
