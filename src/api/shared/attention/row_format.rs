//! Formats of an attention row, and the conversion of a row to its requested format.

use crate::api::shared::Fields;
use crate::api::shared::fields::invalid_value;
use crate::engine::AttentionRow;
use crate::server::ApiError;
use crate::trace::attention::{AttentionRows, AttentionStatistics, TopPosition, layer_weights};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::borrow::Cow;
use utoipa::ToSchema;

/// Maximum excess of a row's sum over 1 that is a rounding error.
const SUM_TOLERANCE: f32 = 0.02;
/// Default number of positions of a sparse row.
const DEFAULT_TOP: i64 = 50;
/// Maximum number of layer weights.
const MAX_WEIGHTS: usize = 1024;
/// Approximate bytes of a number as text.
const NUMBER_BYTES: usize = 12;

/// Requested format of attention rows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowFormat {
    view: RowView,
    half: bool,
    pub(crate) encoding: NumberEncoding,
}

#[derive(Debug, Clone, PartialEq)]
enum RowView {
    /// Every head of every layer.
    PerLayer,
    /// One value per position.
    Aggregated(Aggregation),
    /// The positions with the largest mean.
    Sparse(usize),
    /// Statistics of each layer.
    Viz,
}

/// Aggregation over heads and layers.
#[derive(Debug, Clone, PartialEq)]
enum Aggregation {
    Mean,
    Max,
    LastLayer,
    /// `None` uses [`layer_weights`].
    Weighted(Option<Vec<f32>>),
}

impl Aggregation {
    const fn name(&self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Max => "max",
            Self::LastLayer => "last_layer",
            Self::Weighted(_) => "weighted_layers",
        }
    }
}

/// Encoding of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NumberEncoding {
    /// Base64 of little-endian numbers.
    Base64,
    /// Little-endian numbers outside the message's fields.
    Binary,
    /// A list of numbers.
    Array,
}

/// Default encodings of a message format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DefaultEncodings {
    pub(crate) per_layer: NumberEncoding,
    pub(crate) aggregated: NumberEncoding,
    /// True if a message can contain bytes.
    pub(crate) bytes: bool,
}

/// An attention row as part of a message.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct AttentionPayload {
    /// The requested format.
    pub(crate) format: &'static str,
    /// `[num_layers, num_heads, context_length]`, or `[context_length]` when aggregated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) shape: Vec<usize>,
    /// Number of positions.
    pub(crate) context_length: usize,
    /// Encoding of `data`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) encoding: Option<&'static str>,
    /// `float32` or `float16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dtype: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) aggregation_mode: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) top_k: Option<usize>,
    /// The layers with attention, if not all layers have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layer_ids: Option<Vec<u16>>,
    #[serde(flatten)]
    pub(crate) statistics: RowStatistics,
    /// Length of a binary payload after the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) byte_length: Option<usize>,
    /// Base64 text, bytes in `MessagePack`, numbers, or for the format `sparse` a list of `{position, layers}`.
    #[schema(value_type = Option<Value>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) data: Option<RowData>,
}

/// Statistics of a row per layer, with the format `viz`; entropies are in bits.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub(crate) struct RowStatistics {
    /// Mean over all positions and heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_by_layer: Option<Vec<f32>>,
    /// Largest value of any head.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_by_layer: Option<Vec<f32>>,
    /// Mean entropy of the layer's heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    entropy_by_layer: Option<Vec<f32>>,
    /// Mean entropy of all heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    entropy: Option<f32>,
    /// The position with the largest mean over all heads of all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    sink: Option<u32>,
    /// Share of the row at the sink, mean over the layer's heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    sink_mass_by_layer: Option<Vec<f32>>,
}

impl From<AttentionStatistics> for RowStatistics {
    fn from(statistics: AttentionStatistics) -> Self {
        Self {
            mean_by_layer: Some(statistics.mean_by_layer),
            max_by_layer: Some(statistics.max_by_layer),
            entropy_by_layer: Some(statistics.entropy_by_layer),
            entropy: Some(statistics.entropy),
            sink: Some(statistics.sink),
            sink_mass_by_layer: Some(statistics.sink_mass_by_layer),
        }
    }
}

/// The values of a row.
#[derive(Debug, Clone)]
pub(crate) enum RowData {
    Text(String),
    Bytes(Vec<u8>),
    Numbers(Vec<f32>),
    TopPositions(Vec<TopPosition>),
}

impl Serialize for RowData {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Bytes(bytes) => serializer.serialize_bytes(bytes),
            Self::Numbers(numbers) => numbers.serialize(serializer),
            Self::TopPositions(positions) => positions.serialize(serializer),
        }
    }
}

