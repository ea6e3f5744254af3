//! The operators `~`, `+` and `*`, and slices, as filters with a limit of memory.
//!
//! Templates contain these filters after [`translate`](crate::model::chat::jinja_syntax::translate).

use super::budget::{VALUE_BYTES, spend, spend_text};
use crate::model::chat::jinja_syntax::operators::{ADD, CONCATENATE, MULTIPLY, SLICED};
use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_filter(CONCATENATE, concatenate);
    environment.add_filter(ADD, add);
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(SLICED, sliced);
}

/// `left ~ right`.
fn concatenate(state: &mut State<'_, '_>, left: &Value, right: &Value) -> Result<String, Error> {
    spend_text(state, left)?;
    spend_text(state, right)?;
    Ok(format!("{left}{right}"))
}

/// `left + right`.
fn add(state: &mut State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        spend(state, left.len().saturating_add(right.len()))?;
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple() {
        let mut values = Vec::new();
        for list in [left, right] {
            for value in list.try_iter()?.checked() {
                spend(state, VALUE_BYTES)?;
                values.push(value?);
            }
        }
        return Ok(list_like(left, values));
    }
    calculate("+", left, right, i128::checked_add, |left, right| left + right)
}

/// `left * right`.
fn multiply(state: &mut State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    let is_repeatable = |value: &Value| value.as_str().is_some() || is_list(value);
    let (repeated, count) = if is_repeatable(left) { (left, right) } else { (right, left) };
    if !is_repeatable(repeated) {
        return calculate("*", left, right, i128::checked_mul, |left, right| left * right);
    }
    let count = count.as_usize().ok_or_else(|| {
        invalid("texts and lists can only be multiplied by integers that are not negative".to_owned())
    })?;
    if let Some(text) = repeated.as_str() {
        spend(state, text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    let values = repeated.try_iter()?.checked().collect::<Result<Vec<Value>, Error>>()?;
    spend(state, values.len().saturating_mul(count).saturating_mul(VALUE_BYTES))?;
    Ok(list_like(repeated, std::iter::repeat_n(&values, count).flatten().cloned().collect()))
}

/// Returns a slice and counts its bytes; a slice of a list shares the values.
fn sliced(state: &mut State<'_, '_>, slice: Value) -> Result<Value, Error> {
    if let Some(text) = slice.as_str() {
        spend(state, text.len())?;
    } else if slice.is_tuple() {
        spend(state, slice.len().unwrap_or(0).saturating_mul(VALUE_BYTES))?;
    }
    Ok(slice)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// Returns a tuple if `model` is one, and else a list.
fn list_like(model: &Value, values: Vec<Value>) -> Value {
    if model.is_tuple() { Value::from(Tuple::from(values)) } else { Value::from(values) }
}

/// Calculates with numbers as minijinja does: with integers if both are integers.
fn calculate(
    operator: &str,
    left: &Value,
    right: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let is_bool = |value: &Value| value.kind() == ValueKind::Bool;
    let both = |is: &dyn Fn(&Value) -> bool| is(left) && is(right);
    if !both(&|value| value.kind() == ValueKind::Number || is_bool(value)) {
        let (left, right) = (left.kind(), right.kind());
        return Err(invalid(format!("tried to use {operator} operator on unsupported types {left} and {right}")));
    }
    if both(&|value| value.is_integer() || is_bool(value)) {
        let result = integers(i128::try_from(left.clone())?, i128::try_from(right.clone())?);
        let result = result.ok_or_else(|| invalid(format!("unable to calculate {left} {operator} {right}")))?;
        return Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    let float = |value: &Value| {
        if is_bool(value) { Ok(f64::from(u8::from(value.is_true()))) } else { f64::try_from(value.clone()) }
    };
    Ok(Value::from(floats(float(left)?, float(right)?)))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}
