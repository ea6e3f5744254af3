//! LoRA adapters: low-rank changes that are added to a model's weights during computation, so that every run can use
//! its own scales. Adapters are loaded and unloaded together with the model.

use super::ffi::adapters::{self as ffi, AdapterHandle};
use super::{GgufHeader, ModelError, WeightFile, gguf, reason};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use serde::Serialize;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// The adapters of a model and their default scales.
#[derive(Debug, Default)]
pub struct Adapters {
    list: Vec<Adapter>,
    default_scales: RwLock<AdapterSet>,
}

/// A loaded adapter.
#[derive(Debug)]
pub struct Adapter {
    /// The GGUF file.
    pub path: PathBuf,
    /// `adapter.lora.task_name` of the file; usually empty.
    pub task_name: String,
    /// `adapter.lora.prompt_prefix` of the file; usually empty.
    pub prompt_prefix: String,
    /// The file with its attributes at load time.
    pub weights: WeightFile,
    handle: AdapterHandle,
}

/// A set of active adapters with their scales. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct AdapterSet(Arc<[ScaledAdapter]>);

/// An adapter of a set.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ScaledAdapter {
    /// Index in the list of the model's adapters.
    pub id: usize,
    /// Scale; 1 is the strength used in training.
    #[serde(serialize_with = "serialize_scale")]
    pub scale: f32,
}

/// Serializes 0.8 as 0.8, not as 0.800000011920929.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn serialize_scale<S: serde::Serializer>(scale: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(scale.to_string().parse().unwrap_or_else(|_| f64::from(*scale)))
}

impl AdapterSet {
    /// Creates a set from scales. Scales of 0 are dropped; the last of several scales for one adapter wins.
    #[must_use]
    pub fn new(scales: impl IntoIterator<Item = ScaledAdapter>) -> Self {
        let mut set: Vec<ScaledAdapter> = Vec::new();
        for adapter in scales {
            set.retain(|other| other.id != adapter.id);
            set.push(adapter);
        }
        set.retain(|adapter| adapter.scale != 0.0);
        set.sort_unstable_by_key(|adapter| adapter.id);
        Self(set.into())
    }

    /// Returns the adapters, ordered by id.
    #[must_use]
    pub fn as_slice(&self) -> &[ScaledAdapter] {
        &self.0
    }

    /// Returns the scale of an adapter.
    #[must_use]
    pub fn scale(&self, id: usize) -> f32 {
        self.0.iter().find(|adapter| adapter.id == id).map_or(0.0, |adapter| adapter.scale)
    }

    /// Returns true if no adapter is active.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Adapters {
    /// Loads files, each with its default scale, for a model without contexts.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::Adapter`].
    pub(super) fn load(model: &mut LlamaModel, files: &[(PathBuf, f32)]) -> Result<Self, ModelError> {
        let list = files.iter().map(|(path, _)| Adapter::load(model, path)).collect::<Result<_, _>>()?;
        let default_scales =
            AdapterSet::new(files.iter().enumerate().map(|(id, &(_, scale))| ScaledAdapter { id, scale }));
        Ok(Self { list, default_scales: RwLock::new(default_scales) })
    }

    /// Returns all adapters; an adapter's id is its index.
    #[must_use]
    pub fn list(&self) -> &[Adapter] {
        &self.list
    }

    /// Returns true if there are no adapters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the scales for requests that set none.
    #[must_use]
    pub fn default_scales(&self) -> AdapterSet {
        self.default_scales.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the scales for requests that set none; running runs are not affected.
    pub fn set_default_scales(&self, set: AdapterSet) {
        *self.default_scales.write().unwrap_or_else(PoisonError::into_inner) = set;
    }

    /// Replaces the active set of a context. Does nothing if this set is active already.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub(super) fn apply(&self, set: &AdapterSet, context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        if self.is_empty() {
            return Ok(());
        }
        let active: Vec<(&AdapterHandle, f32)> = set
            .as_slice()
            .iter()
            .filter_map(|adapter| Some((&self.list.get(adapter.id)?.handle, adapter.scale)))
            .collect();
        if ffi::set(context, &active) {
            return Ok(());
        }
        Err(ModelError::Decode("llama.cpp cannot activate the LoRA adapters".into()))
    }
}

impl Adapter {
    fn load(model: &mut LlamaModel, path: &Path) -> Result<Self, ModelError> {
        let display_path = path.display().to_string();
        let invalid = |reason: String| ModelError::Adapter { path: display_path.clone(), reason };
        let unreadable = |source| ModelError::Unreadable { path: display_path.clone(), source };
        let file =
            CString::new(path.as_os_str().as_bytes()).map_err(|_| invalid("its path contains a NUL byte".into()))?;
        let weights = WeightFile::new(path).map_err(unreadable)?;
        let header = GgufHeader::read(path).map_err(|error| match error {
            gguf::GgufError::Io(source) => unreadable(source),
            other => invalid(other.to_string()),
        })?;
        if header.text("adapter.type") != Some("lora") {
            return Err(invalid("the file is not a LoRA adapter: its adapter.type is not lora".into()));
        }
        // llama.cpp aborts the process on an alpha of another type.
        if header.metadata.get("adapter.lora.alpha").is_some_and(|alpha| !matches!(alpha, gguf::GgufScalar::Float(_))) {
            return Err(invalid("its adapter.lora.alpha is not a floating-point number".into()));
        }
        let handle = ffi::load(model, &file).map_err(|lines| invalid(reason::reason(&lines)))?;
        if ffi::needs_activation(&handle) {
            return Err(invalid("it is activated by tokens (aLoRA), which is not supported".into()));
        }
        let text = |key| header.text(key).unwrap_or_default().to_owned();
        Ok(Self {
            task_name: text("adapter.lora.task_name"),
            prompt_prefix: text("adapter.lora.prompt_prefix"),
            weights,
            path: path.to_owned(),
            handle,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{AdapterSet, ScaledAdapter};

    #[test]
    fn equivalent_sets_are_equal() {
        let set =
            |scales: &[(usize, f32)]| AdapterSet::new(scales.iter().map(|&(id, scale)| ScaledAdapter { id, scale }));
        assert_eq!(set(&[(1, 0.5), (0, 1.0)]), set(&[(0, 2.0), (2, 0.0), (0, 1.0), (1, 0.5)]));
        assert_ne!(set(&[(0, 1.0)]), set(&[(0, 0.5)]));
        assert!(set(&[(0, 0.0)]).is_empty() && set(&[]) == AdapterSet::default());
        assert_eq!((set(&[(1, 0.5)]).scale(1), set(&[(1, 0.5)]).scale(0)), (0.5, 0.0));
    }
}
