//! Which versions of the server's own files runs begin with, for whoever keeps their source.

use super::{ModOrigin, RegisteredVersion};
use crate::mods::ModFactory;
use chrono::{NaiveDate, Utc};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use tokio::sync::mpsc;

/// A version of a file that a run begins with, the first time on a day.
#[derive(Debug, Clone, PartialEq)]
pub struct ModUse {
    /// The mod's name.
    pub name: String,
    /// What it is a version of, and since when.
    pub version: RegisteredVersion,
    /// Its source: a text, or an object from path to text.
    pub source: Value,
    /// The day, in UTC.
    pub day: NaiveDate,
}

/// Tells somebody of uses, where somebody wants to know.
#[derive(Default)]
pub(super) struct Uses {
    told: Mutex<HashMap<String, NaiveDate>>,
    to: OnceLock<mpsc::UnboundedSender<ModUse>>,
}

impl Uses {
    /// From now on tells of uses; the second one who asks gets none.
    pub fn tell(&self) -> mpsc::UnboundedReceiver<ModUse> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let _ = self.to.set(sender);
        receiver
    }

    /// A run begins with this version.
    pub fn note(&self, name: &str, version: &RegisteredVersion, factory: &dyn ModFactory) {
        let Some(to) = self.to.get().filter(|_| version.origin == ModOrigin::File) else { return };
        let day = Utc::now().date_naive();
        let key = format!("{name}\0{}", version.hash);
        let before = self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(key, day);
        if before != Some(day)
            && let Some(source) = factory.source_text()
        {
            // Who wanted to know may have gone.
            let _ = to.send(ModUse { name: name.to_owned(), version: version.clone(), source, day });
        }
    }
}
