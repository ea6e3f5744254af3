//! Control vectors: directions that are added to the output of layers, for every token of every run. The scaled files
//! are summed once, when the model is loaded.

use super::ffi::adapters as ffi;
use super::gguf::{self, GgufHeader, GgufTensor};
use super::{ModelCard, ModelError};
use llama_cpp_2::context::LlamaContext;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Prefix of the tensor names in a control vector file, before the number of the layer.
const PREFIX: &str = "direction.";

/// Control vector files and the layers they apply to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ControlVectors {
    /// GGUF files, each with its scale.
    pub files: Vec<(PathBuf, f32)>,
    /// Layers to change, counted from 0; `None` for all layers with a direction in the files.
    pub layers: Option<RangeInclusive<u32>>,
}

/// The sum of all control vectors.
#[derive(Debug)]
pub(super) struct ControlVector {
    /// A direction for each layer from the second on; llama.cpp adds nothing to the first.
    values: Vec<f32>,
    /// Number of values of a direction.
    width: usize,
    layers: RangeInclusive<u32>,
}

impl ControlVector {
    /// Reads and sums the files; `None` if the sum changes nothing.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::ControlVector`].
    pub(super) fn load(control: &ControlVectors, card: &ModelCard) -> Result<Option<Self>, ModelError> {
        let width = card.embedding as usize;
        let mut values = vec![0.0; width * card.layers.saturating_sub(1) as usize];
        for (path, scale) in &control.files {
            if !card.generates {
                let reason =
                    "the model is an encoder; llama.cpp supports control vectors only for models that generate text"
                        .to_owned();
                return Err(ModelError::ControlVector { path: path.display().to_string(), reason });
            }
            add_directions(path, *scale, width, &mut values)?;
        }
        let layers = control.layers.clone().unwrap_or(1..=card.layers);
        let vector = Self { values, width, layers };
        let has_effect = vector.effective_values().next().is_some();
        Ok(has_effect.then_some(vector))
    }

    /// Returns a hash that is equal for control vectors with the same effect.
    pub(super) fn fingerprint(&self) -> u128 {
        let mut hash = Xxh3::new();
        for (at, value) in self.effective_values() {
            hash.update(&(at as u64).to_le_bytes());
            hash.update(&value.to_le_bytes());
        }
        hash.digest128()
    }

    /// Returns the effective values with their indexes.
    fn effective_values(&self) -> impl Iterator<Item = (usize, f32)> {
        let is_effective = |&(at, value): &(usize, f32)| value != 0.0 && self.layers.contains(&layer(at, self.width));
        self.values.iter().copied().enumerate().filter(is_effective)
    }

    /// Applies the vector to a context of the same model, from the next decode on.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub(super) fn apply(&self, context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        let [first, last] =
            [*self.layers.start(), *self.layers.end()].map(|layer| i32::try_from(layer).unwrap_or(i32::MAX));
        if ffi::set_control(context, &self.values, self.width, first, last) {
            return Ok(());
        }
        Err(ModelError::Decode("llama.cpp cannot apply the control vector".into()))
    }
}

/// Returns the layer that a value belongs to.
fn layer(at: usize, width: usize) -> u32 {
    u32::try_from(at / width + 1).unwrap_or(u32::MAX)
}

/// Adds the directions of a file, multiplied by `scale`, to `values`.
fn add_directions(path: &Path, scale: f32, width: usize, values: &mut [f32]) -> Result<(), ModelError> {
    let display_path = path.display().to_string();
    let invalid = |reason: String| ModelError::ControlVector { path: display_path.clone(), reason };
    let unreadable = |source| ModelError::Unreadable { path: display_path.clone(), source };
    let header = GgufHeader::read(path).map_err(|error| match error {
        gguf::GgufError::Io(source) => unreadable(source),
        other => invalid(other.to_string()),
    })?;
    if header.tensors.is_empty() {
        return Err(invalid("the file has no tensors; expected tensors named direction.1, direction.2, …".into()));
    }
    let mut file = File::open(path).map_err(unreadable)?;
    let mut bytes = vec![0; width * size_of::<f32>()];
    for tensor in &header.tensors {
        let number = direction_layer(tensor, width).map_err(invalid)? - 1;
        let Some(sum) = values.get_mut(number * width..(number + 1) * width) else {
            tracing::warn!("{display_path} has a tensor {}, but the model has no such layer", tensor.name);
            continue;
        };
        file.seek(SeekFrom::Start(tensor.offset)).and_then(|_| file.read_exact(&mut bytes)).map_err(unreadable)?;
        for (sum, value) in sum.iter_mut().zip(bytes.as_chunks().0) {
            *sum += f32::from_le_bytes(*value) * scale;
            if !sum.is_finite() {
                return Err(invalid(format!("{} has values that are NaN or too large", tensor.name)));
            }
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
