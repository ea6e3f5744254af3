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
    map_spans(spans, |index| shifted_index(index, ranges))
}

/// Returns the spans after a change of the tokens, without spans that have become empty. Adjacent template spans are
/// merged. `new_index` returns the new position of an index.
pub fn map_spans(spans: &[Span], new_index: impl Fn(usize) -> usize) -> Vec<Span> {
    let mut mapped: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        let (start, end) = (new_index(span.start as usize) as u32, new_index(span.end as usize) as u32);
        match mapped.last_mut() {
            _ if start >= end => {}
            Some(last) if last.role == "template" && span.role == "template" => last.end = end,
            _ => mapped.push(Span { role: span.role.clone(), start, end }),
        }
    }
    mapped
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
