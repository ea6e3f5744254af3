//! Encoding of attention rows in two tiers, T0 and T1, and of the rows of single heads.
//!
//! The attention of one step is `[layer][head][position]` probabilities. T0 holds the data for overviews: mean, maximum
//! and last-layer vectors in f16, and per-head statistics. T1 holds the head-mean of every layer as u8 on a square-root
//! scale, compressed. Both have their own header and version. The encoder runs in parallel to the decode loop and
//! allocates only its results.
//!
//! T0: `ATT0`, u16 version, u16 heads, u32 layers, u32 positions, u32 sink; then f16 mean\[positions\],
//! max\[positions\], last layer\[positions\]; then for every head of every layer f16 entropy, f16 sink mass, f16 peak
//! and u32 peak position, as four arrays. T1: `ATT1`, u16 version, u16 zero, u32 layers, u32 positions; then per layer
//! f32 maximum, u32 offset and u32 length of its section; then the sections, each a zstd frame of one u8 per position.
//! All numbers are little-endian.

mod encode;
mod heads;
mod reduce;
mod view;

pub use encode::AttentionEncoder;
pub use heads::{HeadLocation, decode_head, decode_head_table, encode_heads, find_head};
pub use view::{AttentionRows, AttentionStatistics, TopPosition};

use half::f16;
use half::slice::HalfFloatSliceExt;
use std::cell::RefCell;
use utoipa::ToSchema;

const T0_MAGIC: [u8; 4] = *b"ATT0";
const T1_MAGIC: [u8; 4] = *b"ATT1";
const VERSION: u16 = 1;
/// Bytes of T0 before its vectors: mean, max and last layer.
pub const T0_HEADER: usize = 20;
/// Bytes of T1 before its entries.
const T1_HEADER: usize = 16;
/// Bytes of T1's entry for a layer: maximum, offset and length.
const T1_ENTRY: usize = 12;
/// Steps of the square-root scale.
const STEPS: f32 = 255.0;
/// Maximum row length: far beyond every context, and small enough that sizes cannot overflow.
const MAX_POSITIONS: usize = 1 << 24;

/// The reason why attention cannot be encoded or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttentionCodecError {
    /// The number of values is not layers × heads × row length, or one of these is 0 or too large for the format.
    #[error("{values} values are not {layers} layers × {heads} heads × {row_len} positions")]
    Shape {
        /// Number of values.
        values: usize,
        /// Layers.
        layers: usize,
        /// Heads per layer.
        heads: usize,
        /// Positions.
        row_len: usize,
    },
    /// The bytes are corrupt, or have another version or format.
    #[error("the data is not attention of tier {tier}, version 1, or is damaged")]
    Damaged {
        /// The tier, 0 or 1.
        tier: u8,
    },
    /// The head rows are corrupt, or have another version or format.
    #[error("the data is not attention rows of single heads, version 1, or is damaged")]
    DamagedHeads,
    /// The layer is not stored.
    #[error("layer index {layer} is not among the {layers} stored layers")]
    NoLayer {
        /// The requested index.
        layer: usize,
        /// Number of stored layers.
        layers: usize,
    },
}

/// Statistics of one head's row.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, ToSchema)]
pub struct HeadStatistics {
    /// Entropy in bits.
    pub entropy: f32,
    /// Share of the row at the sink: the position with the largest mean over all heads of all layers.
    pub sink_mass: f32,
    /// Largest value of the row.
    pub peak: f32,
    /// Position of the largest value.
    pub peak_position: u32,
}

/// Tier T0, decoded.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionOverview {
    /// Length of each vector.
    pub row_len: usize,
    /// Number of layers in `stats`.
    pub layers: usize,
    /// Number of heads per layer in `stats`.
    pub heads: usize,
    /// The position with the largest mean.
    pub sink: u32,
    /// Mean over all heads of all layers.
    pub mean: Vec<f32>,
    /// Maximum over all heads of all layers.
    pub max: Vec<f32>,
    /// Mean over the heads of the last layer.
    pub last_layer: Vec<f32>,
    /// Statistics of every head, `[layer][head]` flattened.
    pub stats: Vec<HeadStatistics>,
}

thread_local! {
    static ENCODER: RefCell<AttentionEncoder> = RefCell::new(AttentionEncoder::new());
}

/// Encodes one step with the buffers of the current thread.
///
/// # Errors
/// [`AttentionCodecError::Shape`].
pub fn encode(
    rows: &[f32],
    layers: usize,
    heads: usize,
    row_len: usize,
) -> Result<(Vec<u8>, Vec<u8>), AttentionCodecError> {
    ENCODER.with_borrow_mut(|encoder| encoder.encode(rows, layers, heads, row_len))
}

/// Decodes one stored value of a vector of T0 or of a head's row.
#[must_use]
pub fn decode_value(value: [u8; 2]) -> f32 {
    f16::from_le_bytes(value).to_f32()
}

/// Decodes tier T0.
///
/// # Errors
/// [`AttentionCodecError::Damaged`].
pub fn decode_t0(t0: &[u8]) -> Result<AttentionOverview, AttentionCodecError> {
    overview(t0).ok_or(AttentionCodecError::Damaged { tier: 0 })
}

