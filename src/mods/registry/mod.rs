//! The mods that runs can name, by version, and whether they are switched on.
//!
//! A run takes the version that stands under a name when it begins, and keeps it. Switching a mod off, or removing it, is
//! felt by runs that are going on: at the next event of theirs the call fails with the reason, and none follows.

mod folder;
pub mod source_store;
mod toggle;
mod upload;
mod uses;
mod version;
mod with_source;

pub use folder::{FolderWatch, ModFolder};
pub use toggle::{CallFailure, CallStats};
pub use upload::{InvalidUpload, ModSource, ModUpload};
pub use uses::ModUse;
pub use version::{ModOrigin, RegisteredVersion};
pub use with_source::WithSource;

use super::ModFactory;
use super::python::PythonMods;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use toggle::{State, Switch, Switched};
use tokio::sync::mpsc;
use uses::Uses;

/// Versions that are remembered of a mod, besides the one that runs take.
const MOST_EARLIER: usize = 50;

/// What a person needs to know of a mod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ModDescription {
    /// The name a run uses.
    pub name: String,
    /// One sentence.
    pub description: String,
    /// `rust` or `python`.
    pub language: String,
    /// The first 12 digits of the source's SHA-256 for a Python mod, the release for a built-in one.
    pub version: String,
    /// The configuration it takes, as an example; `null` when it takes none.
    pub config: Value,
    /// Author of the code. Lists show it with the version.
    #[serde(default, skip_serializing)]
    pub origin: ModOrigin,
    /// What it does, in a paragraph; empty where nothing is known beyond the sentence.
    #[serde(default)]
    pub documentation: String,
    /// JSON schema of the configuration, with a default and a description for each field; `null` where there is none.
    #[serde(default)]
    pub schema: Value,
}

/// A mod as a request names it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModRef {
    /// The registered name.
    pub name: String,
    /// The mod's own configuration.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub config: Value,
}

/// A mod that a validated request has chosen.
#[derive(Clone)]
pub struct SelectedMod {
    /// As the request named it.
    pub mod_ref: ModRef,
    /// What it names.
    pub factory: Arc<dyn ModFactory>,
}

impl std::fmt::Debug for SelectedMod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SelectedMod").field("mod_ref", &self.mod_ref).finish_non_exhaustive()
    }
}

impl SelectedMod {
    /// What a run records of it: name, configuration, version (whole) and origin.
    #[must_use]
    pub fn to_record(&self) -> Value {
        let mut record = serde_json::to_value(&self.mod_ref).unwrap_or_default();
        record["version"] = version_of(&*self.factory).into();
        record["origin"] = self.factory.describe().origin.as_str().into();
        record
    }
}

/// The whole hash of a mod's source; the release for a built-in mod.
#[must_use]
pub fn version_of(factory: &dyn ModFactory) -> String {
    factory.source_hash().unwrap_or_else(|| factory.describe().version)
}

/// A request named a mod that it cannot have.
#[derive(Debug, thiserror::Error)]
#[error("{}; {} mods: {}", why.clone().unwrap_or_else(|| format!("unknown mod '{name}'")),
    if *disabled { "enabled" } else { "known" }, known.join(", "))]
pub struct UnknownMod {
    /// The name.
    pub name: String,
    /// The names that runs can use, sorted.
    pub known: Vec<String>,
    /// Whether it is known and switched off.
    pub disabled: bool,
    /// Why it cannot be had, where it is not simply unknown.
    pub why: Option<String>,
}

/// Why a mod is not registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the name '{name}' is taken by {by}")]
pub struct NameTaken {
    /// The name.
    pub name: String,
    /// What has it.
    pub by: String,
}

/// Why a source could not be registered; the version before it stays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModProblem {
    /// The file, or the mod's name.
    pub file: String,
    /// One line.
    pub message: String,
    /// Python's traceback, where there is one.
    pub traceback: Option<String>,
    /// When it was found.
    pub at: DateTime<Utc>,
}

