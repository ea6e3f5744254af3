//! Conversion of the configuration to the options of models, engines and encoders.

use super::ModelEntry;
use crate::config::flags::{OnOff, OnOffAuto};
use crate::config::{
    CacheTypeFlag, Config, DEFAULT_SLOT_CONTEXT, DraftModelConfig, EncoderFlags, EngineConfig, GpuLayersFlag, HeadFlag,
    NumaFlag, OverrideValue, PoolingFlag, RopeScalingFlag, SplitModeFlag, TuningFlags,
};
use crate::engine::encoder::EncoderSettings;
use crate::engine::{Clock, DraftModel, DrafterKind, EngineOptions, MAX_UNREAD_TIME, SpeculationOptions};
use crate::model::Model;
use crate::model::llama::{
    Activation, AttentionCapture, CacheType, ContextRequirements, ControlVectors, DeclaredPooling, EncoderOptions,
    GpuLayers, ImageOptions, MetadataValue, ModelOptions, Numa, Pooling, RopeOptions, RopeScaling, SplitMode,
    TensorPlacement, ThreadOptions, Tuning,
};
use crate::trace::attention;

/// Returns the load options of a model.
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
            SplitModeFlag::None => SplitMode::None,
            SplitModeFlag::Layer => SplitMode::Layer,
            SplitModeFlag::Row => SplitMode::Row,
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
            stores_scores: config.attention != OnOffAuto::Off,
            keys: cache_type(config.cache.type_k),
            values: cache_type(config.cache.type_v),
        },
    }
}

/// Returns the load options of the draft model: those of the main model, without settings that belong to its weights.
pub(super) fn draft_options(config: &EngineConfig, entry: &ModelEntry, draft: &DraftModelConfig) -> ModelOptions {
    let main = model_options(config, entry);
    ModelOptions {
        name: None,
        adapters: Vec::new(),
        control: ControlVectors::default(),
        gpu_layers: gpu_layers(draft.gpu_layers),
        tensors: TensorPlacement::default(),
        context: ContextRequirements {
            stores_scores: false,
            keys: cache_type(draft.cache_type_k),
            values: cache_type(draft.cache_type_v),
            ..main.context
        },
        tuning: Tuning { rope: RopeOptions::default(), overrides: Vec::new(), ..main.tuning },
        ..main
    }
}

fn gpu_layers(layers: GpuLayersFlag) -> GpuLayers {
    match layers {
        GpuLayersFlag::Auto => GpuLayers::Auto,
        GpuLayersFlag::All => GpuLayers::All,
        GpuLayersFlag::Count(count) => GpuLayers::Count(count),
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
                RopeScalingFlag::None => RopeScaling::None,
                RopeScalingFlag::Linear => RopeScaling::Linear,
                RopeScalingFlag::Yarn => RopeScaling::Yarn,
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
        cache_on_host: flags.kv_offload == OnOff::Off,
        no_op_offload: flags.op_offload == OnOff::Off,
        no_repack: flags.repack == OnOff::Off,
        no_host: flags.no_host,
        numa: flags.numa.map(|numa| match numa {
            NumaFlag::Distribute => Numa::Distribute,
            NumaFlag::Isolate => Numa::Isolate,
            NumaFlag::Numactl => Numa::Numactl,
        }),
        threads: ThreadOptions {
            poll: flags.poll,
            priority: flags.prio,
            processors: flags.processors(),
            strict: flags.cpu_strict == OnOff::On,
        },
    }
}

/// Returns the options of a model's engine.
pub(super) fn engine_options(
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
        OnOffAuto::Auto if engine.flash_attention => AttentionCapture::Flash,
        OnOffAuto::Auto => AttentionCapture::Auto,
        OnOffAuto::On => AttentionCapture::On,
        OnOffAuto::Off => AttentionCapture::Off,
    }
}

/// Returns the data type with that name. A test compares the names of both types.
pub(super) fn cache_type(named: CacheTypeFlag) -> CacheType {
    CacheType::ALL.into_iter().find(|kind| kind.as_str() == named.as_str()).unwrap_or_default()
}

/// Returns the settings of a model's encoder.
pub(super) fn encoder_settings(config: &EngineConfig, model: &Model) -> EncoderSettings {
    let requested = &config.encoder;
    EncoderSettings {
        embeddings: requested.embedding,
        reranking: requested.reranking,
        pooling: requested.pooling.map(|pooling| match pooling {
            PoolingFlag::None => DeclaredPooling::Embedding(Pooling::None),
            PoolingFlag::Mean => DeclaredPooling::Embedding(Pooling::Mean),
            PoolingFlag::Cls => DeclaredPooling::Embedding(Pooling::Cls),
            PoolingFlag::Last => DeclaredPooling::Embedding(Pooling::Last),
            PoolingFlag::Rank => DeclaredPooling::Scores,
        }),
        head_activation: requested.classifier_head.map(|head| match head {
            HeadFlag::Direct => Activation::Direct,
            HeadFlag::Tanh => Activation::Tanh,
            HeadFlag::Relu => Activation::Relu,
            HeadFlag::Gelu => Activation::Gelu,
        }),
        context: EncoderOptions {
            max_input_tokens: config.max_text_tokens(model.card().context_train, model.generates()),
            ubatch_size: config.ubatch_size,
            max_output_bytes: EncoderFlags::max_output_bytes(),
            threads: config.threads_batch,
        },
    }
}
