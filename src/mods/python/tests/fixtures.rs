//! Calls of the mods in `fixtures/mods`.

use super::{fixture, harness, lines, logits};
use crate::mods::builtin::testing::{EOG, ModHarness, PROMPT, word};
use crate::mods::{Action, LogitEdit};
use serde_json::json;

#[test]
fn fixture_ban_phrase_backtracks() {
    let factory = fixture("ban_phrase.py");
    let mut harness = ModHarness::new(factory.as_ref(), &json!({"phrase": "bad idea"}));
    assert_eq!(harness.instance.holdback(), 32);
    let reply = harness.write_text("Hello a bad idea").expect("it backtracks");
    assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
    assert_eq!(reply.logs[0].message, "removed ' bad idea'");
    assert_eq!(harness.text(), "Hello a");
    let ban = LogitEdit::Set(vec![(word(" bad"), f32::NEG_INFINITY)]);
    assert_eq!(harness.forward(&logits()).action, Some(Action::AdjustedLogits { edit: ban, temperature: None }));
    harness.write_text("x");
    assert_eq!(harness.forward(&logits()).action, None);
}

#[test]
fn fixture_json_prefix() {
    let mut harness = harness(&fixture("json_prefix.py"));
    let forced: Vec<i32> = b"{\"".iter().map(|&byte| i32::from(byte)).collect();
    assert_eq!(harness.forward(&logits()).action, Some(Action::ForceTokens(forced.clone())));
    harness.sequence.extend(forced);
    assert_eq!(harness.forward(&logits()).action, None);
    assert_eq!(harness.sequence.len(), PROMPT + 2);
}

#[test]
fn fixture_log_top5() {
    let mut harness = harness(&fixture("log_top5.py"));
    let reply = harness.forward(&logits());
    assert_eq!(lines(&reply)[..2], ["'b' -0.288", "'a' -1.386"]);
    assert_eq!(reply.logs.len(), 5);
    assert!(lines(&harness.add(EOG)).is_empty());
}

#[test]
fn fixture_temperature_by_entropy() {
    let mut harness = harness(&fixture("temperature_by_entropy.py"));
    let Some(Action::AdjustedLogits { edit: LogitEdit::Keep, temperature: Some(temperature) }) =
        harness.forward(&logits()).action
    else {
        panic!("no temperature");
    };
    let expected = 0.2 + 0.8 * (0.8113 - 0.5) / 3.5;
    assert!((temperature - expected).abs() < 1e-3, "{temperature}");
}
