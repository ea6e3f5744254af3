//! Registry of mods: the current version of each, and whether it is enabled.
//!
//! A run uses the version that is current when it starts, until it ends. Disabling or removing a mod also affects
//! active runs: the call at their next event fails with the reason, and the run does not call the mod again.

mod call_counters;
mod description;
mod folder;
mod import_retry;
mod info;
mod local_source;
pub mod source_store;
mod tracked_mod;
mod upload;
mod uses;
mod version;
mod with_source;

pub use call_counters::{CallFailure, CallStats};
pub use description::ModDescription;
pub use folder::{FolderWatch, ModFolder};
pub use import_retry::ImportRetry;
pub use info::{ModInfo, ModProblem};
pub use local_source::LocalSource;
pub use upload::{InvalidUpload, ModSource, ModUpload};
pub use uses::ModUse;
pub use version::{ModOrigin, RegisteredVersion};
pub use with_source::WithSource;

use super::ModFactory;
use super::python::PythonMods;
use crate::events::Scope;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::mpsc;
use tracked_mod::{ModStatus, SharedStatus, TrackedMod};
use uses::UseTracker;

/// Maximum earlier versions listed for a mod.
const MAX_EARLIER_VERSIONS: usize = 50;

/// Reference to a mod in a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModRef {
    /// Registered name.
    pub name: String,
    /// Configuration of the mod.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub config: Value,
}

/// A mod selected by a validated request.
#[derive(Clone)]
pub struct SelectedMod {
    /// Reference in the request.
    pub mod_ref: ModRef,
    /// Factory of the mod.
    pub factory: Arc<dyn ModFactory>,
}

impl std::fmt::Debug for SelectedMod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SelectedMod").field("mod_ref", &self.mod_ref).finish_non_exhaustive()
    }
}

impl SelectedMod {
    /// Returns the record of the mod in a run: name, configuration, full version and origin.
    #[must_use]
    pub fn to_record(&self) -> Value {
        let mut record = serde_json::to_value(&self.mod_ref).unwrap_or_default();
        record["version"] = version_of(&*self.factory).into();
        record["origin"] = self.factory.describe().origin.as_str().into();
        record
    }
}

/// Returns the full hash of a mod's source; the release for a built-in mod.
#[must_use]
pub fn version_of(factory: &dyn ModFactory) -> String {
    factory.source_hash().unwrap_or_else(|| factory.describe().version)
}

/// Error for a request that names an unknown or disabled mod.
#[derive(Debug, thiserror::Error)]
#[error("{}; {} mods: {}", reason.clone().unwrap_or_else(|| format!("unknown mod '{name}'")),
    if *disabled { "enabled" } else { "known" }, known.join(", "))]
pub struct UnknownMod {
    /// Requested name.
    pub name: String,
    /// Names that runs can use, sorted.
    pub known: Vec<String>,
    /// True if the mod is known but disabled.
    pub disabled: bool,
    /// Reason, unless the mod is simply unknown.
    pub reason: Option<String>,
}

/// Error for a name that is already taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the name '{name}' is already used by {by}")]
pub struct NameTaken {
    /// Name of the mod.
    pub name: String,
    /// Description of the mod that has the name.
    pub by: String,
}

struct Entry {
    factory: Arc<TrackedMod>,
    version: RegisteredVersion,
    earlier: Vec<RegisteredVersion>,
}

/// Registry of mods.
#[derive(Default)]
pub struct ModRegistry {
    mods: RwLock<BTreeMap<String, Entry>>,
    /// Names of disabled mods, also of those that are not registered. Locked only while `mods` is locked.
    disabled: Mutex<BTreeSet<String>>,
    /// Problems by file, or by name for uploads.
    problems: RwLock<BTreeMap<String, ModProblem>>,
    python: RwLock<PythonMods>,
    uses: UseTracker,
}

impl ModRegistry {
    /// Creates a registry with the built-in mods.
    #[must_use]
    pub fn with_builtin() -> Self {
        let registry = Self::default();
        for factory in super::builtin::all() {
            registry.insert(factory);
        }
        registry
    }

    /// Subscribes to the versions of mod files that runs start with. Only the first subscriber receives them.
    pub fn subscribe_uses(&self) -> mpsc::UnboundedReceiver<ModUse> {
        self.uses.subscribe()
    }

    /// Sets the configuration with which Python mods run.
    pub fn set_python(&self, python: PythonMods) {
        *self.python.write().unwrap_or_else(PoisonError::into_inner) = python;
    }

