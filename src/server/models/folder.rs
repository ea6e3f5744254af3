//! The models in the folder of `--models-dir` and its direct subfolders. A model has the name of its GGUF file.

use super::{ModelEntry, ModelRegistry, ModelState};
use crate::model::{SplitName, split_name};
use memchr::memmem;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

impl ModelRegistry {
    /// Scans the models folder again. Adds new files, and removes deleted ones unless they are loaded.
    pub async fn refresh(&self) {
        let Some(dir) = self.0.config.server.models.dir.clone() else { return };
        let shown = dir.display().to_string();
        let found = match tokio::task::spawn_blocking(move || models_in(&dir)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return tracing::error!(folder = shown, %error, "reading the models folder failed"),
            Err(_) => return,
        };
        let mut models = self.lock();
        models.entries.retain(|entry| {
            entry.default
                || found.get(&entry.name) == Some(&entry.path)
                || !matches!(entry.state, ModelState::Unloaded | ModelState::Failed(_))
        });
        for (name, path) in found {
            let taken = models.entries.iter().any(|entry| entry.path == path || entry.names().any(|own| own == name));
            if !taken {
                models.entries.push(ModelEntry::new(name, Vec::new(), path, false));
            }
        }
        models.entries.sort_by(|a, b| (!a.default, &a.name).cmp(&(!b.default, &b.name)));
    }
}

/// Returns the models in the folder and its subfolders by name. If several files have the same name, the first path is
/// used.
fn models_in(dir: &Path) -> std::io::Result<BTreeMap<String, PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            // Subfolders that cannot be read are ignored.
            paths.extend(std::fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
        } else {
            paths.push(path);
        }
    }
    paths.sort();
    let mut found = BTreeMap::new();
    for path in paths.into_iter().filter(|path| path.is_file()) {
        if let Some(name) = name_of(&path).filter(|_| !is_adapter_or_projector(&path)) {
            found.entry(name).or_insert(path);
        }
    }
    Ok(found)
}

/// Returns true if a file is a LoRA adapter or an image projector, not a model. Converters store the type among the
/// first keys.
fn is_adapter_or_projector(path: &Path) -> bool {
    const HEAD_BYTES: u64 = 2048;
    // The key, the type of its value (8: string), its length and the value.
    const TYPES: [&[u8]; 2] =
        [b"general.type\x08\0\0\0\x07\0\0\0\0\0\0\0adapter", b"general.type\x08\0\0\0\x06\0\0\0\0\0\0\0mmproj"];
    let mut head = Vec::new();
    // A file that cannot be read is reported when it is loaded.
    let _ = std::fs::File::open(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head));
    TYPES.iter().any(|kind| memmem::find(&head, kind).is_some())
}

/// Returns the name of a file's model, or `None` if the file is not a separate model, such as a later part of a split
/// model.
fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = file.strip_suffix(".gguf")?;
    if stem.starts_with("mmproj") || stem.is_empty() {
        return None;
    }
    match split_name(file) {
        Some(SplitName { prefix, index: 1, .. }) => Some(prefix.to_owned()),
        Some(_) => None,
        None => Some(stem.to_owned()),
    }
}

/// Returns the default name of a model: its file's name without the extension.
pub(super) fn default_name(path: &Path) -> String {
    let stem = path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned());
    match path.file_name().and_then(|file| split_name(file.to_str()?)) {
        Some(SplitName { prefix, index: 1, .. }) => prefix.to_owned(),
        _ => stem,
    }
}

#[cfg(test)]
mod tests {
    use super::{default_name, is_adapter_or_projector, models_in, name_of};
    use std::path::Path;

    #[test]
    fn adapters_and_projectors_are_not_listed_as_models() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models");
        assert!(
            is_adapter_or_projector(&folder.join("tiny-lora.gguf"))
                && !is_adapter_or_projector(&folder.join("tiny.gguf"))
        );
        let found = models_in(&folder).unwrap();
        assert!(found.contains_key("tiny") && !found.contains_key("tiny-lora"));
        assert!(!found.contains_key("tiny-mmproj"));
    }

    #[test]
    fn model_name_is_file_stem() {
        let named = |path: &str| name_of(Path::new(path));
        assert_eq!(named("/m/tiny.gguf").as_deref(), Some("tiny"));
        assert_eq!(named("/m/Kimi/Kimi-K2-00001-of-00006.gguf").as_deref(), Some("Kimi-K2"));
        for other in ["/m/Kimi-K2-00002-of-00006.gguf", "/m/mmproj-F16.gguf", "/m/notes.txt", "/m/.gguf", "/m/tiny"] {
            assert_eq!(named(other), None, "{other}");
        }
        assert_eq!(default_name(Path::new("/m/a-of-b.gguf")), "a-of-b");
        assert_eq!(default_name(Path::new("/m/Kimi-K2-00001-of-00006.gguf")), "Kimi-K2");
    }
}
