//! Uploads of mods by clients, validated before any of the code is run.

use super::WithSource;
use crate::events::hex;
use crate::mods::ModFactory;
use crate::mods::name::check_mod_name;
use crate::mods::python::{LoadError, PythonMods};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;

/// Maximum bytes of a mod's source, over all files.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Maximum files of a mod's source.
pub(super) const MAX_FILES: usize = 100;
/// Maximum length of a path, in characters.
const MAX_PATH_CHARS: usize = 200;
/// Maximum length of a description, in characters.
const MAX_DESCRIPTION_CHARS: usize = 2000;

/// Source of a mod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ModSource {
    /// One file.
    Text(String),
    /// Files of a package, by path.
    Files(BTreeMap<String, String>),
}

impl ModSource {
    /// Imports the source and returns all its mods. `module` is the module of a package to import, and `file` the name
    /// of a text in tracebacks.
    ///
    /// # Errors
    /// The Python error with its traceback; a source without any mod is an error too.
    pub fn load_all(
        &self,
        file: &str,
        module: Option<&str>,
        python: &PythonMods,
    ) -> Result<Vec<Arc<dyn ModFactory>>, LoadError> {
        let text = match self {
            Self::Text(text) => text.clone(),
            Self::Files(files) => bundle(files, module.unwrap_or_default()),
        };
        let found = python.load_all(file.to_owned(), text)?;
        let with_source = |factory: Arc<dyn ModFactory>| {
            let upload = ModUpload {
                name: Some(factory.describe().name),
                description: None,
                language: Some("python".to_owned()),
                module: module.map(str::to_owned),
                entrypoint: None,
                source: self.clone(),
            };
            let hash = upload.hash();
            WithSource::wrap(factory, upload, hash)
        };
        Ok(found.into_iter().map(with_source).collect())
    }

    /// Returns the SHA-256 of the source in hexadecimal. For a text, it is the output of `sha256sum`. For a package, it
    /// covers path, length and text of each file, in the order of the paths.
    #[must_use]
    pub fn hash(&self) -> String {
        let digest = match self {
            Self::Text(text) => Sha256::digest(text.as_bytes()),
            Self::Files(files) => {
                let mut hash = Sha256::new();
                for (path, text) in files {
                    hash.update(format!("{path}\0{}\0", text.len()));
                    hash.update(text);
                }
                hash.finalize()
            }
        };
        hex(&digest)
    }
}

/// A mod as sent by a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModUpload {
    /// Name used by runs; by default the name of the entrypoint.
    #[serde(default)]
    pub name: Option<String>,
    /// Description in one sentence; replaces the description in the source.
    #[serde(default)]
    pub description: Option<String>,
    /// `python`.
    #[serde(default)]
    pub language: Option<String>,
    /// Module with the entrypoint, if the source is a package.
    #[serde(default)]
    pub module: Option<String>,
    /// Function of the mod; optional if only one function has `@mod`.
    #[serde(default)]
    pub entrypoint: Option<String>,
    /// Source: a text, or an object from path to text.
    pub source: ModSource,
}

/// Invalid field of an upload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidUpload {
    /// Name of the field.
    pub field: &'static str,
    /// Message with the expected value and the one that was sent.
    pub message: String,
}

fn invalid(field: &'static str, message: impl Into<String>) -> InvalidUpload {
    InvalidUpload { field, message: message.into() }
}

impl ModUpload {
    /// Returns the name of the mod.
    ///
    /// # Errors
    /// The name is missing or invalid.
    pub fn name(&self) -> Result<&str, InvalidUpload> {
        let name = self.name.as_deref().or(self.entrypoint.as_deref());
        let name =
            name.ok_or_else(|| invalid("name", "`name` is missing; it must be the name by which runs use the mod"))?;
        check_mod_name(name).map_err(|rule| invalid("name", format!("`name` {rule}")))?;
        Ok(name)
    }

