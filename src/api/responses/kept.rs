//! Responses that are kept, so that a later one can go on from them: in memory, the newest ones up to a limit.

use crate::api::{ApiError, Caller};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most bytes of all responses with their conversations, as JSON.
const MOST_BYTES: usize = 128 << 20;

/// Items of a conversation, which those that go on from it share.
pub(super) type Items = Vec<Arc<Value>>;

/// The kept responses of a server; cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Responses(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    by_id: HashMap<String, Kept>,
    /// By age; the number of each counts up.
    ages: BTreeMap<u64, String>,
    next: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Kept {
    response: Arc<Value>,
    /// The whole conversation, the response's own items included.
    items: Items,
    /// Whose it is: others do not see it.
    owner: Option<String>,
    age: u64,
    bytes: usize,
}

/// Whoever asks, as far as responses are concerned.
pub(super) fn owner(caller: Option<&Caller>) -> Option<String> {
    caller.map(|caller| caller.label.clone())
}

impl Responses {
    /// Keeps a response, whose id it has, behind the items that it answers.
    pub(super) fn keep(&self, response: &Value, mut items: Items, owner: Option<String>) {
        let Some(id) = response["id"].as_str() else { return };
        items.extend(response["output"].as_array().into_iter().flatten().cloned().map(Arc::new));
        // Shared items count for each conversation: the sum is never less than what is held.
        let bytes = items.iter().map(|item| length(item)).sum::<usize>() + length(response);
        if bytes > MOST_BYTES {
            return;
        }
        let mut held = self.held();
        let age = held.next;
        held.next += 1;
        held.bytes += bytes;
        held.ages.insert(age, id.to_owned());
        held.by_id.insert(id.to_owned(), Kept { response: Arc::new(response.clone()), items, owner, age, bytes });
        while held.bytes > MOST_BYTES
            && let Some(oldest) = held.ages.first_key_value().map(|(_, id)| id.clone())
        {
            held.remove(&oldest);
        }
    }

    /// The conversation that a response ended.
    ///
    /// # Errors
    /// 400 naming `previous_response_id`.
    pub(super) fn conversation(&self, id: &str, owner: Option<&str>) -> Result<Items, ApiError> {
        const FIELD: &str = "previous_response_id";
        let held = self.held();
        let kept = held.by_id.get(id).filter(|kept| kept.owner.as_deref() == owner);
        kept.map(|kept| kept.items.clone()).ok_or_else(|| {
            let detail = format!(
                "{FIELD}: there is no response '{id}'; only the newest are kept, in memory, unless \"store\" is false"
            );
            ApiError::invalid(FIELD, detail).code("previous_response_not_found")
        })
    }

    /// A response.
    ///
    /// # Errors
    /// 404.
    pub(super) fn get(&self, id: &str, owner: Option<&str>) -> Result<Arc<Value>, ApiError> {
        let held = self.held();
        let kept = held.by_id.get(id).filter(|kept| kept.owner.as_deref() == owner);
        kept.map(|kept| Arc::clone(&kept.response)).ok_or_else(|| ApiError::not_found("response", id))
    }

    /// Forgets a response. Those that go on from it keep its items.
    ///
    /// # Errors
    /// 404.
    pub(super) fn delete(&self, id: &str, owner: Option<&str>) -> Result<(), ApiError> {
        self.get(id, owner)?;
        self.held().remove(id);
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    fn remove(&mut self, id: &str) {
        if let Some(kept) = self.by_id.remove(id) {
            self.ages.remove(&kept.age);
            self.bytes -= kept.bytes;
        }
    }
}

fn length(value: &Value) -> usize {
    value.to_string().len()
}

#[cfg(test)]
mod tests {
    use super::{MOST_BYTES, Responses};
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn response(id: &str, text: &str) -> Value {
        json!({ "id": id, "output": [{ "type": "message", "content": text }] })
    }

    #[test]
    fn the_oldest_go_when_there_is_no_room() {
        let responses = Responses::default();
        let large = "x".repeat(MOST_BYTES / 7);
        for id in ["a", "b", "c", "d"] {
            responses.keep(&response(id, &large), vec![Arc::new(json!("hi"))], None);
        }
        assert!(responses.get("a", None).is_err() && responses.get("d", None).is_ok());
        let items = responses.conversation("d", None).unwrap();
        assert_eq!((items.len(), items[0].as_str()), (2, Some("hi")));
        responses.delete("d", None).unwrap();
        assert!(responses.delete("d", None).is_err());
        responses.keep(&response("e", &"x".repeat(MOST_BYTES)), Vec::new(), None);
        assert!(responses.get("e", None).is_err() && responses.get("c", None).is_ok());
    }

    #[test]
    fn a_response_is_its_owners() {
        let responses = Responses::default();
        responses.keep(&response("a", "x"), Vec::new(), Some("key-1".into()));
        assert!(responses.get("a", Some("key-1")).is_ok());
        assert!(responses.get("a", Some("key-2")).is_err() && responses.conversation("a", None).is_err());
        assert!(responses.delete("a", None).is_err());
    }
}
