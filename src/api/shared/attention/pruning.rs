//! Suggests sentences that a client could remove from its context because they received little attention.

use super::sentences::{Sentence, SentenceKey, listed_sentences, split_sentences};
use crate::api::shared::Fields;
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::server::ApiError;
use crate::trace::attention::AttentionRows;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use utoipa::ToSchema;

/// Default threshold: a sentence is suggested if none of its tokens received this much attention at any step.
const DEFAULT_THRESHOLD: f32 = 0.05;
/// Maximum requests whose attention a connection stores for each sentence.
const MAX_STORED_REQUESTS: usize = 3;
/// Maximum sentences in a request.
const MAX_SENTENCES: usize = 100_000;
/// Maximum sentences that a connection stores. The history is cleared before another one is added.
const MAX_STORED_SENTENCES: usize = 20_000;

/// Attention per sentence while an answer is generated.
#[derive(Debug, Clone)]
pub(crate) struct SentenceTracker {
    threshold: f32,
    sentences: Arc<[Sentence]>,
    /// Largest attention of any token of each sentence so far.
    max_attention: Vec<f32>,
    /// For each token of the answer, the sentences whose maximum it raised, with the maximum before it; `None` for a token
    /// without attention.
    steps: Vec<Option<Vec<(u32, f32)>>>,
}

/// A sentence that can be removed.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct Prunable {
    turn_id: i64,
    sentence_id: i64,
    /// Largest attention of any of its tokens at any step of this answer or of the answers to the three requests before
    /// it on this connection. The attention is the mean over all heads of all layers.
    max_attention: f32,
    /// Index of the first token.
    start: usize,
    /// Index after the last token.
    end: usize,
}

/// Attention of each sentence in the answers to the last requests.
type AttentionHistory = HashMap<SentenceKey, VecDeque<f32>>;

/// Attention in the answers to earlier requests of a connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct PruningHistory(Arc<Mutex<AttentionHistory>>);

impl SentenceTracker {
    /// Parses `suggest_pruning`, `prune_below`, and `sentences`: a list of `{turn_id, sentence_id, start, end}`.
    /// Without a list, the prompt is split by [`split_sentences`].
    ///
    /// # Errors
    /// 400 for sentences outside the prompt.
    pub(crate) fn parse(
        fields: Fields<'_>,
        vocabulary: &Vocabulary,
        prompt: &[TokenId],
    ) -> Result<Option<Self>, ApiError> {
        let threshold = fields.number("prune_below", 0.0..=1.0)?.unwrap_or(DEFAULT_THRESHOLD);
        let listed = fields.list("sentences")?;
        if !fields.flag("suggest_pruning")?.unwrap_or(false) {
            return Ok(None);
        }
        let sentences = match listed {
            Some(list) if list.len() > MAX_SENTENCES => {
                let message = format!("`sentences` must have at most {MAX_SENTENCES} entries, got {}", list.len());
                return Err(ApiError::invalid("sentences", message));
            }
            Some(list) => listed_sentences(list, prompt.len())?,
            None => split_sentences(vocabulary, prompt),
        };
        Ok(Some(Self {
            threshold,
            max_attention: vec![0.0; sentences.len()],
            steps: Vec::new(),
            sentences: sentences.into(),
        }))
    }

    /// Adds the attention of a token, if it has one.
    pub(crate) fn add_step(&mut self, rows: Option<&AttentionRows<'_>>) {
        let raised = rows.map(|rows| {
            let mean = rows.mean();
            let mut raised = Vec::new();
            for (index, (sentence, max)) in self.sentences.iter().zip(&mut self.max_attention).enumerate() {
                let values = mean.get(sentence.range()).unwrap_or_default();
                let largest = values.iter().fold(*max, |max, &value| max.max(value));
                if largest > *max {
                    raised.push((index as u32, std::mem::replace(max, largest)));
                }
            }
            raised
        });
        self.steps.push(raised);
    }

    /// Removes the last tokens.
    pub(crate) fn retract(&mut self, tokens: usize) {
        let left = self.steps.len().saturating_sub(tokens);
        for (index, max) in self.steps.drain(left..).rev().flatten().flatten() {
            self.max_attention[index as usize] = max;
        }
    }

