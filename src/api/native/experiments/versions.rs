//! The versions of the model and the mods of an experiment. They are stored with its definition, so that a resumed
//! experiment does not mix the answers of several versions.

use super::ExperimentDefinition;
use crate::mods::{ModOrigin, SelectedMod, version_of};
use crate::server::{ApiError, LoadedModel};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Versions of the model and the mods.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Versions {
    /// Fingerprint of the model.
    model: String,
    /// Version of each mod by its name, without built-in mods: theirs is Thunder's.
    mods: BTreeMap<String, String>,
}

impl Versions {
    pub(super) fn new(loaded: &LoadedModel, mods: &[Vec<SelectedMod>]) -> Self {
        let is_builtin = |selected: &SelectedMod| selected.factory.describe().origin == ModOrigin::Builtin;
        let version = |selected: &SelectedMod| (selected.mod_ref.name.clone(), version_of(&*selected.factory));
        Self {
            model: format!("{:032x}", loaded.model().fingerprint()),
            mods: mods.iter().flatten().filter(|selected| !is_builtin(selected)).map(version).collect(),
        }
    }

    /// Describes the first difference of the current versions from these; `None` if they are equal.
    pub(super) fn difference(&self, current: &Self) -> Option<String> {
        if self.model != current.model {
            return Some(format!(
                "its model is another file or has other overrides now: the fingerprint is {}, expected {}",
                current.model, self.model
            ));
        }
        let (name, version) = self.mods.iter().find(|(name, version)| current.mods.get(*name) != Some(*version))?;
        let found = current.mods.get(name).map_or("missing", String::as_str);
        Some(format!("the mod '{name}' has changed: its version is {found}, expected {version}; restore that version"))
    }
}

/// The stored form of a definition.
#[derive(Debug, Serialize)]
pub(super) struct StoredDefinition<'a> {
    #[serde(flatten)]
    pub(super) definition: &'a ExperimentDefinition,
    pub(super) versions: Versions,
}

/// Parses a stored definition. Earlier releases did not store versions.
pub(super) fn parse_stored(text: &str) -> Result<(ExperimentDefinition, Option<Versions>), ApiError> {
    let parse = || -> serde_json::Result<_> {
        let mut stored: Map<String, Value> = serde_json::from_str(text)?;
        let versions = stored.remove("versions").map(serde_json::from_value).transpose()?;
        Ok((serde_json::from_value(stored.into())?, versions))
    };
    parse().map_err(ApiError::internal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn stored_definition_has_versions_and_earlier_ones_have_none() {
        let text = json!({"name": "n", "prompts": ["p"], "seeds": [1]}).to_string();
        let (definition, none) = parse_stored(&text).unwrap();
        assert!(none.is_none());
        let versions = || Versions { model: "1f".into(), mods: BTreeMap::from([("a".into(), "v1".into())]) };
        let stored = StoredDefinition { definition: &definition, versions: versions() };
        let (parsed, stored) = parse_stored(&serde_json::to_string(&stored).unwrap()).unwrap();
        assert_eq!((parsed, stored.unwrap().difference(&versions())), (definition, None));
    }

    #[test]
    fn difference_names_model_or_mod() {
        let versions = |model: &str, mods: &[(&str, &str)]| Versions {
            model: model.into(),
            mods: mods.iter().map(|&(name, version)| (name.into(), version.into())).collect(),
        };
        let created = versions("1f", &[("a", "v1"), ("b", "v1")]);
        let difference = |current: Versions| created.difference(&current).unwrap();
        let model = difference(versions("2f", &[("a", "v1"), ("b", "v1")]));
        assert!(model.ends_with("the fingerprint is 2f, expected 1f"), "{model}");
        let changed = "the mod 'b' has changed: its version is v2, expected v1; restore that version";
        assert_eq!(difference(versions("1f", &[("a", "v1"), ("b", "v2")])), changed);
    }
}
