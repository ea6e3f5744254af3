use super::ModSource;
use crate::mods::{ModDescription, ModFactory, ModInstance, RunView};
use serde_json::Value;
use std::sync::Arc;

/// A mod together with its source.
pub struct WithSource {
    inner: Arc<dyn ModFactory>,
    source: ModSource,
    hash: String,
    /// Description that replaces the source's own.
    description: Option<String>,
}

impl WithSource {
    /// Adds a source to a mod, from whose hash its version is made, and a description that replaces the source's own.
    #[must_use]
    pub fn wrap(inner: Arc<dyn ModFactory>, source: ModSource, description: Option<String>) -> Arc<dyn ModFactory> {
        Arc::new(Self { hash: source.hash(), inner, source, description })
    }
}

impl ModFactory for WithSource {
    fn describe(&self) -> ModDescription {
        let mut description = self.inner.describe();
        description.version = self.hash.chars().take(12).collect();
        if let Some(text) = &self.description {
            description.description.clone_from(text);
        }
        description
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
