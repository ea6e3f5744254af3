//! Coding of attention rows: tiers T0 and T1.
//!
//! One step's attention is `[layer][head][position]` probabilities. T0 is what every view needs at once: mean, maximum
//! and last-layer vectors in f16, and per-head statistics. T1 is the head-mean of every layer as u8 on a square-root
//! scale, compressed. Both carry their own header and version. The encoder runs next to the decode loop and allocates
//! nothing but its results.

/// Why attention could not be coded or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `rows` is not layers × heads × row length, or one of them is 0 or beyond the format.
    #[error("{values} values are not {layers} layers × {heads} heads × {row_len} positions")]
    Shape {
        /// Values given.
        values: usize,
        /// Layers.
        layers: usize,
        /// Heads per layer.
        heads: usize,
        /// Positions.
        row_len: usize,
    },
    /// The bytes are damaged, of another version or something else.
    #[error("not attention of tier {tier}, version 1, or damaged")]
    Damaged {
        /// 0 or 1.
        tier: u8,
    },
    /// The layer is not there.
    #[error("layer index {layer} is not among the {layers} stored layers")]
    NoLayer {
        /// Index asked for.
        layer: usize,
        /// Layers stored.
        layers: usize,
    },
}

/// Statistics of one head's row.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct HeadStat {
    /// In bits.
    pub entropy: f32,
    /// Share of the row on the sink: the position with the largest mean over all heads of all layers.
    pub sink_mass: f32,
    /// Largest value of the row.
    pub peak: f32,
    /// Where it is.
    pub peak_position: u32,
}

/// Tier T0, decoded.
#[derive(Debug, Clone, PartialEq)]
pub struct Overview {
    /// Positions of each vector.
    pub row_len: usize,
    /// Layers of `stats`.
    pub layers: usize,
    /// Heads per layer of `stats`.
    pub heads: usize,
    /// The position with the largest mean.
    pub sink: u32,
    /// Mean over all heads of all layers.
    pub mean: Vec<f32>,
    /// Maximum over all heads of all layers.
    pub max: Vec<f32>,
    /// Mean over the heads of the last layer.
    pub last_layer: Vec<f32>,
    /// `[layer][head]`, flattened.
    pub stats: Vec<HeadStat>,
}

/// Codes step after step with the same buffers.
#[derive(Default)]
pub struct Encoder {}

impl Encoder {
    /// An encoder with empty buffers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Codes `rows`, `[layer][head][position]` flattened, as (T0, T1).
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn encode(
        &mut self,
        _rows: &[f32],
        _layers: usize,
        _heads: usize,
        _row_len: usize,
    ) -> Result<(Vec<u8>, Vec<u8>), Error> {
        todo!()
    }
}

/// Codes one step; [`Encoder`] for many.
///
/// # Errors
/// [`Error::Shape`].
pub fn encode(rows: &[f32], layers: usize, heads: usize, row_len: usize) -> Result<(Vec<u8>, Vec<u8>), Error> {
    Encoder::new().encode(rows, layers, heads, row_len)
}

/// Reads tier T0.
///
/// # Errors
/// [`Error::Damaged`].
pub fn decode_t0(_t0: &[u8]) -> Result<Overview, Error> {
    todo!()
}

/// Reads the head-mean of the layer with this index out of tier T1; one value per position.
///
/// # Errors
/// [`Error::Damaged`], [`Error::NoLayer`].
pub fn decode_t1(_t1: &[u8], _layer: usize) -> Result<Vec<f32>, Error> {
    todo!()
}
