//! The model and its settings: defaults and validation.

use super::flags::{EngineFlags, OnOff, OnOffAuto};
use super::{
    CacheConfig, ConfigError, ControlConfig, DEFAULT_SLOT_CONTEXT, EncoderFlags, GpuConfig, ImageConfig, LoadMode,
    ModsConfig, SpeculationConfig, TuningFlags, defaults, is_chat_template_name,
};
use std::path::PathBuf;

/// Default number of slots.
const DEFAULT_SLOTS: u32 = 4;
/// Maximum tokens of all slots together, for the default number of slots.
const DEFAULT_CELLS: u32 = DEFAULT_SLOTS * DEFAULT_SLOT_CONTEXT;

/// The ChatML template, which many models share.
const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The model and its settings.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Path of the GGUF file; `None` for the bundled model, or one that the start downloads.
    pub model: Option<PathBuf>,
    /// Names of the model, the displayed one first; empty for the file's name.
    pub alias: Vec<String>,
    /// Tags of the default model in model lists.
    pub tags: Vec<String>,
    /// Context size in tokens; `None` for the model's.
    pub ctx_size: Option<u32>,
    /// True if `ctx_size` is the total of all slots; false if it is the size of each slot.
    pub ctx_is_shared: bool,
    /// Number of slots, 1 or more.
    pub parallel: u32,
    /// Threads for generation, 1 or more.
    pub threads: i32,
    /// Threads for prompt processing, 1 or more.
    pub threads_batch: i32,
    /// Maximum tokens per decode call.
    pub batch_size: u32,
    /// Maximum tokens computed at once, not above `batch_size`.
    pub ubatch_size: u32,
    /// Placement on GPUs.
    pub gpu: GpuConfig,
    /// True if the model is read into memory instead of mapped.
    pub no_mmap: bool,
    /// True if the weights are locked in memory.
    pub mlock: bool,
    /// Capture of attention: from stored probabilities (on), with flash attention (auto), or none (off).
    pub attention: OnOffAuto,
    /// True if flash attention was requested.
    pub flash_attention: bool,
    /// Chat template that replaces the model's.
    pub chat_template: Option<String>,
    /// LoRA adapters of the default model, each with its default scale.
    pub adapters: Vec<(PathBuf, f32)>,
    /// Control vectors of the default model.
    pub control: ControlConfig,
    /// Image encoder of the default model; `None` for text only.
    pub images: Option<ImageConfig>,
    /// The KV cache.
    pub cache: CacheConfig,
    /// Speculative decoding.
    pub speculation: SpeculationConfig,
    /// Compute settings.
    pub tuning: TuningFlags,
    /// Embeddings and scores.
    pub encoder: EncoderFlags,
    /// Resources and sandbox of mods.
    pub mods: ModsConfig,
}

impl EngineConfig {
    /// Returns the maximum tokens of a text that is embedded or scored, for a model trained with `context_train`
    /// tokens. `slots` is true if the model shares the context among slots.
    #[must_use]
    pub fn max_text_tokens(&self, context_train: u32, slots: bool) -> u32 {
        match self.ctx_size {
            Some(all) if !slots => all,
            _ => self.slot_context(context_train),
        }
    }

    /// Returns the context of each slot in tokens, for a model trained with `context_train` tokens.
    #[must_use]
    pub fn slot_context(&self, context_train: u32) -> u32 {
        match self.ctx_size {
            None => context_train.clamp(16, DEFAULT_SLOT_CONTEXT),
            Some(all) if self.ctx_is_shared => all / self.parallel,
            Some(each) => each,
        }
    }
}

