//! Positions of tokens and spans after tokens were removed before them.

use crate::events::Span;
use std::ops::Range;

/// Returns the number of tokens that an eviction should leave in the context: three quarters, so that evictions are
/// rare.
pub fn eviction_target(context: usize) -> usize {
    context - context / 4
}

/// Returns the spans after the removal of `ranges` from the tokens, without spans that were removed completely.
/// Adjacent template spans are merged.
pub fn cut_spans(spans: &[Span], ranges: &[Range<usize>]) -> Vec<Span> {
    let shifted_index = |index: u32| shifted_index(index as usize, ranges) as u32;
    let mut left: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        let (start, end) = (shifted_index(span.start), shifted_index(span.end));
        match left.last_mut() {
            _ if start == end => {}
            Some(last) if last.role == "template" && span.role == "template" => last.end = end,
            _ => left.push(Span { role: span.role.clone(), start, end }),
        }
    }
    left
}

/// Returns the new position of an index after the removal of ordered `ranges` before it.
pub fn shifted_index(index: usize, ranges: &[Range<usize>]) -> usize {
    index - ranges.iter().map(|range| index.min(range.end).saturating_sub(range.start)).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_shift_with_their_tokens() {
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
