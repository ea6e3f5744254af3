//! Lists with mutating methods, as in Python.

use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum values in a list including nested ones, so that a template cannot exhaust the memory.
const MAX_VALUES: usize = 100_000;
/// Maximum depth of a value in a list.
const MAX_DEPTH: usize = 32;

/// A list that a template can change. Its elements are copies, so no list contains itself.
#[derive(Debug, Default)]
struct List(Mutex<Items>);

#[derive(Debug, Default)]
struct Items {
    values: Vec<Value>,
    /// Number of values ever inserted, including nested ones.
    count: usize,
}

/// Creates a mutable list of these values.
pub(super) fn list_of(values: &Value) -> Result<Value, Error> {
    let list = List::default();
    for value in values.try_iter()? {
        list.insert(usize::MAX, &value)?;
    }
    Ok(Value::from_object(list))
}

impl Items {
    /// Converts an index that may count from the end to one from the start.
    fn index(&self, index: i64) -> Option<usize> {
        let len = self.values.len();
        let from_end = usize::try_from(index.unsigned_abs()).ok()?;
        if index < 0 { len.checked_sub(from_end) } else { Some(from_end).filter(|&at| at < len) }
    }
}

/// Copies a value and adds its number of values to `count`.
fn copied(value: &Value, depth: usize, count: &mut usize) -> Result<Value, Error> {
    *count += 1;
    if *count > MAX_VALUES || depth > MAX_DEPTH {
        return Err(too_large());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value
            .try_iter()?
            .map(|item| copied(&item, depth + 1, count))
            .collect::<Result<Vec<_>, _>>()
            .map(Value::from),
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()? {
                let item = copied(&value.get_item(&key)?, depth + 1, count)?;
                pairs.push((key, item));
            }
            Ok(Value::from_pairs(pairs))
        }
        _ => Ok(value.clone()),
    }
}

fn too_large() -> Error {
    let message = format!("a list must not exceed {MAX_VALUES} values and a depth of {MAX_DEPTH}");
    Error::new(ErrorKind::InvalidOperation, message)
}

impl List {
    fn insert(&self, at: usize, value: &Value) -> Result<(), Error> {
        let mut count = 0;
        // The value may be this list, so it cannot be locked yet.
        let copy = copied(value, 0, &mut count)?;
        let mut items = self.items();
        items.count += count;
        if items.count > MAX_VALUES {
            return Err(too_large());
        }
        let at = at.min(items.values.len());
        items.values.insert(at, copy);
        Ok(())
    }

    fn items(&self) -> MutexGuard<'_, Items> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = usize::try_from(i64::try_from(key.clone()).ok()?).ok()?;
        self.items().values.get(index).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items().values.len())
    }

    fn call_method(self: &Arc<Self>, _state: &mut State<'_, '_>, method: &str, args: &[Value]) -> Result<Value, Error> {
        let missing = |what: &str| Error::new(ErrorKind::InvalidOperation, format!("{method}: {what}"));
        match method {
            "append" => {
                let (value,): (&Value,) = from_args(args)?;
                self.insert(usize::MAX, value)?;
            }
            "extend" => {
                let (values,): (&Value,) = from_args(args)?;
                // The list may be extended by itself.
                let values: Vec<Value> = values.try_iter()?.collect();
                for value in values {
                    self.insert(usize::MAX, &value)?;
                }
            }
            "insert" => {
                let (index, value): (i64, &Value) = from_args(args)?;
                let at = self.items().index(index).unwrap_or(if index < 0 { 0 } else { usize::MAX });
                self.insert(at, value)?;
            }
            "pop" => {
                let (index,): (Option<i64>,) = from_args(args)?;
                let mut items = self.items();
                let at = items.index(index.unwrap_or(-1)).ok_or_else(|| missing("the list has no such element"))?;
                return Ok(items.values.remove(at));
            }
            "remove" => {
                let (value,): (&Value,) = from_args(args)?;
                let wanted = copied(value, 0, &mut 0)?;
                let mut items = self.items();
                let at = items.values.iter().position(|item| item == &wanted);
                items.values.remove(at.ok_or_else(|| missing("the list has no such value"))?);
            }
            "reverse" => {
                let () = from_args(args)?;
                self.items().values.reverse();
            }
            "clear" => {
                let () = from_args(args)?;
                self.items().values.clear();
            }
            "copy" => {
                let () = from_args(args)?;
                let values = Value::from(self.items().values.clone());
                return list_of(&values);
            }
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        }
        Ok(Value::from(()))
    }
}
