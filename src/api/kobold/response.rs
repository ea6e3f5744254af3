//! Generated texts and the events of a stream in `KoboldCPP`'s format.

use super::error::KoboldErrorResponse;
use crate::api::shared::generation::{
    LogprobsByText, ProbabilityFormatter, ThunderFields, TokenLogprob, text_or_bytes,
};
use crate::engine::MeasuredToken;
use crate::events::TokenId;
use crate::model::Vocabulary;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// Maximum alternatives per token.
const MAX_ALTERNATIVES: usize = 10;
/// Value for the logarithm of 0, because JSON has no infinity.
const NO_LOGPROB: f32 = f32::MIN;

/// A list with one result.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldResults<T> {
    #[schema(value_type = Vec<T>)]
    pub(super) results: [T; 1],
}

/// A generated text.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldResult {
    pub(super) text: String,
    /// `stop`, `length` or `abort`.
    pub(super) finish_reason: &'static str,
    /// Null unless requested.
    #[schema(value_type = Option<KoboldLogprobs>)]
    pub(super) logprobs: Option<Arc<KoboldLogprobs>>,
    pub(super) prompt_tokens: u32,
    pub(super) completion_tokens: u32,
}

/// Log-probabilities of an answer: lists with one entry per token.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct KoboldLogprobs {
    tokens: Vec<String>,
    token_ids: Vec<TokenId>,
    token_logprobs: Vec<f64>,
    /// The most probable tokens at each position, by text.
    #[schema(value_type = Vec<HashMap<String, f64>>)]
    top_logprobs: Vec<LogprobsByText>,
    /// Index of each token's first character.
    text_offset: Vec<usize>,
    content: Vec<KoboldTokenLogprobs>,
}

/// A token with its log-probability and alternatives.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldTokenLogprobs {
    id: TokenId,
    token: String,
    bytes: Vec<u8>,
    /// The alternatives, most probable first.
    top_logprobs: Vec<TokenLogprob>,
    logprob: f64,
    /// Like `id`.
    token_id: TokenId,
}

/// The log-probabilities of an ended generation.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct LastLogprobsResponse {
    /// Null unless requested.
    #[schema(value_type = Option<KoboldLogprobs>)]
    pub(super) logprobs: Option<Arc<KoboldLogprobs>>,
}

/// The text of a generation, which may be active.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldPartialResult {
    pub(super) text: String,
}

/// The result of ending generations: `"true"` if there were any, otherwise `"false"`.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldAbortResponse {
    pub(super) success: &'static str,
    pub(super) done: &'static str,
}

/// An event of a stream of text.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum KoboldStreamEvent {
    /// An addition to the text, the end, or a retraction.
    Token {
        /// The addition.
        token: String,
        /// `stop`, `length` or `abort`, in the last event.
        finish_reason: Option<&'static str>,
        /// A retraction.
        #[serde(skip_serializing_if = "Option::is_none")]
        thunder: Option<ThunderFields>,
    },
    /// The run failed; the last event.
    Error(KoboldErrorResponse),
}

impl KoboldStreamEvent {
    /// Returns true for the last event of a stream.
    pub(super) const fn is_last(&self) -> bool {
        matches!(self, Self::Error(_) | Self::Token { finish_reason: Some(_), .. })
    }
}

impl KoboldLogprobs {
    /// Returns the approximate size in bytes. Every token and alternative has an entry in two lists.
    pub(super) fn bytes(&self) -> usize {
        let tokens = size_of_val(&*self.content) + self.content.iter().map(|token| token.token.len()).sum::<usize>();
        let alternatives = self.content.iter().flat_map(|token| &token.top_logprobs);
        let alternatives: usize = alternatives.map(|other| size_of_val(other) + other.token.len()).sum();
        2 * (tokens + alternatives)
    }

    /// Returns the log-probabilities of the answer's tokens.
    pub(super) fn new(tokens: &[MeasuredToken], vocabulary: &Vocabulary) -> Self {
        let formatter =
            ProbabilityFormatter { vocabulary, top: MAX_ALTERNATIVES, after_sampler: false, no_logprob: NO_LOGPROB };
        let (mut lists, mut offset) = (Self::default(), 0);
        for MeasuredToken { measurement, alternatives, .. } in tokens {
            let (id, bytes, token) = formatter.parts(measurement.token);
            let logprob = formatter.logprob(measurement).into();
            let top_logprobs = formatter.top_logprobs(alternatives);
            let mut by_text = LogprobsByText::default();
            for other in top_logprobs.iter().filter(|other| other.id != id) {
                by_text.insert(text_or_bytes(&other.bytes), other.logprob);
            }
            // The sampled token has the same text and value as in the other lists.
            by_text.set_sampled(&token, logprob);
            lists.tokens.push(token.clone());
            lists.token_ids.push(id);
            lists.token_logprobs.push(logprob);
            lists.top_logprobs.push(by_text);
            lists.text_offset.push(offset);
            offset += token.chars().count();
            lists.content.push(KoboldTokenLogprobs { id, token, bytes, top_logprobs, logprob, token_id: id });
        }
        lists
    }
}

#[cfg(test)]
impl KoboldLogprobs {
    /// Returns log-probabilities of `count` tokens without alternatives.
    pub(super) fn with_tokens(count: u32) -> Self {
        let token = |id| KoboldTokenLogprobs {
            id: id as TokenId,
            token: "x".into(),
            bytes: Vec::new(),
            top_logprobs: Vec::new(),
            logprob: -1.0,
            token_id: id as TokenId,
        };
        Self { content: (0..count).map(token).collect(), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Alternative, TokenMeasurement};
    use crate::model::SpecialTokens;

    #[test]
    fn sampled_part_of_a_character_has_one_name() {
        let pieces = ["ä".as_bytes(), &"ä".as_bytes()[..1], &"日".as_bytes()[..1]].map(Box::from).into();
        let vocabulary =
            Vocabulary::new(pieces, vec![false; 3], Vec::new(), SpecialTokens::default(), |_, _, _| Vec::new());
        let alternatives =
            [(2, 0.5), (1, 0.25)].map(|(token, prob)| Alternative { token, text: "?".into(), prob }).into();
        let measurement =
            TokenMeasurement { token: 1, text: String::new(), logprob: Some(-1.5), rank: None, entropy: None };
        let lists = KoboldLogprobs::new(&[MeasuredToken { measurement, alternatives, is_hidden: false }], &vocabulary);
        let lists = serde_json::to_value(lists).unwrap();
        let token = &lists["tokens"][0];
        assert_eq!((token, &lists["content"][0]["token"]), (&"\u{fffd}".into(), token));
        assert_eq!(lists["top_logprobs"][0].as_object().unwrap().len(), 2);
        assert_eq!(lists["top_logprobs"][0][token.as_str().unwrap()], -1.5);
    }
}
