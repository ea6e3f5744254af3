//! Comparison of two recordings of the same run.
//!
//! The comparison covers the events, their tokens, and the calls and actions of mods, but not times, probabilities or
//! log lines.

use super::document::Document;
use crate::events::{ActionType, Event, EventType, ModCall, RequestedAction, TraceItem};
use serde::Serialize;

/// The kind of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DifferenceKind {
    /// The prompt.
    Prompt,
    /// A token.
    Token,
    /// The type or step of an event.
    Event,
    /// The called mod, or the failure of a call.
    ModCall,
    /// The action of a mod.
    ModAction,
    /// One recording is longer.
    End,
}

/// The first difference between two recordings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// The kind of the difference.
    pub kind: DifferenceKind,
    /// `sequence_order` of the event with the difference.
    pub sequence_order: i32,
    /// Step of that event.
    pub step: i32,
    /// The entry of the first recording, as text.
    pub recorded: String,
    /// The entry of the second recording, as text.
    pub now: String,
}

/// An item of a recording in comparable form.
struct ComparedItem {
    kind: DifferenceKind,
    sequence_order: i32,
    step: i32,
    /// All numbers that must be equal.
    key: Vec<i64>,
    description: String,
}

/// Finds the first difference between a recording and a second one of the same run. If `is_complete` is false, the
/// first recording was interrupted, and additional items in the second one are not a difference.
#[must_use]
pub fn find_first(recorded: &Document, now: &Document, is_complete: bool) -> Option<Difference> {
    let (a, b) = (compared_items(recorded), compared_items(now));
    let at = a.iter().zip(&b).position(|(a, b)| a.key != b.key || a.description != b.description);
    let at = at.unwrap_or(a.len().min(b.len()));
    let description =
        |item: Option<&ComparedItem>| item.map_or_else(|| "nothing more".to_owned(), |it| it.description.clone());
    let (there, here) = (a.get(at), b.get(at));
    let shown = match (there, here) {
        (None, None) => return None,
        (None, Some(_)) if !is_complete => return None,
        (Some(item), _) | (None, Some(item)) => item,
    };
    Some(Difference {
        kind: if there.is_some() && here.is_some() { shown.kind } else { DifferenceKind::End },
        sequence_order: shown.sequence_order,
        step: shown.step,
        recorded: description(there),
        now: description(here),
    })
}

fn compared_items(document: &Document) -> Vec<ComparedItem> {
    let mut compared_items: Vec<ComparedItem> = Vec::new();
    let (mut order, mut step, mut caller) = (0, 0, String::new());
    for item in document.items() {
        let (kind, key, description) = match &item {
            // Not every version records discarded tokens.
            TraceItem::Event(event) if event.measured.as_ref().is_some_and(|measured| measured.discarded > 0) => {
                continue;
            }
            TraceItem::Event(event) => {
                (order, step) = (event.sequence_order, event.step);
                describe_event(event)
            }
            TraceItem::ModCall(call) => {
                caller.clone_from(&call.mod_name);
                (DifferenceKind::ModCall, vec![i64::from(call.exception_occurred)], describe_call(call))
            }
            TraceItem::Action(action) if action.action_type != ActionType::Noop => {
                (DifferenceKind::ModAction, Vec::new(), format!("{caller}: {}", RequestedAction::from(action)))
            }
            TraceItem::Action(_) | TraceItem::ModLog(_) | TraceItem::Attention(_) => continue,
        };
        compared_items.push(ComparedItem { kind, sequence_order: order, step, key, description });
    }
    compared_items
}

