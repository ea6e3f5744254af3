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
    /// Adds its source and the hash of its version to a mod, and a description that replaces the source's own.
    #[must_use]
    pub fn wrap(
        inner: Arc<dyn ModFactory>,
        source: ModSource,
        hash: String,
        description: Option<String>,
    ) -> Arc<dyn ModFactory> {
        Arc::new(Self { inner, source, hash, description })
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
