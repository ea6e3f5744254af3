//! Logit biases.

use super::tokens::{check_entry_count, encode, token};
use crate::api::shared::fields::invalid_value;
use crate::events::TokenId;
use crate::model::{TokenizeOptions, Vocabulary};
use crate::server::ApiError;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Adds up the biases of tokens that occur several times; the order is that of the first occurrence.
pub(super) fn sum_by_token(biases: &mut Vec<(TokenId, f32)>) {
    let mut indices: HashMap<TokenId, usize> = HashMap::with_capacity(biases.len());
    let mut sums: Vec<(TokenId, f32)> = Vec::with_capacity(biases.len());
    for &(token, bias) in &*biases {
        match indices.entry(token) {
            Entry::Occupied(index) => {
                let sum = &mut sums[*index.get()].1;
                // A banned token stays banned with any additional bias.
                *sum = (*sum + bias).min(f32::MAX);
            }
            Entry::Vacant(index) => {
                index.insert(sums.len());
                sums.push((token, bias));
            }
        }
    }
    *biases = sums;
}

/// Returns the token ids of a list of biases that the vocabulary lacks.
pub(super) fn unknown_tokens(biases: &Value, vocabulary: &Vocabulary) -> Vec<i64> {
    let pairs = biases.as_array().into_iter().flatten();
    pairs.filter(|pair| is_unknown(pair, vocabulary)).filter_map(|pair| pair[0].as_i64()).collect()
}

/// Returns a list of biases without the token ids that the vocabulary lacks.
pub(super) fn without_unknown_tokens(biases: &Value, vocabulary: &Vocabulary) -> Value {
    match biases {
        Value::Array(pairs) => pairs.iter().filter(|pair| !is_unknown(pair, vocabulary)).cloned().collect(),
        other => other.clone(),
    }
}

fn is_unknown(pair: &Value, vocabulary: &Vocabulary) -> bool {
    pair[0].is_i64() && token(&pair[0], vocabulary).is_none()
}

/// Parses biases up to `max_bias`: OpenAI's `{"id or text": bias}`, or llama-server's `[[id or text, bias or false], …]`.
/// Those of the same token are added up.
pub(crate) fn logit_bias(
    value: &Value,
    vocabulary: &Vocabulary,
    max_bias: f32,
) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let expected = if max_bias < f32::MAX {
        format!("an object that maps tokens to a bias between -{max_bias} and {max_bias} (false bans the token)")
    } else {
        "an object that maps tokens to a bias, or a list of [token, bias] (false bans the token)".to_owned()
    };
    let invalid = || invalid_value("logit_bias", &expected, value);
    let bias = |value: &Value| match value {
        Value::Bool(false) => Some(f32::NEG_INFINITY),
        other => other.as_f64().map(|number| number as f32).filter(|number| number.abs() <= max_bias),
    };
    let tokens_of = |name: &str| match name.parse::<TokenId>() {
        Ok(id) => vocabulary.contains(id).then(|| vec![id]),
        Err(_) => Some(encode(vocabulary, name, TokenizeOptions::MARKUP)),
    };
    let entries = value.as_object().map(Map::len).or_else(|| value.as_array().map(Vec::len));
    check_entry_count("logit_bias", entries.unwrap_or(0), vocabulary)?;
    let mut biases = Vec::new();
    let mut add = |tokens: Option<Vec<TokenId>>, value: &Value| -> Option<()> {
        let bias = bias(value)?;
        biases.extend(tokens?.into_iter().map(|token| (token, bias)));
        Some(())
    };
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                add(tokens_of(name), value).ok_or_else(invalid)?;
            }
        }
        Value::Array(list) => {
            for pair in list {
                let [token_value, value] = pair.as_array().map_or(&[][..], Vec::as_slice) else {
                    return Err(invalid());
                };
                let tokens = match token_value.as_str() {
                    Some(text) => Some(encode(vocabulary, text, TokenizeOptions::MARKUP)),
                    None => token(token_value, vocabulary).map(|token| vec![token]),
                };
                add(tokens, value).ok_or_else(invalid)?;
            }
        }
        _ => return Err(invalid()),
    }
    sum_by_token(&mut biases);
    Ok(biases)
}
