//! Tests of a sequence whose context is full.

use super::Sequence;
use crate::engine::request::{Overflow, Request};
use crate::events::Surface;
use crate::model::grammar::testing::vocabulary;

#[test]
fn context_shift_removes_as_many_tokens_as_llama_server() {
    for (keep, removed) in [(0, 127), (3, 126), (5, 125), (20, 117)] {
        let mut request = Request {
            overflow: Overflow::Shift { keep: Some(keep), discard: 0 },
            ..Request::new(vec![97; 256], Surface::LlamaServer)
        };
        let mut sequence = Sequence::new(&mut request, vocabulary(), 256);
        assert_eq!(sequence.make_room(1), Ok(true));
        assert_eq!(256 - sequence.len(), removed, "{keep}");
    }
}

#[test]
fn retracted_answer_includes_evicted_tokens() {
    let mut request = Request {
        overflow: Overflow::Shift { keep: Some(2), discard: 4 },
        ..Request::new(vec![97; 3], Surface::LlamaServer)
    };
    let mut sequence = Sequence::new(&mut request, vocabulary(), 10);
    sequence.extend(&[98; 7]);
    assert_eq!(sequence.make_room(1), Ok(true));
    assert_eq!((sequence.prompt_len(), sequence.generated_in_context(), sequence.answer_len()), (2, 4, 7));
    assert_eq!(sequence.retract_answer(), 7);
    assert_eq!((sequence.len(), sequence.answer_len(), sequence.removable()), (2, 0, 0));
}
