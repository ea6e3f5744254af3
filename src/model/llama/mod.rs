//! llama.cpp with plain Rust types: [`Model`], its decode [`Context`] and [`Sampler`].

mod adapters;
mod attention_capture;
mod attention_support;
mod backend;
mod cache_type;
mod captures;
mod checkpoints;
mod context;
mod control_vectors;
mod devices;
mod draft_check;
mod encoder;
mod ffi;
mod fingerprint;
mod gguf;
mod head;
mod image_spans;
mod images;
mod layer_set;
mod lens;
mod memory;
mod model_file;
mod numa;
mod options;
mod probe;
mod reason;
mod rerank_template;
mod sampler;
mod state;
mod tokenizer;
mod tuning;
mod ubatch;
mod usage;
mod weights;

pub use adapters::{Adapter, AdapterSet, Adapters, ScaledAdapter};
pub use attention_capture::AttentionCapture;
pub use attention_support::{AttentionSupport, UnsupportedAttention};
pub use backend::backend;
pub use cache_type::CacheType;
pub use captures::{AttentionRow, Decoded, NoHiddenStates, TokenOutputs};
pub use checkpoints::{CheckpointPurpose, Checkpoints};
pub use context::{Context, ContextCapabilities, ContextOptions, SequenceMetadata};
pub use control_vectors::{ControlVector, ControlVectorList, ControlVectors, ScaledVector};
pub use devices::{Device, Placement, PlacementError, TensorPlacement, devices, missing_gpu_reason};
pub use encoder::{DeclaredPooling, EncoderContext, EncoderOptions, EncoderOutput, Pooling};
pub use ffi::templates::{apply_chat_template, chat_template_names};
pub use ffi::threads::ThreadOptions;
pub use gguf::GgufHeader;
pub use head::{Activation, Head, HeadError};
pub use image_spans::ImageSpans;
pub use images::{
    EmbeddingRows, Image, ImageError, ImageOptions, Images, MAX_IMAGE_BYTES, first_unknown as first_unknown_image,
    records as image_records,
};
pub use layer_set::LayerSet;
pub use lens::{HiddenStates, UnsupportedLens};
pub use memory::AttentionWindow;
pub use numa::Numa;
pub use options::{ContextRequirements, GpuLayers, ModelOptions, SplitMode};
pub use probe::{STEP_PREFIX as PROBE_STEP_PREFIX, probe};
pub use rerank_template::RerankTemplate;
pub use sampler::{AVOIDED_TOKEN_BIAS, Candidates, Draw, Sampler, SamplerInput, SamplerStage, SamplingParams};
pub use state::{StateError, StateLayout};
pub use tuning::{MetadataValue, RopeOptions, RopeScaling, Tuning};
pub use usage::{LlamaUse, wait_for_end_of_use};
pub use weights::WeightFile;

use super::grammar::GrammarCompiler;
use super::{ModelError, Vocabulary};
use llama_cpp_2::model::LlamaModel;
use model_file::ModelFile;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// llama.cpp's message when there is no memory for weights.
const OUT_OF_MEMORY: &str = "unable to allocate";

/// C++'s message for an invalid regular expression.
const INVALID_PATTERN: &str = "regular expression";

/// Base frequency that llama.cpp uses for rotary positions for files without the key.
const DEFAULT_ROPE_BASE: f32 = 10_000.0;

/// A loaded model.
pub struct Model {
    llama: Arc<LlamaModel>,
    images: Option<Arc<Images>>,
    adapters: Adapters,
    vocabulary: Arc<Vocabulary>,
    grammars: Arc<GrammarCompiler>,
    card: ModelCard,
    fingerprint: u128,
    /// Hash of the settings that change the computation besides the weights.
    settings: u128,
    weights: Vec<WeightFile>,
    placement: Placement,
    path: PathBuf,
    tuning: Tuning,
    /// Held while a context is created, because llama.cpp then writes to the model.
    context_creation: Mutex<()>,
}

