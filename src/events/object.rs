//! Deserialization of structs from JSON objects only. Code that serde derives also accepts an array with the values of the
//! fields, which is not part of any documented format.

use serde::de::{Deserialize, Deserializer, Visitor};
use serde::forward_to_deserialize_any;

/// A deserializer whose structs must be objects. It applies to the outermost value, not to those in its fields.
pub struct ObjectsOnly<D>(pub D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for ObjectsOnly<D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// A struct that was deserialized from an object.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(ObjectsOnly(deserializer)).map(Object)
    }
}

/// Parses a struct from the JSON text of an object.
///
/// # Errors
/// The text is not the JSON of an object, or a field has the wrong type.
pub fn from_object<'de, T: Deserialize<'de>>(json: &'de str) -> serde_json::Result<T> {
    serde_json::from_str(json).map(|Object(value)| value)
}

/// Deserializes an optional struct from an object.
///
/// # Errors
/// The value is neither an object nor `null`, or a field has the wrong type.
pub fn optional_object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|Object(value)| value))
}

#[cfg(test)]
mod tests {
    use super::from_object;
    use crate::events::StageCount;

    #[test]
    fn struct_is_parsed_from_an_object_only() {
        let stage = StageCount { name: "top-k".into(), left: 40 };
        assert_eq!(from_object::<StageCount>(r#"{"name": "top-k", "left": 40}"#).unwrap(), stage);
        assert!(serde_json::from_str::<StageCount>(r#"["top-k", 40]"#).is_ok());
        for json in [r#"["top-k", 40]"#, "null", "5", r#"{"name": "top-k", "left": 40} 1"#] {
            assert!(from_object::<StageCount>(json).is_err(), "{json}");
        }
    }
}
