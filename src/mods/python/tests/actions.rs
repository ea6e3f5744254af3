//! Actions of mods and their validation.

use super::{VOCABULARY, harness, load, logits, no_exception, raised};
use crate::events::Fault;
use crate::mods::builtin::testing::ModHarness;
use crate::mods::{Action, CallEvent, LogitEdit};
use serde_json::json;

#[test]
fn logits_are_edited_in_shared_memory() {
    let factory = load(
        r#"
from max.driver import Tensor
@mod
def edit(event, actions, tokenizer):
    if not isinstance(event, ForwardPass): return
    step = len(event.context_info.generated)
    if step == 0:
        event.logits.to_numpy()[0, 97] = 7.5
        return actions.adjust_logits(event.logits)
    if step == 1: return actions.adjust_logits(token_temp=0.25)
    if step == 2: return actions.adjust_logits(set={97: float("-inf"), 98: 2}, token_temp=0)
    if step == 3: return actions.adjust_logits(add={97: 1.5})
    if step == 4: return actions.adjust_logits(Tensor.from_numpy([[float(i) for i in range(265)]]))
    if step == 5:
        event.logits[97] = 1.0  # without an action for the change
    if step == 6: return actions.adjust_logits([1.0] * 3)
    if step == 7: return actions.adjust_logits([float("nan")] * 265)
    if step == 8: return actions.adjust_logits([float("-inf")] * 265)
    if step == 9: return actions.adjust_logits(set={999: 1.0})
    if step == 10: return actions.adjust_logits(token_temp=-1)
"#,
    );
    let mut harness = harness(&factory);
    let next = |harness: &mut ModHarness| {
        let reply = harness.forward(&logits());
        harness.sequence.push(65);
        reply
    };
    let edited = |edit, temperature| Some(Action::AdjustedLogits { edit, temperature });
    let mut expected = logits();
    expected[97] = 7.5;
    assert_eq!(next(&mut harness).action, edited(LogitEdit::Replace(expected), None));
    assert_eq!(next(&mut harness).action, edited(LogitEdit::Keep, Some(0.25)));
    let set = LogitEdit::Set(vec![(97, f32::NEG_INFINITY), (98, 2.0)]);
    assert_eq!(next(&mut harness).action, edited(set, Some(0.0)));
    assert_eq!(next(&mut harness).action, edited(LogitEdit::Add(vec![(97, 1.5)]), None));
    let ramp = (0..VOCABULARY).map(|index| index as f32).collect();
    assert_eq!(next(&mut harness).action, edited(LogitEdit::Replace(ramp), None));
    let reply = next(&mut harness);
    no_exception(&reply);
    assert_eq!(reply.action, None);
    for message in [
        "InvalidActionError: adjust_logits takes 265 logits, one per token of the vocabulary, got 3",
        "InvalidActionError at ForwardPass: the logit of token 0 must not be NaN; use -inf to ban a token",
        "InvalidActionError at ForwardPass: all tokens are banned: every logit is -inf",
        "InvalidActionError at ForwardPass: token 999 is not in the vocabulary; ids must be from 0 to 264",
        "InvalidActionError: `token_temp` must be a number of 0 or more, got -1",
    ] {
        assert_eq!(raised(&next(&mut harness)).0, message);
    }
}

