use super::{Fold, NEVER, flags};
use crate::events::{ActionRecord, ActionType, Event, EventType, Measurements, ModCall, TraceItem};
use crate::trace::columns;
use crate::trace::document::{Document, item_from_json};
use base64::Engine as _;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::Arc;

/// Returns the rows visible after event `n`, by position.
fn visible(fold: &Fold, n: u32) -> Vec<usize> {
    let mut rows: Vec<usize> =
        (0..fold.rows().len()).filter(|&i| fold.rows()[i].added_at <= n && n < fold.rows()[i].removed_at).collect();
    rows.sort_by_key(|&i| fold.rows()[i].pos);
    rows
}

fn fold_of(items: &[TraceItem]) -> Fold {
    let mut fold = Fold::new();
    for item in items {
        fold.apply(item);
    }
    fold
}

/// Builds the expected data of a fixture. Numbers are rounded as in the columns, because the browser's fold
/// rounds them too.
fn expectation(fold: &Fold) -> Value {
    let unknown = u16::MAX;
    let rows: Vec<Value> = fold
        .rows()
        .iter()
        .map(|row| {
            json!({
                "token": row.token, "text": &*row.text, "pos": row.pos, "added_at": row.added_at,
                "removed_at": (row.removed_at != NEVER).then_some(row.removed_at),
                "logprob_q": columns::quantize_logprob(row.logprob), "rank": row.rank.unwrap_or(0),
                "entropy_q": columns::quantize_entropy(row.entropy), "flags": row.flags, "dt_us": row.dt_us,
            })
        })
        .collect();
    let visible: Vec<Value> = (0..=fold.event_count()).map(|n| json!(visible(fold, n))).collect();
    let events: Vec<Value> = fold.events().iter().map(|e| json!([e.kind, e.step, e.time_ms])).collect();
    json!({
        "unknown_q": unknown, "events": events, "rows": rows, "marks": fold.marks(), "visible": visible,
        "counters": fold.counters(), "answer": fold.answer_text(),
    })
}

/// Compares the fold with `fixtures/folds/*.json`, which also test the browser's fold. `THUNDER_UPDATE_FIXTURES=1`
/// rewrites `expected` and `columns` in these files; review them before you commit them.
#[test]
fn fold_matches_the_fixtures() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/folds");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let mut fixture: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let lines = fixture["items"].as_array().unwrap();
        let items: Vec<TraceItem> =
            lines.iter().map(|line| item_from_json(line.to_string().as_bytes()).unwrap()).collect();
        let fold = fold_of(&items);
        let found = expectation(&fold);
        let columns = base64::engine::general_purpose::STANDARD.encode(columns::encode(&fold));
        if std::env::var_os("THUNDER_UPDATE_FIXTURES").is_some() {
            fixture["expected"] = found;
            fixture["columns"] = columns.into();
            std::fs::write(&path, readable(&fixture)).unwrap();
        } else {
            let expected = &fixture["expected"];
            assert_eq!(&found, expected, "{}\n{found:#}", path.display());
            assert_eq!(fixture["columns"], columns, "{}", path.display());
        }
        seen += 1;
    }
    assert!(seen >= 6);
}

/// Formats JSON with one line per item and per row.
fn readable(fixture: &Value) -> String {
    let lines = |list: &Value| {
        list.as_array().unwrap().iter().map(|entry| format!("    {entry}")).collect::<Vec<_>>().join(",\n")
    };
    let expected: Vec<String> = fixture["expected"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, value)| match name.as_str() {
            "rows" | "marks" if value != &json!([]) => format!("    \"{name}\": [\n{}\n    ]", lines(value)),
            _ => format!("    \"{name}\": {value}"),
        })
        .collect();
    format!(
        "{{\n  \"about\": {},\n  \"items\": [\n{}\n  ],\n  \"expected\": {{\n{}\n  }},\n  \"columns\": {}\n}}\n",
        fixture["about"],
        lines(&fixture["items"]),
        expected.join(",\n"),
        fixture["columns"]
    )
}

