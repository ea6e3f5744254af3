//! Speculative decoding: source and length of drafts. The spellings are llama-server's.

use super::{CacheTypeFlag, ConfigError, GpuLayersFlag};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Speculative decoding.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub struct SpeculationFlags {
    /// Source of draft tokens, which one decode verifies together: earlier occurrences of the last tokens in prompt and answer
    /// (ngram-simple), a draft model (draft-simple), both (ngram-simple,draft-simple), or none; answers differ only by
    /// rounding; default: draft-simple with --spec-draft-model, otherwise none [also: --spec-default for ngram-simple]
    #[arg(long, env = "THUNDER_SPEC_TYPE", value_name = "TYPE", value_delimiter = ',', value_enum)]
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
    /// GGUF file of a smaller model with the same vocabulary, which drafts tokens [also: --model-draft, -md]
    #[arg(long, alias = "model-draft", env = "THUNDER_SPEC_DRAFT_MODEL", value_name = "PATH")]
    pub spec_draft_model: Option<PathBuf>,
    /// Minimum probability of a draft model's token, 0 to 1; a draft ends before a less probable token; requests can
    /// override it with `speculative.p_min` [also: --draft-p-min]
    #[arg(long, alias = "draft-p-min", env = "THUNDER_SPEC_DRAFT_P_MIN", value_name = "P", default_value_t = 0.0)]
    pub spec_draft_p_min: f32,
    /// Number of the draft model's layers on GPUs, auto for as many as fit, or all [also: --gpu-layers-draft, -ngld]
    #[arg(
        long,
        aliases = ["gpu-layers-draft", "n-gpu-layers-draft"],
        env = "THUNDER_SPEC_DRAFT_NGL",
        value_name = "auto|all|N",
        default_value = "auto",
        allow_negative_numbers = true
    )]
    pub spec_draft_ngl: GpuLayersFlag,
    /// Threads with which the draft model drafts; default: those of --threads [also: --threads-draft, -td]
    #[arg(long, alias = "threads-draft", env = "THUNDER_SPEC_DRAFT_THREADS", value_name = "N")]
    pub spec_draft_threads: Option<u16>,
    /// Threads with which the draft model decodes prompts; default: those of --spec-draft-threads, or of --threads-batch
    /// [also: --threads-batch-draft, -tbd]
    #[arg(long, alias = "threads-batch-draft", env = "THUNDER_SPEC_DRAFT_THREADS_BATCH", value_name = "N")]
    pub spec_draft_threads_batch: Option<u16>,
    /// Data type of keys in the draft model's KV cache, as for --cache-type-k [also: --cache-type-k-draft, -ctkd]
    #[arg(
        long,
        alias = "cache-type-k-draft",
        env = "THUNDER_SPEC_DRAFT_TYPE_K",
        value_name = "TYPE",
        default_value = "f16"
    )]
    pub spec_draft_type_k: CacheTypeFlag,
    /// Data type of values in the draft model's KV cache, as for --cache-type-v [also: --cache-type-v-draft, -ctvd]
    #[arg(
        long,
        alias = "cache-type-v-draft",
        env = "THUNDER_SPEC_DRAFT_TYPE_V",
        value_name = "TYPE",
        default_value = "f16"
    )]
    pub spec_draft_type_v: CacheTypeFlag,
}

/// Source of drafts, by llama-server's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecTypeFlag {
    /// No drafts.
    None,
    /// Earlier occurrences of the last tokens.
    #[value(aliases = ["ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "ngram"])]
    NgramSimple,
    /// A draft model.
    #[value(alias = "draft")]
    DraftSimple,
    /// Draft layers, which are not supported.
    #[value(name = "draft-mtp", aliases = ["draft-eagle3", "draft-dflash", "draft-dspark"], hide = true)]
    DraftLayers,
}

/// Validated settings of speculative decoding.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeculationConfig {
    /// True if drafts are made from n-grams.
    pub ngrams: bool,
    /// Maximum tokens of a draft.
    pub max_draft: u32,
    /// Minimum tokens of a draft.
    pub min_draft: u32,
    /// Minimum number of last tokens that must occur earlier.
    pub min_match: u32,
    /// Minimum probability of a draft model's token.
    pub min_probability: f32,
    /// The draft model, if there is one.
    pub draft_model: Option<DraftModelConfig>,
}

