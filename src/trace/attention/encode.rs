//! The encoder of one step's attention.

use super::{
    AttentionCodecError, MAX_POSITIONS, STEPS, T0_HEADER, T0_MAGIC, T1_ENTRY, T1_HEADER, T1_MAGIC, VERSION, reduce,
};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fmt;
use zstd::bulk::Compressor;

/// Level 1 is fast, and for one byte per position its output is hardly larger than that of slower levels.
const ZSTD_LEVEL: i32 = 1;

/// An encoder that reuses its buffers from step to step.
pub struct AttentionEncoder {
    mean: Vec<f32>,
    max: Vec<f32>,
    layer: Vec<f32>,
    peaks: Vec<(f32, u32)>,
    entropies: Vec<f32>,
    codes: Vec<u8>,
    frame: Vec<u8>,
    halves: Vec<f16>,
    compressor: Option<Compressor<'static>>,
}

impl fmt::Debug for AttentionEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionEncoder").finish_non_exhaustive()
    }
}

impl Default for AttentionEncoder {
    fn default() -> Self {
        Self::new()
    }
}

impl AttentionEncoder {
    /// Creates an encoder with empty buffers.
    #[must_use]
    pub fn new() -> Self {
        Self {
            mean: Vec::new(),
            max: Vec::new(),
            layer: Vec::new(),
            peaks: Vec::new(),
            entropies: Vec::new(),
            codes: Vec::new(),
            frame: Vec::new(),
            halves: Vec::new(),
            compressor: Compressor::new(ZSTD_LEVEL).ok(),
        }
    }

    /// Encodes `rows`, `[layer][head][position]` flattened, as (T0, T1).
    ///
    /// # Errors
    /// [`AttentionCodecError::Shape`].
    pub fn encode(
        &mut self,
        rows: &[f32],
        layers: usize,
        heads: usize,
        row_len: usize,
    ) -> Result<(Vec<u8>, Vec<u8>), AttentionCodecError> {
        let values = layers.checked_mul(heads).and_then(|rows| rows.checked_mul(row_len));
        let fits = u16::try_from(heads).is_ok() && u16::try_from(layers).is_ok() && row_len <= MAX_POSITIONS;
        if values != Some(rows.len()) || rows.is_empty() || !fits {
            return Err(AttentionCodecError::Shape { values: rows.len(), layers, heads, row_len });
        }
        let t1 = self.reduce(rows, layers, heads, row_len);
        Ok((self.encode_overview(rows, layers, heads, row_len), t1))
    }

    /// Reduces the rows in one pass: fills `mean`, `max`, `peaks` and `entropies`, leaves the last layer's head-mean in
    /// `layer`, and encodes the head-mean of every layer as T1.
    fn reduce(&mut self, rows: &[f32], layers: usize, heads: usize, row_len: usize) -> Vec<u8> {
        for buffer in [&mut self.mean, &mut self.max, &mut self.layer] {
            buffer.clear();
            buffer.resize(row_len, 0.0);
        }
        self.peaks.clear();
        self.entropies.clear();
        let table_end = T1_HEADER + layers * T1_ENTRY;
        let mut t1 = Vec::with_capacity(table_end + layers * row_len / 2);
        t1.extend(T1_MAGIC);
        t1.extend(VERSION.to_le_bytes());
        t1.extend([0, 0]);
        t1.extend((layers as u32).to_le_bytes());
        t1.extend((row_len as u32).to_le_bytes());
        t1.resize(table_end, 0);
        for (index, layer) in rows.chunks_exact(heads * row_len).enumerate() {
            self.layer.fill(0.0);
            for head in layer.chunks_exact(row_len) {
                reduce::accumulate(head, &mut self.layer, &mut self.max);
                let peak = reduce::max_value(head);
                self.peaks.push((peak, reduce::position_of(head, peak) as u32));
                self.entropies.push(reduce::entropy(head));
            }
            reduce::add(&self.layer, &mut self.mean);
            reduce::scale(&mut self.layer, 1.0 / heads as f32);
            self.append_section(&mut t1, index);
        }
        reduce::scale(&mut self.mean, 1.0 / (layers * heads) as f32);
        t1
    }

    /// Appends `layer` to T1 and adds it to the table.
    fn append_section(&mut self, t1: &mut Vec<u8>, index: usize) {
        let max = reduce::max_value(&self.layer);
        let max = if max.is_finite() { max } else { 0.0 };
        reduce::quantize(&self.layer, max, &mut self.codes);
        self.frame.clear();
        self.frame.reserve(zstd::zstd_safe::compress_bound(self.codes.len()));
        let coded = match &mut self.compressor {
            Some(compressor) => compressor.compress_to_buffer(&self.codes, &mut self.frame).is_ok(),
            None => false,
        };
        debug_assert!(coded, "the buffer fits zstd's worst case, and the level is valid");
        let (offset, entry) = (t1.len() as u32, T1_HEADER + index * T1_ENTRY);
        t1.extend(&self.frame);
        t1[entry..entry + 4].copy_from_slice(&max.to_le_bytes());
        t1[entry + 4..entry + 8].copy_from_slice(&offset.to_le_bytes());
        t1[entry + 8..entry + 12].copy_from_slice(&(self.frame.len() as u32).to_le_bytes());
    }

    /// Encodes the reduced rows as T0.
    fn encode_overview(&mut self, rows: &[f32], layers: usize, heads: usize, row_len: usize) -> Vec<u8> {
        let sink = reduce::position_of(&self.mean, reduce::max_value(&self.mean));
        let mut t0 = Vec::with_capacity(T0_HEADER + 6 * row_len + 10 * layers * heads);
        t0.extend(T0_MAGIC);
        t0.extend(VERSION.to_le_bytes());
        t0.extend((heads as u16).to_le_bytes());
        for number in [layers, row_len, sink] {
            t0.extend((number as u32).to_le_bytes());
        }
        for vector in [&self.mean, &self.max, &self.layer, &self.entropies] {
            push_halves(vector, &mut self.halves, &mut t0);
        }
        t0.extend(rows.chunks_exact(row_len).flat_map(|head| f16::from_f32(head[sink]).to_le_bytes()));
        t0.extend(self.peaks.iter().flat_map(|&(peak, _)| f16::from_f32(peak).to_le_bytes()));
        t0.extend(self.peaks.iter().flat_map(|&(_, position)| position.to_le_bytes()));
        t0
    }
}

fn push_halves(values: &[f32], halves: &mut Vec<f16>, out: &mut Vec<u8>) {
    halves.clear();
    halves.resize(values.len(), f16::ZERO);
    halves.convert_from_f32_slice(values);
    out.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
}

// The code of a row's maximum is `STEPS`, which must be the largest `u8`.
const _: () = assert!(STEPS as u32 == u8::MAX as u32);
