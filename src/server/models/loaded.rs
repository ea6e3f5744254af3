use crate::config::is_chat_template_name;
use crate::engine::encoder::Encoder;
use crate::engine::{Engine, SubmitError};
use crate::model::chat::ChatTemplate;
use crate::model::{Model, Vocabulary};
use crate::server::ApiError;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A loaded model with its engine; cheap to clone.
///
/// A clone keeps the model's memory allocated, so a handler holds it for one request only.
#[derive(Clone)]
pub struct LoadedModel(Arc<Inner>);

struct Inner {
    aliases: Vec<String>,
    engine: Engine,
    encoder: Encoder,
    template: Result<ChatTemplate, String>,
    created: Instant,
    /// Held while the threads end.
    stopping: tokio::sync::Mutex<()>,
}

/// A reference to a loaded model that does not keep its memory allocated.
#[derive(Debug, Clone, Default)]
pub struct WeakLoadedModel(Weak<Inner>);

impl WeakLoadedModel {
    /// Returns the model if it is still in memory.
    #[must_use]
    pub fn upgrade(&self) -> Option<LoadedModel> {
        self.0.upgrade().map(LoadedModel)
    }
}

impl LoadedModel {
    /// Creates a loaded model from its engine and encoder. `aliases` are additional names for requests. `template`
    /// replaces the model's own chat template.
    pub(super) fn new(engine: Engine, encoder: Encoder, aliases: Vec<String>, template: Option<&str>) -> Self {
        let template = template_of(&engine, template);
        if let Err(reason) = &template
            && engine.model().generates()
        {
            tracing::warn!(model = engine.model().name(), %reason, "chat is not available for this model");
        }
        let (created, stopping) = (Instant::now(), tokio::sync::Mutex::default());
        Self(Arc::new(Inner { aliases, engine, encoder, template, created, stopping }))
    }

    /// Returns a reference that does not keep the model in memory.
    #[must_use]
    pub fn downgrade(&self) -> WeakLoadedModel {
        WeakLoadedModel(Arc::downgrade(&self.0))
    }

    /// Returns the model's name, as used in responses and traces.
    #[must_use]
    pub fn name(&self) -> &str {
        self.model().name()
    }

    /// Returns all names that requests may use.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        std::iter::once(self.name()).chain(self.0.aliases.iter().map(String::as_str))
    }

    /// Returns the additional names.
    #[must_use]
    pub fn aliases(&self) -> &[String] {
        &self.0.aliases
    }

    /// Returns the engine.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.0.engine
    }

    /// Returns true if runs are queued or active, or other clones of this value exist besides the caller's.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.0) > 1 || !self.is_idle()
    }

    /// Returns true if nothing is queued or active.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.engine.unfinished_runs() == 0 && self.0.encoder.pending() == 0
    }

    /// Returns the encoder for embeddings and scores.
    #[must_use]
    pub fn encoder(&self) -> &Encoder {
        &self.0.encoder
    }

    /// Returns the supported request types and inputs: `completion`, `vision`, `embedding`, `rerank`, `classify`.
    #[must_use]
    pub fn capabilities(&self) -> Vec<&'static str> {
        let scores = self.0.encoder.scores().ok();
        let ranks = scores.is_some_and(|scores| scores.labels.len() == 1 || scores.softmax);
        let classifies = scores.is_some_and(|scores| scores.labels.len() > 1);
        [
            (self.model().generates(), "completion"),
            (self.model().images().is_some(), "vision"),
            (self.0.encoder.embeddings().is_ok(), "embedding"),
            (ranks, "rerank"),
            (classifies, "classify"),
        ]
        .into_iter()
        .filter_map(|(can, name)| can.then_some(name))
        .collect()
    }

    /// Returns true if the threads are running. They end after [`LoadedModel::stop`] or a panic.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.0.engine.is_running() && self.0.encoder.is_running()
    }

    /// Returns the time since the model was loaded.
    pub(super) fn age(&self) -> Duration {
        self.0.created.elapsed()
    }

    /// Ends all runs and waits for the threads. After that, the recorder has received all data of the runs.
    pub async fn stop(&self) {
        // A second caller waits for the threads, too.
        let _stopping = self.0.stopping.lock().await;
        tokio::join!(self.0.engine.stop(), self.0.encoder.stop());
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        self.0.engine.model()
    }

    /// Returns the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        self.model().vocabulary()
    }

    /// Returns the chat template.
    ///
    /// # Errors
    /// 400 if the model's template is invalid; 501 if the model does not generate text.
    pub fn template(&self) -> Result<&ChatTemplate, ApiError> {
        if !self.model().generates() {
            return Err(SubmitError::NoGeneration { model: self.name().to_owned() }.into());
        }
        let template = self.0.template.as_ref();
        template.map_err(|reason| ApiError::bad_request(format!("{reason}; use /v1/completions")))
    }
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LoadedModel").field(&self.name()).finish()
    }
}

fn template_of(engine: &Engine, given: Option<&str>) -> Result<ChatTemplate, String> {
    let model = engine.model();
    let vocabulary = model.vocabulary();
    let text = |token: Option<_>| token.map(|token| vocabulary.decode(&[token])).unwrap_or_default();
    let special = vocabulary.special();
    let (bos, eos) = (text(special.bos), text(special.eos));
    let template = match given {
        Some(name) if is_chat_template_name(name) => ChatTemplate::from_llama_cpp(name),
        given => ChatTemplate::new(given.or(model.card().chat_template.as_deref()), &bos, &eos),
    };
    template.map(|template| template.with_literal_masking(Arc::clone(vocabulary))).map_err(|error| error.to_string())
}
