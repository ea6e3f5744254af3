//! Loading: creates an engine from a GGUF file.

use super::{Loaded, ModelEntry, ModelRegistry, ModelState, Models, folder};
use crate::config::{
    self, Config, DEFAULT_SLOT_CONTEXT, EngineConfig, OverrideValue, TuningFlags, bundled_model, flags,
};
use crate::engine::encoder::Encoder;
use crate::engine::{Clock, DraftModel, DrafterKind, Engine, EngineOptions, MAX_UNREAD_TIME, SpeculationOptions};
use crate::events::Recorder;
use crate::model::llama::{
    AttentionCapture, CacheType, ContextRequirements, ControlVectors, GpuLayers, ImageOptions, MetadataValue,
    ModelOptions, Numa, RopeOptions, RopeScaling, SplitMode, TensorPlacement, ThreadOptions, Tuning, WeightFile,
};
use crate::model::{Model, ModelError};
use crate::server::ApiError;
use crate::trace::attention;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Time after which a request repeats a failed load of an unchanged file. The cause may have been temporary, such as too
/// little free memory.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Progress of a load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LoadStep {
    /// Reading the weights, from 0 to 1.
    Weights(f32),
    /// Creating the context for decoding.
    Context,
}

/// A failed load.
#[derive(Debug, Clone)]
pub struct LoadFailure {
    /// The cause.
    pub reason: String,
    /// The file before the load; `None` if there was none.
    file: Option<WeightFile>,
    at: Instant,
}

type Observer = dyn Fn(&str, LoadStep) + Send + Sync;

