//! Conversion of the configuration to encoder settings.

use crate::config::{EncoderFlags, EngineConfig, HeadFlag, PoolingFlag};
use crate::engine::encoder::EncoderSettings;
use crate::model::Model;
use crate::model::llama::{Activation, DeclaredPooling, EncoderOptions, Pooling};

pub(super) fn settings(config: &EngineConfig, model: &Model) -> EncoderSettings {
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
