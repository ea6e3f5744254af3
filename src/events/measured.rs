use super::{EvictedMessage, RawJson, TokenId};
use serde::{Deserialize, Serialize};

/// What our engine measured at an event; serialised, it is the event's `details`.
///
/// Every field is optional on the way in, so that the `details` of a foreign engine, which may hold anything,
/// read as an empty `Measurements`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Measurements {
    /// Index in the sequence: of the first token concerned, or for `ForwardPass` of the token to come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<u32>,
    /// `Prefilled`: the prompt and the request's parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<Box<PromptRecord>>,
    /// `Sampled`: the drawn token. `Added`: one entry per appended token. In order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<TokenMeasurement>,
    /// `ForwardPass`: entropy of the model's full distribution, in bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f32>,
    /// `ForwardPass`: most probable next tokens of the model, before mods, temperature 1, highest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub model: Vec<Alternative>,
    /// `Sampled`: the same after mods edited the logits; empty when none did.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after_mods: Vec<Alternative>,
    /// `Sampled`: the distribution that was drawn from, after penalties, filters and temperature; the drawn token is always there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after_sampler: Vec<Alternative>,
    /// `Sampled`: the sampler's stages in order and how many candidates each left.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageCount>,
    /// `Added`: why these tokens end the sequence, e.g. the stop string they completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<String>,
    /// `Prefilled` and `ForwardPass`: what went before it, because the context was full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evicted: Option<Box<Eviction>>,
    /// `Added`: what a person should know of these tokens, e.g. that they are not what the request's grammar allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// `Added`: the last of these tokens ends the generation and is no part of the answer, in text or count.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ends_generation: bool,
    /// Microseconds since the run started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elapsed_us: Option<u64>,
}

/// Tokens that went because the context was full. Positions of later events are those behind it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Eviction {
    /// First token and one past the last of what went, as indices of the sequence before; in order.
    pub ranges: Vec<(u32, u32)>,
    /// The messages; empty where tokens went whatever they were.
    pub messages: Vec<EvictedMessage>,
}

/// The prompt as the model will see it, and what was asked.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PromptRecord {
    /// Token ids.
    pub tokens: Vec<TokenId>,
    /// The text of each; a token that is an incomplete piece of UTF-8 has "" and its bytes join a later one.
    pub texts: Vec<String>,
    /// Which part of the prompt came from whom.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<Span>,
    /// The messages, as they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation: Option<serde_json::Value>,
    /// The tools, as they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<serde_json::Value>,
    /// Sampling parameters, seed, stop strings: whatever is needed to run it again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<serde_json::Value>,
}

/// A contiguous part of the prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// `system`, `user`, `assistant`, `tool`, or `template` for what the chat template wrote itself.
    pub role: String,
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
}

/// A token and where it stood in the model's full distribution, before mods, temperature and penalties.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenMeasurement {
    /// The token.
    pub token: TokenId,
    /// Its text; "" for an incomplete piece of UTF-8, whose bytes join the text of a later token.
    #[serde(default)]
    pub text: String,
    /// Natural logarithm of its probability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f32>,
    /// 1 for the most probable token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Entropy of the distribution it was taken from, in bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f32>,
}

/// One candidate for the next token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// The token.
    pub token: TokenId,
    /// Its text, lossy where it is an incomplete piece of UTF-8.
    #[serde(default)]
    pub text: String,
    /// Its probability, 0 … 1.
    pub prob: f32,
}

/// One stage of the sampler chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageCount {
    /// llama.cpp's name: `penalties`, `top-k`, `top-p`, `min-p`, `temp` …; `grammar` for the request's constraint, `argmax` at
    /// temperature 0.
    pub name: String,
    /// Candidates left after it.
    pub left: u32,
}

impl Measurements {
    /// Reads `details`; anything that is not ours reads as empty.
    #[must_use]
    pub fn from_details(details: &RawJson) -> Self {
        serde_json::from_str(details.get()).unwrap_or_default()
    }

    /// Whether nothing was measured, as in the `details` of somebody else's engine.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self {
            position,
            prompt,
            tokens,
            entropy,
            model,
            after_mods,
            after_sampler,
            stages,
            stopped_by,
            evicted,
            note,
            ends_generation,
            elapsed_us,
        } = self;
        position.is_none()
            && prompt.is_none()
            && tokens.is_empty()
            && entropy.is_none()
            && model.is_empty()
            && after_mods.is_empty()
            && after_sampler.is_empty()
            && stages.is_empty()
            && stopped_by.is_none()
            && evicted.is_none()
            && note.is_none()
            && !ends_generation
            && elapsed_us.is_none()
    }
}