impl RowFormat {
    /// Parses `attention_format`, `aggregation_mode`, `layer_weights`, `attention_top_k`, `attention_dtype` and
    /// `attention_encoding`.
    ///
    /// # Errors
    /// 400 for unknown values and invalid combinations.
    pub(crate) fn parse(fields: Fields<'_>, defaults: DefaultEncodings) -> Result<Self, ApiError> {
        const FORMATS: &str = "\"per_layer\", \"aggregated\", \"sparse\" or \"viz\"";
        // Validated with every format, so that an invalid value is always an error.
        let aggregation = parse_aggregation(fields)?;
        let top = fields.integer("attention_top_k", 1..=i64::from(u32::MAX))?.unwrap_or(DEFAULT_TOP) as usize;
        let view = match fields.text("attention_format")? {
            None | Some("per_layer") => RowView::PerLayer,
            Some("aggregated") => RowView::Aggregated(aggregation),
            Some("sparse") => RowView::Sparse(top),
            Some("viz") => RowView::Viz,
            Some(other) => return Err(invalid_value("attention_format", FORMATS, &Value::from(other))),
        };
        let half = match fields.text("attention_dtype")? {
            None | Some("float32") => false,
            Some("float16") => true,
            Some(other) => {
                return Err(invalid_value("attention_dtype", "\"float32\" or \"float16\"", &Value::from(other)));
            }
        };
        let numbers = matches!(view, RowView::PerLayer | RowView::Aggregated(_));
        let encoding = match fields.text("attention_encoding")? {
            None if !numbers => NumberEncoding::Array,
            None if matches!(view, RowView::PerLayer) => defaults.per_layer,
            // Half floats only make sense as bytes.
            None if half && defaults.aggregated == NumberEncoding::Array => NumberEncoding::Base64,
            None => defaults.aggregated,
            Some("base64") => NumberEncoding::Base64,
            Some("binary") if defaults.bytes || !numbers => NumberEncoding::Binary,
            Some("array") => NumberEncoding::Array,
            Some("binary") => {
                let message = "`attention_encoding` must be \"base64\" or \"array\" because JSON cannot contain bytes, \
                               got \"binary\"; accept application/msgpack or use the WebSocket to receive bytes";
                return Err(ApiError::invalid("attention_encoding", message));
            }
            Some(other) => {
                return Err(invalid_value(
                    "attention_encoding",
                    "\"base64\", \"binary\" or \"array\"",
                    &Value::from(other),
                ));
            }
        };
        Ok(Self { view, half, encoding: if numbers { encoding } else { NumberEncoding::Array } })
    }

    /// Converts a row of a model with `layers` layers.
    ///
    /// # Errors
    /// The row is not a probability distribution, or its dimensions are invalid.
    pub(crate) fn convert(&self, row: &AttentionRow, layers: usize) -> Result<AttentionPayload, ApiError> {
        let rows =
            AttentionRows::new(&row.values, row.layer_ids.len(), usize::from(row.heads)).map_err(ApiError::internal)?;
        let sum = rows.max_row_sum();
        if sum > 1.0 + SUM_TOLERANCE {
            return Err(ApiError::internal(format!("an attention row sums to {sum} instead of 1")));
        }
        let context_length = rows.row_len();
        let complete = row.layer_ids.len() == layers;
        let mut attention = AttentionPayload {
            format: "per_layer",
            shape: Vec::new(),
            context_length,
            encoding: None,
            dtype: None,
            aggregation_mode: None,
            top_k: None,
            layer_ids: (!complete).then(|| row.layer_ids.clone()),
            statistics: RowStatistics::default(),
            byte_length: None,
            data: None,
        };
        match &self.view {
            RowView::PerLayer => {
                attention.shape = vec![row.layer_ids.len(), usize::from(row.heads), context_length];
                self.write(&mut attention, &row.values);
            }
            RowView::Aggregated(mode) => {
                let values = match mode {
                    Aggregation::Mean => rows.mean(),
                    Aggregation::Max => rows.max(),
                    Aggregation::LastLayer => rows.last_layer(),
                    Aggregation::Weighted(weights) => {
                        rows.weighted(&layer_weights_for(weights.as_deref(), &row.layer_ids, layers)?)
                    }
                };
                attention.format = "aggregated";
                attention.shape = vec![context_length];
                attention.aggregation_mode = Some(mode.name());
                self.write(&mut attention, &values);
            }
            RowView::Sparse(count) => {
                attention.format = "sparse";
                attention.top_k = Some(*count);
                attention.data = Some(RowData::TopPositions(rows.top_positions(*count)));
            }
            RowView::Viz => {
                attention.format = "viz";
                attention.statistics = rows.statistics().into();
            }
        }
        Ok(attention)
    }