fn overview(t0: &[u8]) -> Option<AttentionOverview> {
    let header =
        t0.get(..T0_HEADER).filter(|header| header[..4] == T0_MAGIC && header[4..6] == VERSION.to_le_bytes())?;
    let heads = u16::from_le_bytes([header[6], header[7]]) as usize;
    let (layers, row_len, sink) = (u32_at(header, 8)? as usize, u32_at(header, 12)? as usize, u32_at(header, 16)?);
    let stats = layers.checked_mul(heads)?;
    let expected = row_len.checked_mul(6)?.checked_add(stats.checked_mul(10)?)?.checked_add(T0_HEADER)?;
    if t0.len() != expected || row_len == 0 || row_len > MAX_POSITIONS || sink as usize >= row_len {
        return None;
    }
    let mut at = T0_HEADER;
    let mut halves = |count: usize| {
        let values: Vec<f16> = pairs(&t0[at..at + 2 * count]).map(f16::from_le_bytes).collect();
        at += 2 * count;
        values.to_f32_vec()
    };
    let (mean, max, last_layer) = (halves(row_len), halves(row_len), halves(row_len));
    let (entropy, sink_mass, peak) = (halves(stats), halves(stats), halves(stats));
    let stats = (0..stats)
        .map(|i| {
            let peak_position = u32_at(t0, at + 4 * i)?;
            Some(HeadStatistics { entropy: entropy[i], sink_mass: sink_mass[i], peak: peak[i], peak_position })
        })
        .collect::<Option<_>>()?;
    Some(AttentionOverview { row_len, layers, heads, sink, mean, max, last_layer, stats })
}

/// Decodes the head-mean of the layer with this index from tier T1; one value per position. The error is below 0.002 of
/// the row's maximum for values up to a quarter of the maximum, and below 0.004 for the largest.
///
/// # Errors
/// [`AttentionCodecError::Damaged`], [`AttentionCodecError::NoLayer`].
pub fn decode_t1(t1: &[u8], layer: usize) -> Result<Vec<f32>, AttentionCodecError> {
    let damaged = || AttentionCodecError::Damaged { tier: 1 };
    let header = t1.get(..T1_HEADER).ok_or_else(damaged)?;
    if header[..4] != T1_MAGIC || header[4..6] != VERSION.to_le_bytes() {
        return Err(damaged());
    }
    let layers = u32_at(header, 8).ok_or_else(damaged)? as usize;
    if layer >= layers {
        return Err(AttentionCodecError::NoLayer { layer, layers });
    }
    head_mean(t1, header, layer).ok_or_else(damaged)
}

/// Returns the default weights of the aggregation `weighted_layers`, which are those of Halo Weave: 0.5 + l / L for
/// layer l = 0 … L - 1 of the L layers with attention.
#[must_use]
pub fn layer_weights(layers: usize) -> Vec<f32> {
    (0..layers).map(|layer| 0.5 + layer as f32 / layers as f32).collect()
}

/// Decodes the mean of the first `layers` layers, weighted with [`layer_weights`], from tier T1; one value per
/// position.
///
/// # Errors
/// [`AttentionCodecError::Damaged`], [`AttentionCodecError::NoLayer`].
pub fn decode_t1_weighted(t1: &[u8], layers: usize) -> Result<Vec<f32>, AttentionCodecError> {
    let weights = layer_weights(layers);
    let total: f32 = weights.iter().sum();
    let mut mean = Vec::new();
    for (layer, weight) in weights.into_iter().enumerate() {
        let mut values = decode_t1(t1, layer)?;
        mean.resize(values.len(), 0.0);
        reduce::scale(&mut values, weight / total);
        reduce::add(&values, &mut mean);
    }
    Ok(mean)
}

fn head_mean(t1: &[u8], header: &[u8], layer: usize) -> Option<Vec<f32>> {
    let row_len = u32_at(header, 12).map(|len| len as usize).filter(|len| (1..=MAX_POSITIONS).contains(len))?;
    let entry = layer.checked_mul(T1_ENTRY)?.checked_add(T1_HEADER)?;
    let max = f32::from_bits(u32_at(t1, entry)?);
    let (from, len) = (u32_at(t1, entry + 4)? as usize, u32_at(t1, entry + 8)? as usize);
    let section = t1.get(from..from.checked_add(len)?)?;
    // A corrupt frame may claim any size, so the buffer has exactly the size from the header.
    let mut codes = vec![0; row_len];
    let written = zstd::bulk::decompress_to_buffer(section, &mut codes).ok()?;
    if written != row_len || !max.is_finite() {
        return None;
    }
    let scale = max / (STEPS * STEPS);
    Some(codes.iter().map(|&code| f32::from(code) * f32::from(code) * scale).collect())
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    four.try_into().ok().map(u32::from_le_bytes)
}

fn pairs(bytes: &[u8]) -> impl Iterator<Item = [u8; 2]> + '_ {
    bytes.as_chunks::<2>().0.iter().copied()
}

#[cfg(test)]
mod tests;