impl ModelRegistry {
    /// Registers the configured models. From now on engines can start, and their signals are sent to `recorder`.
    ///
    /// # Errors
    /// The bundled model could not be unpacked.
    pub async fn open(&self, recorder: Recorder) -> Result<(), ModelError> {
        *self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner) = Some(recorder);
        let path = default_path(&self.0.config).await?;
        // llama-server names a model after its file, including the extension. Clients may have stored this name.
        let file = path.file_name().map(|file| file.to_string_lossy().into_owned());
        let mut names = self.0.config.engine.alias.clone();
        for name in std::iter::once(folder::default_name(&path)).chain(file) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let name = names.remove(0);
        *self.lock() = Models { entries: vec![ModelEntry::new(name, names, path, true)], uses: 0 };
        self.refresh().await;
        Ok(())
    }

    /// Loads the default model and reports progress to `observe`.
    ///
    /// # Errors
    /// The cause of the failure.
    pub async fn load_default(
        &self,
        observe: impl Fn(&str, LoadStep) + Send + Sync + 'static,
    ) -> Result<(), ModelError> {
        let entry = self.lock().entries.first().cloned();
        let entry = entry.ok_or_else(|| load_error(Path::new("no model"), "the model registry is not open"))?;
        self.change(&entry.name, |entry| entry.state = ModelState::Loading(0.0));
        self.load(&entry, Arc::new(observe)).await
    }

    /// Starts loading a model in the background.
    ///
    /// # Errors
    /// 404 for an unknown model; 400 if it is loaded; 503 if it is being unloaded; 429 if `--models-max` models are in
    /// use.
    pub async fn begin_load(&self, name: &str) -> Result<(), ApiError> {
        self.refresh().await;
        let entry = self.named(name)?;
        match entry.state {
            ModelState::Ready(_) => {
                return Err(ApiError::invalid("model", format!("the model '{}' is already loaded", entry.name)));
            }
            ModelState::Loading(_) => return Ok(()),
            ModelState::Unloading(_) => return Err(entry.not_loaded()),
            ModelState::Unloaded | ModelState::Failed(_) => {}
        }
        self.load_in_background(&entry.name).await
    }

    /// Unloads other models if necessary and starts loading, unless another request has already started.
    pub(super) async fn load_in_background(&self, name: &str) -> Result<(), ApiError> {
        let _admitted = self.0.admission.lock().await;
        self.make_room(name).await?;
        let started = self.change(name, |entry| {
            if !matches!(entry.state, ModelState::Unloaded | ModelState::Failed(_)) {
                return None;
            }
            entry.state = ModelState::Loading(0.0);
            entry.load_cancelled = Arc::default();
            Some(entry.clone())
        });
        let Some(entry) = started.flatten() else { return Ok(()) };
        let registry = self.clone();
        tokio::spawn(async move {
            tracing::info!(model = entry.name, "loading model");
            match registry.load(&entry, Arc::new(|_, _| ())).await {
                Ok(()) => tracing::info!(model = entry.name, "model loaded"),
                Err(_) if entry.load_cancelled.load(Ordering::Acquire) => {
                    tracing::info!(model = entry.name, "model load cancelled");
                }
                Err(error) => tracing::error!(model = entry.name, %error, "model load failed"),
            }
        });
        Ok(())
    }

    async fn load(&self, entry: &ModelEntry, observe: Arc<Observer>) -> Result<(), ModelError> {
        let file = WeightFile::new(&entry.path).ok();
        let started = self.start(entry, observe).await;
        let load_cancelled = entry.load_cancelled.load(Ordering::Acquire);
        let (state, result) = match started {
            Ok(loaded) if load_cancelled => {
                loaded.stop().await;
                (ModelState::Unloaded, Err(load_error(&entry.path, "the load was cancelled")))
            }
            Ok(loaded) => (ModelState::Ready(loaded), Ok(())),
            Err(error) if load_cancelled => (ModelState::Unloaded, Err(error)),
            Err(error) => {
                (ModelState::Failed(LoadFailure { reason: error.to_string(), file, at: Instant::now() }), Err(error))
            }
        };
        self.change(&entry.name, |entry| {
            entry.state = state;
            // A sleeping model whose load failed stays asleep: another request loads it.
            if !matches!(entry.state, ModelState::Failed(_)) {
                entry.sleeping = None;
            }
        });
        result
    }

    async fn start(&self, entry: &ModelEntry, observe: Arc<Observer>) -> Result<Loaded, ModelError> {
        let recorder = self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(recorder) = recorder else {
            return Err(load_error(&entry.path, "the model registry is not open"));
        };
        let config = &self.0.config.engine;
        self.probe_file(&entry.path).await?;
        // The draft model comes first, so that the layers of the main model are placed in the memory that it leaves.
        let draft_model = self.load_draft(entry).await?;
        let model = self.read(entry, Arc::clone(&observe)).await?;
        observe(&entry.name, LoadStep::Context);
        let options = engine_options(&self.0.config, &model, draft_model, self.0.clock);
        let settings = super::encoding::settings(config, &model);
        let model = Arc::new(model);
        let engine = Engine::start(Arc::clone(&model), options, recorder).await?;
        match Encoder::start(model, &settings).await {
            Ok(encoder) => Ok(Loaded::new(engine, encoder, entry.aliases.clone(), config.chat_template.as_deref())),
            Err(error) => {
                engine.stop().await;
                Err(error)
            }
        }
    }

    /// Reads the weights on a blocking thread.
    async fn read(&self, entry: &ModelEntry, observe: Arc<Observer>) -> Result<Model, ModelError> {
        let options = model_options(&self.0.config.engine, entry);
        let registry = self.clone();
        let ModelEntry { name, path, load_cancelled, .. } = entry.clone();
        let read = move || {
            let mut reported = 0.0;
            Model::load(&path, &options, move |done| {
                observe(&name, LoadStep::Weights(done));
                // llama.cpp reports progress for every tensor; one report per percent is enough.
                if done - reported >= 0.01 {
                    reported = done;
                    registry.change(&name, |entry| {
                        if let ModelState::Loading(progress) = &mut entry.state {
                            *progress = done;
                        }
                    });
                }
                !load_cancelled.load(Ordering::Acquire)
            })
        };
        tokio::task::spawn_blocking(read).await.map_err(|_| load_error(&entry.path, "the loader panicked"))?
    }

    /// Returns true if another load may succeed although the last one failed. The load of an unchanged file is not
    /// repeated if another model would have to be unloaded for it.
    pub(super) fn may_load_again(&self, entry: &ModelEntry) -> bool {
        let ModelState::Failed(LoadFailure { file, at, .. }) = &entry.state else { return true };
        WeightFile::new(&entry.path).ok() != *file || (at.elapsed() >= RETRY_DELAY && self.has_room(&entry.name))
    }
}