    /// Returns the approximate size of a row in a message.
    pub(crate) fn bytes(&self, row: &AttentionRow) -> usize {
        let row_len = row.row_len as usize;
        let values = match &self.view {
            RowView::PerLayer => row.values.len(),
            RowView::Aggregated(_) => row_len,
            RowView::Sparse(count) => (*count).min(row_len).saturating_mul(row.layer_ids.len() + 1),
            RowView::Viz => 4 * row.layer_ids.len(),
        };
        let number_bytes = if self.half { size_of::<f16>() } else { size_of::<f32>() };
        match self.encoding {
            NumberEncoding::Array => values.saturating_mul(NUMBER_BYTES),
            NumberEncoding::Binary => values.saturating_mul(number_bytes),
            NumberEncoding::Base64 => values.saturating_mul(number_bytes).div_ceil(3).saturating_mul(4),
        }
    }

    fn write(&self, attention: &mut AttentionPayload, values: &[f32]) {
        attention.dtype = Some(if self.half { "float16" } else { "float32" });
        let (name, data) = match self.encoding {
            NumberEncoding::Array if self.half => {
                ("array", RowData::Numbers(values.iter().map(|&value| f16::from_f32(value).to_f32()).collect()))
            }
            NumberEncoding::Array => ("array", RowData::Numbers(values.to_vec())),
            NumberEncoding::Binary => ("binary", RowData::Bytes(self.encode(values).into_owned())),
            NumberEncoding::Base64 => ("base64", RowData::Text(STANDARD.encode(&*self.encode(values)))),
        };
        attention.encoding = Some(name);
        attention.data = Some(data);
    }

    fn encode<'a>(&self, values: &'a [f32]) -> Cow<'a, [u8]> {
        if !self.half {
            return little_endian(values, |value| value.to_le_bytes());
        }
        let mut halves = vec![f16::ZERO; values.len()];
        halves.convert_from_f32_slice(values);
        little_endian(&halves, |value| value.to_le_bytes()).into_owned().into()
    }
}

fn little_endian<T: bytemuck::NoUninit, const N: usize>(values: &[T], swap: impl Fn(&T) -> [u8; N]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        bytemuck::cast_slice(values).into()
    } else {
        values.iter().flat_map(swap).collect::<Vec<_>>().into()
    }
}

fn parse_aggregation(fields: Fields<'_>) -> Result<Aggregation, ApiError> {
    const MODES: &str = "\"mean\", \"max\", \"last_layer\" or \"weighted_layers\"";
    let weights = parse_weights(fields)?;
    match fields.text("aggregation_mode")? {
        None | Some("mean") => Ok(Aggregation::Mean),
        Some("max") => Ok(Aggregation::Max),
        Some("last_layer") => Ok(Aggregation::LastLayer),
        Some("weighted_layers") => Ok(Aggregation::Weighted(weights)),
        Some(other) => Err(invalid_value("aggregation_mode", MODES, &Value::from(other))),
    }
}

fn parse_weights(fields: Fields<'_>) -> Result<Option<Vec<f32>>, ApiError> {
    const FIELD: &str = "layer_weights";
    const WEIGHTS: &str = "a list of non-negative numbers, one per layer, whose sum is between 0 (exclusive) and 3e38";
    let Some(list) = fields.list(FIELD)? else { return Ok(None) };
    let weight = |value: &Value| {
        let weight = value.as_f64().map(|weight| weight as f32);
        weight.filter(|weight| weight.is_finite() && *weight >= 0.0)
    };
    let weights: Option<Vec<f32>> = list.iter().map(weight).collect();
    let usable = |weights: &Vec<f32>| {
        let sum: f32 = weights.iter().sum();
        weights.len() <= MAX_WEIGHTS && sum.is_normal()
    };
    weights.filter(usable).map(Some).ok_or_else(|| invalid_value(FIELD, WEIGHTS, &Value::Array(list.clone())))
}

/// Returns the weights of the layers that a row contains. `requested` has a weight for every layer of the model.
fn layer_weights_for(requested: Option<&[f32]>, layer_ids: &[u16], layers: usize) -> Result<Vec<f32>, ApiError> {
    let weights: Vec<f32> = match requested {
        None => layer_weights(layer_ids.len()),
        Some(all) if all.len() == layers => {
            layer_ids.iter().map(|&layer| all.get(usize::from(layer)).copied().unwrap_or(0.0)).collect()
        }
        Some(all) => {
            let message = format!("`layer_weights` must have {layers} numbers, one per layer, got {}", all.len());
            return Err(ApiError::invalid("layer_weights", message));
        }
    };
    if weights.iter().sum::<f32>() > 0.0 {
        return Ok(weights);
    }
    Err(ApiError::invalid("layer_weights", "`layer_weights` must not be 0 for every layer with attention"))
}

impl RowFormat {
    /// Checks before the run that the weights match the number of layers.
    ///
    /// # Errors
    /// 400 if they do not.
    pub(crate) fn check_layers(&self, layers: usize) -> Result<(), ApiError> {
        if let RowView::Aggregated(Aggregation::Weighted(weights @ Some(_))) = &self.view {
            let all: Vec<u16> = (0..layers as u16).collect();
            layer_weights_for(weights.as_deref(), &all, layers)?;
        }
        Ok(())
    }
}
