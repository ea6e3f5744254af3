//! Control vectors: directions that are added to the output of layers. Every run can have its own vectors, scales and
//! layers; the directions of all vectors of a run are summed when they become active.

use super::ffi::adapters as ffi;
use super::gguf::{self, GgufFile, GgufTensor};
use super::{ModelCard, ModelError};
use crate::events::shortest_f64;
use llama_cpp_2::context::LlamaContext;
use serde::{Serialize, Serializer};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// Prefix of the tensor names in a control vector file, before the number of the layer.
const PREFIX: &str = "direction.";

/// Maximum absolute value of a direction, with and without its scale, so that sums of directions are finite.
const MAX_VALUE: f32 = 1e30;

/// Control vector files and the layers they apply to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ControlVectors {
    /// GGUF files, each with the scale for requests that select no vectors.
    pub files: Vec<(PathBuf, f32)>,
    /// Layers to change unless a request selects others, counted from 0; `None` for all layers.
    pub layers: Option<RangeInclusive<u32>>,
}

/// A loaded control vector.
#[derive(Debug)]
pub struct ControlVector {
    /// Name in requests: the file's name without folder and extension. A repeated name has a number, such as `happy-2`.
    pub name: Arc<str>,
    /// The GGUF file.
    pub path: PathBuf,
    /// Hash of the directions.
    pub fingerprint: u128,
    /// A direction for each layer from the second on; llama.cpp adds nothing to the first.
    values: Vec<f32>,
}

/// A control vector of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScaledVector {
    /// Index in the list of the model's control vectors.
    #[serde(skip)]
    pub id: usize,
    /// Name of the vector.
    pub name: Arc<str>,
    /// Factor of the directions.
    #[serde(serialize_with = "serialize_scale")]
    pub scale: f32,
    /// First and last layer that the vector is added to, counted from 0.
    pub layers: [u32; 2],
    /// Hash of the directions.
    #[serde(serialize_with = "serialize_fingerprint")]
    pub fingerprint: u128,
}

/// Serializes the shortest decimal form.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(super) fn serialize_scale<S: Serializer>(scale: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(shortest_f64(*scale))
}

/// Serializes a fingerprint in hexadecimal.
fn serialize_fingerprint<S: Serializer>(fingerprint: &u128, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{fingerprint:032x}"))
}

/// The control vectors of a model, in the order of the command line.
#[derive(Debug, Default)]
pub struct ControlVectorList {
    vectors: Vec<ControlVector>,
    /// Number of values of a direction.
    width: usize,
    /// Number of layers of the model.
    layers: u32,
    /// Layers that a vector is added to if a request selects none.
    default_layers: [u32; 2],
}

impl ControlVectorList {
    /// Reads the files. Returns the vectors, and those with a scale for requests that select none.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::ControlVector`].
    pub(super) fn load(control: &ControlVectors, card: &ModelCard) -> Result<(Self, Vec<ScaledVector>), ModelError> {
        let last = card.layers.saturating_sub(1);
        let default_layers =
            control.layers.as_ref().map_or([last.min(1), last], |range| [*range.start(), (*range.end()).min(last)]);
        let width = card.embedding as usize;
        let invalid = |path: &Path, reason| ModelError::ControlVector { path: path.display().to_string(), reason };
        let mut list = Self { vectors: Vec::new(), width, layers: card.layers, default_layers };
        let mut defaults = Vec::new();
        for (path, scale) in &control.files {
            if !card.generates {
                let reason =
                    "the model is an encoder; llama.cpp supports control vectors only for models that generate text";
                return Err(invalid(path, reason.to_owned()));
            }
            if default_layers[0] > last {
                let first = default_layers[0];
                let reason =
                    format!("the layer range begins at layer {first}, but the last layer of the model is {last}");
                return Err(invalid(path, reason));
            }
            let mut values = vec![0.0; width * last as usize];
            read_directions(path, *scale, width, &mut values)?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let name = list.unused_name(&super::file_stem(path));
            list.vectors.push(ControlVector { name, path: path.clone(), fingerprint: xxh3_128(&bytes), values });
            defaults.extend(list.scaled(list.vectors.len() - 1, *scale, default_layers));
        }
        Ok((list, defaults))
    }

    /// Returns a name, with a number if another vector has this name.
    fn unused_name(&self, name: &str) -> Arc<str> {
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let mut names = std::iter::once(name.to_owned()).chain(numbered);
        let unused = names.find(|name| self.vectors.iter().all(|vector| *vector.name != **name));
        unused.unwrap_or_default().into()
    }

    /// Returns the vectors; a vector's id is its index.
    #[must_use]
    pub fn as_slice(&self) -> &[ControlVector] {
        &self.vectors
    }

    /// Returns the number of layers of the model.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Returns the first and last layer that a vector is added to if a request selects none.
    #[must_use]
    pub fn default_layers(&self) -> [u32; 2] {
        self.default_layers
    }

