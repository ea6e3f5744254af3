//! Tests of the answer's text while tokens are added and removed.

use super::*;
use proptest::prelude::*;

fn answer(stop: &[&str]) -> OutputText {
    OutputText::new(&stop.iter().map(ToString::to_string).collect::<Vec<_>>())
}

#[test]
fn stop_string_across_tokens_is_never_released() {
    let mut answer = answer(&["END"]);
    let mut released = String::new();
    for piece in ["ab", "E", "N", "x E", "ND", "more"] {
        answer.push(piece.as_bytes(), false);
        released += &answer.take_releasable(0);
    }
    assert_eq!(released, "abENx ");
    assert_eq!(answer.stopped_by().as_deref(), Some("END"));
    assert_eq!(answer.text(), "abENx ");
    assert!(answer.is_stopped(5) && !answer.is_stopped(4), "the fifth token completes the stop string");
}

#[test]
fn new_stop_strings_do_not_retract_released_text() {
    let mut answer = answer(&["xyz"]);
    answer.push(b"one xy", false);
    assert_eq!(answer.take_releasable(0), "one ");
    answer.set_stop_strings(vec![b"one".to_vec(), b"xy".to_vec()]);
    assert_eq!((answer.stopped_by().as_deref(), answer.text().as_str()), (Some("xy"), "one "));
    answer.set_stop_strings(vec![b"e ".to_vec()]);
    answer.push(b" one ", false);
    assert_eq!((answer.stopped_by().as_deref(), answer.text().as_str()), (Some("e "), "one xy on"));
}

#[test]
fn new_stop_strings_apply_after_retraction() {
    let mut answer = answer(&["xyz"]);
    ["ab", "cd", "ef", "g"].iter().for_each(|piece| drop(answer.push(piece.as_bytes(), false)));
    answer.set_stop_strings(vec![b"abcdef".to_vec(), b"cd".to_vec()]);
    assert!(answer.is_stopped(2) && !answer.is_stopped(1), "the second token completes a stop string");
    assert_eq!((answer.truncate(2), answer.text().as_str()), (0, "ab"));
    assert_eq!(answer.stopped_by().as_deref(), Some("cd"));
}

#[test]
fn incomplete_characters_are_held_back() {
    let mut answer = answer(&[]);
    let euro = "€".as_bytes();
    assert_eq!(answer.push(&euro[..2], false), "");
    assert_eq!(answer.take_releasable(0), "");
    assert_eq!(answer.push(&euro[2..], false), "€");
    assert_eq!(answer.take_releasable(0), "€");
}

#[test]
fn less_indented_line_ends_text() {
    let mut answer = answer(&[]).with_min_indent(2);
    let mut released = String::new();
    for piece in ["def f():\n", " ", " x", "\n    y\n", "z = 1\nmore"] {
        assert!(!answer.is_outdented(answer.tokens()), "{released:?}");
        answer.push(piece.as_bytes(), false);
        released += &answer.take_releasable(0);
    }
    assert!(answer.is_outdented(answer.tokens()));
    assert_eq!(released, "def f():\n  x\n    y\n");
    assert_eq!(answer.text(), released);
    answer.truncate(4);
    assert!(!answer.is_outdented(answer.tokens()));
}

#[test]
fn new_line_is_found_in_first_tokens() {
    let mut answer = answer(&[]);
    for piece in ["a", "\n", "b"] {
        answer.push(piece.as_bytes(), false);
    }
    assert!(!answer.has_new_line(1) && answer.has_new_line(2));
}

#[test]
fn text_that_may_become_stop_string_is_retracted() {
    let mut answer = answer(&["cc"]);
    answer.push(b"c", false);
    answer.push(b".", false);
    assert_eq!(answer.take_releasable(0), "c.");
    assert_eq!(answer.truncate(1), 2);
    answer.push(b"c", false);
    assert_eq!((answer.take_remaining().as_str(), answer.stopped_by().as_deref()), ("", Some("cc")));
}

#[test]
fn removed_holdback_retracts_nothing() {
    let mut answer = answer(&["\n\n"]);
    let mut released = String::new();
    for piece in ["foo\n", " bad", "word", "!"] {
        answer.push(piece.as_bytes(), false);
        if piece == "!" {
            assert_eq!(answer.truncate(1), 0);
        }
        released += &answer.take_releasable(2);
    }
    assert_eq!((released.as_str(), answer.take_remaining().as_str()), ("foo", "\n"));
}