#[test]
fn example_of_the_specification_folds_to_one_row() {
    let document = Document::parse(include_bytes!("../../../fixtures/sample_payload.json")).unwrap();
    let fold = fold_of(&document.items());
    assert_eq!(fold.answer_text(), " there");
    let row = &fold.rows()[0];
    assert_eq!(
        (row.pos, row.added_at, row.removed_at, row.rank, row.flags),
        (150, 3, NEVER, Some(1), flags::SAMPLED | flags::TOUCHED)
    );
    assert!((row.logprob.unwrap() - 0.85_f32.ln()).abs() < 1e-6);
    assert_eq!((fold.counters().actions, fold.counters().prompt_tokens), (1, 150));
}

/// The documents were recorded by Quote's own loop, with its final text.
#[test]
fn quote_traces_fold_to_their_final_text() {
    let documents: Vec<Value> = serde_json::from_slice(include_bytes!("../../../fixtures/quote_traces.json")).unwrap();
    let mut wrong = String::new();
    for document in &documents {
        let document = Document::parse(document.to_string().as_bytes()).unwrap();
        let fold = fold_of(&document.items());
        let (request, expected) = (&document.request.request_id, document.request.extras.final_text.as_deref());
        if expected != Some(&fold.answer_text()) {
            let _ = writeln!(wrong, "{request}: {:?} instead of {expected:?}", fold.answer_text());
        }
        assert!(!fold.rows().iter().any(|row| row.text.contains('⟨')), "{request}");
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(documents.len() >= 30);
}

/// An export has the fields of Quote's actions also next to `details`, but still names the active mod.
#[test]
fn exported_quote_traces_fold_to_their_final_text() {
    let documents: Vec<Value> = serde_json::from_slice(include_bytes!("../../../fixtures/quote_traces.json")).unwrap();
    for document in &documents {
        let document = Document::parse(document.to_string().as_bytes()).unwrap();
        let exported = Document::parse(&document.write()).unwrap();
        assert!(!exported.request.extras.specified_actions, "{}", document.request.request_id);
        assert_eq!(fold_of(&exported.items()).answer_text(), fold_of(&document.items()).answer_text());
    }
}

#[test]
fn quote_names_in_details_have_no_meaning_next_to_specified_fields() {
    let items: Vec<TraceItem> = [
        r#"{"kind":"event","event_type":"Added","step":1,"sequence_order":0,"added_tokens":[5],"added_token_count":1}"#,
        r#"{"kind":"mod_call","event_sequence_order":0,"mod_name":"m","event_type":"Added","step":1}"#,
        r#"{"kind":"action","mod_call_sequence":0,"action_type":"Backtrack","action_order":0,"backtrack_steps":1,
            "details":{"backtrack_steps":1}}"#,
    ]
    .map(|line| item_from_json(line.as_bytes()).unwrap())
    .into();
    let mut specified = Fold::new();
    specified.set_has_specified_actions(true);
    items.iter().for_each(|item| specified.apply(item));
    assert_eq!((specified.counters().backtracked, fold_of(&items).counters().backtracked), (1, 0));
}

#[test]
fn prompt_without_tokens_in_details_does_not_hide_the_prompt_length() {
    let event = br#"{"kind":"event","event_type":"Prefilled","step":0,"sequence_order":0,"prompt_length":150,
        "details":{"prompt":{"text":"Once"}}}"#;
    assert_eq!(fold_of(&[item_from_json(event).unwrap()]).counters().prompt_tokens, 150);
}

