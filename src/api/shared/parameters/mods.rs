//! The mods of a request, from its `mods` field and from the model's name.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::mods::{ModRef, ModRegistry, SelectedMod, UnknownMod};
use crate::server::{ApiError, ErrorCode, LoadedModel, models};
use serde_json::Value;

/// Maximum mods of one run. The thread that generates for all runs calls each of them at every token.
pub(crate) const MAX_RUN_MODS: usize = 64;

/// Expected value of `mods`, for errors.
const EXPECTED: &str = "a list of names or of {\"name\": …, \"config\": …}";

/// Returns the mods of a request. Mods in the model's name come first.
///
/// The model's name has the form `model`, `model/mod-a/mod-b`, or, for a model with a publisher,
/// `publisher/model/mod-a`.
pub(crate) fn requested_mods(
    fields: Fields<'_>,
    loaded: &LoadedModel,
    registry: &ModRegistry,
) -> Result<Vec<SelectedMod>, ApiError> {
    let known = |name: &str| registry.get(name).is_some();
    let mut refs = Vec::new();
    if let Some(requested) = fields.text("model")? {
        refs.extend(
            names_after_model(requested, loaded.names(), known)
                .map(|name| ModRef { name: name.to_owned(), config: Value::Null }),
        );
    }
    let from_model = refs.len();
    for entry in fields.list("mods")?.into_iter().flatten() {
        refs.push(mod_ref(entry)?);
    }
    if refs.len() > MAX_RUN_MODS {
        let detail = format!("`mods` must name at most {MAX_RUN_MODS} mods, got {}", refs.len());
        return Err(ApiError::invalid("mods", detail));
    }
    let names: Vec<String> = refs.iter().map(|mod_ref| mod_ref.name.clone()).collect();
    registry.select(refs).map_err(|error| unknown_mod(&error, names.iter().position(|n| *n == error.name), from_model))
}

fn names_after_model<'a, 'n>(
    requested: &'a str,
    names: impl Iterator<Item = &'n str> + Clone,
    known: impl Fn(&str) -> bool,
) -> impl Iterator<Item = &'a str> {
    let segments = |text: &'a str| text.split('/').filter(|segment| !segment.is_empty());
    let untagged = models::without_tag(requested);
    let (rest, skip) = match (models::resolve(requested, names), &segments(untagged).collect::<Vec<_>>()[..]) {
        (Some((_, rest)), _) => (rest, 0),
        // An unknown name is accepted as a model. Two segments are `publisher/model`, unless the second one is a mod.
        (None, [_, second]) => (untagged, if known(second) { 1 } else { 2 }),
        (None, _) => (untagged, 2),
    };
    segments(rest).skip(skip)
}

fn mod_ref(entry: &Value) -> Result<ModRef, ApiError> {
    match entry {
        Value::String(name) => Ok(ModRef { name: name.clone(), config: Value::Null }),
        Value::Object(object) => {
            // A misspelled `config` would otherwise be ignored.
            if let Some(field) = object.keys().find(|field| !matches!(field.as_str(), "name" | "config")) {
                let detail = format!("`mods`: unknown field '{field}'; known fields: name, config");
                return Err(ApiError::invalid("mods", detail));
            }
            let name =
                object.get("name").and_then(Value::as_str).ok_or_else(|| invalid_value("mods", EXPECTED, entry))?;
            Ok(ModRef { name: name.to_owned(), config: object.get("config").cloned().unwrap_or_default() })
        }
        _ => Err(invalid_value("mods", EXPECTED, entry)),
    }
}

fn unknown_mod(error: &UnknownMod, at: Option<usize>, from_model: usize) -> ApiError {
    let param = if at.is_some_and(|index| index < from_model) { "model" } else { "mods" };
    let code = if error.disabled { ErrorCode::ModDisabled } else { ErrorCode::UnknownMod };
    ApiError::invalid(param, error.to_string()).code(code)
}

#[cfg(test)]
mod tests {
    use super::names_after_model;

    #[test]
    fn mods_are_parsed_after_model_name() {
        let mods =
            |requested| names_after_model(requested, ["demo"].into_iter(), |name| name == "a").collect::<Vec<_>>();
        assert_eq!(mods("demo"), [""; 0]);
        assert_eq!(mods("demo/a/b"), ["a", "b"]);
        assert_eq!(mods("gpt-4"), [""; 0]);
        assert_eq!(mods("gpt-4/a"), ["a"]);
        assert_eq!(mods("publisher/demo/a"), ["a"]);
        assert_eq!(mods("publisher/model"), [""; 0]);
        assert_eq!(mods("publisher/model/typo"), ["typo"]);
        assert_eq!(mods("demo/typo"), ["typo"]);
    }
}
