//! PostgreSQL's binary COPY, which inserts new rows at half the cost of `insert`.
//!
//! The format is a header, then for each row the number of fields and for each field its length and bytes, all in network
//! byte order, and a final row of −1 fields. An unfinished COPY leaves the connection unusable for other statements, so a
//! future that may be dropped during a COPY uses [`PgPool::begin_for_copy`](super::pool::PgPool::begin_for_copy).
//! Format: <https://www.postgresql.org/docs/current/sql-copy.html>.

use super::pool::PgConnection;
use super::table::Table;
use chrono::{DateTime, Utc};
use sqlx::encode::{Encode, IsNull};
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, Postgres};
use std::borrow::Cow;
use std::fmt::Write;
use uuid::Uuid;

/// Bytes per write. The server processes a chunk while the next one is encoded.
const CHUNK_BYTES: usize = 64 * 1024;
const HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
/// PostgreSQL's epoch, the start of the year 2000, in Unix microseconds.
const EPOCH_US: i64 = 946_684_800_000_000;
/// OID of the type `integer`, in the header of an array.
const INTEGER_OID: i32 = 23;

/// Copies all rows.
pub async fn copy<T: Table>(connection: &mut PgConnection, table: &T) -> Result<(), sqlx::Error> {
    let mut copy = connection.raw().copy_in_raw(T::COPY).await?;
    let mut chunk = Vec::with_capacity(CHUNK_BYTES + CHUNK_BYTES / 8);
    chunk.extend_from_slice(HEADER);
    for row in 0..table.len() {
        table.put(row, &mut chunk);
        if chunk.len() >= CHUNK_BYTES {
            copy.send(chunk.as_slice()).await?;
            chunk.clear();
        }
    }
    chunk.extend_from_slice(&(-1i16).to_be_bytes());
    copy.send(chunk.as_slice()).await?;
    copy.finish().await?;
    Ok(())
}

/// A value that binary COPY can encode.
pub trait CopyField {
    /// Appends the length and the bytes of the value.
    fn put(&self, out: &mut Vec<u8>);
}

/// A value of type `integer[]`. COPY encodes it as an array. As a statement argument it is sent as the text of the array,
/// because `unnest` flattens arrays of arrays.
#[derive(Debug)]
pub struct Integers<'a>(pub Cow<'a, [i32]>);

impl CopyField for Integers<'_> {
    fn put(&self, out: &mut Vec<u8>) {
        let numbers = &*self.0;
        // Dimensions, null flag, element type; length and first index of the single dimension.
        let head = [1, 0, INTEGER_OID, numbers.len() as i32, 1];
        let head = if numbers.is_empty() { &[0, 0, INTEGER_OID] } else { &head[..] };
        let at = out.len();
        out.extend_from_slice(&[0; 4]);
        head.iter().for_each(|number| out.extend_from_slice(&number.to_be_bytes()));
        numbers.iter().for_each(|number| number.put(out));
        let length = (out.len() - at - 4) as i32;
        out[at..at + 4].copy_from_slice(&length.to_be_bytes());
    }
}

impl sqlx::Type<Postgres> for Integers<'_> {
    fn type_info() -> PgTypeInfo {
        <str as sqlx::Type<Postgres>>::type_info()
    }
}

impl PgHasArrayType for Integers<'_> {
    fn array_type_info() -> PgTypeInfo {
        <&str as PgHasArrayType>::array_type_info()
    }
}

impl Encode<'_, Postgres> for Integers<'_> {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        let mut text = String::with_capacity(2 + self.0.len() * 6);
        text.push('{');
        for (i, number) in self.0.iter().enumerate() {
            let _ = write!(text, "{}{number}", if i > 0 { "," } else { "" });
        }
        text.push('}');
        <&str as Encode<Postgres>>::encode(&text, buffer)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl CopyField for $number {
            fn put(&self, out: &mut Vec<u8>) {
                bytes(out, &self.to_be_bytes());
            }
        })*
    };
}

numbers!(i32, i64, f32, f64);

impl CopyField for bool {
    fn put(&self, out: &mut Vec<u8>) {
        bytes(out, &[u8::from(*self)]);
    }
}

impl CopyField for Uuid {
    fn put(&self, out: &mut Vec<u8>) {
        bytes(out, self.as_bytes());
    }
}

impl CopyField for DateTime<Utc> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.timestamp_micros() - EPOCH_US).put(out);
    }
}

impl CopyField for &str {
    fn put(&self, out: &mut Vec<u8>) {
        bytes(out, self.as_bytes());
    }
}

impl CopyField for Cow<'_, str> {
    fn put(&self, out: &mut Vec<u8>) {
        bytes(out, self.as_bytes());
    }
}

impl CopyField for &[u8] {
    fn put(&self, out: &mut Vec<u8>) {
        bytes(out, self);
    }
}

impl CopyField for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>) {
        bytes(out, self);
    }
}

impl<F: CopyField> CopyField for Option<F> {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Some(field) => field.put(out),
            None => out.extend_from_slice(&(-1i32).to_be_bytes()),
        }
    }
}

fn bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    // PostgreSQL rejects fields of 1 GiB or more with an error that names the limit.
    out.extend_from_slice(&i32::try_from(bytes.len()).unwrap_or(i32::MAX).to_be_bytes());
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode_for_copy(field: &impl CopyField) -> Vec<u8> {
        let mut out = Vec::new();
        field.put(&mut out);
        let length = i32::from_be_bytes(out[..4].try_into().unwrap());
        assert_eq!(usize::try_from(length).unwrap(), out.len() - 4);
        out.split_off(4)
    }

    /// Encodes an argument with sqlx.
    fn encode_with_sqlx<'q>(value: impl Encode<'q, Postgres>) -> Vec<u8> {
        let mut buffer = PgArgumentBuffer::default();
        let _ = value.encode(&mut buffer).unwrap();
        buffer.to_vec()
    }

    proptest! {
        #[test]
        fn fields_are_encoded_like_sqlx_arguments(
            small: i32, large: i64, single: f32, double: f64, truth: bool, text: String, bytes: Vec<u8>,
            micros in -60_000_000_000_000_000i64..200_000_000_000_000_000,
        ) {
            prop_assert_eq!(encode_for_copy(&small), encode_with_sqlx(small));
            prop_assert_eq!(encode_for_copy(&large), encode_with_sqlx(large));
            prop_assert_eq!(encode_for_copy(&single), encode_with_sqlx(single));
            prop_assert_eq!(encode_for_copy(&double), encode_with_sqlx(double));
            prop_assert_eq!(encode_for_copy(&truth), encode_with_sqlx(truth));
            prop_assert_eq!(encode_for_copy(&text.as_str()), encode_with_sqlx(text.as_str()));
            prop_assert_eq!(encode_for_copy(&bytes), encode_with_sqlx(bytes.as_slice()));
            let time = DateTime::from_timestamp_micros(micros).unwrap();
            prop_assert_eq!(encode_for_copy(&time), encode_with_sqlx(time));
        }

        #[test]
        fn integers_are_encoded_like_sqlx_arrays(numbers in proptest::collection::vec(any::<i32>(), 1..9)) {
            prop_assert_eq!(encode_for_copy(&Integers((&numbers).into())), encode_with_sqlx(numbers.as_slice()));
        }
    }
}
