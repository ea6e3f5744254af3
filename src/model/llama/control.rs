//! ControlVectors vectors: directions that are added to what comes out of layers, for every token of every run. Files and scales are
//! added up once, when the model is loaded.

use super::ffi::adapters as ffi;
use super::gguf::{self, GgufHeader, GgufTensor};
use super::{ModelCard, ModelError};
use llama_cpp_2::context::LlamaContext;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// What tensors of such a file are called, before the number of their layer.
const PREFIX: &str = "direction.";

/// Which control vectors hold, and where.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ControlVectors {
    /// GGUF files, each with how strongly it holds.
    pub files: Vec<(PathBuf, f32)>,
    /// The layers that they are added to, counted from 0; without it all that the files have a direction for.
    pub layers: Option<RangeInclusive<u32>>,
}

/// What is added to which layers.
#[derive(Debug)]
pub(super) struct ControlVector {
    /// A direction for each layer from the second on; llama.cpp adds nothing to the first.
    values: Vec<f32>,
    /// Values of a direction.
    width: usize,
    layers: RangeInclusive<u32>,
}

impl ControlVector {
    /// Reads and adds up the files; `None` where nothing is added to anything.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::ControlVector`].
    pub(super) fn load(control: &ControlVectors, card: &ModelCard) -> Result<Option<Self>, ModelError> {
        let width = card.embedding as usize;
        let mut values = vec![0.0; width * card.layers.saturating_sub(1) as usize];
        for (path, scale) in &control.files {
            if !card.generates {
                let reason = "the model is an encoder, to which llama.cpp adds none".to_owned();
                return Err(ModelError::ControlVector { path: path.display().to_string(), reason });
            }
            add(path, *scale, width, &mut values)?;
        }
        let layers = control.layers.clone().unwrap_or(1..=card.layers);
        let vector = Self { values, width, layers };
        let adds = vector.added().next().is_some();
        Ok(adds.then_some(vector))
    }

    /// A number that is the same for those that do the same.
    pub(super) fn fingerprint(&self) -> u128 {
        let mut hash = Xxh3::new();
        for (at, value) in self.added() {
            hash.update(&(at as u64).to_le_bytes());
            hash.update(&value.to_le_bytes());
        }
        hash.digest128()
    }

    /// The values that change something, each with its place.
    fn added(&self) -> impl Iterator<Item = (usize, f32)> {
        let holds = |&(at, value): &(usize, f32)| value != 0.0 && self.layers.contains(&layer(at, self.width));
        self.values.iter().copied().enumerate().filter(holds)
    }

    /// Makes it hold in a context, of the model that it was loaded for, from the next decode on.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub(super) fn apply(&self, context: &mut LlamaContext<'_>) -> Result<(), ModelError> {
        let [first, last] =
            [*self.layers.start(), *self.layers.end()].map(|layer| i32::try_from(layer).unwrap_or(i32::MAX));
        if ffi::set_control(context, &self.values, self.width, first, last) {
            return Ok(());
        }
        Err(ModelError::Decode("the control vector could not be set".into()))
    }
}

/// The layer that a value is for.
fn layer(at: usize, width: usize) -> u32 {
    u32::try_from(at / width + 1).unwrap_or(u32::MAX)
}

/// Adds what a file has, times `scale`, to the values of all layers but the first.
fn add(path: &Path, scale: f32, width: usize, values: &mut [f32]) -> Result<(), ModelError> {
    let shown = path.display().to_string();
    let refused = |reason: String| ModelError::ControlVector { path: shown.clone(), reason };
    let unreadable = |source| ModelError::Unreadable { path: shown.clone(), source };
    let header = GgufHeader::read(path).map_err(|error| match error {
        gguf::GgufError::Io(source) => unreadable(source),
        other => refused(other.to_string()),
    })?;
    if header.tensors.is_empty() {
        return Err(refused(
            "the file has no tensors; a control vector has some called direction.1, direction.2, …".into(),
        ));
    }
    let mut file = File::open(path).map_err(unreadable)?;
    let mut bytes = vec![0; width * size_of::<f32>()];
    for tensor in &header.tensors {
        let number = direction(tensor, width).map_err(refused)? - 1;
        let Some(sum) = values.get_mut(number * width..(number + 1) * width) else {
            tracing::warn!("{shown} has a {}, and the model has no such layer", tensor.name);
            continue;
        };
        file.seek(SeekFrom::Start(tensor.begins)).and_then(|_| file.read_exact(&mut bytes)).map_err(unreadable)?;
        for (sum, value) in sum.iter_mut().zip(bytes.as_chunks().0) {
            *sum += f32::from_le_bytes(*value) * scale;
            if !sum.is_finite() {
                return Err(refused(format!("{} has values that are no numbers, or far too large", tensor.name)));
            }
        }
    }
    Ok(())
}

/// The layer that a tensor is the direction of, at least 1.
fn direction(tensor: &GgufTensor, width: usize) -> Result<usize, String> {
    let name = &tensor.name;
    let layer = name.strip_prefix(PREFIX).and_then(|number| number.parse::<u16>().ok()).filter(|&layer| layer > 0);
    let Some(layer) = layer else {
        return Err(format!(
            "it is no control vector: its tensor '{name}' is not called direction.N, with N from 1 on"
        ));
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
                "{name} has {extents} values, and the model's hidden state {width}: it was made for another model"
            ))
        }
    }
}
