use super::ModUpload;
use crate::mods::{ModDescription, ModFactory, ModInstance, RunView};
use serde_json::Value;
use std::sync::Arc;

/// A mod together with its source.
pub struct WithSource {
    inner: Arc<dyn ModFactory>,
    upload: ModUpload,
    hash: String,
}

impl WithSource {
    /// Adds its upload and the hash of its version to a mod. A description of the upload replaces the source's own.
    #[must_use]
    pub fn wrap(inner: Arc<dyn ModFactory>, upload: ModUpload, hash: String) -> Arc<dyn ModFactory> {
        Arc::new(Self { inner, upload, hash })
    }
}

impl ModFactory for WithSource {
    fn describe(&self) -> ModDescription {
        let mut description = self.inner.describe();
        description.version = self.hash.chars().take(12).collect();
        if let Some(text) = &self.upload.description {
            description.description.clone_from(text);
        }
        description
    }

    fn source_hash(&self) -> Option<String> {
        Some(self.hash.clone())
    }

    fn upload(&self) -> Option<&ModUpload> {
        Some(&self.upload)
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        self.inner.start(config, run)
    }
}