/// Descriptive data of a model.
#[derive(Debug, Clone, serde::Serialize)]
pub struct ModelCard {
    /// Name of the model.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Number of weights.
    pub parameters: u64,
    /// Size of the weights in bytes.
    pub size_bytes: u64,
    /// Training context in tokens.
    pub context_train: u32,
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Number of layers.
    pub layers: u32,
    /// Attention heads per layer.
    pub heads: u32,
    /// Key/value heads per layer.
    pub kv_heads: u32,
    /// Base frequency of the rotary positions; `None` if the model has none.
    pub rope_base: Option<f32>,
    /// Attention window of some layers.
    pub window: Option<u32>,
    /// Width of the hidden state.
    pub embedding: u32,
    /// Quantization of the file, e.g. `Q8_0`.
    pub file_type: String,
    /// Type of tokenizer: `none`, `spm`, `bpe`, `wpm`, `ugm`, `rwkv` or `plamo2`.
    pub tokenizer: &'static str,
    /// llama.cpp's number of the tokenizer type.
    pub tokenizer_id: u32,
    /// The chat template in the file, if any.
    pub chat_template: Option<String>,
    /// True if the model generates text; false for an encoder.
    pub generates: bool,
}

impl Model {
    /// Loads a GGUF file. `progress` is called with 0 … 1 and cancels the load by returning false. The end of the program
    /// cancels it, too.
    ///
    /// # Errors
    /// [`ModelError::Backend`], [`ModelError::Unreadable`], [`ModelError::Placement`], [`ModelError::NoMemory`],
    /// [`ModelError::Load`], [`ModelError::Adapter`], [`ModelError::ControlVector`] and [`ModelError::Projector`].
    pub fn load(
        path: &Path,
        options: &ModelOptions,
        mut progress: impl FnMut(f32) -> bool + 'static,
    ) -> Result<Self, ModelError> {
        let _use = LlamaUse::begin();
        let progress = move |done| progress(done) && !usage::is_ending();
        backend()?;
        let file = ModelFile::open(path)?;
        let header = &file.header;
        let others = devices::other_split_files(path, header);
        file.check_values(&others)?;
        devices::check_context(options, header)?;
        let files = std::iter::once(path).chain(others.iter().map(PathBuf::as_path));
        let weights = files.map(WeightFile::new).collect::<Result<_, _>>().map_err(|source| file.unreadable(source))?;
        let (load_params, placement) = devices::load_params(options, header, path)?;
        if load_params.mmap {
            file.check_alignment(&others)?;
        }
        options.tuning.init_numa();
        let failed = |lines: Vec<String>| match reason::from_log(&lines) {
            reason if reason.contains(INVALID_PATTERN) => PlacementError::Pattern { reason }.into(),
            reason if reason.contains(OUT_OF_MEMORY) => file.no_memory(reason),
            reason => file.load_error(reason),
        };
        let mut llama = ffi::loading::load(&file.c_path, &load_params, progress).map_err(failed)?;
        if architecture(&llama) == "t5" {
            return Err(file.load_error("encoder-decoder models, such as T5, are not supported".into()));
        }
        let adapters = Adapters::load(&mut llama, &options.adapters)?;
        let llama = Arc::new(llama);
        file.check_rotary_dimensions(&llama)?;
        let tokenizer = tokenizer::check(&llama).map_err(|reason| file.load_error(reason))?;
        let vocabulary = Arc::new(tokenizer::read_vocabulary(&llama));
        tokenizer::check_tokens(&vocabulary).map_err(|reason| file.load_error(reason))?;
        let name = options.name.clone().unwrap_or_else(|| file_stem(path));
        let card = ModelCard::read(name, &llama, header, vocabulary.len(), tokenizer, options.tuning.rope.base);
        let adapters = adapters.with_control_vectors(&options.control, &card)?;
        let fingerprint = fingerprint::hash_file(path).map_err(|source| file.unreadable(source))?;
        let settings = fingerprint::hash_text(&options.tuning.result_settings());
        let fingerprint = fingerprint ^ settings;
        let grammars = Arc::new(GrammarCompiler::new(Arc::clone(&vocabulary)));
        let has_gpu = !placement.devices.is_empty();
        let load_images = |options| Images::load(options, &llama, &vocabulary, has_gpu).map(Arc::new);
        let images = options.images.as_ref().filter(|_| card.generates).map(load_images).transpose()?;
        Ok(Self {
            llama,
            images,
            adapters,
            vocabulary,
            grammars,
            card,
            fingerprint,
            settings,
            weights,
            placement,
            path: path.to_owned(),
            tuning: options.tuning.clone(),
            context_creation: Mutex::new(()),
        })
    }