    /// Validates the fields without running the code.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(&self) -> Result<(), InvalidUpload> {
        self.name()?;
        if let Some(language) = self.language.as_deref().filter(|language| *language != "python") {
            return Err(invalid("language", format!("`language` must be \"python\", got {:?}", excerpt(language))));
        }
        if let Some(entrypoint) = self.entrypoint.as_deref().filter(|name| !is_identifier(name)) {
            let message = format!("`entrypoint` must be the name of a function, got {:?}", excerpt(entrypoint));
            return Err(invalid("entrypoint", message));
        }
        if self
            .description
            .as_ref()
            .is_some_and(|text| text.chars().count() > MAX_DESCRIPTION_CHARS || has_control_characters(text))
        {
            let message =
                format!("`description` must have at most {MAX_DESCRIPTION_CHARS} characters and no control characters");
            return Err(invalid("description", message));
        }
        match &self.source {
            ModSource::Text(text) => check_text(text.len(), text, "source"),
            ModSource::Files(files) => self.check_files(files),
        }
    }

    fn check_files(&self, files: &BTreeMap<String, String>) -> Result<(), InvalidUpload> {
        if files.is_empty() || files.len() > MAX_FILES {
            return Err(invalid("source", format!("`source` must have 1 to {MAX_FILES} files, got {}", files.len())));
        }
        let total = files.values().map(String::len).sum();
        for (path, text) in files {
            let parts = path.strip_suffix(".py").map(|path| path.split('/').all(is_identifier));
            if parts != Some(true) || path.chars().count() > MAX_PATH_CHARS {
                let message = format!(
                    "`source`: a path must be relative, consist of Python identifiers and end in .py, e.g. \
                     \"my_mods/calm.py\", got {:?}",
                    excerpt(path)
                );
                return Err(invalid("source", message));
            }
            check_text(total, text, path)?;
        }
        let module = self.module.as_deref();
        let module = module
            .ok_or_else(|| invalid("module", "`module` is missing; it must name the module with the entrypoint"))?;
        let path = module.replace('.', "/");
        if !module.split('.').all(is_identifier)
            || !(files.contains_key(&format!("{path}.py")) || files.contains_key(&format!("{path}/__init__.py")))
        {
            let message = format!("`module` must name one of the files of `source`, got {:?}", excerpt(module));
            return Err(invalid("module", message));
        }
        Ok(())
    }

    /// Returns the hash of this version of the mod: that of the source, or the SHA-256 of that hash, the module and the
    /// entrypoint if the upload names one of them.
    #[must_use]
    pub fn hash(&self) -> String {
        let (source, module, entrypoint) = (self.source.hash(), self.module.as_deref(), self.entrypoint.as_deref());
        if module.is_none() && entrypoint.is_none() {
            return source;
        }
        let whole = format!("{source}\0{}\0{}", module.unwrap_or_default(), entrypoint.unwrap_or_default());
        hex(&Sha256::digest(whole))
    }

    /// Imports the source in a worker and creates the mod. Takes as long as the import. `hash` is the hash of this version:
    /// [`ModUpload::hash`] for a new one, and the stored hash for a stored one, because runs recorded it.
    ///
    /// # Errors
    /// The Python error with its traceback. The caller runs [`ModUpload::check`] first.
    pub fn load(&self, hash: String, python: &PythonMods) -> Result<Arc<dyn ModFactory>, LoadError> {
        let name = self.name.as_deref().or(self.entrypoint.as_deref()).unwrap_or("mod");
        let bundled;
        let text = match (&self.source, &self.module) {
            (ModSource::Text(text), _) => text,
            (ModSource::Files(files), module) => {
                bundled = bundle(files, module.as_deref().unwrap_or_default());
                &bundled
            }
        };
        let factory = python.load_one(name, text, self.entrypoint.as_deref())?;
        Ok(WithSource::wrap(factory, self.clone(), hash))
    }
}

