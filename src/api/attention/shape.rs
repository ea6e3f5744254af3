//! What a client wants to see of a row of attention, and how it becomes that.

use crate::api::ApiError;
use crate::api::shared::Fields;
use crate::api::shared::fields::invalid_value;
use crate::engine::AttentionRow;
use crate::trace::attention::{AttentionRows, AttentionStatistics, TopPosition, layer_weights};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::borrow::Cow;

/// Largest deviation of a row's sum from 1 that is taken for rounding.
const SUM_TOLERANCE: f32 = 0.02;
/// Positions of a sparse row, unless the request says how many.
const TOP: i64 = 50;
/// Most weights of layers.
const MOST_WEIGHTS: usize = 1024;
/// Bytes of a number as text, about.
const NUMBER_BYTES: usize = 12;

/// What of a row goes to the client.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::api) struct Shape {
    view: View,
    half: bool,
    pub(super) coding: Coding,
}

#[derive(Debug, Clone, PartialEq)]
enum View {
    /// Everything.
    PerLayer,
    /// One value per position.
    Aggregated(Mode),
    /// The positions with the largest mean.
    Sparse(usize),
    /// AttentionStatistics of each layer.
    Viz,
}

/// How heads and layers are put together.
#[derive(Debug, Clone, PartialEq)]
enum Mode {
    Mean,
    Max,
    LastLayer,
    /// `None` for [`layer_weights`].
    Weighted(Option<Vec<f32>>),
}

impl Mode {
    const fn name(&self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Max => "max",
            Self::LastLayer => "last_layer",
            Self::Weighted(_) => "weighted_layers",
        }
    }
}

/// How numbers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    /// A text of little-endian numbers.
    Base64,
    /// Little-endian numbers, beside the message's fields.
    Binary,
    /// A list of numbers.
    Array,
}

/// What the carrier of the messages does when the request does not say how numbers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usual {
    pub(super) per_layer: Coding,
    pub(super) aggregated: Coding,
    /// Whether a message can have bytes at all.
    pub(super) bytes: bool,
}

/// A row as it stands in a message.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Attention {
    pub(super) format: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) shape: Vec<usize>,
    pub(super) context_length: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) encoding: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) dtype: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) aggregation_mode: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) top_k: Option<usize>,
    /// Where not every layer has attention: those that have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) layer_ids: Option<Vec<u16>>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) statistics: Option<AttentionStatistics>,
    /// Of numbers that stand behind the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) byte_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<Data>,
}

/// The values of a row.
#[derive(Debug, Clone)]
pub(super) enum Data {
    Text(String),
    Bytes(Vec<u8>),
    Numbers(Vec<f32>),
    Strong(Vec<TopPosition>),
}

impl Serialize for Data {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Bytes(bytes) => serializer.serialize_bytes(bytes),
            Self::Numbers(numbers) => numbers.serialize(serializer),
            Self::Strong(strong) => strong.serialize(serializer),
        }
    }
}