#[test]
fn truncate_counts_retracted_characters() {
    let mut answer = answer(&[]);
    for piece in ["a", "é", "€uro"] {
        answer.push(piece.as_bytes(), false);
    }
    assert_eq!(answer.take_releasable(0), "aé€uro");
    assert_eq!(answer.truncate(1), 5);
    assert_eq!(answer.text(), "a");
}

/// Returns a strategy for the bytes of a token: often a part of a stop string, sometimes incomplete characters.
fn piece() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof!["[a-cé]{0,3}".prop_map(String::into_bytes), any::<Vec<u8>>()]
}

fn stop_strings() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec("[a-c]{1,4}", 0..4)
}

proptest! {
    #[test]
    fn outdented_line_is_found_after_truncation(edits in proptest::collection::vec(("[ \nx]{0,4}", 0usize..4), 1..30)) {
        let mut edited = answer(&[]).with_min_indent(2);
        let mut pieces: Vec<String> = Vec::new();
        for (piece, removed) in edits {
            edited.push(piece.as_bytes(), false);
            pieces.push(piece);
            pieces.truncate(pieces.len() - removed.saturating_sub(2).min(pieces.len()));
            edited.truncate(pieces.len());
            let mut expected = answer(&[]).with_min_indent(2);
            pieces.iter().for_each(|piece| drop(expected.push(piece.as_bytes(), false)));
            prop_assert_eq!((edited.outdented, edited.last_line), (expected.outdented, expected.last_line));
        }
    }

    /// Stop strings that replace others, or that follow removed tokens, end the text as if they had been set at the
    /// start.
    #[test]
    fn stop_string_is_found_after_edits(
        edits in proptest::collection::vec(("[a-c]{0,3}", 0usize..4, proptest::option::of(stop_strings())), 1..20),
    ) {
        let mut edited = answer(&["a"]);
        let (mut pieces, mut stop): (Vec<String>, _) = (Vec::new(), vec!["a".to_owned()]);
        for (piece, removed, new_stop) in edits {
            edited.push(piece.as_bytes(), false);
            pieces.push(piece);
            if let Some(new_stop) = new_stop {
                edited.set_stop_strings(new_stop.iter().map(|text| text.as_bytes().to_vec()).collect());
                stop = new_stop;
            }
            pieces.truncate(pieces.len() - removed.saturating_sub(1).min(pieces.len()));
            edited.truncate(pieces.len());
            let mut expected = OutputText::new(&stop);
            pieces.iter().for_each(|piece| drop(expected.push(piece.as_bytes(), false)));
            prop_assert_eq!((edited.stopped, edited.text()), (expected.stopped, expected.text()));
        }
    }

    /// A client that applies every delta and retraction always has the text of the answer. Removed tokens in the
    /// holdback cause no retraction.
    #[test]
    fn client_text_matches_after_retractions(
        pieces in proptest::collection::vec((piece(), proptest::option::of(0usize..5)), 0..30),
        holdback in 0usize..4,
        stop in "[a-c]{1,3}",
    ) {
        let mut answer = OutputText::new(&[stop]);
        let mut client: Vec<char> = Vec::new();
        // `before_holdback`: tokens that were before the holdback when text was released.
        let (mut tokens, mut before_holdback) = (0usize, 0usize);
        for (piece, removed) in pieces {
            answer.push(&piece, false);
            tokens += 1;
            if let Some(removed) = removed {
                tokens = tokens.saturating_sub(removed);
                let retracted = answer.truncate(tokens);
                prop_assert!(tokens < before_holdback || retracted == 0, "{} characters retracted", retracted);
                before_holdback = before_holdback.min(tokens);
                client.truncate(client.len() - retracted);
            }
            client.extend(answer.take_releasable(holdback).chars());
            before_holdback = before_holdback.max(tokens.saturating_sub(holdback));
            if answer.stopped_by().is_some() { break; }
        }
        client.extend(answer.take_remaining().chars());
        prop_assert_eq!(client.into_iter().collect::<String>(), answer.text());
    }
}
