//! Answers to the queries of a worker.

use super::message::{QueryKind, ToWorker, WorkerQuery};
use super::process::WorkerFailure;
use crate::events::TokenId;
use crate::model::Vocabulary;
use std::sync::{Arc, Weak};

/// Maximum bytes of a text that is encoded for a worker. A longer one would delay the supervisor beyond the deadline.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// Returns the answer to a query, with its body.
pub fn answer(
    query: WorkerQuery,
    vocabularies: &[Weak<Vocabulary>],
) -> Result<(ToWorker<'static>, Vec<u8>), WorkerFailure> {
    let (mut tokens, mut control, mut body) = (None, None, Vec::new());
    let vocabulary = vocabularies.get(query.vocabulary).and_then(Weak::upgrade);
    let gone = vocabulary.is_none();
    match (query.about, vocabulary) {
        (QueryKind::Encode { text, .. }, _) if text.len() > MAX_TEXT_BYTES => {
            return Err(WorkerFailure::Protocol(format!("it requested the encoding of {} bytes at once", text.len())));
        }
        (QueryKind::Encode { text, add_special: true }, Some(known)) => tokens = Some(known.encode_prompt(&text)),
        (QueryKind::Encode { text, add_special: false }, Some(known)) => {
            tokens = Some(known.encode_markup_continuation(&text));
        }
        (QueryKind::Vocabulary, Some(known)) => {
            control = Some(control_tokens(&known));
            body = vocabulary_body(&known);
        }
        (_, None) => {}
    }
    Ok((ToWorker::Answer { tokens, control, gone }, body))
}

/// Returns the id of a vocabulary for workers. Ids of removed models are not used again.
pub fn vocabulary_id(vocabularies: &mut Vec<Weak<Vocabulary>>, vocabulary: &Arc<Vocabulary>) -> usize {
    let own = Arc::downgrade(vocabulary);
    vocabularies.iter().position(|known| known.ptr_eq(&own)).unwrap_or_else(|| {
        vocabularies.push(own);
        vocabularies.len() - 1
    })
}

/// Encodes the vocabulary as the body of an answer.
fn vocabulary_body(vocabulary: &Vocabulary) -> Vec<u8> {
    let pieces =
        || (0..vocabulary.len()).map(|index| vocabulary.piece(TokenId::try_from(index).unwrap_or(TokenId::MAX)));
    let mut end = 0_u32;
    let mut bytes = end.to_ne_bytes().to_vec();
    for piece in pieces() {
        end += piece.len() as u32;
        bytes.extend_from_slice(&end.to_ne_bytes());
    }
    pieces().for_each(|piece| bytes.extend_from_slice(piece));
    bytes
}

/// Returns the control tokens of the vocabulary.
fn control_tokens(vocabulary: &Vocabulary) -> Vec<TokenId> {
    (0..TokenId::try_from(vocabulary.len()).unwrap_or(TokenId::MAX))
        .filter(|&token| vocabulary.is_control(token))
        .collect()
}
