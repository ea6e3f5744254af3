//! Speculative decoding: source and length of drafts. The spellings are llama-server's.

use super::ConfigError;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

/// Speculative decoding.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub struct SpeculationFlags {
    /// Source of draft tokens, which one decode verifies together: earlier occurrences of the last tokens in prompt and answer
    /// (ngram-simple), or none; answers do not depend on it [also: --spec-default for ngram-simple]
    #[arg(
        long,
        env = "THUNDER_SPEC_TYPE",
        value_name = "TYPE",
        value_delimiter = ',',
        value_enum,
        default_value = "none"
    )]
    pub spec_type: Vec<SpecTypeFlag>,
    /// Maximum tokens of a draft, 0 to 64; requests can override it with `speculative.n_max` [also: --draft-max]
    #[arg(long, aliases = ["draft-max", "draft", "draft-n", "spec-ngram-simple-size-m", "spec-ngram-size-m"],
          env = "THUNDER_SPEC_DRAFT_N_MAX", value_name = "TOKENS", default_value_t = 16)]
    pub spec_draft_n_max: u32,
    /// Minimum tokens of a draft; shorter ones are not used; requests can override it with `speculative.n_min`
    /// [also: --draft-min]
    #[arg(long, aliases = ["draft-min", "draft-n-min"], env = "THUNDER_SPEC_DRAFT_N_MIN", value_name = "TOKENS",
          default_value_t = 0)]
    pub spec_draft_n_min: u32,
    /// Minimum number of last tokens that must occur earlier for a draft, 1 to 1024 [also: --spec-ngram-size-n]
    #[arg(
        long,
        alias = "spec-ngram-size-n",
        env = "THUNDER_SPEC_NGRAM_SIZE_N",
        value_name = "TOKENS",
        default_value_t = 3
    )]
    pub spec_ngram_simple_size_n: u32,
}

/// Source of drafts, by llama-server's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecTypeFlag {
    /// No drafts.
    None,
    /// Earlier occurrences of the last tokens.
    #[value(aliases = ["ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "ngram"])]
    NgramSimple,
    /// A draft model or draft layers, which are not supported.
    #[value(name = "draft-simple", aliases = ["draft", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"], hide = true)]
    Draft,
}

/// Validated settings of speculative decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeculationConfig {
    /// True if drafts are made from n-grams.
    pub ngrams: bool,
    /// Maximum tokens of a draft.
    pub max_draft: u32,
    /// Minimum tokens of a draft.
    pub min_draft: u32,
    /// Minimum number of last tokens that must occur earlier.
    pub min_match: u32,
}

impl Default for SpeculationFlags {
    fn default() -> Self {
        Self {
            spec_type: vec![SpecTypeFlag::None],
            spec_draft_n_max: 16,
            spec_draft_n_min: 0,
            spec_ngram_simple_size_n: 3,
        }
    }
}

impl SpeculationFlags {
    fn has_ngrams(&self) -> bool {
        self.spec_type.contains(&SpecTypeFlag::NgramSimple)
    }

    /// Returns a warning about a source of drafts that is not supported.
    #[must_use]
    pub fn unsupported_note(&self) -> Option<&'static str> {
        self.spec_type.contains(&SpecTypeFlag::Draft).then_some(
            "a draft model in --spec-type has no effect: speculative decoding drafts only from the text of the run \
             (--spec-type ngram-simple)",
        )
    }

    /// Returns the request defaults that the flags set.
    pub(super) fn defaults(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        if self.has_ngrams() {
            fields.insert("speculative.types".into(), json!("ngram-simple"));
            fields.insert("speculative.n_max".into(), json!(self.spec_draft_n_max));
            fields.insert("speculative.n_min".into(), json!(self.spec_draft_n_min));
        }
        fields
    }

    /// Validates the flags.
    pub(super) fn config(&self) -> Result<SpeculationConfig, ConfigError> {
        let check_range = |flag, value: u32, (min, max), range| {
            if (min..=max).contains(&value) {
                Ok(value)
            } else {
                Err(ConfigError::Range { flag, range, value: value.into() })
            }
        };
        let max = (0, SpeculationConfig::MAX_DRAFT);
        Ok(SpeculationConfig {
            ngrams: self.has_ngrams(),
            max_draft: check_range("--spec-draft-n-max", self.spec_draft_n_max, max, "between 0 and 64")?,
            min_draft: check_range("--spec-draft-n-min", self.spec_draft_n_min, max, "between 0 and 64")?,
            min_match: check_range(
                "--spec-ngram-simple-size-n",
                self.spec_ngram_simple_size_n,
                (1, 1024),
                "between 1 and 1024",
            )?,
        })
    }
}

impl SpeculationConfig {
    /// Maximum tokens of a draft.
    pub const MAX_DRAFT: u32 = 64;
}
