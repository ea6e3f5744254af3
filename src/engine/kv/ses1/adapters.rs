//! LoRA adapters and control vectors of a state, identified by their fingerprints.

use super::{Ses1Error, field};
use crate::engine::kv::snapshot::ModelIdentity;
use crate::model::llama::{ScaledAdapter, ScaledVector};
use std::sync::Arc;

/// Length of a LoRA adapter: fingerprint and scale.
const LORA_BYTES: usize = 16 + 4;
/// Length of a control vector: fingerprint, scale, first and last layer.
const VECTOR_BYTES: usize = 16 + 4 + 2 * 4;
/// Maximum control vectors of a state.
const MAX_VECTORS: usize = 4096;

/// Writes the LoRA adapters.
///
/// # Errors
/// An adapter is not loaded.
pub fn write_loras(loras: &[ScaledAdapter], identity: &ModelIdentity, out: &mut Vec<u8>) -> Result<(), Ses1Error> {
    out.extend_from_slice(&(loras.len() as u32).to_le_bytes());
    for adapter in loras {
        out.extend_from_slice(&identity.adapters.get(adapter.id).ok_or(Ses1Error::Adapter)?.to_le_bytes());
        out.extend_from_slice(&adapter.scale.to_le_bytes());
    }
    Ok(())
}

/// Writes the control vectors.
pub fn write_steering(vectors: &[ScaledVector], out: &mut Vec<u8>) {
    out.extend_from_slice(&(vectors.len() as u32).to_le_bytes());
    for vector in vectors {
        out.extend_from_slice(&vector.fingerprint.to_le_bytes());
        out.extend_from_slice(&vector.scale.to_le_bytes());
        vector.layers.iter().for_each(|layer| out.extend_from_slice(&layer.to_le_bytes()));
    }
}

/// Reads the LoRA adapters and advances `kv` beyond them.
///
/// # Errors
/// An adapter is not loaded, or the data is invalid.
pub fn read_loras(identity: &ModelIdentity, kv: &mut &[u8]) -> Result<Vec<ScaledAdapter>, Ses1Error> {
    let read = |entry: &[u8]| {
        let fingerprint = u128::from_le_bytes(field(entry, 0..16)?);
        let scale = f32::from_le_bytes(field(entry, 16..LORA_BYTES)?);
        let id = identity.adapters.iter().position(|&known| known == fingerprint).ok_or(Ses1Error::Adapter)?;
        if scale.is_finite() { Ok(ScaledAdapter { id, scale }) } else { Err(Ses1Error::Adapter) }
    };
    let entries = entries(kv, LORA_BYTES, identity.adapters.len(), Ses1Error::Adapter)?;
    entries.chunks_exact(LORA_BYTES).map(read).collect()
}

/// Reads the control vectors and advances `kv` beyond them.
///
/// # Errors
/// A vector is not loaded, or the data is invalid.
pub fn read_steering(identity: &ModelIdentity, kv: &mut &[u8]) -> Result<Vec<ScaledVector>, Ses1Error> {
    let read = |entry: &[u8]| {
        let fingerprint = u128::from_le_bytes(field(entry, 0..16)?);
        let scale = f32::from_le_bytes(field(entry, 16..20)?);
        let layers = [u32::from_le_bytes(field(entry, 20..24)?), u32::from_le_bytes(field(entry, 24..VECTOR_BYTES)?)];
        let known = identity.vectors.iter().position(|known| known.fingerprint == fingerprint);
        let id = known.filter(|_| scale.is_finite()).ok_or(Ses1Error::ControlVector)?;
        Ok(ScaledVector { id, name: Arc::clone(&identity.vectors[id].name), scale, layers, fingerprint })
    };
    let entries = entries(kv, VECTOR_BYTES, MAX_VECTORS, Ses1Error::ControlVector)?;
    entries.chunks_exact(VECTOR_BYTES).map(read).collect()
}

/// Returns the bytes of a list of up to `max` entries of `size` bytes, and advances `kv` beyond them.
fn entries<'a>(kv: &mut &'a [u8], size: usize, max: usize, too_many: Ses1Error) -> Result<&'a [u8], Ses1Error> {
    let count = u32::from_le_bytes(field(kv, 0..4)?) as usize;
    if count > max {
        return Err(too_many);
    }
    let end = 4 + count * size;
    let needed = Ses1Error::Truncated { found: kv.len(), needed: end as u64 };
    let (list, rest) = kv.split_at_checked(end).ok_or(needed)?;
    *kv = rest;
    Ok(&list[4..])
}
