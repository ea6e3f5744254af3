use super::{EvictedMessage, ImageRecord, RawJson, TokenId, from_object};
use half::f16;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use utoipa::ToSchema;

/// Thunder's measurements at an event; their JSON is the event's `details`.
///
/// All fields are optional: `details` of another engine may have any content and parse as empty measurements.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Measurements {
    /// Index in the sequence of the first affected token; for `ForwardPass`, of the next token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<u32>,
    /// `Prefilled`: the prompt and the request's parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<Box<PromptRecord>>,
    /// `Sampled`: the sampled token. `Added`: one entry per appended token, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<TokenMeasurement>,
    /// `ForwardPass`: entropy of the model's full distribution, in bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f32>,
    /// `ForwardPass`: most probable next tokens of the model at temperature 1, before mods, highest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub model: Vec<Alternative>,
    /// `ForwardPass`: the logits of the first tokens of `model`, up to 64, after each layer, if the request had `lens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lens: Option<Box<LogitLens>>,
    /// `Sampled`: the most probable tokens after mods edited the logits; empty when no mod did.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after_mods: Vec<Alternative>,
    /// `Sampled`: the most probable tokens of the distribution that the token was drawn from, after penalties, filters
    /// and temperature, and always the sampled token.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after_sampler: Vec<Alternative>,
    /// `Sampled`: the sampler's stages in order, each with the number of candidates left after it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageCount>,
    /// `Sampled`: the token that speculative decoding drafted for this position. If it equals the sampled token, that
    /// token needed no separate decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafted: Option<TokenId>,
    /// `Sampled`: number of draws before this one in the step. Their tokens contained the trigger of the request's
    /// constraint and text after it that the constraint does not permit.
    #[serde(skip_serializing_if = "is_zero")]
    pub redraws: u32,
    /// `Added`: the reason why these tokens end the sequence, e.g. the stop string they completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<String>,
    /// `Prefilled`, `ForwardPass` and `Added`: tokens evicted before the event because the context was full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evicted: Option<Box<Eviction>>,
    /// `ForwardPass` and `Added`: a note for the reader, e.g. that parameters were changed, or that these tokens
    /// violate the request's grammar.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// `Added`: the last of these tokens ends the generation and is not part of the answer's text or token count.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ends_generation: bool,
    /// `Added` without tokens, the last event of a run: number of tokens at the end of the sequence that are not part of
    /// the answer, because the run ended before they were released.
    #[serde(skip_serializing_if = "is_zero")]
    pub discarded: u32,
    /// Microseconds since the run started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elapsed_us: Option<u64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Tokens evicted because the context was full. Positions in this event and later ones, and in attention rows, refer to
/// the sequence after the eviction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Eviction {
    /// First index and one past the last index of each evicted range, in the sequence before the eviction; in order. At
    /// `Prefilled`, this is the client's prompt: the recorded prompt is already without these tokens.
    pub ranges: Vec<(u32, u32)>,
    /// The evicted messages; empty if tokens were evicted regardless of messages.
    pub messages: Vec<EvictedMessage>,
}

/// The prompt as the model sees it, and the parameters of the request.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PromptRecord {
    /// Token ids.
    pub tokens: Vec<TokenId>,
    /// Text of each token. A token that is an incomplete part of a UTF-8 character has ""; its bytes join a later
    /// token.
    pub texts: Vec<String>,
    /// The author of each part of the prompt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<Span>,
    /// The images, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageRecord>,
    /// The messages as the client sent them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation: Option<serde_json::Value>,
    /// The tools as the client sent them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<serde_json::Value>,
    /// The request's parameters, e.g. for sampling, limits and mods: everything needed to repeat the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<serde_json::Value>,
}

/// A contiguous part of the prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Span {
    /// `system`, `user`, `assistant`, `tool`, or `template` for text that the chat template adds.
    pub role: String,
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
}

/// A token and its place in the model's full distribution, before mods, temperature and penalties.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenMeasurement {
    /// The token.
    pub token: TokenId,
    /// Its text; "" for an incomplete part of a UTF-8 character, whose bytes join the text of a later token.
    #[serde(default)]
    pub text: String,
    /// Natural logarithm of its probability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f32>,
    /// 1 for the most probable token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Entropy of that distribution, in bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f32>,
}

/// One candidate for the next token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Alternative {
    /// The token.
    pub token: TokenId,
    /// Its text; lossy for an incomplete part of a UTF-8 character.
    #[serde(default)]
    pub text: String,
    /// Its probability, between 0 and 1.
    pub prob: f32,
}

/// Logits that the output head gives for the hidden states after each layer, for some tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LogitLens {
    /// The layers, in order.
    pub layers: Vec<u16>,
    /// A list for each layer, with the logit of each token.
    pub logits: Vec<Vec<f32>>,
}

impl LogitLens {
    /// Rounds a logit to the nearest finite 16-bit float.
    #[must_use]
    pub fn round(logit: f32) -> f16 {
        f16::from_f32(logit.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
    }
}

/// The number of candidates after one stage of the sampler chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StageCount {
    /// llama.cpp's name of the stage: `penalties`, `top-k`, `top-p`, `min-p`, `temp` …; `grammar` for the request's
    /// constraint, `argmax` at temperature 0.
    #[schema(value_type = String)]
    pub name: Cow<'static, str>,
    /// Number of candidates left after the stage.
    pub left: u32,
}

impl Measurements {
    /// Parses `details`; JSON of another shape gives empty measurements.
    #[must_use]
    pub fn from_details(details: &RawJson) -> Self {
        from_object(details.get()).unwrap_or_default()
    }

    /// Returns true if nothing was measured, as in the `details` of another engine.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self {
            position,
            prompt,
            tokens,
            entropy,
            model,
            lens,
            after_mods,
            after_sampler,
            stages,
            drafted,
            redraws,
            stopped_by,
            evicted,
            note,
            ends_generation,
            discarded,
            elapsed_us,
        } = self;
        position.is_none()
            && prompt.is_none()
            && tokens.is_empty()
            && entropy.is_none()
            && model.is_empty()
            && lens.is_none()
            && after_mods.is_empty()
            && after_sampler.is_empty()
            && stages.is_empty()
            && drafted.is_none()
            && *redraws == 0
            && stopped_by.is_none()
            && evicted.is_none()
            && note.is_none()
            && !ends_generation
            && *discarded == 0
            && elapsed_us.is_none()
    }
}
