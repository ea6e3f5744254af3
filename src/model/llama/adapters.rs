//! Adapters of a run: LoRA adapters, which are low-rank changes to a model's weights, and control vectors, which are
//! added to the output of layers. Both are loaded together with the model and applied during computation, so that every
//! run can use its own.

use super::control_vectors::{ControlVectorList, ControlVectors, ScaledVector, serialize_scale};
use super::ffi::adapters::{self as ffi, AdapterHandle};
use super::{GgufHeader, ModelCard, ModelError, WeightFile, gguf, reason};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use serde::Serialize;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// The adapters of a model, and the set for requests that select none.
#[derive(Debug, Default)]
pub struct Adapters {
    loras: Vec<Adapter>,
    vectors: ControlVectorList,
    default_set: RwLock<AdapterSet>,
}

/// A loaded LoRA adapter.
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

/// The LoRA adapters and control vectors of a run with their scales. Cheap to clone.
///
/// Runs with different sets are not decoded together, and do not share KV states.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdapterSet {
    loras: Arc<[ScaledAdapter]>,
    steering: Arc<[ScaledVector]>,
}

/// A LoRA adapter of a set.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ScaledAdapter {
    /// Index in the list of the model's adapters.
    pub id: usize,
    /// Scale; 1 is the strength used in training.
    #[serde(serialize_with = "serialize_scale")]
    pub scale: f32,
}

impl AdapterSet {
    /// Creates a set from scales of LoRA adapters. Scales of 0 are dropped; the last of several scales for one adapter
    /// wins.
    #[must_use]
    pub fn new(scales: impl IntoIterator<Item = ScaledAdapter>) -> Self {
        let mut loras: Vec<ScaledAdapter> = Vec::new();
        for adapter in scales {
            loras.retain(|other| other.id != adapter.id);
            loras.push(adapter);
        }
        loras.retain(|adapter| adapter.scale != 0.0);
        loras.sort_unstable_by_key(|adapter| adapter.id);
        Self { loras: loras.into(), steering: Arc::default() }
    }

    /// Returns the set with these control vectors instead of its own. Scales of 0 are dropped; a vector may be listed
    /// several times, e.g. with different layers.
    #[must_use]
    pub fn with_steering(self, mut vectors: Vec<ScaledVector>) -> Self {
        vectors.retain(|vector| vector.scale != 0.0);
        vectors.sort_by(|a, b| (a.id, a.layers).cmp(&(b.id, b.layers)).then(a.scale.total_cmp(&b.scale)));
        Self { steering: vectors.into(), ..self }
    }

    /// Returns the set with the LoRA adapters of another set instead of its own.
    #[must_use]
    pub fn with_loras_of(self, other: &Self) -> Self {
        Self { loras: Arc::clone(&other.loras), ..self }
    }

    /// Returns the LoRA adapters, ordered by id.
    #[must_use]
    pub fn loras(&self) -> &[ScaledAdapter] {
        &self.loras
    }

    /// Returns the control vectors, ordered by id.
    #[must_use]
    pub fn steering(&self) -> &[ScaledVector] {
        &self.steering
    }

    /// Returns the scale of a LoRA adapter.
    #[must_use]
    pub fn scale(&self, id: usize) -> f32 {
        self.loras.iter().find(|adapter| adapter.id == id).map_or(0.0, |adapter| adapter.scale)
    }

    /// Returns true if nothing is active.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.loras.is_empty() && self.steering.is_empty()
    }
}

impl Adapters {
    /// Loads LoRA adapters, each with its default scale, for a model without contexts.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::Adapter`].
    pub(super) fn load(model: &mut LlamaModel, files: &[(PathBuf, f32)]) -> Result<Self, ModelError> {
        let loras = files.iter().map(|(path, _)| Adapter::load(model, path)).collect::<Result<_, _>>()?;
        let default_set =
            AdapterSet::new(files.iter().enumerate().map(|(id, &(_, scale))| ScaledAdapter { id, scale }));
        Ok(Self { loras, vectors: ControlVectorList::default(), default_set: RwLock::new(default_set) })
    }

    /// Loads control vectors.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::ControlVector`].
    pub(super) fn with_control_vectors(self, control: &ControlVectors, card: &ModelCard) -> Result<Self, ModelError> {
        let (vectors, defaults) = ControlVectorList::load(control, card)?;
        let default_set = RwLock::new(self.default_set().with_steering(defaults));
        Ok(Self { vectors, default_set, ..self })
    }