/// A mod as lists show it.
#[derive(Debug, Clone, Serialize)]
pub struct ModInfo {
    /// What it is.
    #[serde(flatten)]
    pub description: ModDescription,
    /// The version that runs take.
    #[serde(flatten)]
    pub current: RegisteredVersion,
    /// Whether runs can name it.
    pub enabled: bool,
    /// Earlier versions since the server's start, oldest first.
    pub earlier: Vec<RegisteredVersion>,
    /// What its calls came to since the server's start.
    #[serde(flatten)]
    pub record: CallStats,
    /// Why a newer source of it is not registered.
    pub problem: Option<ModProblem>,
}

struct Entry {
    factory: Arc<Switched>,
    version: RegisteredVersion,
    earlier: Vec<RegisteredVersion>,
}

/// The mods that runs can name.
#[derive(Default)]
pub struct ModRegistry {
    mods: RwLock<BTreeMap<String, Entry>>,
    /// By file, or by name for one that has none.
    problems: RwLock<BTreeMap<String, ModProblem>>,
    python: RwLock<PythonMods>,
    uses: Uses,
}

impl ModRegistry {
    /// A registry that holds the built-in mods.
    #[must_use]
    pub fn with_builtin() -> Self {
        let registry = Self::default();
        for factory in super::builtin::all() {
            registry.insert(factory);
        }
        registry
    }

    /// The versions of files that runs begin with from now on; only the first call gets them.
    pub fn subscribe_uses(&self) -> mpsc::UnboundedReceiver<ModUse> {
        self.uses.tell()
    }

    /// From now on Python mods run like this.
    pub fn set_python(&self, python: PythonMods) {
        *self.python.write().unwrap_or_else(PoisonError::into_inner) = python;
    }