pub(super) fn model_options(config: &EngineConfig, entry: &ModelEntry) -> ModelOptions {
    let control = || ControlVectors { files: config.control.files.clone(), layers: config.control.layers.clone() };
    ModelOptions {
        name: Some(entry.name.clone()),
        adapters: if entry.default { config.adapters.clone() } else { Vec::new() },
        images: config.images.as_ref().filter(|_| entry.default).map(|images| ImageOptions {
            projector: images.projector.clone(),
            gpu: images.gpu,
            threads: config.threads_batch,
            min_tokens: images.min_tokens,
            max_tokens: images.max_tokens,
        }),
        control: if entry.default { control() } else { ControlVectors::default() },
        gpu_layers: gpu_layers(config.gpu.layers),
        devices: config.gpu.devices.clone(),
        split_mode: match config.gpu.split_mode {
            config::SplitModeFlag::None => SplitMode::None,
            config::SplitModeFlag::Layer => SplitMode::Layer,
            config::SplitModeFlag::Row => SplitMode::Row,
        },
        tensor_split: config.gpu.tensor_split.clone(),
        main_gpu: config.gpu.main_gpu,
        tensors: TensorPlacement {
            named: config.gpu.tensors.iter().map(|place| (place.pattern.clone(), place.buffer.clone())).collect(),
            cpu_moe: config.gpu.cpu_moe,
            n_cpu_moe: config.gpu.n_cpu_moe,
            n_cpu_ffn: config.gpu.n_cpu_ffn,
        },
        no_mmap: config.no_mmap,
        mlock: config.mlock,
        tuning: tuning(&config.tuning),
        context: ContextRequirements {
            context_per_sequence: config.slot_context(DEFAULT_SLOT_CONTEXT),
            limit_to_training_context: config.ctx_size.is_none(),
            sequences: config.parallel,
            ubatch_size: config.ubatch_size,
            stores_scores: config.attention != flags::OnOffAuto::Off,
            keys: cache_type(config.cache.type_k),
            values: cache_type(config.cache.type_v),
        },
    }
}

pub(super) fn gpu_layers(layers: config::GpuLayersFlag) -> GpuLayers {
    match layers {
        config::GpuLayersFlag::Auto => GpuLayers::Auto,
        config::GpuLayersFlag::All => GpuLayers::All,
        config::GpuLayersFlag::Count(count) => GpuLayers::Count(count),
    }
}

fn tuning(flags: &TuningFlags) -> Tuning {
    let overridden = |value: &OverrideValue| match value {
        OverrideValue::Int(number) => MetadataValue::Int(*number),
        OverrideValue::Float(number) => MetadataValue::Float(*number),
        OverrideValue::Bool(yes) => MetadataValue::Bool(*yes),
        OverrideValue::Text(text) => MetadataValue::Text(text.clone()),
    };
    Tuning {
        rope: RopeOptions {
            scaling: flags.rope_scaling.map(|scaling| match scaling {
                config::RopeScalingFlag::None => RopeScaling::None,
                config::RopeScalingFlag::Linear => RopeScaling::Linear,
                config::RopeScalingFlag::Yarn => RopeScaling::Yarn,
            }),
            base: flags.rope_freq_base,
            scale: flags.frequency_scale(),
            yarn_original_context: flags.yarn_orig_ctx,
            yarn_extrapolation: flags.yarn_ext_factor,
            yarn_attention: flags.yarn_attn_factor,
            yarn_beta_fast: flags.yarn_beta_fast,
            yarn_beta_slow: flags.yarn_beta_slow,
        },
        overrides: flags.override_kv.iter().map(|entry| (entry.key.clone(), overridden(&entry.value))).collect(),
        check_tensors: flags.check_tensors,
        cache_on_host: flags.kv_offload == flags::OnOff::Off,
        no_op_offload: flags.op_offload == flags::OnOff::Off,
        no_repack: flags.repack == flags::OnOff::Off,
        no_host: flags.no_host,
        numa: flags.numa.map(|numa| match numa {
            config::NumaFlag::Distribute => Numa::Distribute,
            config::NumaFlag::Isolate => Numa::Isolate,
            config::NumaFlag::Numactl => Numa::Numactl,
        }),
        threads: ThreadOptions {
            poll: flags.poll,
            priority: flags.prio,
            processors: flags.processors(),
            strict: flags.cpu_strict == flags::OnOff::On,
        },
    }
}

