//! Tracking of the text of an answer and of its reasoning.

use super::answer_text::AnswerText;
use super::reasoning::ReasoningState;
use super::sequence::{SequenceDelta, SequenceTracker};
use crate::mods::{Call, RunView};

/// Text and reasoning of an answer while it is generated.
pub struct AnswerTracker {
    sequence: SequenceTracker,
    text: AnswerText,
    /// `None` before the first call.
    reasoning: Option<ReasoningState>,
    /// Markers of reasoning that replace those of the model's family.
    markers: Option<(String, String)>,
}

impl AnswerTracker {
    /// Creates the tracker of a run. `markers` replace those of the model's family.
    pub fn new(run: &RunView, markers: Option<(String, String)>) -> Self {
        Self { sequence: SequenceTracker::default(), text: AnswerText::new(run), reasoning: None, markers }
    }

    /// Processes a call and returns the change of the answer. The mod must handle `Added`.
    pub fn update<'a>(&mut self, call: &Call<'a>) -> SequenceDelta<'a> {
        let delta = self.sequence.update(call);
        let remaining_bytes = self.text.apply(&delta, &call.run.vocabulary);
        let markers = self.markers.as_ref().map(|(begin, end)| (begin.as_str(), end.as_str()));
        let reasoning = self.reasoning.get_or_insert_with(|| ReasoningState::new(call, markers));
        reasoning.apply(&delta, &self.text, remaining_bytes);
        delta
    }

    /// Returns the text of the answer.
    pub fn text(&self) -> &AnswerText {
        &self.text
    }

    /// Returns the reasoning of the answer; `None` before the first call.
    pub fn reasoning(&self) -> Option<&ReasoningState> {
        self.reasoning.as_ref()
    }

    /// Returns true if the answer is within reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningState::is_within)
    }

    /// Returns the number of tokens of the answer.
    pub fn token_count(&self) -> usize {
        self.sequence.token_count()
    }
}