    /// Returns a vector with scale and layers; `None` if there is no vector with this id.
    #[must_use]
    pub fn scaled(&self, id: usize, scale: f32, layers: [u32; 2]) -> Option<ScaledVector> {
        let ControlVector { name, fingerprint, .. } = self.vectors.get(id)?;
        Some(ScaledVector { id, name: Arc::clone(name), scale, layers, fingerprint: *fingerprint })
    }

    /// Adds the sum of these vectors to the layers of a context, from the next decode on, in place of other vectors.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub(super) fn apply(&self, set: &[ScaledVector], context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        if set.is_empty() {
            return applied(ffi::clear_control(context));
        }
        self.apply_values(&self.sum(set), context)
    }

    /// Adds a direction with large values to all layers of a context from the next decode on.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub(super) fn apply_probe(&self, context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        let values = (0..self.width * self.layers.saturating_sub(1) as usize).map(|at| (at % 7) as f32 - 3.0);
        self.apply_values(&values.collect::<Vec<_>>(), context)
    }

    fn apply_values(&self, values: &[f32], context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        let last = i32::try_from(self.layers).unwrap_or(i32::MAX);
        applied(ffi::set_control(context, values, self.width, 1, last))
    }

    /// Returns the sum of the scaled directions for each layer from the second on.
    fn sum(&self, set: &[ScaledVector]) -> Vec<f32> {
        let mut sums = vec![0.0; self.width * self.layers.saturating_sub(1) as usize];
        for ScaledVector { id, scale, layers: [first, last], .. } in set {
            let Some(vector) = self.vectors.get(*id) else { continue };
            let layers = first.saturating_sub(1) as usize..(*last).min(self.layers.saturating_sub(1)) as usize;
            let values = layers.start * self.width..layers.end.max(layers.start) * self.width;
            let (Some(sums), Some(values)) = (sums.get_mut(values.clone()), vector.values.get(values)) else {
                continue;
            };
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value * scale;
            }
        }
        sums
    }

    /// Returns the error for a model whose output does not change with [`Self::apply_probe`].
    pub(super) fn unsupported(&self, architecture: &str) -> ModelError {
        let path = self.vectors.first().map(|vector| vector.path.display().to_string()).unwrap_or_default();
        let layers = self.layers;
        let reason = format!(
            "llama.cpp does not add control vectors to this model, which has the architecture '{architecture}' and \
             {layers} layers"
        );
        ModelError::ControlVector { path, reason }
    }
}

fn applied(is_applied: bool) -> Result<(), ModelError> {
    if is_applied { Ok(()) } else { Err(ModelError::Decode("llama.cpp cannot apply the control vectors".into())) }
}

/// Reads the directions of a file into `values`, and checks that they can be multiplied by `scale`.
fn read_directions(path: &Path, scale: f32, width: usize, values: &mut [f32]) -> Result<(), ModelError> {
    let display_path = path.display().to_string();
    let invalid = |reason: String| ModelError::ControlVector { path: display_path.clone(), reason };
    let unreadable = |source| ModelError::Unreadable { path: display_path.clone(), source };
    let file = GgufFile::open(path).map_err(|error| match error {
        gguf::GgufError::Io(source) => unreadable(source),
        other => invalid(other.to_string()),
    })?;
    let tensors = &file.header().tensors;
    if tensors.is_empty() {
        return Err(invalid("the file has no tensors; expected tensors named direction.1, direction.2, …".into()));
    }
    let is_valid = |value: f32| value.abs() <= MAX_VALUE;
    for tensor in tensors {
        let number = direction_layer(tensor, width).map_err(invalid)? - 1;
        let Some(direction) = values.get_mut(number * width..(number + 1) * width) else {
            tracing::warn!("{display_path} has a tensor {}, but the model has no such layer", tensor.name);
            continue;
        };
        direction.copy_from_slice(&file.read(tensor, width).map_err(unreadable)?.values);
        if !direction.iter().all(|&value| is_valid(value) && is_valid(value * scale)) {
            return Err(invalid(format!("{} has values that are NaN or too large", tensor.name)));
        }
    }
    Ok(())
}

/// Returns the layer of a direction tensor, 1 or more.
fn direction_layer(tensor: &GgufTensor, width: usize) -> Result<usize, String> {
    let name = &tensor.name;
    let layer = name.strip_prefix(PREFIX).and_then(|number| number.parse::<u16>().ok()).filter(|&layer| layer > 0);
    let Some(layer) = layer else {
        return Err(format!("it is not a control vector: the tensor '{name}' is not named direction.N with N >= 1"));
    };
    if tensor.kind != gguf::F32 {
        return Err(format!("{name} is not of type f32"));
    }
    match tensor.extents[..] {
        [extent, ref others @ ..] if extent == width as u64 && others.iter().all(|&other| other == 1) => {
            Ok(layer.into())
        }
        _ => {
            let extents = tensor.extents.iter().map(ToString::to_string).collect::<Vec<_>>().join(" × ");
            Err(format!(
                "{name} has {extents} values, but the model's hidden state has {width}; the file belongs to another model"
            ))
        }
    }
}