    /// Returns the removable sentences in order. An answer without attention returns nothing.
    pub(crate) fn suggestion(&self, history: &PruningHistory) -> Vec<Prunable> {
        if !self.has_attention() {
            return Vec::new();
        }
        let history = history.0.lock().unwrap_or_else(PoisonError::into_inner);
        let prunable = self.sentences.iter().zip(&self.max_attention).filter_map(|(sentence, &max)| {
            let earlier = history.get(&sentence.key).into_iter().flatten();
            let max_attention = earlier.fold(max, |a, &b| a.max(b));
            (max_attention < self.threshold).then_some(Prunable {
                turn_id: sentence.turn,
                sentence_id: sentence.sentence,
                max_attention,
                start: sentence.start,
                end: sentence.end,
            })
        });
        prunable.collect()
    }

    fn has_attention(&self) -> bool {
        self.steps.iter().any(Option::is_some)
    }
}

impl PruningHistory {
    /// Stores the attention of the answers to one request.
    pub(crate) fn add<'a>(&self, answers: impl Iterator<Item = &'a SentenceTracker>) {
        let mut maxima: HashMap<SentenceKey, f32> = HashMap::new();
        for answer in answers.filter(|answer| answer.has_attention()) {
            for (sentence, &max) in answer.sentences.iter().zip(&answer.max_attention) {
                let largest = maxima.entry(sentence.key).or_default();
                *largest = largest.max(max);
            }
        }
        let mut history = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, max) in maxima {
            if history.len() >= MAX_STORED_SENTENCES && !history.contains_key(&key) {
                history.clear();
            }
            let earlier = history.entry(key).or_default();
            earlier.push_back(max);
            if earlier.len() > MAX_STORED_REQUESTS {
                earlier.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sentences::tests::list;
    use super::*;

    fn tracker(threshold: f32) -> SentenceTracker {
        let sentences = listed_sentences(&list(&[(0, 2), (2, 3)]), 3).unwrap();
        SentenceTracker {
            threshold,
            max_attention: vec![0.0; sentences.len()],
            steps: Vec::new(),
            sentences: sentences.into(),
        }
    }

    /// Returns a tracker of an answer with these rows.
    fn answer(rows: &[[f32; 3]]) -> SentenceTracker {
        let mut tracker = tracker(0.2);
        rows.iter().for_each(|row| tracker.add_step(Some(&AttentionRows::new(row, 1, 1).unwrap())));
        tracker
    }

    /// Returns the `sentence_id` of each sentence that is suggested.
    fn suggested(tracker: &SentenceTracker, history: &PruningHistory) -> Vec<i64> {
        tracker.suggestion(history).iter().map(|prunable| prunable.sentence_id).collect()
    }

    #[test]
    fn unattended_sentence_is_suggested_until_attended_again() {
        let history = PruningHistory::default();
        let suggestion = |row: [f32; 3]| {
            let answer = answer(&[row]);
            let prunable = answer.suggestion(&history);
            history.add(std::iter::once(&answer));
            prunable
        };
        let first = suggestion([0.1, 0.8, 0.1]);
        assert_eq!((first.len(), first[0].sentence_id, first[0].max_attention), (1, 1, 0.1));
        assert!(suggestion([0.1, 0.1, 0.8]).is_empty(), "the earlier answer attended to the first sentence");
        for _ in 0..3 {
            assert!(suggestion([0.1, 0.8, 0.1]).is_empty());
        }
        assert_eq!(suggestion([0.1, 0.8, 0.1])[0].sentence_id, 1, "only the last three requests count");
        assert!(tracker(0.2).suggestion(&history).is_empty(), "an answer without tokens suggests nothing");
    }

    #[test]
    fn samples_of_a_request_do_not_affect_each_other() {
        let history = PruningHistory::default();
        let samples = [[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]].map(|row| answer(&[row]));
        let found = samples.each_ref().map(|sample| suggested(sample, &history));
        assert_eq!(found, [vec![1], vec![0], vec![0, 1], vec![0, 1]]);
        history.add(samples.iter());
        assert!(suggested(&answer(&[[0.1, 0.1, 0.1]]), &history).is_empty(), "the samples attended to both sentences");
    }

    #[test]
    fn removed_tokens_do_not_count() {
        let history = PruningHistory::default();
        let mut answer = answer(&[[0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]);
        answer.add_step(None);
        assert!(suggested(&answer, &history).is_empty());
        answer.retract(2);
        assert_eq!(suggested(&answer, &history), [1]);
        answer.retract(1);
        assert!(suggested(&answer, &history).is_empty(), "no token is left");
        assert_eq!(answer.max_attention, [0.0, 0.0]);
    }
}