fn describe_event(event: &Event) -> (DifferenceKind, Vec<i64>, String) {
    let name = event.event_type.as_str();
    let measured = event.measured.as_ref();
    let kind = event.event_type as i64;
    let texts = || -> String {
        let tokens = measured.map_or(&[][..], |measured| &measured.tokens);
        tokens.iter().map(|measure| measure.text.as_str()).collect()
    };
    match event.event_type {
        EventType::Prefilled => {
            let prompt = measured.and_then(|measured| measured.prompt.as_ref());
            let tokens = prompt.map_or(&[][..], |prompt| &prompt.tokens);
            let length = event.prompt_length.unwrap_or_default();
            let key = [kind, i64::from(length)].into_iter().chain(tokens.iter().map(|&token| token.into())).collect();
            (DifferenceKind::Prompt, key, format!("a prompt of {length} tokens"))
        }
        EventType::ForwardPass => (DifferenceKind::Event, vec![kind, event.step.into()], name.to_owned()),
        EventType::Sampled => {
            let token = event.sampled_token.unwrap_or(-1);
            let text = event.token_text.clone().unwrap_or_else(texts);
            (DifferenceKind::Token, vec![kind, event.step.into(), token.into()], format!("{name} {text:?} ({token})"))
        }
        EventType::Added => {
            let tokens = event.added_tokens.as_deref().unwrap_or_default();
            let forced = event.forced.unwrap_or_default();
            let head = [kind, event.step.into(), forced.into()];
            let key = head.into_iter().chain(tokens.iter().map(|&token| token.into())).collect();
            let how = if forced { " by a mod" } else { "" };
            (DifferenceKind::Token, key, format!("{name}{how} {:?} {tokens:?}", texts()))
        }
    }
}

fn describe_call(call: &ModCall) -> String {
    match (&call.exception_message, call.exception_occurred) {
        (_, false) => format!("{} called", call.mod_name),
        (message, true) => format!("{} failed: {}", call.mod_name, message.as_deref().unwrap_or("no message")),
    }
}

#[cfg(test)]
mod tests {
    use super::{DifferenceKind, find_first};
    use crate::events::{Event, EventType, Measurements};
    use crate::trace::document::Document;
    use serde_json::{Value, json};

    fn document(token: i32, action: &Value, more: bool) -> Document {
        let mut events = vec![
            json!({"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 3}),
            json!({"event_type": "Sampled", "step": 1, "sequence_order": 1, "sampled_token": token, "token_text": "a"}),
        ];
        if more {
            events.push(json!({"event_type": "Added", "step": 1, "sequence_order": 2, "added_tokens": [token], "forced": false}));
        }
        let call = json!({"event_sequence_order": 1, "mod_name": "m", "event_type": "Sampled", "step": 1, "execution_time_ms": 3.0});
        let text = json!({"request": {"request_id": "r"}, "events": events, "mod_calls": [call], "mod_logs": [], "actions": [action]});
        Document::parse(text.to_string().as_bytes()).unwrap()
    }

    fn backtrack(steps: i32) -> Value {
        json!({"mod_call_sequence": 0, "action_type": "Backtrack", "action_order": 0, "backtrack_steps": steps})
    }

    #[test]
    fn first_difference_is_located_and_described() {
        let same = document(5, &backtrack(1), true);
        assert_eq!(find_first(&same, &document(5, &backtrack(1), true), true), None);
        let token = find_first(&same, &document(6, &backtrack(1), true), true).unwrap();
        assert_eq!((token.kind, token.sequence_order, token.step), (DifferenceKind::Token, 1, 1));
        assert_eq!((token.recorded.as_str(), token.now.as_str()), ("Sampled \"a\" (5)", "Sampled \"a\" (6)"));
        let action = find_first(&same, &document(5, &backtrack(2), true), true).unwrap();
        assert_eq!((action.kind, action.recorded.as_str()), (DifferenceKind::ModAction, "m: Backtrack 1"));
    }

    #[test]
    fn events_of_discarded_tokens_are_not_compared() {
        let (recorded, mut now) = (document(5, &backtrack(1), true), document(5, &backtrack(1), true));
        let mut event = Event::new(EventType::Added, 1, 3, None);
        event.measured = Some(Box::new(Measurements { discarded: 1, ..Measurements::default() }));
        now.events.push(event);
        assert_eq!(find_first(&recorded, &now, true), None);
        assert_eq!(find_first(&now, &recorded, true), None);
    }

    #[test]
    fn early_end_is_a_difference_unless_recording_is_incomplete() {
        let (short, long) = (document(5, &backtrack(1), false), document(5, &backtrack(1), true));
        assert_eq!(find_first(&long, &short, false).unwrap().kind, DifferenceKind::End);
        assert_eq!(find_first(&short, &long, true).unwrap().recorded, "nothing more");
        assert_eq!(find_first(&short, &long, false), None);
    }
}
