//! Speculative decoding in the batches: drafts for runs that generate, and delivery of the logits after drafted tokens.

use super::active_run::ActiveRun;
use super::batch::BatchPart;
use super::{Scheduler, reply_sender};
use crate::engine::speculation::SpeculationOptions;
use crate::engine::speculation::lookahead::DraftedToken;
use crate::events::TokenId;
use crate::model::llama::AttentionRow;
use std::sync::Arc;
use std::time::Instant;

/// Maximum drafted tokens of a run that captures attention, since each row waits in memory until it is recorded.
const MAX_CAPTURED_DRAFT: usize = 4;

impl Scheduler<'_> {
    /// Drafts tokens for the runs in `parts`, which are `(slot, tokens)`, and returns one draft for each part. Batches with
    /// prompts get no drafts: their time would not tell what a draft costs. `captures` is the number of runs that capture
    /// attention.
    pub(super) fn draft(&mut self, parts: &[(usize, usize)], captures: usize) -> Vec<Vec<TokenId>> {
        let mut drafts = vec![Vec::new(); parts.len()];
        if !self.speculates || parts.iter().any(|&(_, tokens)| tokens != 1) {
            return drafts;
        }
        let options = self.options.speculation;
        let token_cost = match self.decode_times.token_cost(parts.len()) {
            _ if !options.adaptive => 0.0,
            Some(token_cost) => token_cost,
            None => return drafts,
        };
        let mut room = self.options.ubatch_size.min(self.options.batch_size) as usize;
        room = room.saturating_sub(parts.len());
        let mut rows = captures;
        for (&(slot, _), draft) in parts.iter().zip(&mut drafts) {
            let Some(ActiveRun { run, speculation, .. }) = self.slots.get_mut(slot) else { continue };
            let limits = run.request().drafts;
            let limit = limits.max.map_or(options.max_draft, |max| SpeculationOptions::MAX_DRAFT.min(max as usize));
            let mut max = limit.min(run.max_draft()).min(room);
            if options.adaptive {
                max = max.min(speculation.account.max_draft(token_cost));
            }
            if run.request().attention {
                max = max.min(MAX_CAPTURED_DRAFT);
                if !self.recording.has_room_for_attention(rows + max) {
                    continue;
                }
            }
            if max == 0 {
                continue;
            }
            let sequence = run.sequence_mut();
            let unchanged = sequence.take_unchanged();
            speculation.ngrams.update(sequence.tokens(), unchanged);
            *draft = speculation.ngrams.draft(sequence.tokens(), max);
            let min = limits.min.map_or(options.min_draft, |min| min as usize);
            // A draft that is shortened because the account is low or the answer ends is used.
            if draft.len() < min.min(max) {
                draft.clear();
            }
            room -= draft.len();
            rows += if run.request().attention { draft.len() } else { 0 };
        }
        drafts
    }

    /// Charges the runs of a batch with the time of its decode, which began at `begun`.
    pub(super) fn charge_drafts(&mut self, parts: &[BatchPart], begun: Instant) {
        if !self.speculates || parts.iter().any(|part| part.len() != 1) {
            return;
        }
        // A GPU has finished when the logits are there.
        if let Some(index) = parts.iter().find_map(BatchPart::first_output) {
            let _ = self.kv.logits(index);
        }
        let elapsed = begun.elapsed();
        let drafted: usize = parts.iter().map(|part| part.draft.len()).sum();
        let seconds = elapsed.as_secs_f64();
        let token_cost = if drafted == 0 {
            self.decode_times.add_plain(parts.len(), seconds);
            None
        } else {
            self.decode_times.add_drafted(parts.len(), drafted, seconds)
        };
        for part in parts {
            let Some(ActiveRun { run, speculation, .. }) = self.slots.get_mut(part.slot) else { continue };
            if part.draft.is_empty() {
                if drafted == 0 {
                    speculation.account.add_plain();
                }
                continue;
            }
            run.count_draft(part.draft.len());
            speculation.account.add_draft(part.draft.len(), token_cost.unwrap_or_default());
        }
    }

    /// Delivers the logits that wait for runs whose mods have replied. Returns `false` if there are none.
    pub(super) fn deliver_lookaheads(&mut self) -> bool {
        let mut delivered = false;
        for index in 0..self.slots.len() {
            let Self { slots, commands, candidates, .. } = self;
            let Some(active) = slots.get_mut(index) else { continue };
            let waits = !active.run.needs_decode() || active.run.has_outputs() || active.is_paused();
            if waits || active.speculation.lookahead.is_empty() {
                continue;
            }
            active.deliver_lookahead(candidates, &|id, call| reply_sender(commands, id, call));
            self.wipe_invalid_state(index);
            delivered = true;
        }
        delivered
    }

    /// Delivers the logits after the drafted tokens of a part that was decoded. `rows` returns the captured attention of a
    /// token of the batch.
    pub(super) fn deliver_draft(
        &mut self,
        part: &BatchPart,
        rows: &mut impl FnMut(usize) -> Option<Arc<AttentionRow>>,
    ) {
        if part.draft.is_empty() {
            return;
        }
        let Self { kv, slots, commands, candidates, .. } = self;
        let Some(active) = slots.get_mut(part.slot) else { return };
        kv.extend(part.slot, &part.draft.iter().map(|&(_, token)| token).collect::<Vec<_>>(), None);
        for (offset, &(index, token)) in part.draft.iter().enumerate() {
            let next = part.draft.get(offset + 1).map(|&(_, token)| token);
            let drafted = DraftedToken { position: part.end + offset, token, next, attention: rows(index) };
            if active.run.awaited_mod().is_some() {
                // The next decode overwrites the logits before the mod replies.
                active.speculation.lookahead.push_back((drafted, kv.logits(index).to_vec()));
            } else if !active
                .deliver(drafted, kv.logits(index), candidates, &|id, call| reply_sender(commands, id, call))
            {
                break;
            }
        }
    }
}
