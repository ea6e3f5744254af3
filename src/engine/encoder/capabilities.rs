//! Outputs that an encoder provides for a model: embeddings, scores, or the reasons why they are unavailable.

use crate::model::Model;
use crate::model::llama::{Activation, DeclaredPooling, EncoderOptions, Head, HeadError, Pooling};

/// Settings of the encoder.
#[derive(Debug, Clone)]
pub struct EncoderSettings {
    /// True if embeddings are enabled.
    pub embeddings: bool,
    /// True if scores are enabled.
    pub reranking: bool,
    /// Pooling of embeddings; `None` for the model's default.
    pub pooling: Option<DeclaredPooling>,
    /// Activation after the head's dense layer; `None` for the model's default.
    pub head_activation: Option<Activation>,
    /// Size and threads of the context.
    pub context: EncoderOptions,
}

/// Reason why embeddings or scores are unavailable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncoderUnavailable {
    /// Embeddings are not enabled.
    #[error("embeddings and hidden states are not enabled; start the server with --embedding")]
    Embeddings,
    /// Scores are not enabled.
    #[error("scores are not enabled; start the server with --reranking")]
    Scores,
    /// The configured pooling gives scores, not embeddings.
    #[error("--pooling rank gives scores, not embeddings; start the server with --pooling mean, cls, last or none")]
    Ranked,
    /// The model has no usable head.
    #[error(transparent)]
    Head(#[from] HeadError),
}

/// Outputs that a model provides, or the reasons why it does not provide them.
pub(super) struct EncoderCapabilities {
    pub(super) embeddings: Result<Pooling, EncoderUnavailable>,
    pub(super) scores: Result<Head, EncoderUnavailable>,
}

impl EncoderCapabilities {
    pub(super) fn new(model: &Model, settings: &EncoderSettings) -> Self {
        let declared = settings.pooling.or_else(|| model.declared_pooling());
        let nothing_requested = !settings.embeddings && !settings.reranking;
        let scores = if settings.reranking
            || nothing_requested && (declared == Some(DeclaredPooling::Scores) || !model.generates())
        {
            model.head(settings.head_activation).map_err(EncoderUnavailable::Head)
        } else {
            Err(EncoderUnavailable::Scores)
        };
        let is_encoder = !model.generates() || matches!(declared, Some(DeclaredPooling::Embedding(_)));
        let embeddings = if settings.embeddings || nothing_requested && is_encoder {
            match (declared, settings.pooling) {
                (_, Some(DeclaredPooling::Scores)) => Err(EncoderUnavailable::Ranked),
                (Some(DeclaredPooling::Embedding(pooling)), _) => Ok(pooling),
                // The head requires the pooling of its training.
                (Some(DeclaredPooling::Scores), _) => Ok(model.head_pooling()),
                (None, _) => Ok(Pooling::Mean),
            }
        } else {
            Err(EncoderUnavailable::Embeddings)
        };
        Self { embeddings, scores }
    }

    pub(super) fn log(&self, model: &Model, settings: &EncoderSettings) {
        let name = model.name();
        if !model.generates() {
            tracing::info!(model = name, "model is an encoder: it provides embeddings or scores and generates no text");
        }
        if let Ok(pooling) = self.embeddings {
            tracing::info!(model = name, ?pooling, "embeddings enabled");
        }
        if self.scores.as_ref().is_ok_and(|head| head.segments && head.labels.len() == 1) {
            tracing::warn!(
                model = name,
                "the model distinguishes query and document by token types, which llama.cpp does not support; scores of pairs differ \
                 from the reference implementation"
            );
        }
        match &self.scores {
            Ok(head) => tracing::info!(
                model = name,
                labels = head.labels.join(","),
                activation = ?head.activation,
                pooling = ?head.pooling,
                "scores enabled"
            ),
            Err(EncoderUnavailable::Head(HeadError::None)) if !settings.reranking => {}
            Err(reason @ EncoderUnavailable::Head(_)) => tracing::warn!(model = name, "scores unavailable: {reason}"),
            Err(_) => {}
        }
    }
}
