//! What the engine knows of conversations: which messages a full context can do without, and what a slot remembers so
//! that a client's next request finds its state again.
//!
//! Everything here is about token ids and the prompt's [`Span`]s, so that no sum of counts can drift. Which template
//! wrote the prompt does not matter; a prompt without spans is no conversation, and nothing is left out of it.

mod align;
mod kept;
mod memory;
mod turns;

pub(super) use align::{Aligned, align};
pub(super) use memory::Memory;
pub(super) use turns::{droppable, pick, said};

use crate::events::Span;
use std::ops::Range;

/// What is left of a context after messages were dropped: a quarter is free, so that it does not happen at every token.
pub(super) fn low_water(context: usize) -> usize {
    context - context / 4
}

/// Spans after `ranges` were cut out of the tokens; a span that was cut as a whole is gone.
pub(super) fn cut_spans(spans: &[Span], ranges: &[Range<usize>]) -> Vec<Span> {
    let moved = |index: u32| moved(index as usize, ranges) as u32;
    let mut left: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        let (start, end) = (moved(span.start), moved(span.end));
        match left.last_mut() {
            _ if start == end => {}
            Some(last) if last.role == "template" && span.role == "template" => last.end = end,
            _ => left.push(Span { role: span.role.clone(), start, end }),
        }
    }
    left
}

/// Where an index is after `ranges`, in order, were cut out before it.
pub(super) fn moved(index: usize, ranges: &[Range<usize>]) -> usize {
    index - ranges.iter().map(|range| index.min(range.end).saturating_sub(range.start)).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_follow_their_tokens() {
        let span = |role: &str, start, end| Span { role: role.into(), start, end };
        let spans = [span("template", 0, 2), span("user", 2, 5), span("template", 5, 8), span("user", 8, 9)];
        assert_eq!(cut_spans(&spans, &[2..8]), [span("template", 0, 2), span("user", 2, 3)]);
        assert_eq!(
            cut_spans(&spans, &[3..4, 6..7]),
            [span("template", 0, 2), span("user", 2, 4), span("template", 4, 6), span("user", 6, 7)]
        );
        assert_eq!(cut_spans(&spans, &[1..6]), [span("template", 0, 3), span("user", 3, 4)]);
    }
}