    /// Returns the configuration with which Python mods run.
    #[must_use]
    pub fn python(&self) -> PythonMods {
        self.python.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Registers a mod and replaces any mod of the same name. Returns true if it replaced one. Active runs keep the
    /// previous version.
    pub fn insert(&self, factory: Arc<dyn ModFactory>) -> bool {
        let description = factory.describe();
        let version = RegisteredVersion {
            hash: version_of(&*factory),
            origin: description.origin,
            registered_at: None,
            registered_by: None,
        };
        self.insert_version(factory, version)
    }

    /// Registers a version of a mod. Returns true if it replaced another one. Active runs keep the previous version.
    ///
    /// # Errors
    /// The name belongs to a built-in mod, to another file, or to a mod of another origin.
    pub fn register(&self, factory: Arc<dyn ModFactory>, version: RegisteredVersion) -> Result<bool, NameTaken> {
        let name = factory.describe().name;
        self.check_name(&name, version.origin, version.registered_by.as_deref())?;
        Ok(self.insert_version(factory, version))
    }

    /// Checks that code of that origin, from that file, may use the name.
    ///
    /// # Errors
    /// The name is taken.
    pub fn check_name(&self, name: &str, origin: ModOrigin, file: Option<&str>) -> Result<(), NameTaken> {
        let mods = self.read();
        let Some(entry) = mods.get(name) else { return Ok(()) };
        let by = match entry.version.origin {
            ModOrigin::Builtin => "a built-in mod".to_owned(),
            ModOrigin::File if origin == ModOrigin::Uploaded => "a file of the server".to_owned(),
            ModOrigin::File if entry.version.registered_by.as_deref() != file => {
                format!("the file {}", entry.version.registered_by.as_deref().unwrap_or("on the command line"))
            }
            ModOrigin::Uploaded if origin != ModOrigin::Uploaded => "an uploaded mod".to_owned(),
            ModOrigin::File | ModOrigin::Uploaded => return Ok(()),
        };
        Err(NameTaken { name: name.to_owned(), by })
    }

    fn insert_version(&self, factory: Arc<dyn ModFactory>, version: RegisteredVersion) -> bool {
        let name = factory.describe().name;
        let mut mods = self.write();
        let before = mods.remove(&name);
        let status = self.status(&name, before.as_ref());
        let mut earlier = Vec::new();
        let replaced = before.is_some();
        if let Some(before) = before {
            earlier = before.earlier;
            if before.version.hash != version.hash {
                earlier.push(before.version);
            }
            earlier.retain(|known| known.hash != version.hash);
            let excess = earlier.len().saturating_sub(MAX_EARLIER_VERSIONS);
            earlier.drain(..excess);
        }
        mods.insert(name, Entry { factory: Arc::new(TrackedMod::new(factory, status)), version, earlier });
        replaced
    }

    /// Connects an earlier version of a mod to the status of the mod, so that runs of that version, too, end its calls
    /// when the mod is disabled or removed.
    #[must_use]
    pub fn with_status(&self, name: &str, version: Arc<dyn ModFactory>) -> Arc<dyn ModFactory> {
        let mods = self.read();
        Arc::new(TrackedMod::new(version, self.status(name, mods.get(name))))
    }

    /// Returns the status of a mod. `entry` is its current version.
    fn status(&self, name: &str, entry: Option<&Entry>) -> Arc<SharedStatus> {
        if let Some(entry) = entry {
            return Arc::clone(entry.factory.status());
        }
        let is_disabled = self.disabled_names().contains(name);
        SharedStatus::new(name, if is_disabled { ModStatus::Disabled } else { ModStatus::Enabled })
    }

    /// Removes a mod. Returns true if it existed. Active runs stop calling it and continue. If it was disabled, a later mod of
    /// that name is disabled, too, except after the removal of an uploaded mod.
    pub fn remove(&self, name: &str) -> bool {
        let mut mods = self.write();
        let removed = mods.remove(name);
        if let Some(entry) = &removed {
            entry.factory.status().set(ModStatus::Removed);
            if entry.version.origin == ModOrigin::Uploaded {
                self.disabled_names().remove(name);
            }
        }
        removed.is_some()
    }

    /// Enables or disables a mod, also for active runs at their next event; runs that were informed that it is disabled do not
    /// call it again. The state also applies to a mod of that name that is
    /// registered later. Returns true if the mod exists.
    pub fn set_enabled(&self, name: &str, enabled: bool) -> bool {
        let mods = self.read();
        if enabled {
            self.disabled_names().remove(name);
        } else {
            self.disabled_names().insert(name.to_owned());
        }
        let entry = mods.get(name);
        if let Some(entry) = entry {
            entry.factory.status().set(if enabled { ModStatus::Enabled } else { ModStatus::Disabled });
        }
        entry.is_some()
    }

    /// Returns true if mods of that name are disabled, even if there is none.
    #[must_use]
    pub fn is_disabled(&self, name: &str) -> bool {
        let _mods = self.read();
        self.disabled_names().contains(name)
    }

    /// Sets or clears the problem of a source.
    pub fn set_problem(&self, file: &str, problem: Option<ModProblem>) {
        let mut problems = self.problems.write().unwrap_or_else(PoisonError::into_inner);
        match problem {
            Some(problem) => problems.insert(file.to_owned(), problem),
            None => problems.remove(file),
        };
    }

    /// Returns the problems of sources that are not registered, by file.
    #[must_use]
    pub fn problems(&self) -> Vec<ModProblem> {
        self.problems.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Returns all enabled mods, by name.
    #[must_use]
    pub fn list(&self) -> Vec<ModDescription> {
        let mods = self.read();
        mods.values()
            .filter(|entry| entry.factory.status().is_enabled())
            .map(|entry| entry.factory.describe())
            .collect()
    }

    /// Returns information about all mods, by name. The last failures are those of runs that the scope covers; `None`
    /// without a scope.
    #[must_use]
    pub fn list_info(&self, failures_for: Option<&Scope>) -> Vec<ModInfo> {
        let problems = self.problems();
        self.read().values().map(|entry| entry.info(&problems, failures_for)).collect()
    }

    /// Returns information about one mod. The last failure is that of a run that the scope covers; `None` without a
    /// scope.
    #[must_use]
    pub fn info(&self, name: &str, failures_for: Option<&Scope>) -> Option<ModInfo> {
        let problems = self.problems();
        self.read().get(name).map(|entry| entry.info(&problems, failures_for))
    }

    /// Returns the mod of that name, enabled or not.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<dyn ModFactory>> {
        self.read().get(name).map(|entry| Arc::clone(&entry.factory) as Arc<dyn ModFactory>)
    }

    /// Looks up the mods that a request names, in order.
    ///
    /// # Errors
    /// The first name that is unknown or disabled.
    pub fn select(&self, refs: Vec<ModRef>) -> Result<Vec<SelectedMod>, UnknownMod> {
        let mods = self.read();
        let known = || {
            let enabled = mods.iter().filter(|(_, entry)| entry.factory.status().is_enabled());
            enabled.map(|(name, _)| name.clone()).collect()
        };
        refs.into_iter()
            .map(|mod_ref| match mods.get(&mod_ref.name) {
                Some(entry) if entry.factory.status().is_enabled() => {
                    self.uses.record_use(&mod_ref.name, &entry.version, &*entry.factory);
                    Ok(SelectedMod { factory: Arc::clone(&entry.factory) as Arc<dyn ModFactory>, mod_ref })
                }
                Some(_) => {
                    let reason = Some(format!("the mod '{}' is disabled", mod_ref.name));
                    Err(UnknownMod { name: mod_ref.name, known: known(), disabled: true, reason })
                }
                None => {
                    let reason = self.load_failure(&mod_ref.name);
                    Err(UnknownMod { name: mod_ref.name, known: known(), disabled: false, reason })
                }
            })
            .collect()
    }

    /// Returns the reason why a file of that name provides no mod.
    fn load_failure(&self, name: &str) -> Option<String> {
        let problems = self.problems();
        let problem = problems.iter().find(|problem| problem.file == name || problem.file == format!("{name}.py"))?;
        Some(format!("the mod '{name}' is unavailable: {} could not be loaded ({})", problem.file, problem.message))
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Entry>> {
        self.mods.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Entry>> {
        self.mods.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn disabled_names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.disabled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn info(&self, problems: &[ModProblem], failures_for: Option<&Scope>) -> ModInfo {
        let description = self.factory.describe();
        let own = |problem: &&ModProblem| {
            problem.file == description.name || Some(&problem.file) == self.version.registered_by.as_ref()
        };
        ModInfo {
            problem: problems.iter().find(own).cloned(),
            current: self.version.clone(),
            enabled: self.factory.status().is_enabled(),
            earlier: self.earlier.clone(),
            stats: self.factory.counters().stats(failures_for),
            description,
        }
    }
}

#[cfg(test)]
mod tests;
