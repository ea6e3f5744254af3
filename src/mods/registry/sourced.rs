use super::SourceText;
use crate::mods::{Description, Factory, RunView, Session};
use serde_json::Value;
use std::sync::Arc;

/// A mod together with the source that it was made from.
pub struct Sourced {
    inner: Arc<dyn Factory>,
    source: SourceText,
    hash: String,
    /// In place of the source's own.
    description: Option<String>,
}

impl Sourced {
    /// The mod with its source.
    #[must_use]
    pub fn wrap(inner: Arc<dyn Factory>, source: SourceText) -> Arc<dyn Factory> {
        Self::described(inner, source, None)
    }

    /// The same with another description.
    #[must_use]
    pub fn described(inner: Arc<dyn Factory>, source: SourceText, description: Option<String>) -> Arc<dyn Factory> {
        Arc::new(Self { hash: source.hash(), inner, source, description })
    }
}

impl Factory for Sourced {
    fn describe(&self) -> Description {
        let mut described = self.inner.describe();
        described.version = self.hash.chars().take(12).collect();
        if let Some(description) = &self.description {
            described.description.clone_from(description);
        }
        described
    }

    fn source_hash(&self) -> Option<String> {
        Some(self.hash.clone())
    }

    fn source_text(&self) -> Option<Value> {
        serde_json::to_value(&self.source).ok()
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn Session>, String> {
        self.inner.start(config, run)
    }
}
