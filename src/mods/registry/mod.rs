mod version;

pub use version::{Origin, Version};

use super::Factory;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// What a person needs to know of a mod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Description {
    /// The name a run uses.
    pub name: String,
    /// One sentence.
    pub description: String,
    /// `rust` or `python`.
    pub language: String,
    /// Hash of the source for a Python mod, the release for a built-in one.
    pub version: String,
    /// The configuration it takes, as an example; `null` when it takes none.
    pub config: Value,
    /// Whose code it is.
    #[serde(default)]
    pub origin: Origin,
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
pub struct Chosen {
    /// As the request named it.
    pub mod_ref: ModRef,
    /// What it names.
    pub factory: Arc<dyn Factory>,
}

impl std::fmt::Debug for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chosen").field("mod_ref", &self.mod_ref).finish_non_exhaustive()
    }
}

/// A request named a mod that is not registered.
#[derive(Debug, thiserror::Error)]
#[error("unknown mod '{name}'; known mods: {}", known.join(", "))]
pub struct UnknownMod {
    /// The name.
    pub name: String,
    /// The registered names, sorted.
    pub known: Vec<String>,
}

/// The mods that runs can name.
#[derive(Default)]
pub struct Registry {
    mods: RwLock<BTreeMap<String, Arc<dyn Factory>>>,
}

impl Registry {
    /// A registry that holds the built-in mods.
    #[must_use]
    pub fn with_builtin() -> Self {
        let registry = Self::default();
        for factory in super::builtin::all() {
            registry.insert(factory);
        }
        registry
    }

    /// Registers a mod and says whether it replaced one of that name. Runs that already began keep the old one.
    pub fn insert(&self, factory: Arc<dyn Factory>) -> bool {
        let mut mods = self.mods.write().unwrap_or_else(PoisonError::into_inner);
        mods.insert(factory.describe().name, factory).is_some()
    }

    /// Removes a mod and says whether it was there.
    pub fn remove(&self, name: &str) -> bool {
        self.mods.write().unwrap_or_else(PoisonError::into_inner).remove(name).is_some()
    }

    /// All mods, by name.
    #[must_use]
    pub fn list(&self) -> Vec<Description> {
        self.mods.read().unwrap_or_else(PoisonError::into_inner).values().map(|f| f.describe()).collect()
    }

    /// Looks up the mods that a request names, in its order.
    ///
    /// # Errors
    /// The first name that is not registered.
    pub fn choose(&self, refs: Vec<ModRef>) -> Result<Vec<Chosen>, UnknownMod> {
        let mods = self.mods.read().unwrap_or_else(PoisonError::into_inner);
        refs.into_iter()
            .map(|mod_ref| match mods.get(&mod_ref.name) {
                Some(factory) => Ok(Chosen { factory: Arc::clone(factory), mod_ref }),
                None => Err(UnknownMod { name: mod_ref.name, known: mods.keys().cloned().collect() }),
            })
            .collect()
    }
}
