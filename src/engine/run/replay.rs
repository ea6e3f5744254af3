//! Delivery of a recorded run's events to new instances of its mods, which brings them to the state they had.

use super::dispatch::ActiveMod;
use crate::engine::error::SubmitError;
use crate::engine::fork::ForkPoint;
use crate::events::{ActionRecord, ActionType, Event, ModCall, RequestedAction, TraceItem};
use crate::mods::{ActionDetails, RecordedSequence, RunView};
use std::sync::Arc;

/// Delivers the events before a fork to the mods of the new run. Their actions are compared with the recorded ones and
/// not applied.
///
/// # Errors
/// [`SubmitError::ModDiffers`], and [`SubmitError::NotForkable`] if the events do not fit the model.
pub fn replay_mods(fork: &ForkPoint, mods: &mut [ActiveMod], view: &Arc<RunView>) -> Result<(), SubmitError> {
    if mods.is_empty() {
        return Ok(());
    }
    let mut sequence = RecordedSequence::default();
    let refuse = |reason| SubmitError::NotForkable { step: fork.step, reason };
    for group in fork.items.chunk_by(|_, next| !matches!(next, TraceItem::Event(_))) {
        let Some((TraceItem::Event(event), rest)) = group.split_first() else { continue };
        sequence.apply_event(event, &view.vocabulary).map_err(refuse)?;
        let mut called = vec![false; mods.len()];
        // The action that won the event, which takes effect after all mods were called.
        let mut winner: Option<&ActionRecord> = None;
        for (at, item) in rest.iter().enumerate() {
            match item {
                TraceItem::ModCall(call) => {
                    let same = |&index: &usize| !called[index] && mods[index].name == call.mod_name;
                    let Some(index) = (0..mods.len()).find(same) else { continue };
                    called[index] = true;
                    let recorded = Some((call, recorded_action(&rest[at + 1..])));
                    let repeats = fork.mods_repeat_from[index].is_some_and(|from| event.step >= from as i32);
                    deliver(&sequence, event, &mut mods[index], view, recorded.filter(|_| repeats), fork.step)?;
                    let failure =
                        call.exception_occurred.then(|| call.exception_message.as_deref().unwrap_or_default());
                    let ActiveMod { name, health, .. } = &mut mods[index];
                    health.count_call(name, event.event_type, event.step.max(0) as u32, failure);
                }
                TraceItem::Action(action) if action.action_type == ActionType::AdjustedPrefill => {
                    sequence.apply_action(action);
                }
                TraceItem::Action(action) if !ActionDetails::from(action).superseded => winner = Some(action),
                _ => {}
            }
        }
        for (active, _) in mods.iter_mut().zip(called).filter(|(_, called)| !called) {
            deliver(&sequence, event, active, view, None, fork.step)?;
        }
        if let Some(action) = winner {
            sequence.apply_action(action);
        }
    }
    Ok(())
}

/// Returns the action that follows a call, unless it is a Noop.
fn recorded_action(items: &[TraceItem]) -> Option<RequestedAction> {
    let own = items.iter().take_while(|item| !matches!(item, TraceItem::ModCall(_)));
    let mut actions = own.filter_map(|item| match item {
        TraceItem::Action(action) if action.action_type != ActionType::Noop => Some(RequestedAction::from(action)),
        _ => None,
    });
    actions.next()
}

/// Delivers an event to a mod, and compares its answer with `recorded`.
fn deliver(
    sequence: &RecordedSequence,
    event: &Event,
    active: &mut ActiveMod,
    view: &Arc<RunView>,
    recorded: Option<(&ModCall, Option<RequestedAction>)>,
    step: u32,
) -> Result<(), SubmitError> {
    if active.health.disabled.is_some() {
        return Ok(());
    }
    let answer = sequence.deliver(event, active.instance.as_mut(), view);
    let answer = answer.map_err(|reason| SubmitError::NotForkable { step, reason })?;
    let (Some(answer), Some((call, action))) = (answer, recorded) else { return Ok(()) };
    // A call that failed had no effect; it may have failed for lack of time.
    if call.exception_occurred || (answer.exception.is_none() && answer.action == action) {
        return Ok(());
    }
    let described = |action: Option<RequestedAction>| action.map_or_else(|| "Noop".to_owned(), |it| it.to_string());
    Err(SubmitError::ModDiffers {
        name: active.name.clone(),
        step: event.step,
        event: event.event_type.as_str(),
        recorded: described(action),
        now: answer.exception.map_or_else(|| described(answer.action), |message| format!("the error {message:?}")),
    })
}
