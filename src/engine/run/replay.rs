//! Replay of recorded events for a fork: new mod instances receive them and reach the same state as the recorded ones.

use super::dispatch::ActiveMod;
use crate::engine::error::SubmitError;
use crate::engine::fork::ForkPoint;
use crate::events::{ActionType, Event, ModCall, RequestedAction, TraceItem};
use crate::mods::{RecordedSequence, ReplayLimits, RunView};
use std::sync::Arc;

/// Delivers the recorded events before the fork to the mods of the new run. Their actions are compared with the
/// recorded ones, but not applied.
///
/// # Errors
/// [`SubmitError::ModDiffers`], and [`SubmitError::NotForkable`] if the events do not fit the model.
pub fn replay_mods(
    fork: &ForkPoint,
    mods: &mut [ActiveMod],
    view: &Arc<RunView>,
    limits: ReplayLimits,
) -> Result<(), SubmitError> {
    if mods.is_empty() {
        return Ok(());
    }
    let mut sequence = RecordedSequence::new(limits);
    let not_forkable = |reason| SubmitError::NotForkable { step: fork.step, reason };
    // An event is followed by the calls of mods for it, each with its action.
    for group in fork.items.chunk_by(|_, next| !matches!(next, TraceItem::Event(_))) {
        let Some((TraceItem::Event(event), rest)) = group.split_first() else { continue };
        sequence.apply_event(event, &view.vocabulary).map_err(not_forkable)?;
        let mut called = vec![false; mods.len()];
        for (at, item) in rest.iter().enumerate() {
            match item {
                TraceItem::ModCall(call) => {
                    let is_called = |&index: &usize| !called[index] && mods[index].name == call.mod_name;
                    let Some(index) = (0..mods.len()).find(is_called) else { continue };
                    called[index] = true;
                    let recorded = Some((call, recorded_action(&rest[at + 1..])));
                    let must_repeat = fork.mods_repeat_from[index].is_some_and(|from| event.step >= from as i32);
                    deliver(&sequence, event, &mut mods[index], view, recorded.filter(|_| must_repeat), fork.step)?;
                }
                TraceItem::Action(action) => sequence.apply_action(action),
                _ => {}
            }
        }
        for (active, _) in mods.iter_mut().zip(called).filter(|(_, called)| !called) {
            deliver(&sequence, event, active, view, None, fork.step)?;
        }
    }
    Ok(())
}

/// Returns the action that follows a call, unless it is a Noop.
fn recorded_action(items: &[TraceItem]) -> Option<RequestedAction> {
    let of_call = items.iter().take_while(|item| !matches!(item, TraceItem::ModCall(_)));
    let mut actions = of_call.filter_map(|item| match item {
        TraceItem::Action(action) if action.action_type != ActionType::Noop => Some(RequestedAction::from(action)),
        _ => None,
    });
    actions.next()
}

/// Delivers an event to a mod, and compares its reply with `recorded`: a call and its action. Counts the failure of that
/// call. Without a recorded call, failures do not count: recorded events lack data, such as hidden states.
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
    let reply = sequence.deliver(event, active.instance.as_mut(), view);
    let reply = reply.map_err(|reason| SubmitError::NotForkable { step, reason })?;
    let (Some(reply), Some((call, action))) = (reply, recorded) else { return Ok(()) };
    let failure = call.exception_occurred.then(|| call.exception_message.as_deref().unwrap_or_default());
    active.health.count_call(&active.name, event.event_type, event.step.max(0) as u32, failure);
    // A failed call had no effect, and may succeed now, for example if it had timed out.
    if call.exception_occurred || (reply.exception.is_none() && reply.action == action) {
        return Ok(());
    }
    let describe = |action: Option<RequestedAction>| action.map_or_else(|| "Noop".to_owned(), |it| it.to_string());
    Err(SubmitError::ModDiffers {
        name: active.name.clone(),
        step: event.step,
        event: event.event_type.as_str(),
        recorded: describe(action),
        now: reply.exception.map_or_else(|| describe(reply.action), |message| format!("the error {message:?}")),
    })
}
