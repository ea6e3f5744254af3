//! Generation with the attention of each token, for the attention API and for `KoboldCPP`'s clients that request it.
//!
//! Value `i` of a row is the attention to token `i` of the sequence: `input_ids`, then the answer. [`request`] parses a
//! request, [`stream`] follows its runs, [`row_format`] converts rows to the requested format, [`event`] encodes
//! messages. Rows are converted and encoded on blocking threads while the next token is computed.

pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod pruning;
pub(crate) mod request;
pub(crate) mod row_format;
mod sentences;
pub(crate) mod stream;

pub(crate) use error::AttentionError;
pub(crate) use event::{AttentionWriter, MessageFormat, error_message};
pub(crate) use request::{AttentionOptions, Transport, has_input_ids, parse, token_ids};
pub(crate) use stream::{AttentionEvent, AttentionStream, was_stopped};
