//! Properties of the parser for random pieces of answers.

use super::{ANSWERS, answer_format, apply, read, read_in};
use crate::model::chat::answer::{AnswerFormat, AnswerMessage, AnswerParser};
use crate::model::chat::family::ModelFamily;
use proptest::prelude::*;
use std::sync::Arc;

/// Returns valid and invalid pieces of answers.
fn text() -> impl Strategy<Value = (ModelFamily, String)> {
    let fragments = [
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"add\", ",
        "\"arguments\": {",
        "\"parameters\": {",
        "\"days\": 1",
        "}",
        "}}",
        "]",
        "[",
        ",",
        ";",
        "\n",
        " ",
        "add",
        "add\n",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<function=add>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|python_tag|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
        "analysis",
        "final",
        "commentary to=functions.add",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "```json",
        "```",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "\"\\ud800\"",
        "é",
        "<",
        "<|",
        "\"",
        "a",
    ];
    let family = prop::sample::select(ANSWERS.iter().map(|(family, _)| *family).collect::<Vec<_>>());
    let noise = prop::collection::vec(prop::sample::select(fragments.to_vec()), 0..14).prop_map(|parts| parts.concat());
    let broken = (
        prop::sample::select(ANSWERS.to_vec()),
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
        noise.clone(),
    )
        .prop_map(|((family, answer), from, to, noise)| {
            let place = |index: prop::sample::Index| {
                let places: Vec<usize> = answer.char_indices().map(|(at, _)| at).collect();
                places[index.index(places.len())]
            };
            let (a, b) = (place(from), place(to));
            (family, format!("{}{noise}{}", &answer[..a.min(b)], &answer[a.max(b)..]))
        });
    prop_oneof![(family, noise), broken]
}

fn in_parts<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    if places.is_empty() {
        return vec![text];
    }
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| places[cut.index(places.len())]).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The result does not depend on the division into pieces.
    #[test]
    fn division_into_pieces_does_not_change_the_result(
        (family, text) in text(), cuts: Vec<prop::sample::Index>, separates_reasoning: bool, thinking: bool, single: bool, cut: bool,
    ) {
        let answer_format = AnswerFormat { separates_reasoning, thinking, single, ..answer_format(family) };
        let whole = read_in(&answer_format, [text.as_str()], cut);
        prop_assert_eq!(&read_in(&answer_format, in_parts(&text, &cuts), cut), &whole);
        let each: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&read_in(&answer_format, each.iter().map(String::as_str), cut), &whole);
    }

    /// Every character outside markers, calls and whitespace is sent.
    #[test]
    fn no_text_is_lost((family, text) in text(), mark in any::<prop::sample::Index>()) {
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let place = places[mark.index(places.len())];
        // A word that is no marker in any format.
        let text = format!("{}\u{2603}{}", &text[..place], &text[place..]);
        let message = read(family, &text);
        let is_sent = message.content.contains('\u{2603}')
            || message.reasoning.contains('\u{2603}')
            || message.calls.iter().any(|call| call.name.contains('\u{2603}') || call.arguments.contains('\u{2603}'));
        prop_assert!(is_sent || has_unsent_text(&text), "{text:?}: {message:?}");
    }

    /// Retracting text gives the same result as never adding it.
    #[test]
    fn retracting_text_undoes_it((family, text) in text(), chars in 0usize..40, addition in "[a-z{}<>]{0,6}") {
        let answer_format = Arc::new(answer_format(family));
        let mut parser = AnswerParser::new(Arc::clone(&answer_format));
        let mut client = AnswerMessage::default();
        apply(&mut client, parser.push(&text));
        apply(&mut client, parser.retract(chars));
        apply(&mut client, parser.push(&addition));
        apply(&mut client, parser.finish());
        let kept: String = text.chars().take(text.chars().count().saturating_sub(chars)).collect();
        prop_assert_eq!(client, read(family, &format!("{kept}{addition}")));
    }
}

/// Returns true if a part of the text is not sent: another member of a call's object, or the header of a channel.
fn has_unsent_text(text: &str) -> bool {
    let before = text.split('\u{2603}').next().unwrap_or_default();
    before.contains("{\"")
        || before.contains("<|channel|>")
        || before.contains("<|start|>")
        || before.contains("[CALL_ID]")
}
