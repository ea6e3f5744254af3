//! LoRA adapters: changes to a model's weights that are added while it computes, so that every run can weigh them as it
//! likes. They are loaded with the model, and stay as long as it does.

use super::ffi::adapters::{self as ffi, AdapterHandle};
use super::{GgufHeader, ModelError, WeightFile, gguf, reason};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use serde::Serialize;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// The adapters of a model, and how strongly each holds where a request does not say.
#[derive(Debug, Default)]
pub struct Adapters {
    list: Vec<Adapter>,
    usual: RwLock<AdapterSet>,
}

/// One adapter.
#[derive(Debug)]
pub struct Adapter {
    /// The GGUF file.
    pub path: PathBuf,
    /// `adapter.lora.task_name` of the file; mostly empty.
    pub task_name: String,
    /// `adapter.lora.prompt_prefix` of the file; mostly empty.
    pub prompt_prefix: String,
    /// The file with its weights.
    pub weights: WeightFile,
    handle: AdapterHandle,
}

/// Which adapters hold, and how strongly. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct AdapterSet(Arc<[ScaledAdapter]>);

/// An adapter of a set.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ScaledAdapter {
    /// Its place in the list of the model's adapters, from 0.
    pub id: usize,
    /// How strongly it holds; 1 is as it was trained.
    #[serde(serialize_with = "shortest")]
    pub scale: f32,
}

/// 0.8, not 0.800000011920929.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn shortest<S: serde::Serializer>(scale: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(scale.to_string().parse().unwrap_or_else(|_| f64::from(*scale)))
}

impl AdapterSet {
    /// A set from scales; those that are 0 do not count, and of several for one adapter the last does.
    #[must_use]
    pub fn new(scales: impl IntoIterator<Item = ScaledAdapter>) -> Self {
        let mut set: Vec<ScaledAdapter> = Vec::new();
        for weighed in scales {
            set.retain(|other| other.id != weighed.id);
            set.push(weighed);
        }
        set.retain(|weighed| weighed.scale != 0.0);
        set.sort_unstable_by_key(|weighed| weighed.id);
        Self(set.into())
    }

    /// The adapters, by id.
    #[must_use]
    pub fn as_slice(&self) -> &[ScaledAdapter] {
        &self.0
    }

    /// How strongly an adapter holds.
    #[must_use]
    pub fn scale(&self, id: usize) -> f32 {
        self.0.iter().find(|weighed| weighed.id == id).map_or(0.0, |weighed| weighed.scale)
    }

    /// Whether the model is as it is in its file.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Adapters {
    /// Loads files, each with its usual scale, for a model of which no context was made yet.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::Adapter`].
    pub(super) fn load(model: &mut LlamaModel, files: &[(PathBuf, f32)]) -> Result<Self, ModelError> {
        let list = files.iter().map(|(path, _)| Adapter::load(model, path)).collect::<Result<_, _>>()?;
        let usual = AdapterSet::new(files.iter().enumerate().map(|(id, &(_, scale))| ScaledAdapter { id, scale }));
        Ok(Self { list, usual: RwLock::new(usual) })
    }

    /// All of them; an adapter's id is its index.
    #[must_use]
    pub fn list(&self) -> &[Adapter] {
        &self.list
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// What holds where a request does not say.
    #[must_use]
    pub fn usual(&self) -> AdapterSet {
        self.usual.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets what holds where a request does not say; runs that have begun go on as they are.
    pub fn set_usual(&self, set: AdapterSet) {
        *self.usual.write().unwrap_or_else(PoisonError::into_inner) = set;
    }

    /// Makes exactly this set hold in a context. Costs nothing when it holds already.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub(super) fn apply(&self, set: &AdapterSet, context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        if self.is_empty() {
            return Ok(());
        }
        let chosen: Vec<(&AdapterHandle, f32)> = set
            .as_slice()
            .iter()
            .filter_map(|weighed| Some((&self.list.get(weighed.id)?.handle, weighed.scale)))
            .collect();
        if ffi::set(context, &chosen) {
            return Ok(());
        }
        Err(ModelError::Decode("the LoRA adapters could not be set".into()))
    }
}

impl Adapter {
    fn load(model: &mut LlamaModel, path: &Path) -> Result<Self, ModelError> {
        let shown = path.display().to_string();
        let refused = |reason: String| ModelError::Adapter { path: shown.clone(), reason };
        let unreadable = |source| ModelError::Unreadable { path: shown.clone(), source };
        let file = CString::new(path.as_os_str().as_bytes()).map_err(|_| refused("its path has a zero byte".into()))?;
        let weights = WeightFile::new(path).map_err(unreadable)?;
        let header = GgufHeader::read(path).map_err(|error| match error {
            gguf::GgufError::Io(source) => unreadable(source),
            other => refused(other.to_string()),
        })?;
        if header.text("adapter.type") != Some("lora") {
            return Err(refused("the file is no LoRA adapter: its adapter.type is not lora".into()));
        }
        // llama.cpp ends the process over an alpha of another type.
        if header.metadata.get("adapter.lora.alpha").is_some_and(|alpha| !matches!(alpha, gguf::GgufScalar::Float(_))) {
            return Err(refused("its adapter.lora.alpha is not a number with a fraction".into()));
        }
        let handle = ffi::load(model, &file).map_err(|lines| refused(reason::reason(&lines)))?;
        if ffi::is_activated(&handle) {
            return Err(refused("it holds only behind certain tokens (aLoRA), which is not supported".into()));
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
    fn sets_that_do_the_same_are_equal() {
        let set =
            |scales: &[(usize, f32)]| AdapterSet::new(scales.iter().map(|&(id, scale)| ScaledAdapter { id, scale }));
        assert_eq!(set(&[(1, 0.5), (0, 1.0)]), set(&[(0, 2.0), (2, 0.0), (0, 1.0), (1, 0.5)]));
        assert_ne!(set(&[(0, 1.0)]), set(&[(0, 0.5)]));
        assert!(set(&[(0, 0.0)]).is_empty() && set(&[]) == AdapterSet::default());
        assert_eq!((set(&[(1, 0.5)]).scale(1), set(&[(1, 0.5)]).scale(0)), (0.5, 0.0));
    }
}
