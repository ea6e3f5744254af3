//! Decode of a planned batch, and delivery of its logits to the runs.

use super::batch::BatchPart;
use super::drafts::Drafter;
use super::run_slots::RunSlots;
use crate::engine::captures::BatchCaptures;
use crate::engine::kv::slots::KvSlots;
use crate::engine::run::RunResources;
use crate::engine::speculation::run_speculation::DraftedToken;
use crate::events::EndCause;
use crate::model::ModelError;
use std::time::Instant;

/// Decodes the batch and passes the logits to its runs. If the decode fails, ends these runs and returns `false`.
pub fn decode(
    parts: Vec<BatchPart>,
    kv: &mut KvSlots<'_>,
    slots: &mut RunSlots,
    drafter: &mut Drafter<'_>,
    resources: &mut RunResources,
) -> bool {
    let start = Instant::now();
    let mut captures = match kv.decode() {
        Ok(decoded) => BatchCaptures::new(decoded),
        Err(error) => {
            fail(&parts, kv, slots, &error);
            return false;
        }
    };
    drafter.charge(&parts, slots, kv, start);
    for part in parts {
        let Some(scheduled) = slots.get_mut(part.slot) else { continue };
        scheduled.run.sequence_mut().set_kv_len(part.end);
        let checkpoint = scheduled.run.take_due_checkpoint();
        kv.extend(part.slot, &scheduled.run.sequence().tokens()[part.from..part.end], checkpoint);
        scheduled.run.report_progress();
        scheduled.run.set_drafted(part.draft.first().map(|&(_, token)| token));
        for &(index, position) in &part.outputs {
            scheduled.run.set_captures(captures.take(index));
            scheduled.run.on_logits(position, kv.logits(index), resources);
        }
        deliver_draft_logits(&part, kv, slots, resources, &mut captures);
        wipe_invalid_state(part.slot, kv, slots);
    }
    true
}

/// Passes the logits after the drafted tokens of a part to its run.
fn deliver_draft_logits(
    part: &BatchPart,
    kv: &mut KvSlots<'_>,
    slots: &mut RunSlots,
    resources: &mut RunResources,
    captures: &mut BatchCaptures,
) {
    let Some(scheduled) = slots.get_mut(part.slot).filter(|_| !part.draft.is_empty()) else { return };
    kv.extend(part.slot, &part.draft.iter().map(|&(_, token)| token).collect::<Vec<_>>(), None);
    for (offset, &(index, token)) in part.draft.iter().enumerate() {
        let next = part.draft.get(offset + 1).map(|&(_, token)| token);
        let drafted = DraftedToken { position: part.end + offset, token, next, captures: captures.take(index) };
        if !scheduled.on_drafted(drafted, kv.logits(index), resources) {
            break;
        }
    }
}

/// Continues with the drafts of runs whose mods have replied. Returns `false` if there are none.
pub fn resume_drafts(kv: &mut KvSlots<'_>, slots: &mut RunSlots, resources: &mut RunResources) -> bool {
    let mut resumed = false;
    for index in 0..slots.len() {
        if slots.get_mut(index).is_some_and(|scheduled| scheduled.resume_draft(resources)) {
            wipe_invalid_state(index, kv, slots);
            resumed = true;
        }
    }
    resumed
}

/// Discards a slot's state if its run got logits that were NaN or infinite.
fn wipe_invalid_state(index: usize, kv: &mut KvSlots<'_>, slots: &RunSlots) {
    if slots.get(index).is_some_and(|scheduled| scheduled.run.has_invalid_logits()) {
        kv.wipe(index);
    }
}

/// Ends the runs of a batch that could not be decoded, and discards their KV states.
fn fail(parts: &[BatchPart], kv: &mut KvSlots<'_>, slots: &mut RunSlots, error: &ModelError) {
    tracing::error!(%error, "decode failed");
    let cause = match error {
        ModelError::OutOfMemory => EndCause::OutOfMemory,
        _ => EndCause::DecodeFailed,
    };
    for part in parts {
        kv.discard(part.slot);
        if let Some(scheduled) = slots.get_mut(part.slot) {
            scheduled.run.sequence_mut().discard_kv();
            scheduled.run.abort(cause, error.to_string());
        }
    }
}
