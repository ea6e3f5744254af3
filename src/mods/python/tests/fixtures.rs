//! The mods of `fixtures/mods`, in scenes.

use super::{fixture, lines, logits, scene};
use crate::mods::builtin::testing::{EOG, PROMPT, Scene, word};
use crate::mods::{Action, LogitEdit};
use serde_json::json;

#[test]
fn fixture_ban_phrase_backtracks() {
    let factory = fixture("ban_phrase.py");
    let mut scene = Scene::new(factory.as_ref(), &json!({"phrase": "bad idea"}));
    assert_eq!(scene.instance.holdback(), 32);
    let reply = scene.write_text("Hello a bad idea").expect("it backtracks");
    assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
    assert_eq!(reply.logs[0].message, "removed ' bad idea'");
    assert_eq!(scene.text(), "Hello a");
    let ban = LogitEdit::Set(vec![(word(" bad"), f32::NEG_INFINITY)]);
    assert_eq!(scene.forward(&logits()).action, Some(Action::AdjustedLogits { edit: ban, temperature: None }));
    scene.write_text("x");
    assert_eq!(scene.forward(&logits()).action, None);
}

#[test]
fn fixture_json_prefix() {
    let mut scene = scene(&fixture("json_prefix.py"));
    let forced: Vec<i32> = b"{\"".iter().map(|&byte| i32::from(byte)).collect();
    assert_eq!(scene.forward(&logits()).action, Some(Action::ForceTokens(forced.clone())));
    scene.sequence.extend(forced);
    assert_eq!(scene.forward(&logits()).action, None);
    assert_eq!(scene.sequence.len(), PROMPT + 2);
}

#[test]
fn fixture_log_top5() {
    let mut scene = scene(&fixture("log_top5.py"));
    let reply = scene.forward(&logits());
    assert_eq!(lines(&reply)[..2], ["'b' -0.288", "'a' -1.386"]);
    assert_eq!(reply.logs.len(), 5);
    assert!(lines(&scene.add(EOG)).is_empty());
}

#[test]
fn fixture_temperature_by_entropy() {
    let mut scene = scene(&fixture("temperature_by_entropy.py"));
    let Some(Action::AdjustedLogits { edit: LogitEdit::Keep, temperature: Some(temperature) }) =
        scene.forward(&logits()).action
    else {
        panic!("no temperature");
    };
    let expected = 0.2 + 0.8 * (0.8113 - 0.5) / 3.5;
    assert!((temperature - expected).abs() < 1e-3, "{temperature}");
}
