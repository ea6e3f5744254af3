//! Parameters and stages of the sampler chain.

use crate::events::TokenId;
use serde::Serialize;

/// Sampling parameters: llama.cpp's sampler chain with its names, defaults and order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SamplingParams {
    /// The stages in order. A stage that is not listed is skipped.
    pub samplers: Vec<SamplerStage>,
    /// Minimum number of candidates that the filters leave.
    pub min_keep: usize,
    /// Temperature; 0 for argmax.
    pub temperature: f32,
    /// Maximum change of the temperature up and down, depending on the entropy of the candidates; 0 = off.
    pub dynatemp_range: f32,
    /// Exponent that maps the entropy to that range.
    pub dynatemp_exponent: f32,
    /// Number of most probable candidates to keep; 0 = all.
    pub top_k: i32,
    /// Cumulative probability to keep; 1 = off.
    pub top_p: f32,
    /// Minimum probability relative to the most probable candidate; 0 = off.
    pub min_p: f32,
    /// Cumulative probability of typical candidates to keep; 1 = off.
    pub typical_p: f32,
    /// Maximum distance from the highest logit in standard deviations; 0 and below = off.
    pub top_n_sigma: f32,
    /// Probability of removing the most probable candidates; 0 = off.
    pub xtc_probability: f32,
    /// Minimum probability of the candidates to remove; above 0.5 = off.
    pub xtc_threshold: f32,
    /// Divisor of the logits of repeated tokens; 1 = off.
    pub repeat_penalty: f32,
    /// Number of last tokens for the three penalties, including the prompt; -1 = all, 0 = off.
    pub repeat_last_n: i32,
    /// Penalty on tokens that occurred; 0 = off.
    pub presence_penalty: f32,
    /// Penalty per occurrence; 0 = off.
    pub frequency_penalty: f32,
    /// Strength of the penalty on tokens that would continue a repetition; 0 = off.
    pub dry_multiplier: f32,
    /// Growth of the penalty with the length of the repetition; below 1 = off.
    pub dry_base: f32,
    /// Maximum length of repetitions without penalty.
    pub dry_allowed_length: i32,
    /// Number of last tokens that are searched for repetitions; -1 = all, 0 = off.
    pub dry_penalty_last_n: i32,
    /// Texts that end a repetition.
    pub dry_sequence_breakers: Vec<String>,
    /// 0 = off; 1 and 2 = mirostat of that version, which replaces the chain except the temperature.
    pub mirostat: u8,
    /// Target surprise of mirostat, in bits.
    pub mirostat_tau: f32,
    /// Learning rate of mirostat.
    pub mirostat_eta: f32,
    /// Target probability of adaptive-p; below 0 = off.
    pub adaptive_target: f32,
    /// Decay of adaptive-p's memory, below 1.
    pub adaptive_decay: f32,
    /// Random seed.
    pub seed: u32,
    /// Bias per token, added to logits before all stages; `-inf` bans a token.
    pub logit_bias: Vec<(TokenId, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            samplers: SamplerStage::DEFAULT.to_vec(),
            min_keep: 0,
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: 64,
            dry_sequence_breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
            mirostat: 0,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            adaptive_target: -1.0,
            adaptive_decay: 0.9,
            seed: 0,
            logit_bias: Vec::new(),
        }
    }
}

/// A stage of the sampler chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerStage {
    /// Repetition, presence and frequency penalties.
    Penalties,
    /// DRY, the penalty on repeated sequences.
    Dry,
    /// Keeps logits near the highest.
    TopNSigma,
    /// Keeps a number of candidates.
    TopK,
    /// Keeps candidates with a typical probability for the distribution.
    #[serde(rename = "typ_p")]
    TypicalP,
    /// Keeps the most probable candidates up to a cumulative probability.
    TopP,
    /// Keeps candidates near the probability of the best.
    MinP,
    /// Sometimes removes the most probable candidates.
    Xtc,
    /// Ends completions between two texts early, and merges candidates that start with the same text.
    Infill,
    /// The temperature.
    Temperature,
    /// Draws near a target probability; always last.
    AdaptiveP,
}

impl SamplerStage {
    /// llama.cpp's default order.
    pub const DEFAULT: [Self; 9] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
    ];

    /// Name and letter of every stage, as in llama-server.
    pub const NAMES: [(Self, &'static str, char); 11] = [
        (Self::Penalties, "penalties", 'e'),
        (Self::Dry, "dry", 'd'),
        (Self::TopNSigma, "top_n_sigma", 's'),
        (Self::TopK, "top_k", 'k'),
        (Self::TypicalP, "typ_p", 'y'),
        (Self::TopP, "top_p", 'p'),
        (Self::MinP, "min_p", 'm'),
        (Self::Xtc, "xtc", 'x'),
        (Self::Infill, "infill", 'i'),
        (Self::Temperature, "temperature", 't'),
        (Self::AdaptiveP, "adaptive_p", 'a'),
    ];

    /// Returns the stage with this name in any spelling (`top_k`, `top-k`, `topk`) or a common alias.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let plain = |name: &str| name.to_ascii_lowercase().replace(['_', '-'], "");
        match plain(name).as_str() {
            "nucleus" => Some(Self::TopP),
            "temp" => Some(Self::Temperature),
            "typ" | "typical" | "typicalp" => Some(Self::TypicalP),
            wanted => Self::NAMES.iter().find(|(_, name, _)| plain(name) == wanted).map(|(stage, ..)| *stage),
        }
    }

    /// Returns the stage with this letter.
    #[must_use]
    pub fn from_letter(letter: char) -> Option<Self> {
        Self::NAMES.iter().find(|(.., known)| *known == letter).map(|(stage, ..)| *stage)
    }

    /// Returns the name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(stage, ..)| *stage == self).map_or("", |(_, name, _)| name)
    }
}
