//! Recording of a run: the events of its prompt and of discarded tokens, and the transfer of its events, attention rows
//! and end to the recorder.

use super::Run;
use crate::engine::recording::Recording;
use crate::events::{EventType, Measurements, PromptRecord};

impl Run {
    /// Records the `Prefilled` event and returns its number.
    pub(super) fn record_prompt(&mut self) -> i32 {
        let Self { event_buffer, sequence, view, request, budget, .. } = self;
        event_buffer.event(EventType::Prefilled, 0, |event| {
            event.prompt_length = Some(sequence.prompt_len() as i32);
            event.tokens_so_far_len = Some(0);
            event.max_steps = Some(budget.max_tokens() as i32);
            event.measured = Some(Box::new(Measurements {
                position: Some(0),
                evicted: sequence.take_unreported_eviction(),
                prompt: Some(Box::new(PromptRecord {
                    texts: view.vocabulary.storable_texts(sequence.tokens()),
                    tokens: sequence.tokens().to_vec(),
                    spans: sequence.spans().to_vec(),
                    images: request.describe_images(sequence.tokens()),
                    conversation: request.conversation.clone(),
                    tools: request.tools.clone(),
                    parameters: Some(view.parameters.clone()),
                })),
                ..Measurements::default()
            }));
        })
    }

    /// Records that the last `discarded` tokens are not part of the answer.
    pub(super) fn record_discard(&mut self, discarded: usize) {
        let Self { event_buffer, sequence, budget, added, .. } = self;
        event_buffer.event(EventType::Added, budget.step(), |event| {
            event.added_tokens = Some(Vec::new());
            event.added_token_count = Some(0);
            event.forced = Some(added.forced);
            event.measured = Some(Box::new(Measurements {
                position: Some(sequence.len().saturating_sub(discarded) as u32),
                discarded: discarded as u32,
                note: Some(
                    "the run ended before its last tokens were released; they are not part of the answer".into(),
                ),
                ..Measurements::default()
            }));
        });
    }

    /// Sends the run's events to the recorder: those that are due, or `everything`.
    pub fn record(&mut self, recording: &mut Recording, everything: bool) {
        let items = if everything { Some(self.event_buffer.take_all()) } else { self.event_buffer.take_due() };
        if let Some(items) = items {
            recording.send_items(self.id, items);
        }
        for (order, captured) in self.attention.take_ready() {
            if self.event_buffer.is_recorded() {
                let stored = self.attention.stored_heads(&self.request.stored_heads, &captured);
                recording.send_attention_row(self.id, order, captured, stored);
            }
        }
    }

    /// Sends the last events and the end of the run to the recorder.
    pub fn record_end(mut self, recording: &mut Recording) {
        if self.event_buffer.is_recorded() {
            self.record(recording, true);
            if let Some(end) = self.end {
                recording.send_end(self.id, end, self.request.attention);
            }
        }
        self.registration.end();
    }
}