fn engine_options(
    Config { engine, server, data }: &Config,
    model: &Model,
    draft_model: Option<DraftModel>,
    clock: Clock,
) -> EngineOptions {
    // llama.cpp decodes an image within one physical batch if its tokens attend to each other.
    let undivided = model.images().map_or(0, |images| images.max_undivided_tokens());
    if undivided > engine.ubatch_size {
        tracing::info!(model = model.name(), ubatch_size = undivided, "physical batch enlarged for whole images");
    }
    EngineOptions {
        ctx_size: engine.slot_context(model.card().context_train),
        parallel: engine.parallel,
        threads: engine.threads,
        threads_batch: engine.threads_batch,
        batch_size: engine.batch_size.max(undivided),
        ubatch_size: engine.ubatch_size.max(undivided),
        attention: attention_capture(engine),
        cache_type_k: cache_type(engine.cache.type_k),
        cache_type_v: cache_type(engine.cache.type_v),
        slot_prompt_similarity: engine.cache.slot_prompt_similarity,
        cache_ram_bytes: engine.cache.cache_ram_bytes,
        speculation: speculation(engine, draft_model.is_some()),
        draft_model,
        max_unread_time: MAX_UNREAD_TIME,
        hash_cache: Some(data.dir.join("cache").join("weights")),
        max_tokens: server.max_tokens,
        encode_heads: attention::encode_heads,
        encode_attention: |values, layers, heads, row_len| attention::encode(values, layers, heads, row_len).ok(),
        clock,
    }
}

fn speculation(EngineConfig { speculation, .. }: &EngineConfig, has_draft_model: bool) -> SpeculationOptions {
    SpeculationOptions {
        drafter: match (speculation.ngrams, has_draft_model) {
            (false, false) => DrafterKind::None,
            (true, false) => DrafterKind::Ngram,
            (false, true) => DrafterKind::Model,
            (true, true) => DrafterKind::NgramThenModel,
        },
        max_draft: speculation.max_draft as usize,
        min_draft: speculation.min_draft as usize,
        min_match: speculation.min_match as usize,
        min_probability: speculation.min_probability,
        adaptive: true,
    }
}

fn attention_capture(engine: &EngineConfig) -> AttentionCapture {
    match engine.attention {
        flags::OnOffAuto::Auto if engine.flash_attention => AttentionCapture::Flash,
        flags::OnOffAuto::Auto => AttentionCapture::Auto,
        flags::OnOffAuto::On => AttentionCapture::On,
        flags::OnOffAuto::Off => AttentionCapture::Off,
    }
}

pub(super) fn cache_type(named: crate::config::CacheTypeFlag) -> CacheType {
    CacheType::ALL.into_iter().find(|kind| kind.as_str() == named.as_str()).unwrap_or_default()
}

pub(super) async fn default_path(config: &Config) -> Result<PathBuf, ModelError> {
    if let Some(path) = &config.engine.model {
        return Ok(path.clone());
    }
    let cache = config.data.dir.join("cache");
    let shown = cache.display().to_string();
    let unpacked = tokio::task::spawn_blocking(move || bundled_model(&cache)).await;
    let unpacked = unpacked.map_err(|_| load_error(Path::new(&shown), "the bundled model could not be unpacked"))?;
    unpacked.map_err(|source| ModelError::Unpack { folder: shown, source })
}

fn load_error(path: &Path, reason: &str) -> ModelError {
    ModelError::Load { path: path.display().to_string(), reason: reason.into() }
}