/// Settings of a draft model.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftModelConfig {
    /// Path of the GGUF file.
    pub path: PathBuf,
    /// Layers on GPUs.
    pub gpu_layers: GpuLayersFlag,
    /// Threads that draft; `None` for those of the main model.
    pub threads: Option<i32>,
    /// Threads that read prompts; `None` for those of the main model.
    pub threads_batch: Option<i32>,
    /// Data type of keys.
    pub cache_type_k: CacheTypeFlag,
    /// Data type of values.
    pub cache_type_v: CacheTypeFlag,
}

impl SpeculationFlags {
    fn has_ngrams(&self) -> bool {
        self.spec_type.contains(&SpecTypeFlag::NgramSimple)
    }

    fn has_model(&self) -> bool {
        match self.spec_type[..] {
            [] => self.spec_draft_model.is_some(),
            ref types => types.contains(&SpecTypeFlag::DraftSimple),
        }
    }

    /// Returns the warning about a flag that has no effect.
    #[must_use]
    pub fn ineffective_flag_note(&self) -> Option<&'static str> {
        if self.spec_type.contains(&SpecTypeFlag::DraftLayers) {
            return Some(
                "draft layers in --spec-type have no effect: drafts come from the text of the run (ngram-simple) or from a \
                 draft model (draft-simple)",
            );
        }
        (self.spec_draft_model.is_some() && !self.has_model())
            .then_some("--spec-draft-model has no effect: --spec-type does not include draft-simple")
    }

    /// Returns the request defaults that the flags set.
    pub(super) fn defaults(&self) -> Map<String, Value> {
        let sources = [(self.has_ngrams(), "ngram-simple"), (self.has_model(), "draft-simple")];
        let names: Vec<&str> = sources.into_iter().filter_map(|(used, name)| used.then_some(name)).collect();
        let mut fields = Map::new();
        if !names.is_empty() {
            fields.insert("speculative.types".into(), json!(names.join(",")));
            fields.insert("speculative.n_max".into(), json!(self.spec_draft_n_max));
            fields.insert("speculative.n_min".into(), json!(self.spec_draft_n_min));
        }
        if self.has_model() {
            fields.insert("speculative.p_min".into(), json!(self.spec_draft_p_min));
        }
        fields
    }

    /// Validates the flags.
    pub(super) fn config(self) -> Result<SpeculationConfig, ConfigError> {
        let check_range = |flag, value: u32, (min, max), range| {
            if (min..=max).contains(&value) {
                Ok(value)
            } else {
                Err(ConfigError::Range { flag, range, value: value.into() })
            }
        };
        let max = (0, SpeculationConfig::MAX_DRAFT);
        if !(0.0..=1.0).contains(&self.spec_draft_p_min) {
            return Err(ConfigError::DraftProbability { value: self.spec_draft_p_min });
        }
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
            min_probability: self.spec_draft_p_min,
            draft_model: if self.has_model() { Some(self.draft_model()?) } else { None },
        })
    }

    fn draft_model(self) -> Result<DraftModelConfig, ConfigError> {
        let path = self.spec_draft_model.ok_or(ConfigError::NoDraftModel)?;
        if !path.is_file() {
            return Err(ConfigError::DraftModelFile { path: path.display().to_string() });
        }
        let positive = |count: Option<u16>| count.filter(|&count| count > 0).map(i32::from);
        let threads = positive(self.spec_draft_threads);
        Ok(DraftModelConfig {
            path,
            gpu_layers: self.spec_draft_ngl,
            threads,
            threads_batch: positive(self.spec_draft_threads_batch).or(threads),
            cache_type_k: self.spec_draft_type_k,
            cache_type_v: self.spec_draft_type_v,
        })
    }
}

impl SpeculationConfig {
    /// Maximum tokens of a draft.
    pub const MAX_DRAFT: u32 = 64;
}