/// Returns a text that imports the module of a package from memory and exports its names.
fn bundle(files: &BTreeMap<String, String>, module: &str) -> String {
    // A JSON string is a valid Python string; paths and module were validated.
    let files = serde_json::to_string(files).unwrap_or_default();
    let files = serde_json::to_string(&files).unwrap_or_default();
    format!("from thunder_mods.worker.package import load\nglobals().update(load({files}, \"{module}\"))\n")
}

fn check_text(total: usize, text: &str, subject: &str) -> Result<(), InvalidUpload> {
    if total > MAX_BYTES {
        return Err(invalid("source", format!("`source` must have at most {MAX_BYTES} bytes, got {total}")));
    }
    if text.contains('\0') {
        return Err(invalid("source", format!("`{subject}` must not contain a zero byte; remove it")));
    }
    Ok(())
}

pub(super) fn is_identifier(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn has_control_characters(text: &str) -> bool {
    text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t'))
}

fn excerpt(text: &str) -> String {
    text.chars().take(MAX_PATH_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::ModUpload;
    use serde_json::{Value, json};

    fn field(body: Value) -> Option<&'static str> {
        let upload: ModUpload = serde_json::from_value(body).unwrap();
        upload.check().err().map(|invalid| invalid.field)
    }

    #[test]
    fn invalid_upload_error_names_field() {
        let source = "@mod\ndef a(e, a): ...";
        assert_eq!(field(json!({"name": "a-b.c_1", "source": source})), None);
        assert_eq!(field(json!({"entrypoint": "calm", "source": source})), None);
        assert_eq!(field(json!({"source": source})), Some("name"));
        for name in ["", "a/b", "../x", ".x", "-x", "a b", "ü", "a\u{0}", &"x".repeat(65)] {
            assert_eq!(field(json!({"name": name, "source": source})), Some("name"), "{name:?}");
        }
        assert_eq!(field(json!({"name": "a", "language": "lua", "source": source})), Some("language"));
        assert_eq!(field(json!({"name": "a", "entrypoint": "x()", "source": source})), Some("entrypoint"));
        assert_eq!(field(json!({"name": "a", "description": "\u{7}", "source": source})), Some("description"));
        assert_eq!(field(json!({"name": "a", "source": "a\u{0}"})), Some("source"));
        assert_eq!(field(json!({"name": "a", "source": " ".repeat((1 << 20) + 1)})), Some("source"));
    }

    #[test]
    fn package_requires_plain_paths_and_module() {
        let body = |path: &str, module: Option<&str>| json!({"name": "a", "module": module, "source": {path: ""}});
        assert_eq!(field(body("p/calm.py", Some("p.calm"))), None);
        assert_eq!(field(body("p/__init__.py", Some("p"))), None);
        assert_eq!(field(body("p/calm.py", None)), Some("module"));
        assert_eq!(field(body("p/calm.py", Some("p.angry"))), Some("module"));
        for path in ["/p.py", "../p.py", "p/../q.py", "p.txt", "p\\q.py", ".py", "a b.py", "p//q.py"] {
            assert_eq!(field(body(path, Some("p"))), Some("source"), "{path}");
        }
        assert_eq!(field(json!({"name": "a", "source": {}})), Some("source"));
    }

    #[test]
    fn hash_covers_source_module_and_entrypoint() {
        let hash = |body: Value| serde_json::from_value::<ModUpload>(body).unwrap().hash();
        let of_file = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash(json!({"name": "a", "description": "d", "source": "abc"})), of_file, "as by sha256sum");
        let a = hash(json!({"name": "m", "entrypoint": "a", "source": "abc"}));
        let b = hash(json!({"name": "m", "entrypoint": "b", "source": "abc"}));
        assert!(a != b && a != of_file && b != of_file);
        let module = |name: &str| hash(json!({"name": "m", "module": name, "source": {"a.py": "", "b.py": ""}}));
        assert_ne!(module("a"), module("b"));
    }
}
