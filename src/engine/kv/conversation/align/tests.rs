use super::*;
use crate::model::SpecialTokens;

const END: TokenId = 1;

/// Token 1 ends a message, 2 is `</think>`, and every other token is the ASCII character with its number.
fn vocabulary() -> Vocabulary {
    let pieces = (0..128u8)
        .map(|id| match id {
            1 => b"<end>".to_vec().into(),
            2 => b"</think>".to_vec().into(),
            id => vec![id].into_boxed_slice(),
        })
        .collect();
    Vocabulary::new(pieces, (0..128).map(|id| id == END).collect(), vec![END], SpecialTokens::default(), |_, _, _| {
        Vec::new()
    })
}

fn text(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

/// Renders messages: `U` (user) or `A` (assistant), a colon, the text and the end token.
fn chat(messages: &[(&str, &str)]) -> (Vec<TokenId>, Vec<Span>) {
    let (mut tokens, mut spans) = (Vec::new(), Vec::new());
    let mut template_from = 0;
    for (role, content) in messages {
        tokens.extend(text(if *role == "user" { "U:" } else { "A:" }));
        let start = tokens.len() as u32;
        spans.push(Span { role: "template".into(), start: template_from, end: start });
        tokens.extend(text(content));
        template_from = tokens.len() as u32;
        spans.push(Span { role: (*role).into(), start, end: template_from });
        tokens.push(END);
    }
    tokens.extend(text("A:"));
    spans.push(Span { role: "template".into(), start: template_from, end: tokens.len() as u32 });
    (tokens, spans)
}

/// Returns tokens and history of a slot after its first answer. The end token was sampled but never decoded.
fn slot(reasoning: &str, output: &str) -> (Vec<TokenId>, SlotHistory) {
    let vocabulary = vocabulary();
    let (mut cached, _) = chat(&[("user", "hi")]);
    let start = cached.len();
    let mut generated = text(reasoning);
    if !reasoning.is_empty() {
        generated.push(2);
    }
    generated.extend(text(output));
    generated.push(END);
    let mut history = SlotHistory::default();
    history.record_answer(start, &generated, &vocabulary);
    generated.pop();
    cached.extend(generated);
    history.truncate(cached.len());
    (cached, history)
}

#[test]
fn reasoning_is_restored() {
    let (cached, history) = slot("hmm", "hello");
    let (prompt, spans) = chat(&[("user", "hi"), ("assistant", "hello"), ("user", "more")]);
    let aligned = align(&prompt, &spans, &cached, &history, &vocabulary(), false).unwrap();
    assert_eq!(aligned.tokens[..cached.len()], cached);
    assert_eq!(vocabulary().decode(&aligned.tokens), "U:hi<end>A:hmm</think>hello<end>U:more<end>A:");
    let output: Vec<(String, String)> = aligned
        .spans
        .iter()
        .map(|span| (span.role.clone(), vocabulary().decode(&aligned.tokens[span.start as usize..span.end as usize])))
        .collect();
    assert_eq!(output[1], ("user".into(), "hi".into()));
    assert_eq!(output.last().unwrap().1, "<end>A:");
    assert_eq!(output[output.len() - 2], ("user".into(), "more".into()));
}

#[test]
fn edited_answer_is_not_restored() {
    let (cached, history) = slot("hmm", "hello");
    for changed in ["hell", "hello!", "no", "ello"] {
        let (prompt, spans) = chat(&[("user", "hi"), ("assistant", changed), ("user", "more")]);
        assert_eq!(align(&prompt, &spans, &cached, &history, &vocabulary(), false), None, "{changed}");
    }
    let (plain, history) = slot("", "yes hello");
    let (prompt, spans) = chat(&[("user", "hi"), ("assistant", "hello"), ("user", "more")]);
    assert_eq!(align(&prompt, &spans, &plain, &history, &vocabulary(), false), None, "only reasoning is restored");
}

#[test]
fn unchanged_answer_needs_no_alignment() {
    let (cached, history) = slot("", "hello");
    let (prompt, spans) = chat(&[("user", "hi"), ("assistant", "hello"), ("user", "more")]);
    assert_eq!(align(&prompt, &spans, &cached, &history, &vocabulary(), false), None);
}

#[test]
fn dropped_messages_are_omitted_again() {
    let vocabulary = vocabulary();
    let conversation =
        [("user", "one"), ("assistant", "first"), ("user", "two"), ("assistant", "second"), ("user", "three")];
    let (full, spans) = chat(&conversation);
    let (start, end) = (spans[1].start as usize, spans[5].start as usize);
    let mut history = SlotHistory::default();
    history.record_dropped(&full, &spans, &[start..end], &vocabulary);
    let mut cached = full.clone();
    cached.drain(start..end);
    assert_eq!(vocabulary.decode(&cached), "U:two<end>A:second<end>U:three<end>A:");
    let mut longer = conversation.to_vec();
    longer.extend([("assistant", "third"), ("user", "four")]);
    let (prompt, prompt_spans) = chat(&longer);
    let aligned = align(&prompt, &prompt_spans, &cached, &history, &vocabulary, true).unwrap();
    assert_eq!(vocabulary.decode(&aligned.tokens), "U:two<end>A:second<end>U:three<end>A:third<end>U:four<end>A:");
    assert_eq!(aligned.omitted, [start..end]);
    assert_eq!(align(&prompt, &prompt_spans, &cached, &history, &vocabulary, false), None);
    // A second eviction after the first.
    let (second, third) = (aligned.spans[1].start as usize, aligned.spans[5].start as usize);
    let mut history = history.clone();
    history.record_dropped(&aligned.tokens, &aligned.spans, &[second..third], &vocabulary);
    let mut cached = aligned.tokens.clone();
    cached.drain(second..third);
    let aligned = align(&prompt, &prompt_spans, &cached, &history, &vocabulary, true).unwrap();
    assert_eq!(vocabulary.decode(&aligned.tokens), "U:three<end>A:third<end>U:four<end>A:");
    // Messages that differ from the dropped ones are not omitted.
    longer[0] = ("user", "other");
    let (prompt, prompt_spans) = chat(&longer);
    assert_eq!(align(&prompt, &prompt_spans, &cached, &history, &vocabulary, true), None);
}

#[test]
fn dropped_messages_match_without_reasoning() {
    let vocabulary = vocabulary();
    let thinking = [("user", "one"), ("assistant", "hm\u{2}first"), ("user", "two")];
    let (full, spans) = chat(&thinking);
    let (start, end) = (spans[1].start as usize, spans[5].start as usize);
    let mut history = SlotHistory::default();
    history.record_dropped(&full, &spans, &[start..end], &vocabulary);
    let mut cached = full.clone();
    cached.drain(start..end);
    let (prompt, prompt_spans) = chat(&[("user", "one"), ("assistant", "first"), ("user", "two")]);
    let aligned = align(&prompt, &prompt_spans, &cached, &history, &vocabulary, true).unwrap();
    assert_eq!(vocabulary.decode(&aligned.tokens), "U:two<end>A:");
}

#[test]
fn history_follows_removed_tokens() {
    let (_, mut history) = slot("", "hello");
    history.remove_ranges(&[0..3]);
    assert_eq!(history.answers[0].start, 4);
    let mut cut = history.clone();
    cut.remove_ranges(&[5..6]);
    assert!(cut.is_empty(), "an answer with removed tokens leaves the history");
    history.truncate(7);
    assert!(history.is_empty());
}