impl Shape {
    /// Reads `attention_format`, `aggregation_mode`, `layer_weights`, `attention_top_k`, `attention_dtype` and
    /// `attention_encoding`.
    ///
    /// # Errors
    /// 400 for what is not known, or does not go together.
    pub(super) fn read(fields: Fields<'_>, usual: Usual) -> Result<Self, ApiError> {
        const FORMATS: &str = "\"per_layer\", \"aggregated\", \"sparse\" or \"viz\"";
        let view = match fields.text("attention_format")? {
            None | Some("per_layer") => View::PerLayer,
            Some("aggregated") => View::Aggregated(mode(fields)?),
            Some("sparse") => {
                View::Sparse(fields.integer("attention_top_k", 1..=i64::from(u32::MAX))?.unwrap_or(TOP) as usize)
            }
            Some("viz") => View::Viz,
            Some(other) => return Err(invalid_value("attention_format", FORMATS, &Value::from(other))),
        };
        let half = match fields.text("attention_dtype")? {
            None | Some("float32") => false,
            Some("float16") => true,
            Some(other) => {
                return Err(invalid_value("attention_dtype", "\"float32\" or \"float16\"", &Value::from(other)));
            }
        };
        let numbers = matches!(view, View::PerLayer | View::Aggregated(_));
        let coding = match fields.text("attention_encoding")? {
            None if !numbers => Coding::Array,
            None if matches!(view, View::PerLayer) => usual.per_layer,
            // Half floats are for those who read bytes.
            None if half && usual.aggregated == Coding::Array => Coding::Base64,
            None => usual.aggregated,
            Some("base64") => Coding::Base64,
            Some("binary") if usual.bytes => Coding::Binary,
            Some("array") => Coding::Array,
            Some("binary") => {
                let message = "attention_encoding: JSON holds no bytes; ask for base64, take the answer as \
                               application/msgpack, or use the WebSocket";
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
        Ok(Self { view, half, coding: if numbers { coding } else { Coding::Array } })
    }

    /// What this shape makes of a row of a model with so many layers.
    ///
    /// # Errors
    /// The row is no distribution, or has no shape: nothing of it can be believed.
    pub(super) fn of(&self, row: &AttentionRow, layers: usize) -> Result<Attention, ApiError> {
        let rows =
            AttentionRows::new(&row.values, row.layer_ids.len(), usize::from(row.heads)).map_err(ApiError::internal)?;
        let sum = rows.max_row_sum();
        if sum > 1.0 + SUM_TOLERANCE {
            return Err(ApiError::internal(format!("an attention row sums to {sum} instead of 1")));
        }
        let context_length = rows.row_len();
        let complete = row.layer_ids.len() == layers;
        let mut attention = Attention {
            format: "per_layer",
            shape: Vec::new(),
            context_length,
            encoding: None,
            dtype: None,
            aggregation_mode: None,
            top_k: None,
            layer_ids: (!complete).then(|| row.layer_ids.clone()),
            statistics: None,
            byte_length: None,
            data: None,
        };
        match &self.view {
            View::PerLayer => {
                attention.shape = vec![row.layer_ids.len(), usize::from(row.heads), context_length];
                self.write(&mut attention, &row.values);
            }
            View::Aggregated(mode) => {
                let values = match mode {
                    Mode::Mean => rows.mean(),
                    Mode::Max => rows.max(),
                    Mode::LastLayer => rows.last_layer(),
                    Mode::Weighted(weights) => rows.weighted(&weights_of(weights.as_deref(), &row.layer_ids, layers)?),
                };
                attention.format = "aggregated";
                attention.shape = vec![context_length];
                attention.aggregation_mode = Some(mode.name());
                self.write(&mut attention, &values);
            }
            View::Sparse(count) => {
                attention.format = "sparse";
                attention.top_k = Some(*count);
                attention.data = Some(Data::Strong(rows.top_positions(*count)));
            }
            View::Viz => {
                attention.format = "viz";
                attention.statistics = Some(rows.statistics());
            }
        }
        Ok(attention)
    }

    /// About how many bytes a row takes in a message.
    pub(super) fn bytes(&self, row: &AttentionRow) -> usize {
        let row_len = row.row_len as usize;
        let values = match &self.view {
            View::PerLayer => row.values.len(),
            View::Aggregated(_) => row_len,
            View::Sparse(count) => (*count).min(row_len).saturating_mul(row.layer_ids.len() + 1),
            View::Viz => 4 * row.layer_ids.len(),
        };
        let plain = if self.half { size_of::<f16>() } else { size_of::<f32>() };
        match self.coding {
            Coding::Array => values.saturating_mul(NUMBER_BYTES),
            Coding::Binary => values.saturating_mul(plain),
            Coding::Base64 => values.saturating_mul(plain).div_ceil(3).saturating_mul(4),
        }
    }

    fn write(&self, attention: &mut Attention, values: &[f32]) {
        attention.dtype = Some(if self.half { "float16" } else { "float32" });
        let (name, data) = match self.coding {
            Coding::Array if self.half => {
                ("array", Data::Numbers(values.iter().map(|&value| f16::from_f32(value).to_f32()).collect()))
            }
            Coding::Array => ("array", Data::Numbers(values.to_vec())),
            Coding::Binary => ("binary", Data::Bytes(self.coded(values).into_owned())),
            Coding::Base64 => ("base64", Data::Text(STANDARD.encode(&*self.coded(values)))),
        };
        attention.encoding = Some(name);
        attention.data = Some(data);
    }

    fn coded<'a>(&self, values: &'a [f32]) -> Cow<'a, [u8]> {
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

fn mode(fields: Fields<'_>) -> Result<Mode, ApiError> {
    const MODES: &str = "\"mean\", \"max\", \"last_layer\" or \"weighted_layers\"";
    match fields.text("aggregation_mode")? {
        None | Some("mean") => Ok(Mode::Mean),
        Some("max") => Ok(Mode::Max),
        Some("last_layer") => Ok(Mode::LastLayer),
        Some("weighted_layers") => Ok(Mode::Weighted(weights(fields)?)),
        Some(other) => Err(invalid_value("aggregation_mode", MODES, &Value::from(other))),
    }
}

fn weights(fields: Fields<'_>) -> Result<Option<Vec<f32>>, ApiError> {
    const FIELD: &str = "layer_weights";
    const WEIGHTS: &str =
        "a list of numbers of 0 or more, one per layer, that are not all 0 and whose sum is no larger than 3e38";
    let Some(list) = fields.list(FIELD)? else { return Ok(None) };
    let weight = |value: &Value| {
        let weight = value.as_f64().map(|weight| weight as f32);
        weight.filter(|weight| weight.is_finite() && *weight >= 0.0)
    };
    let weights: Option<Vec<f32>> = list.iter().map(weight).collect();
    let usable = |weights: &Vec<f32>| {
        let sum: f32 = weights.iter().sum();
        weights.len() <= MOST_WEIGHTS && sum.is_normal()
    };
    weights.filter(usable).map(Some).ok_or_else(|| invalid_value(FIELD, WEIGHTS, &Value::Array(list.clone())))
}

/// The weights of the layers that a row has.
fn weights_of(given: Option<&[f32]>, layer_ids: &[u16], layers: usize) -> Result<Vec<f32>, ApiError> {
    let weights: Vec<f32> = match given {
        None => layer_weights(layer_ids.len()),
        Some(given) if given.len() == layers => {
            layer_ids.iter().map(|&layer| given.get(usize::from(layer)).copied().unwrap_or(0.0)).collect()
        }
        Some(given) => {
            let message =
                format!("layer_weights must have one number for each of the {layers} layers, got {}", given.len());
            return Err(ApiError::invalid("layer_weights", message));
        }
    };
    if weights.iter().sum::<f32>() > 0.0 {
        return Ok(weights);
    }
    Err(ApiError::invalid("layer_weights", "layer_weights are 0 for every layer that has attention"))
}

impl Shape {
    /// Whether the weights fit a model of so many layers; asked before the run begins.
    ///
    /// # Errors
    /// 400 when they do not.
    pub(super) fn fits(&self, layers: usize) -> Result<(), ApiError> {
        if let View::Aggregated(Mode::Weighted(weights @ Some(_))) = &self.view {
            let all: Vec<u16> = (0..layers as u16).collect();
            weights_of(weights.as_deref(), &all, layers)?;
        }
        Ok(())
    }
}
