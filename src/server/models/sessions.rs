//! Slot snapshots that clients store on the server, by model and number, until they remove them or the server stops.
//! They remain when their model is unloaded.

use crate::events::{Scope, Tenant};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The stored sessions of all models, in memory, up to a size limit.
#[derive(Debug)]
pub struct Sessions {
    stored: Mutex<StoredSessions>,
    limit: usize,
}

#[derive(Debug, Default)]
struct StoredSessions {
    sessions: BTreeMap<Key, Session>,
    bytes: usize,
}

/// Model, number and owner of a session: each tenant has its own numbers.
type Key = (String, i64, Option<Tenant>);

/// A client of the stored sessions.
#[derive(Debug, Clone, Copy)]
pub struct SessionClient<'a> {
    /// Owner of the sessions that it saves.
    pub tenant: Option<&'a Tenant>,
    /// Sessions that it may see and change.
    pub scope: &'a Scope,
}

/// A stored slot snapshot.
#[derive(Debug, Clone)]
pub struct Session {
    /// The snapshot in SES1 format.
    pub block: Bytes,
    /// Time of the first save under its number.
    pub created_at: DateTime<Utc>,
    /// Time of the last save.
    pub updated_at: DateTime<Utc>,
}

/// The size limit of stored sessions is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the session has {needed} bytes, but only {free} of the {limit} bytes for sessions are free; remove a session or start the server with a larger --session-memory"
)]
pub struct InsufficientMemory {
    /// Size of the session in bytes.
    pub needed: usize,
    /// Free bytes, including those of the session that it would replace.
    pub free: usize,
    /// Size limit of all sessions in bytes.
    pub limit: usize,
}

impl Sessions {
    /// Creates a store for up to `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { stored: Mutex::new(StoredSessions::default()), limit }
    }

    /// Stores a snapshot under a model and number, replacing an existing one.
    ///
    /// # Errors
    /// [`InsufficientMemory`]; the existing snapshot is kept.
    pub fn put(
        &self,
        owner: Option<&Tenant>,
        model: &str,
        id: i64,
        block: Bytes,
        now: DateTime<Utc>,
    ) -> Result<(), InsufficientMemory> {
        let mut stored = self.stored();
        let key = (model.to_owned(), id, owner.cloned());
        let old = stored.sessions.get(&key);
        let without = stored.bytes - old.map_or(0, |old| old.block.len());
        let free = self.limit.saturating_sub(without);
        if block.len() > free {
            return Err(InsufficientMemory { needed: block.len(), free, limit: self.limit });
        }
        let created_at = old.map_or(now, |old| old.created_at);
        stored.bytes = without + block.len();
        stored.sessions.insert(key, Session { block, created_at, updated_at: now });
        Ok(())
    }

    /// Returns the client's session of that model and number, otherwise one of another tenant that it may see.
    #[must_use]
    pub fn get(&self, client: SessionClient<'_>, model: &str, id: i64) -> Option<Session> {
        let stored = self.stored();
        stored.sessions.get(&stored.key(client, model, id)?).cloned()
    }

    /// Removes a session.
    pub fn remove(&self, client: SessionClient<'_>, model: &str, id: i64) -> Option<Session> {
        let mut stored = self.stored();
        let key = stored.key(client, model, id)?;
        let removed = stored.sessions.remove(&key);
        stored.bytes -= removed.as_ref().map_or(0, |session| session.block.len());
        removed
    }

    /// Removes a session if it is unchanged. Returns false if it was removed or saved again.
    pub fn remove_unchanged(&self, client: SessionClient<'_>, model: &str, id: i64, session: &Session) -> bool {
        let mut stored = self.stored();
        let Some(key) = stored.key(client, model, id) else { return false };
        let same = |one: &Session| one.updated_at == session.updated_at && one.block.as_ptr() == session.block.as_ptr();
        if !stored.sessions.get(&key).is_some_and(same) {
            return false;
        }
        stored.bytes -= session.block.len();
        stored.sessions.remove(&key);
        true
    }

    /// Returns the sessions of a model that the scope covers, sorted by number.
    #[must_use]
    pub fn list(&self, scope: &Scope, model: &str) -> Vec<(i64, Session)> {
        let stored = self.stored();
        let own = stored.sessions.iter().filter(|((of, _, owner), _)| of == model && scope.includes(owner.as_ref()));
        own.map(|((_, id, _), session)| (*id, session.clone())).collect()
    }

    fn stored(&self) -> MutexGuard<'_, StoredSessions> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoredSessions {
    fn key(&self, client: SessionClient<'_>, model: &str, id: i64) -> Option<Key> {
        let own = (model.to_owned(), id, client.tenant.cloned());
        if self.sessions.contains_key(&own) {
            return Some(own);
        }
        let is_found = |key: &&Key| key.0 == model && key.1 == id && client.scope.includes(key.2.as_ref());
        self.sessions.keys().find(is_found).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: SessionClient<'_> = SessionClient { tenant: None, scope: &Scope::All };

    #[test]
    fn size_limit_applies_and_session_can_be_replaced() {
        let sessions = Sessions::new(100);
        let (now, later) = (DateTime::UNIX_EPOCH, DateTime::UNIX_EPOCH + chrono::TimeDelta::seconds(5));
        let block = |len| Bytes::from(vec![0; len]);
        sessions.put(None, "m", 7, block(60), now).unwrap();
        assert_eq!(
            sessions.put(None, "m", 8, block(41), now),
            Err(InsufficientMemory { needed: 41, free: 40, limit: 100 })
        );
        sessions.put(None, "m", 7, block(100), later).unwrap();
        let session = sessions.get(ALL, "m", 7).unwrap();
        assert_eq!((session.created_at, session.updated_at, session.block.len()), (now, later, 100));
        assert_eq!(sessions.list(&Scope::All, "m").len(), 1);
        assert!(sessions.get(ALL, "other", 7).is_none() && sessions.list(&Scope::All, "other").is_empty());
        assert_eq!(
            sessions.put(None, "other", 7, block(1), now),
            Err(InsufficientMemory { needed: 1, free: 0, limit: 100 })
        );
        assert!(sessions.remove(ALL, "m", 7).is_some() && sessions.remove(ALL, "m", 7).is_none());
        sessions.put(None, "m", 8, block(100), now).unwrap();
    }

    #[test]
    fn session_saved_again_is_not_removed() {
        let sessions = Sessions::new(100);
        let block = |byte| Bytes::from(vec![byte; 50]);
        sessions.put(None, "m", 1, block(1), DateTime::UNIX_EPOCH).unwrap();
        let old = sessions.get(ALL, "m", 1).unwrap();
        sessions.put(None, "m", 1, block(2), DateTime::UNIX_EPOCH).unwrap();
        assert!(!sessions.remove_unchanged(ALL, "m", 1, &old) && sessions.get(ALL, "m", 1).unwrap().block[0] == 2);
        let new = sessions.get(ALL, "m", 1).unwrap();
        assert!(sessions.remove_unchanged(ALL, "m", 1, &new) && !sessions.remove_unchanged(ALL, "m", 1, &new));
        sessions.put(None, "m", 2, block(3), DateTime::UNIX_EPOCH).unwrap();
        sessions.put(None, "m", 3, block(3), DateTime::UNIX_EPOCH).unwrap();
    }
}
