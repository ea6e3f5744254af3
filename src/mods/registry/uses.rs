//! Notification of the versions of mod files that runs start with.

use super::{ModOrigin, ModUpload, RegisteredVersion};
use crate::events::system;
use crate::mods::ModFactory;
use chrono::NaiveDate;
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use tokio::sync::mpsc;

/// First use of a version of a mod file on a day.
#[derive(Debug, Clone, PartialEq)]
pub struct ModUse {
    /// Name of the mod.
    pub name: String,
    /// Version that was used.
    pub version: RegisteredVersion,
    /// Upload that registers the version.
    pub upload: ModUpload,
    /// Day, in UTC.
    pub day: NaiveDate,
}

/// Sender of uses to the subscriber, if any.
#[derive(Default)]
pub(super) struct UseTracker {
    /// Day of the last sent use of each version, by name and hash.
    sent: Mutex<HashMap<String, NaiveDate>>,
    to: OnceLock<mpsc::UnboundedSender<ModUse>>,
}

impl UseTracker {
    /// Subscribes to uses. Only the first subscriber receives them.
    pub fn subscribe(&self) -> mpsc::UnboundedReceiver<ModUse> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let _ = self.to.set(sender);
        receiver
    }

    /// Records that a run starts with this version.
    pub fn record_use(&self, name: &str, version: &RegisteredVersion, factory: &dyn ModFactory) {
        let Some(to) = self.to.get().filter(|_| version.origin == ModOrigin::File) else { return };
        let day = system::now().date_naive();
        let key = format!("{name}\0{}", version.hash);
        let before = self.sent.lock().unwrap_or_else(PoisonError::into_inner).insert(key, day);
        if before != Some(day)
            && let Some(upload) = factory.upload().cloned()
        {
            // Fails if the subscriber was dropped.
            let _ = to.send(ModUse { name: name.to_owned(), version: version.clone(), upload, day });
        }
    }
}
