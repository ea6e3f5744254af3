use super::ModSource;
use crate::mods::{ModDescription, ModFactory, ModInstance, RunView};
use serde_json::Value;
use std::sync::Arc;

/// A mod together with the source that it was made from.
pub struct WithSource {
    inner: Arc<dyn ModFactory>,
    source: ModSource,
    hash: String,
    /// In place of the source's own.
    description: Option<String>,
}

impl WithSource {
    /// The mod with its source.
    #[must_use]
    pub fn wrap(inner: Arc<dyn ModFactory>, source: ModSource) -> Arc<dyn ModFactory> {
        Self::described(inner, source, None)
    }

    /// The same with another description.
    #[must_use]
    pub fn described(
        inner: Arc<dyn ModFactory>,
        source: ModSource,
        description: Option<String>,
    ) -> Arc<dyn ModFactory> {
        Arc::new(Self { hash: source.hash(), inner, source, description })
    }
}

impl ModFactory for WithSource {
    fn describe(&self) -> ModDescription {
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

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        self.inner.start(config, run)
    }
}
