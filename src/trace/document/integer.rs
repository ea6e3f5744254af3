//! Integers of the document. Languages without an integer type send them as `1.0`.

use crate::events::TokenId;
use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};
use serde_json::Deserializer as JsonDeserializer;
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
        let visitor = IntegerVisitor { min: i32::MIN.into(), max: i32::MAX.into() };
        deserializer.deserialize_i64(visitor).map(|value| Self(value as i32))
    }
}

/// An integer from 0 to `MAX`, in the notations of [`Integer`].
struct Unsigned<const MAX: i64>(i64);

impl<'de, const MAX: i64> Deserialize<'de> for Unsigned<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_i64(IntegerVisitor { min: 0, max: MAX }).map(Self)
    }
}

/// Deserializes an optional integer from 0 to `MAX`.
pub fn optional<'de, const MAX: i64, T: TryFrom<i64>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let value = Option::<Unsigned<MAX>>::deserialize(deserializer)?;
    let convert = |Unsigned(value)| T::try_from(value).map_err(|_| D::Error::custom("the integer is too large"));
    value.map(convert).transpose()
}

/// Returns true if JSON is an integer from 0 to `max`.
pub fn is_unsigned(json: &str, max: i64) -> bool {
    JsonDeserializer::from_str(json).deserialize_i64(IntegerVisitor { min: 0, max }).is_ok()
}

/// A visitor for the integers from `min` to `max`.
struct IntegerVisitor {
    min: i64,
    max: i64,
}

impl Visitor<'_> for IntegerVisitor {
    type Value = i64;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an integer from {} to {}", self.min, self.max)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<i64, E> {
        let fits = (self.min..=self.max).contains(&value);
        if fits { Ok(value) } else { Err(E::invalid_value(Unexpected::Signed(value), &self)) }
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<i64, E> {
        let fitting = i64::try_from(value).ok().filter(|value| (self.min..=self.max).contains(value));
        fitting.ok_or_else(|| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<i64, E> {
        let range = self.min as f64..=self.max as f64;
        if value.fract() == 0.0 && range.contains(&value) {
            Ok(value as i64)
        } else {
            Err(E::invalid_value(Unexpected::Float(value), &self))
        }
    }
}
