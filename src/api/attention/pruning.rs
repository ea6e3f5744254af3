//! Suggestions what a client could take out of its context: sentences that the model hardly looked at while it answered.

use crate::api::ApiError;
use crate::api::shared::Fields;
use crate::api::shared::fields::{abbreviate, integer};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::trace::attention::AttentionRows;
use serde::Serialize;
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// A sentence of which no token got so much attention at any step is suggested, unless the request says otherwise.
const THRESHOLD: f32 = 0.05;
/// Answers that a connection remembers of each sentence.
const REMEMBERED: usize = 4;
/// Sentences that a request can name.
const MOST_SENTENCES: usize = 100_000;
/// Sentences that a connection remembers; one that has seen more starts over.
const MOST_REMEMBERED: usize = 20_000;
/// Ends of sentences, where a request does not say where they are.
const ENDS: [char; 4] = ['.', '!', '?', '\n'];

/// What a sentence is remembered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Name {
    /// Turn and sentence, as the client numbers them.
    Given(i64, i64),
    /// Its tokens: where sentences are counted here, their numbers change when one goes.
    Tokens(u64),
}

/// A sentence of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sentence {
    name: Name,
    turn: i64,
    sentence: i64,
    start: usize,
    end: usize,
}

/// What is watched while an answer is generated.
#[derive(Debug, Clone)]
pub(super) struct Watch {
    threshold: f32,
    sentences: Arc<[Sentence]>,
    /// Largest mean attention of each sentence so far.
    most: Vec<f32>,
    /// Whether there was a step at all.
    saw: bool,
}

/// A sentence that could go.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(in crate::api) struct Prunable {
    turn_id: i64,
    sentence_id: i64,
    /// The largest attention that one of its tokens got at any step of this answer, and of the last ones on this connection:
    /// mean over all heads of all layers.
    max_attention: f32,
    /// First token.
    start: usize,
    /// One past the last token.
    end: usize,
}

/// Of each sentence, the largest attention of the last answers.
type Seen = HashMap<Name, VecDeque<f32>>;

/// What earlier answers on a connection looked at.
#[derive(Debug, Clone, Default)]
pub(super) struct History(Arc<Mutex<Seen>>);

impl Watch {
    /// Reads `suggest_pruning`, `prune_below`, and `sentences`: a list of `{turn_id, sentence_id, start, end}`. Without them
    /// turns begin at control tokens and sentences end at full stops and line breaks.
    ///
    /// # Errors
    /// 400 for sentences that are not within the prompt.
    pub(super) fn read(
        fields: Fields<'_>,
        vocabulary: &Vocabulary,
        prompt: &[TokenId],
    ) -> Result<Option<Self>, ApiError> {
        let threshold = fields.number("prune_below", 0.0..=1.0)?.unwrap_or(THRESHOLD);
        let named = fields.list("sentences")?;
        if !fields.flag("suggest_pruning")?.unwrap_or(false) {
            return Ok(None);
        }
        let sentences = match named {
            Some(list) if list.len() > MOST_SENTENCES => {
                let message = format!("sentences may name {MOST_SENTENCES} of them, got {}", list.len());
                return Err(ApiError::invalid("sentences", message));
            }
            Some(list) => {
                list.iter().enumerate().map(|(at, one)| sentence(at, one, prompt.len())).collect::<Result<_, _>>()?
            }
            None => found(vocabulary, prompt),
        };
        Ok(Some(Self { threshold, most: vec![0.0; sentences.len()], saw: false, sentences: sentences.into() }))
    }

    /// Looks at the attention of a step.
    pub(super) fn see(&mut self, rows: &AttentionRows<'_>) {
        self.saw = true;
        let mean = rows.mean();
        for (sentence, most) in self.sentences.iter().zip(&mut self.most) {
            let seen = mean.get(sentence.range()).unwrap_or_default();
            *most = seen.iter().fold(*most, |most, &value| most.max(value));
        }
    }

