//! Integers of the document. Languages without an integer type send them as `1.0`.

use crate::events::TokenId;
use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};
use std::fmt;
use utoipa::ToSchema;

/// The accepted values, for errors.
pub const EXPECTED: &str = "an integer from -2147483648 to 2147483647";

/// An integer from -2147483648 to 2147483647. It may be written with a fraction of 0, such as `1.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[schema(as = IngestInteger)]
pub struct Integer(i32);

impl From<Integer> for i32 {
    fn from(Integer(value): Integer) -> Self {
        value
    }
}

/// Converts a list of token ids.
pub fn integers(list: Vec<Integer>) -> Vec<TokenId> {
    list.into_iter().map(TokenId::from).collect()
}

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_i32(IntegerVisitor)
    }
}

struct IntegerVisitor;

impl Visitor<'_> for IntegerVisitor {
    type Value = Integer;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(EXPECTED)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Integer, E> {
        i32::try_from(value).map(Integer).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Integer, E> {
        i32::try_from(value).map(Integer).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Integer, E> {
        let range = f64::from(i32::MIN)..=f64::from(i32::MAX);
        if value.fract() == 0.0 && range.contains(&value) {
            Ok(Integer(value as i32))
        } else {
            Err(E::invalid_value(Unexpected::Float(value), &self))
        }
    }
}