#[test]
fn valid_actions_pass_and_invalid_ones_are_rejected() {
    let factory = load(
        r#"
from shared.types import ForceTokens
@mod(config={"do": "nothing"})
def act(event, actions, tokenizer):
    return eval(event.config["do"])
"#,
    );
    let act = |what: &str, event: CallEvent<'_>| ModHarness::new(factory.as_ref(), &json!({ "do": what })).call(event);
    let prefilled = || CallEvent::Prefilled;
    let drawn = || CallEvent::Sampled { token: 65, text: "A", logprob: -1.0 };
    for (what, action) in [
        (
            "actions.adjust_prefill([65, 66], max_steps=5)",
            Action::AdjustedPrefill { tokens: vec![65, 66], max_tokens: Some(5) },
        ),
        ("actions.force_output((65,))", Action::ForceOutput(vec![65])),
        ("actions.tool_calls({'name': 'ä'})", Action::ToolCalls(json!({"name": "ä"}))),
        ("actions.emit_error('no')", Action::EmitError { message: "no".into(), fault: Fault::QuoteMod }),
    ] {
        let reply = act(what, prefilled());
        no_exception(&reply);
        assert_eq!(reply.action, Some(action));
    }
    assert_eq!(act("ForceTokens([65])", drawn()).action, Some(Action::ForceTokens(vec![65])));
    assert_eq!(act("actions.backtrack(2)", drawn()).action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
    assert_eq!(act("actions.noop()", drawn()).action, None);
    for (what, message) in [
        (
            "actions.force_tokens([65])",
            "InvalidActionError: Action 'force_tokens' not permitted for event type Prefilled; it is permitted for ForwardPass, Sampled, Added",
        ),
        ("ForceTokens([65])", "InvalidActionError: Action 'ForceTokens' not permitted for event type Prefilled"),
        (
            "actions.force_output('text')",
            "InvalidActionError: force_output takes token ids, not text; use tokenizer.encode(text)",
        ),
        (
            "actions.force_output([9999])",
            "InvalidActionError at Prefilled: token 9999 is not in the vocabulary; ids must be from 0 to 264",
        ),
        ("actions.tool_calls(object)", "TypeError: Object of type type is not JSON serializable"),
        ("3", "InvalidActionError: a mod must return an action or None, got int; use the builder, e.g. actions.noop()"),
    ] {
        assert_eq!(raised(&act(what, prefilled())).0, message);
    }
    let message = factory.start(&json!({"doo": 1}), &crate::mods::builtin::testing::run()).err().unwrap();
    assert_eq!(message, "unknown field `doo`; known fields: do");
}

#[test]
fn nothing_is_discarded_after_removal_of_announced_tokens() {
    let factory = load("@mod\ndef act(event, actions): event.hold_back(2, discard=True)");
    let mut harness = ModHarness::new(factory.as_ref(), &json!({}));
    for token in [65, 66, 67] {
        no_exception(&harness.add(token));
    }
    for (left, discard_from) in [(2, Some(1)), (1, None)] {
        harness.instance.retracted(left);
        assert_eq!(harness.instance.discard_from(), discard_from);
    }
}

#[test]
fn tokens_are_discarded_as_long_as_the_mod_announces_it() {
    let factory = load(
        r"
@mod
def act(event, actions):
    if event.added_tokens == [67]: raise ValueError('no announcement')
    if event.added_tokens != [68]: event.hold_back(1, discard=True)
",
    );
    let mut harness = ModHarness::new(factory.as_ref(), &json!({}));
    for (token, discard_from) in [(65, Some(0)), (66, Some(1)), (67, Some(1)), (68, None)] {
        harness.add(token);
        assert_eq!((harness.instance.discard_from(), harness.instance.holdback()), (discard_from, 1));
    }
}

#[test]
fn out_of_range_numbers_are_handled() {
    let factory = load(
        r#"
@mod(config={"do": ""})
def act(event, actions, tokenizer):
    return eval(event.config["do"])
"#,
    );
    let act = |what: &str| {
        let mut harness = ModHarness::new(factory.as_ref(), &json!({ "do": what }));
        let reply = harness.call(CallEvent::Sampled { token: 65, text: "A", logprob: -1.0 });
        (reply, harness.instance.holdback())
    };
    let all = Action::Backtrack { n: i32::MAX.unsigned_abs(), tokens: vec![] };
    assert_eq!(act("actions.backtrack(10**30)").0.action, Some(all));
    let (reply, holdback) = act("event.hold_back(10**30)");
    no_exception(&reply);
    assert!(holdback >= 1 << 20, "{holdback}");
    let discard_from = |what: &str| {
        let mut harness = ModHarness::new(factory.as_ref(), &json!({ "do": what }));
        no_exception(&harness.add(65));
        no_exception(&harness.add(66));
        harness.instance.discard_from()
    };
    assert_eq!(discard_from("event.hold_back(1, discard=True)"), Some(1));
    assert_eq!(discard_from("event.hold_back(10**30, discard=True)"), Some(0));
    assert_eq!(discard_from("event.hold_back(1)"), None);
    assert_eq!(discard_from("event.hold_back(-1, discard=True)"), None);
    for (what, message) in [
        ("event.hold_back(1.5)", "InvalidActionError: `count` of hold_back must be an integer or None, got 1.5"),
        (
            "actions.backtrack(1.5)",
            "InvalidActionError: `steps` of backtrack must be an integer of 1 or more, got 1.5; use force_tokens to append without removing",
        ),
        (
            "actions.force_tokens([65] * 1000 + [2**70])",
            "InvalidActionError: an action takes token ids, got 1180591620717411303424",
        ),
        (
            "actions.force_tokens([float('inf')])",
            "InvalidActionError: force_tokens takes a list of token ids: cannot convert float infinity to integer",
        ),
        ("actions.tool_calls('y' * (17 << 20))", "ValueError: a message to the server has"),
        (
            "actions.emit_error('y' * 100000)",
            "InvalidActionError at Sampled: the text of an error must have at most 65536 bytes, got 100000",
        ),
        ("tokenizer.encode('y' * (2 << 20))", "ValueError: encode takes a text of up to 1048576 bytes, got 2097152"),
    ] {
        let (reply, _) = act(what);
        assert!(raised(&reply).0.starts_with(message), "{what}: {:?}", reply.exception);
    }
}