impl EngineFlags {
    /// Validates the flags and fills in the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] names the invalid flag.
    pub fn config(self) -> Result<EngineConfig, ConfigError> {
        let check_range = |flag, value: u32, min: u32, max: u32, range| {
            if (min..=max).contains(&value) {
                Ok(value)
            } else {
                Err(ConfigError::Range { flag, range, value: value.into() })
            }
        };
        if let Some(path) = self.model.as_ref().filter(|path| !path.is_file()) {
            return Err(ConfigError::NoModel { path: path.display().to_string() });
        }
        // As in llama-server, -1 slots means automatic, and a context of 0 the model's.
        let requested = self.parallel.and_then(|slots| u32::try_from(slots).ok());
        let ctx_size = self.ctx_size.filter(|&size| size > 0);
        let parallel = match requested {
            Some(slots) => check_range("--parallel", slots, 1, 256, "between 1 and 256")?,
            None => ctx_size.map_or(DEFAULT_SLOTS, |size| (DEFAULT_CELLS / size).clamp(1, DEFAULT_SLOTS)),
        };
        let ctx_is_shared = requested.is_some() && self.cache.kv_unified != Some(OnOff::On);
        if let Some(size) = ctx_size {
            let slots = if ctx_is_shared { parallel } else { 1 };
            check_range("--ctx-size", size / slots, 16, u32::MAX, "at least 16 tokens for each slot (--parallel)")?;
        }
        let positive = |count: Option<u16>| count.filter(|&count| count > 0).map(i32::from);
        let threads = positive(self.threads).unwrap_or_else(defaults::threads);
        let batch_size = check_range("--batch-size", self.batch_size, 1, 1 << 20, "between 1 and 1048576")?;
        let ubatch_size = check_range("--ubatch-size", self.ubatch_size, 1, 1 << 20, "between 1 and 1048576")?;
        let attention = attention(self.attention.unwrap_or_default(), self.flash_attn.unwrap_or_default())?;
        Ok(EngineConfig {
            model: self.model,
            alias: self.alias.iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect(),
            tags: self.tags.iter().map(|tag| tag.trim().to_owned()).filter(|tag| !tag.is_empty()).collect(),
            ctx_size,
            ctx_is_shared,
            parallel,
            threads,
            threads_batch: positive(self.threads_batch).unwrap_or(threads),
            batch_size,
            ubatch_size: ubatch_size.min(batch_size),
            gpu: self.gpu.config()?,
            no_mmap: match self.tuning.load_mode {
                Some(mode) => matches!(mode, LoadMode::None | LoadMode::Mlock),
                None => self.no_mmap,
            },
            mlock: self.mlock || matches!(self.tuning.load_mode, Some(LoadMode::Mlock | LoadMode::MmapMlock)),
            attention,
            flash_attention: self.flash_attn == Some(OnOffAuto::On),
            chat_template: chat_template(self.chat_template, self.chat_template_file)?,
            adapters: self.adapters.config()?,
            control: self.control.config()?,
            images: self.images.config()?,
            cache: self.cache.config(attention == OnOffAuto::On)?,
            speculation: self.speculation.config()?,
            tuning: self.tuning,
            encoder: self.encoder,
            mods: self.mods.config()?,
        })
    }
}

/// Returns the capture of attention. Without flash attention, `auto` is the same as `on`.
fn attention(capture: OnOffAuto, flash: OnOffAuto) -> Result<OnOffAuto, ConfigError> {
    match (capture, flash) {
        (OnOffAuto::On, OnOffAuto::On) => Err(ConfigError::FlashAttention),
        (OnOffAuto::Auto, OnOffAuto::Off) => Ok(OnOffAuto::On),
        (capture, _) => Ok(capture),
    }
}

fn chat_template(text: Option<String>, file: Option<PathBuf>) -> Result<Option<String>, ConfigError> {
    if let Some(path) = file {
        let read = std::fs::read_to_string(&path);
        let flag = "--chat-template-file";
        return read.map(Some).map_err(|source| ConfigError::File { flag, path: path.display().to_string(), source });
    }
    match text {
        // llama.cpp has this template, too, but only Jinja text supports tools.
        Some(name) if name.trim() == "chatml" => Ok(Some(CHATML.to_owned())),
        Some(name) if is_chat_template_name(name.trim()) => Ok(Some(name.trim().to_owned())),
        Some(name) if !name.contains('{') => Err(ConfigError::ChatTemplate { name }),
        text => Ok(text),
    }
}