    /// How Python mods run.
    #[must_use]
    pub fn python(&self) -> PythonMods {
        self.python.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Registers a mod, whatever had its name, and says whether there was one. Runs that already began keep the old one.
    pub fn insert(&self, factory: Arc<dyn ModFactory>) -> bool {
        let description = factory.describe();
        let version = RegisteredVersion {
            hash: version_of(&*factory),
            origin: description.origin,
            registered_at: None,
            registered_by: None,
        };
        self.put(factory, version)
    }

    /// Registers a version of a mod and says whether it replaced another. Runs that already began keep the old one.
    ///
    /// # Errors
    /// A built-in mod has the name, a file has it and somebody sent this one, or another file has it.
    pub fn register(&self, factory: Arc<dyn ModFactory>, version: RegisteredVersion) -> Result<bool, NameTaken> {
        let name = factory.describe().name;
        self.check_name(&name, version.origin, version.registered_by.as_deref())?;
        Ok(self.put(factory, version))
    }

    /// Whether code of that origin, from that file, may be registered under the name.
    ///
    /// # Errors
    /// What has the name.
    pub fn check_name(&self, name: &str, origin: ModOrigin, file: Option<&str>) -> Result<(), NameTaken> {
        let mods = self.read();
        let Some(entry) = mods.get(name) else { return Ok(()) };
        let by = match entry.version.origin {
            ModOrigin::Builtin => "a built-in mod".to_owned(),
            ModOrigin::File if origin == ModOrigin::Uploaded => "a file of the server's own".to_owned(),
            ModOrigin::File if entry.version.registered_by.as_deref() != file => {
                format!("the file {}", entry.version.registered_by.as_deref().unwrap_or("on the command line"))
            }
            ModOrigin::Uploaded if origin != ModOrigin::Uploaded => "an uploaded mod".to_owned(),
            ModOrigin::File | ModOrigin::Uploaded => return Ok(()),
        };
        Err(NameTaken { name: name.to_owned(), by })
    }

    fn put(&self, factory: Arc<dyn ModFactory>, version: RegisteredVersion) -> bool {
        let name = factory.describe().name;
        let mut mods = self.write();
        let before = mods.remove(&name);
        let switch = match &before {
            Some(entry) => entry.factory.switch().of_next_version(),
            None => Switch::new(&name),
        };
        let mut earlier = Vec::new();
        let replaced = before.is_some();
        if let Some(before) = before {
            earlier = before.earlier;
            if before.version.hash != version.hash {
                earlier.push(before.version);
            }
            earlier.retain(|known| known.hash != version.hash);
            let over = earlier.len().saturating_sub(MOST_EARLIER);
            earlier.drain(..over);
        }
        mods.insert(name, Entry { factory: Arc::new(Switched::new(factory, switch)), version, earlier });
        replaced
    }

    /// Removes a mod and says whether it was there. Runs that use it go on without it.
    pub fn remove(&self, name: &str) -> bool {
        let removed = self.write().remove(name);
        if let Some(entry) = &removed {
            entry.factory.switch().set(State::Removed);
        }
        removed.is_some()
    }

    /// Switches a mod on or off, also for runs that are going on: at their next event. Says whether there is such a mod.
    pub fn enable(&self, name: &str, enabled: bool) -> bool {
        let mods = self.read();
        let entry = mods.get(name);
        if let Some(entry) = entry {
            entry.factory.switch().set(if enabled { State::On } else { State::Off });
        }
        entry.is_some()
    }

    /// Notes why a source is not registered, or that there is nothing wrong with it any more.
    pub fn set_problem(&self, file: &str, problem: Option<ModProblem>) {
        let mut problems = self.problems.write().unwrap_or_else(PoisonError::into_inner);
        match problem {
            Some(problem) => problems.insert(file.to_owned(), problem),
            None => problems.remove(file),
        };
    }

    /// The sources that are not registered, and why, by file.
    #[must_use]
    pub fn problems(&self) -> Vec<ModProblem> {
        self.problems.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// All mods that runs can name, by name.
    #[must_use]
    pub fn list(&self) -> Vec<ModDescription> {
        let mods = self.read();
        mods.values().filter(|entry| entry.factory.switch().is_on()).map(|entry| entry.factory.describe()).collect()
    }

    /// Everything about all mods, by name.
    #[must_use]
    pub fn list_info(&self) -> Vec<ModInfo> {
        let problems = self.problems();
        self.read().values().map(|entry| entry.info(&problems)).collect()
    }

    /// Everything about one mod.
    #[must_use]
    pub fn info(&self, name: &str) -> Option<ModInfo> {
        let problems = self.problems();
        self.read().get(name).map(|entry| entry.info(&problems))
    }

    /// The mod of that name, whether it is switched on or not.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<dyn ModFactory>> {
        self.read().get(name).map(|entry| Arc::clone(&entry.factory) as Arc<dyn ModFactory>)
    }

    /// Looks up the mods that a request names, in its order.
    ///
    /// # Errors
    /// The first name that is not registered, or switched off.
    pub fn select(&self, refs: Vec<ModRef>) -> Result<Vec<SelectedMod>, UnknownMod> {
        let mods = self.read();
        let known = || {
            let enabled = mods.iter().filter(|(_, entry)| entry.factory.switch().is_on());
            enabled.map(|(name, _)| name.clone()).collect()
        };
        refs.into_iter()
            .map(|mod_ref| match mods.get(&mod_ref.name) {
                Some(entry) if entry.factory.switch().is_on() => {
                    self.uses.note(&mod_ref.name, &entry.version, &*entry.factory);
                    Ok(SelectedMod { factory: Arc::clone(&entry.factory) as Arc<dyn ModFactory>, mod_ref })
                }
                Some(_) => {
                    let why = Some(format!("the mod '{}' is switched off", mod_ref.name));
                    Err(UnknownMod { name: mod_ref.name, known: known(), disabled: true, why })
                }
                None => {
                    let why = self.broken(&mod_ref.name);
                    Err(UnknownMod { name: mod_ref.name, known: known(), disabled: false, why })
                }
            })
            .collect()
    }

    /// Why a file of that name holds no mod.
    fn broken(&self, name: &str) -> Option<String> {
        let problems = self.problems();
        let problem = problems.iter().find(|problem| problem.file == name || problem.file == format!("{name}.py"))?;
        Some(format!("there is no mod '{name}', since {} could not be loaded ({})", problem.file, problem.message))
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Entry>> {
        self.mods.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Entry>> {
        self.mods.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn info(&self, problems: &[ModProblem]) -> ModInfo {
        let description = self.factory.describe();
        let own = |problem: &&ModProblem| {
            problem.file == description.name || Some(&problem.file) == self.version.registered_by.as_ref()
        };
        ModInfo {
            problem: problems.iter().find(own).cloned(),
            current: self.version.clone(),
            enabled: self.factory.switch().is_on(),
            earlier: self.earlier.clone(),
            record: self.factory.switch().record(),
            description,
        }
    }
}

#[cfg(test)]
mod tests;