/// Each of these actions would append the queued tokens again.
#[test]
fn repeated_backtracks_create_a_bounded_number_of_rows() {
    let mut added = Event::new(EventType::Added, 0, 0, None);
    added.added_tokens = Some(vec![1; 30_000]);
    let mut forced = Event { sequence_order: 1, ..added.clone() };
    forced.forced = Some(true);
    let call =
        item_from_json(br#"{"kind":"mod_call","event_sequence_order":1,"mod_name":"m","event_type":"Added","step":0}"#)
            .unwrap();
    let mut back = ActionRecord::new(0, ActionType::Backtrack, None);
    back.details = Some(serde_json::value::to_raw_value(&json!({"backtrack_steps": 2})).unwrap());
    let mut items = vec![TraceItem::Event(added), TraceItem::Event(forced), call];
    items.extend(std::iter::repeat_n(TraceItem::Action(back), 10_000));
    assert!(fold_of(&items).rows().len() <= 60_000 + super::MAX_PLACEHOLDER_ROWS as usize);
}

/// A `Backtrack` before queued tokens appends them again.
#[test]
fn rows_that_are_appended_again_share_their_text() {
    let mut sampled = Event::new(EventType::Sampled, 1, 1, None);
    sampled.token_text = Some("t".repeat(1000));
    let mut before = Event::new(EventType::Added, 0, 0, None);
    before.added_tokens = Some(vec![1; 100]);
    let mut queued = Event::new(EventType::Added, 1, 2, None);
    (queued.added_tokens, queued.forced) = (Some(vec![2]), Some(true));
    let call =
        item_from_json(br#"{"kind":"mod_call","event_sequence_order":2,"mod_name":"m","event_type":"Added","step":1}"#)
            .unwrap();
    let mut back = ActionRecord::new(0, ActionType::Backtrack, None);
    back.details = Some(serde_json::value::to_raw_value(&json!({"backtrack_steps": 2})).unwrap());
    let mut items = vec![TraceItem::Event(before), TraceItem::Event(sampled), TraceItem::Event(queued), call];
    items.extend(std::iter::repeat_n(TraceItem::Action(back), 100));
    let fold = fold_of(&items);
    let texts: Vec<_> = fold.rows().iter().map(|row| &row.text).filter(|text| text.len() == 1000).collect();
    assert_eq!(texts.len(), 101);
    assert!(texts.iter().all(|text| Arc::ptr_eq(text, texts[0])));
}

#[test]
fn short_payload_creates_a_bounded_number_of_rows() {
    let mut added = Event::new(EventType::Added, 0, 1, None);
    added.added_token_count = Some(i32::MAX);
    let call = ModCall {
        event_sequence_order: 0,
        mod_name: "m".into(),
        event_type: EventType::Prefilled,
        step: 0,
        created_at: None,
        execution_time_ms: None,
        exception_occurred: false,
        exception_message: None,
        exception_traceback: None,
    };
    let mut adjust = ActionRecord::new(0, ActionType::AdjustedPrefill, None);
    adjust.new_length = Some(i32::MAX);
    let fold = fold_of(&[
        TraceItem::Event(Event::new(EventType::Prefilled, 0, 0, None)),
        TraceItem::ModCall(call),
        TraceItem::Action(adjust),
        TraceItem::Event(added),
    ]);
    assert!(fold.rows().len() <= super::MAX_PLACEHOLDER_ROWS as usize);
    assert_eq!(fold.counters().prompt_tokens, i32::MAX as u32);
}

/// Otherwise a small document with many tokens and many failing calls would need hours.
#[test]
fn rows_are_flagged_once_for_any_number_of_exceptions() {
    let mut added = Event::new(EventType::Added, 0, 0, None);
    added.added_tokens = Some(vec![1; 3]);
    let raise = items_of(&[Move::Raise]).remove(0);
    let mut fold = fold_of(&[TraceItem::Event(added), raise.clone()]);
    assert!(fold.rows().iter().all(|row| row.flags & flags::ERROR != 0));
    fold.rows.iter_mut().for_each(|row| row.flags = 0);
    fold.apply(&raise);
    assert!(fold.rows().iter().all(|row| row.flags == 0));
    assert_eq!(fold.counters().errors, 2);
}

#[test]
fn forty_thousand_tokens_with_backtracks_are_counted() {
    let mut fold = Fold::new();
    for seq in 0..40_000 {
        let mut added = Event::new(EventType::Added, seq, seq, None);
        added.added_tokens = Some(vec![seq]);
        fold.apply(&TraceItem::Event(added));
        let mut back = ActionRecord::new(0, ActionType::Backtrack, None);
        back.backtrack_steps = Some(seq % 2);
        fold.apply(&TraceItem::Action(back));
    }
    assert_eq!(fold.counters().tokens_out, 20_000);
}

/// An event, an action or an exception of a generated run.
#[derive(Debug, Clone)]
enum Move {
    Event(EventType, Vec<i32>, bool),
    Action(ActionType, i32, bool, Vec<i32>),
    Raise,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let event = (prop::sample::select(&EventType::ALL[..]), prop::collection::vec(0..50, 0..4), any::<bool>());
    let action = (
        prop::sample::select(&ActionType::ALL[..]),
        -1..6,
        prop::bool::weighted(0.2),
        prop::collection::vec(0..50, 0..3),
    );
    let entry = prop_oneof![
        4 => event.prop_map(|(kind, tokens, forced)| Move::Event(kind, tokens, forced)),
        3 => action.prop_map(|(kind, n, superseded, tokens)| Move::Action(kind, n, superseded, tokens)),
        1 => Just(Move::Raise),
    ];
    prop::collection::vec(entry, 0..80)
}

fn items_of(moves: &[Move]) -> Vec<TraceItem> {
    let (mut seq, mut calls) = (0, 0);
    let mut items = Vec::new();
    for entry in moves {
        match entry {
            Move::Event(kind, tokens, forced) => {
                // A later `Prefilled` would hide all earlier rows, so only the first event may be one.
                let kind = if seq > 0 && *kind == EventType::Prefilled { EventType::Added } else { *kind };
                let mut event = Event::new(kind, seq / 3, seq, None);
                event.forced = Some(*forced);
                event.added_tokens = (kind == EventType::Added).then(|| tokens.clone());
                event.sampled_token = tokens.first().copied();
                event.prompt_length = Some(tokens.len() as i32);
                // The form of an event that records discarded tokens.
                let discards = kind == EventType::Added && tokens.is_empty();
                let measured = Measurements { discarded: 2, ..Measurements::default() };
                event.measured = discards.then(|| Box::new(measured));
                items.push(TraceItem::Event(event));
                seq += 1;
            }
            Move::Action(..) | Move::Raise => {
                items.push(TraceItem::ModCall(ModCall {
                    event_sequence_order: seq - 1,
                    mod_name: "m".into(),
                    event_type: EventType::Added,
                    step: 0,
                    created_at: None,
                    execution_time_ms: None,
                    exception_occurred: matches!(entry, Move::Raise),
                    exception_message: None,
                    exception_traceback: None,
                }));
                if let Move::Action(kind, n, superseded, tokens) = entry {
                    let mut action = ActionRecord::new(calls, *kind, None);
                    action.backtrack_steps = Some(*n);
                    action.new_length = Some(*n);
                    let details = json!({"superseded": superseded, "tokens": tokens});
                    action.details = Some(serde_json::value::to_raw_value(&details).unwrap());
                    items.push(TraceItem::Action(action));
                }
                calls += 1;
            }
        }
    }
    items
}

proptest! {
    /// The state after event `n` does not depend on later items, except for `flags` and `removed_at`.
    #[test]
    fn fold_of_a_prefix_equals_the_state_in_the_whole(moves in moves(), part: prop::sample::Index) {
        let items = items_of(&moves);
        let whole = fold_of(&items);
        let cut = part.index(items.len() + 1);
        let before = fold_of(&items[..cut]);
        let mut resumed = before.clone();
        for item in &items[cut..] {
            resumed.apply(item);
        }
        prop_assert_eq!(resumed.rows(), whole.rows());
        prop_assert_eq!(resumed.marks(), whole.marks());
        prop_assert_eq!(resumed.counters(), whole.counters());
        for n in 0..before.event_count() {
            prop_assert_eq!(visible(&before, n), visible(&whole, n));
        }
    }

    /// After every event, the visible positions are consecutive. They begin at 0, or at the length of a prompt whose
    /// tokens are unknown.
    #[test]
    fn alive_positions_have_no_holes(moves in moves()) {
        let items = items_of(&moves);
        let fold = fold_of(&items);
        for n in 0..=fold.event_count() {
            let positions: Vec<u32> = visible(&fold, n).iter().map(|&row| fold.rows()[row].pos).collect();
            let base = positions.first().copied().unwrap_or(0);
            prop_assert_eq!(&positions, &(base..base + positions.len() as u32).collect::<Vec<_>>(), "at {}", n);
        }
        for row in fold.rows() {
            prop_assert!(row.added_at <= row.removed_at);
        }
        let remaining = fold.rows().iter().filter(|row| row.removed_at == NEVER && row.flags & flags::PROMPT == 0).count();
        prop_assert_eq!(remaining as u32, fold.counters().tokens_out);
    }
}