    /// Returns all LoRA adapters; an adapter's id is its index.
    #[must_use]
    pub fn loras(&self) -> &[Adapter] {
        &self.loras
    }

    /// Returns all control vectors.
    #[must_use]
    pub fn control_vectors(&self) -> &ControlVectorList {
        &self.vectors
    }

    /// Returns true if there are neither LoRA adapters nor control vectors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.loras.is_empty() && self.vectors.as_slice().is_empty()
    }

    /// Returns the set for requests that select none.
    #[must_use]
    pub fn default_set(&self) -> AdapterSet {
        self.default_set.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the scales of LoRA adapters for requests that set none; running runs are not affected.
    pub fn set_default_loras(&self, set: &AdapterSet) {
        let mut default_set = self.default_set.write().unwrap_or_else(PoisonError::into_inner);
        *default_set = default_set.clone().with_loras_of(set);
    }
}

/// The adapters of a context.
#[derive(Debug)]
pub(super) struct ContextAdapters<'model> {
    known: &'model Adapters,
    active: AdapterSet,
}

impl<'model> ContextAdapters<'model> {
    /// Returns the adapters of a new context, none of which is active.
    pub(super) fn new(known: &'model Adapters) -> Self {
        Self { known, active: AdapterSet::default() }
    }

    /// Returns the model's adapters.
    pub(super) fn known(&self) -> &'model Adapters {
        self.known
    }

    /// Replaces the active set. Does nothing if this set is active already.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub(super) fn apply(&mut self, set: &AdapterSet, context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        if self.active.loras != set.loras {
            let handle = |adapter: &ScaledAdapter| Some((&self.known.loras.get(adapter.id)?.handle, adapter.scale));
            let active: Vec<(&AdapterHandle, f32)> = set.loras.iter().filter_map(handle).collect();
            if !ffi::set(context, &active) {
                return Err(ModelError::Decode("llama.cpp cannot activate the LoRA adapters".into()));
            }
            self.active.loras = Arc::clone(&set.loras);
        }
        if self.active.steering != set.steering {
            self.known.vectors.apply(&set.steering, context)?;
            self.active.steering = Arc::clone(&set.steering);
        }
        Ok(())
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
        header.check_types().map_err(invalid)?;
        let handle = ffi::load(model, &file).map_err(|lines| invalid(reason::from_log(&lines)))?;
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
    use super::{AdapterSet, ScaledAdapter, ScaledVector};

    #[test]
    fn equivalent_sets_are_equal() {
        let set =
            |scales: &[(usize, f32)]| AdapterSet::new(scales.iter().map(|&(id, scale)| ScaledAdapter { id, scale }));
        assert_eq!(set(&[(1, 0.5), (0, 1.0)]), set(&[(0, 2.0), (2, 0.0), (0, 1.0), (1, 0.5)]));
        assert_ne!(set(&[(0, 1.0)]), set(&[(0, 0.5)]));
        assert!(set(&[(0, 0.0)]).is_empty() && set(&[]) == AdapterSet::default());
        assert_eq!((set(&[(1, 0.5)]).scale(1), set(&[(1, 0.5)]).scale(0)), (0.5, 0.0));
    }

    #[test]
    fn set_has_adapters_and_control_vectors() {
        let vector = |id, scale, layers| ScaledVector { id, name: "calm".into(), scale, layers, fingerprint: 7 };
        let lora = AdapterSet::new([ScaledAdapter { id: 0, scale: 1.0 }]);
        let set =
            lora.clone().with_steering(vec![vector(1, 1.0, [1, 2]), vector(0, 0.5, [3, 4]), vector(0, 0.0, [1, 9])]);
        let same = lora.clone().with_steering(vec![vector(0, 0.5, [3, 4]), vector(1, 1.0, [1, 2])]);
        assert_eq!(set, same);
        assert_ne!(set, lora.clone().with_steering(vec![vector(0, 0.5, [3, 5]), vector(1, 1.0, [1, 2])]));
        assert_eq!(set.clone().with_steering(Vec::new()), lora);
        assert_eq!(AdapterSet::default().with_steering(set.steering().to_vec()).with_loras_of(&lora), set);
        let recorded = serde_json::to_value(set.steering()).unwrap();
        let fingerprint = "00000000000000000000000000000007";
        assert_eq!(
            recorded[0],
            serde_json::json!({"name": "calm", "scale": 0.5, "layers": [3, 4], "fingerprint": fingerprint})
        );
    }
}
