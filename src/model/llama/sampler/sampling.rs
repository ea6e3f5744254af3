use crate::events::TokenId;
use serde::Serialize;

/// How tokens are drawn: llama.cpp's sampler chain, with its names, defaults and order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SamplingParams {
    /// The stages in order. One that is left out does not take place, whatever its parameters say.
    pub samplers: Vec<SamplerStage>,
    /// Fewest candidates that the filters leave.
    pub min_keep: usize,
    /// 0 = argmax.
    pub temperature: f32,
    /// How far the temperature may go to either side with the entropy of the candidates; 0 = off.
    pub dynatemp_range: f32,
    /// How the entropy maps to that range.
    pub dynatemp_exponent: f32,
    /// 0 = all.
    pub top_k: i32,
    /// 1 = off.
    pub top_p: f32,
    /// 0 = off.
    pub min_p: f32,
    /// 1 = off.
    pub typical_p: f32,
    /// Standard deviations below the highest logit; 0 and below = off.
    pub top_n_sigma: f32,
    /// How often the most probable candidates are left out; 0 = off.
    pub xtc_probability: f32,
    /// Which those are; above 0.5 = off.
    pub xtc_threshold: f32,
    /// 1 = off.
    pub repeat_penalty: f32,
    /// Tokens that the three penalties look back on, the prompt's too; -1 = all, 0 = off.
    pub repeat_last_n: i32,
    /// 0 = off.
    pub presence_penalty: f32,
    /// 0 = off.
    pub frequency_penalty: f32,
    /// Strength of the penalty on tokens that would continue a repetition; 0 = off.
    pub dry_multiplier: f32,
    /// How the penalty grows with the length of the repetition; below 1 = off.
    pub dry_base: f32,
    /// Repetitions up to this length go unpunished.
    pub dry_allowed_length: i32,
    /// Tokens that are searched for repetitions; -1 = all, 0 = off.
    pub dry_penalty_last_n: i32,
    /// Texts that a repetition does not reach across.
    pub dry_sequence_breakers: Vec<String>,
    /// 0 = off; 1 and 2 = mirostat of that version, which replaces the whole chain but the temperature.
    pub mirostat: u8,
    /// Surprise that mirostat aims at, in bits.
    pub mirostat_tau: f32,
    /// How fast it learns.
    pub mirostat_eta: f32,
    /// Probability that adaptive-p aims at; below 0 = off.
    pub adaptive_target: f32,
    /// How slowly it forgets, below 1.
    pub adaptive_decay: f32,
    /// Seed of the draw.
    pub seed: u32,
    /// Added to logits before everything else; `-inf` bans.
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
    /// The penalty on repeated sequences.
    Dry,
    /// Only logits near the highest.
    TopNSigma,
    /// Only so many.
    TopK,
    /// Only those that are about as surprising as the distribution.
    #[serde(rename = "typ_p")]
    TypicalP,
    /// Only the most probable, up to a mass.
    TopP,
    /// Only those that are not much less probable than the best.
    MinP,
    /// Sometimes without the most probable.
    Xtc,
    /// The temperature.
    Temperature,
    /// Draws near a probability; always comes last.
    AdaptiveP,
}

impl SamplerStage {
    /// llama.cpp's order.
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

    /// Name and letter of every stage, as llama-server takes and shows them.
    pub const NAMES: [(Self, &'static str, char); 10] = [
        (Self::Penalties, "penalties", 'e'),
        (Self::Dry, "dry", 'd'),
        (Self::TopNSigma, "top_n_sigma", 's'),
        (Self::TopK, "top_k", 'k'),
        (Self::TypicalP, "typ_p", 'y'),
        (Self::TopP, "top_p", 'p'),
        (Self::MinP, "min_p", 'm'),
        (Self::Xtc, "xtc", 'x'),
        (Self::Temperature, "temperature", 't'),
        (Self::AdaptiveP, "adaptive_p", 'a'),
    ];

    /// By name, however it is spelt (`top_k`, `top-k`, `topk`), and by the usual other names.
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

    /// By letter.
    #[must_use]
    pub fn from_letter(letter: char) -> Option<Self> {
        Self::NAMES.iter().find(|(.., known)| *known == letter).map(|(stage, ..)| *stage)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(stage, ..)| *stage == self).map_or("", |(_, name, _)| name)
    }
}