    /// What could go, in order; the history remembers what this answer looked at. An answer of nothing looked at nothing, which
    /// says nothing.
    pub(super) fn suggestion(&self, history: &History) -> Vec<Prunable> {
        if !self.saw {
            return Vec::new();
        }
        let mut history = history.0.lock().unwrap_or_else(PoisonError::into_inner);
        let prunable = self.sentences.iter().zip(&self.most).filter_map(|(sentence, &most)| {
            if history.len() >= MOST_REMEMBERED && !history.contains_key(&sentence.name) {
                history.clear();
            }
            let earlier = history.entry(sentence.name).or_default();
            earlier.push_back(most);
            if earlier.len() > REMEMBERED {
                earlier.pop_front();
            }
            let max_attention = earlier.iter().fold(most, |a, &b| a.max(b));
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
}

impl Sentence {
    fn range(self) -> Range<usize> {
        self.start..self.end
    }
}

fn sentence(at: usize, value: &Value, tokens: usize) -> Result<Sentence, ApiError> {
    let field = |name: &str| value.get(name).and_then(integer);
    let read = || {
        let (start, end) = (usize::try_from(field("start")?).ok()?, usize::try_from(field("end")?).ok()?);
        let (turn, number) = (field("turn_id")?, field("sentence_id")?);
        let sentence = Sentence { name: Name::Given(turn, number), turn, sentence: number, start, end };
        (start < end && end <= tokens).then_some(sentence)
    };
    read().ok_or_else(|| {
        let message = format!(
            "sentences[{at}] must be {{turn_id, sentence_id, start, end}} with 0 <= start < end <= {tokens}, the number of \
             input_ids, got {}",
            abbreviate(value)
        );
        ApiError::invalid(format!("sentences[{at}]"), message)
    })
}

/// Sentences as they stand in the text.
fn found(vocabulary: &Vocabulary, prompt: &[TokenId]) -> Vec<Sentence> {
    let mut sentences = Vec::new();
    let (mut turn, mut number, mut start) = (0, 0, 0);
    let texts = vocabulary.texts(prompt);
    for (index, (&token, text)) in prompt.iter().zip(&texts).enumerate() {
        let control = vocabulary.is_control(token);
        let ends = !control && (index + 1 == prompt.len() || text.trim_end_matches(' ').ends_with(ENDS));
        // A control token belongs to no sentence: without it the next turn would not be one.
        let upto = if control { index } else { index + 1 };
        if (control || ends) && upto > start {
            let mut hasher = DefaultHasher::new();
            prompt[start..upto].hash(&mut hasher);
            let name = Name::Tokens(hasher.finish());
            sentences.push(Sentence { name, turn, sentence: number, start, end: upto });
            number += 1;
        }
        if control {
            (turn, number) = (turn + i64::from(number > 0), 0);
        }
        if control || ends {
            start = index + 1;
        }
    }
    sentences
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn watch(threshold: f32) -> Watch {
        let sentences: Vec<Sentence> = [(0, 2), (2, 3)]
            .into_iter()
            .enumerate()
            .map(|(at, (start, end))| {
                sentence(at, &json!({"turn_id": 1, "sentence_id": at, "start": start, "end": end}), 3)
            })
            .collect::<Result<_, _>>()
            .unwrap();
        Watch { threshold, most: vec![0.0; sentences.len()], saw: false, sentences: sentences.into() }
    }

    #[test]
    fn what_no_step_looked_at_is_suggested_until_it_is_looked_at_again() {
        let history = History::default();
        let see = |values: &[f32]| {
            let mut watch = watch(0.2);
            watch.see(&AttentionRows::new(values, 1, 1).unwrap());
            watch.suggestion(&history)
        };
        let first = see(&[0.1, 0.8, 0.1]);
        assert_eq!((first.len(), first[0].sentence_id, first[0].max_attention), (1, 1, 0.1));
        assert!(see(&[0.1, 0.1, 0.8]).is_empty(), "the earlier answer looked at the first sentence");
        for _ in 0..3 {
            see(&[0.1, 0.8, 0.1]);
        }
        assert_eq!(see(&[0.1, 0.8, 0.1])[0].sentence_id, 1, "what lies four answers back is forgotten");
        assert!(watch(0.2).suggestion(&history).is_empty(), "an answer without a token says nothing");
    }

    #[test]
    fn sentences_must_lie_within_the_prompt() {
        let valid = json!({"turn_id": 1, "sentence_id": 3, "start": 1, "end": 2});
        assert!(sentence(0, &valid, 2).is_ok());
        for (field, value) in [("end", json!(3)), ("start", json!(2)), ("start", json!(-1)), ("turn_id", json!("x"))] {
            let mut wrong = valid.clone();
            wrong[field] = value;
            let error = sentence(4, &wrong, 2).unwrap_err().problem().detail;
            assert!(error.starts_with("sentences[4] must be"), "{error}");
        }
    }
}