    /// Returns the model's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.card.name
    }

    /// Returns the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Returns the grammar compiler for the vocabulary.
    #[must_use]
    pub fn grammars(&self) -> &Arc<GrammarCompiler> {
        &self.grammars
    }

    /// Returns the descriptive data.
    #[must_use]
    pub fn card(&self) -> &ModelCard {
        &self.card
    }

    /// Returns the LoRA adapters and control vectors.
    #[must_use]
    pub fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    /// Returns the placement on GPUs.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the files of the model.
    #[must_use]
    pub fn weights(&self) -> &[WeightFile] {
        &self.weights
    }

    /// Returns a hash of the settings that change the computation: rotary positions and metadata overrides.
    #[must_use]
    pub fn settings(&self) -> u128 {
        self.settings
    }

    /// Returns a hash that distinguishes this model with its overrides from others. Only parts of the file are hashed;
    /// use [`WeightFile::hash`] where the distinction must be secure.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        self.fingerprint
    }

    /// Creates a context for decoding. It decodes on the threads of `threads_of`, if that has any; then only one of the
    /// two contexts may decode at a time.
    ///
    /// # Errors
    /// [`ModelError::Context`], usually due to a lack of memory; [`ModelError::QuantizedValues`] and
    /// [`ModelError::QuantizedHeads`] for cache types that do not fit.
    pub fn context(
        &self,
        options: &ContextOptions,
        threads_of: Option<&Context<'_>>,
    ) -> Result<Context<'_>, ModelError> {
        let _one_at_a_time = self.context_creation.lock().unwrap_or_else(PoisonError::into_inner);
        let files = &self.weights;
        Context::new(&self.llama, files, &self.adapters, &self.placement, options, &self.tuning, threads_of)
    }
}

impl ModelCard {
    /// Reads the data of a loaded model. `rope_base` replaces the file's value.
    fn read(
        name: String,
        llama: &LlamaModel,
        header: &GgufHeader,
        vocabulary: usize,
        tokenizer: tokenizer::TokenizerType,
        rope_base: Option<f32>,
    ) -> Self {
        let architecture = architecture(llama);
        Self {
            name,
            generates: encoder::generates(llama, &architecture),
            parameters: llama.n_params(),
            size_bytes: llama.size(),
            context_train: llama.n_ctx_train(),
            vocabulary,
            layers: llama.n_layer(),
            // llama.cpp returns the numbers of the first layer, which are 0 if that layer is recurrent.
            heads: llama.n_head().max(header.array_maximum("attention.head_count").unwrap_or(0)),
            kv_heads: llama.n_head_kv().max(header.array_maximum("attention.head_count_kv").unwrap_or(0)),
            rope_base: rope_base
                .or_else(|| parameter(llama, "rope.freq_base"))
                .or_else(|| llama.rope_type().map(|_| DEFAULT_ROPE_BASE)),
            window: Some(ffi::model_info::window(llama)).filter(|&width| width > 0),
            embedding: llama.n_embd().unsigned_abs(),
            file_type: ffi::model_info::file_type(llama),
            tokenizer: tokenizer.name,
            tokenizer_id: tokenizer.id,
            chat_template: llama.chat_template(None).ok().and_then(|template| template.to_string().ok()),
            architecture,
        }
    }
}

/// Returns `general.architecture`.
fn architecture(llama: &LlamaModel) -> String {
    llama.meta_val_str("general.architecture").unwrap_or_default()
}

/// Parses a numeric metadata value, e.g. `rope.freq_base`.
fn parameter<T: std::str::FromStr>(llama: &LlamaModel, key: &str) -> Option<T> {
    llama.meta_val_str(&format!("{}.{key}", architecture(llama))).ok()?.parse().ok()
}

fn file_stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned())
}
