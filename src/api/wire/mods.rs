//! Which mods a request names: in its `mods` field, or behind the model's name.

use super::fields::{Fields, wrong};
use crate::api::{ApiError, Loaded, catalogue};
use crate::mods::{ModRef, ModRegistry, SelectedMod, UnknownMod};
use serde_json::Value;

/// Most mods of one run: each is called at every token, on the thread that generates for all runs.
pub(in crate::api) const MOST: usize = 64;

/// What `mods` holds, in words.
const RIGHT: &str = "a list of names or of {\"name\": …, \"config\": …}";

/// The mods of a request, those behind the model's name first.
///
/// The model's name is `model`, `model/mod-a/mod-b`, or, for a model that is named by its publisher,
/// `publisher/model/mod-a`.
pub(in crate::api) fn chosen(
    fields: Fields<'_>,
    loaded: &Loaded,
    registry: &ModRegistry,
) -> Result<Vec<SelectedMod>, ApiError> {
    let known = |name: &str| registry.info(name).is_some();
    let mut refs = Vec::new();
    if let Some(asked) = fields.text("model")? {
        refs.extend(
            suffix(asked, loaded.names(), known).map(|name| ModRef { name: name.to_owned(), config: Value::Null }),
        );
    }
    let from_model = refs.len();
    for entry in fields.list("mods")?.into_iter().flatten() {
        refs.push(mod_ref(entry)?);
    }
    if refs.len() > MOST {
        let detail = format!("a run can have {MOST} mods, the request names {}", refs.len());
        return Err(ApiError::invalid("mods", detail));
    }
    let names: Vec<String> = refs.iter().map(|mod_ref| mod_ref.name.clone()).collect();
    registry.select(refs).map_err(|error| unknown(&error, names.iter().position(|n| *n == error.name), from_model))
}

fn suffix<'a, 'n>(
    asked: &'a str,
    names: impl Iterator<Item = &'n str> + Clone,
    known: impl Fn(&str) -> bool,
) -> impl Iterator<Item = &'a str> {
    let segments = |text: &'a str| text.split('/').filter(|segment| !segment.is_empty());
    let (rest, skip) = match (catalogue::meant(asked, names), &segments(asked).collect::<Vec<_>>()[..]) {
        (Some((_, rest)), _) => (rest, 0),
        // The server takes any name: "any/model", unless the second part is a mod.
        (None, [_, second]) => (asked, if known(second) { 1 } else { 2 }),
        (None, _) => (asked, 2),
    };
    segments(rest).skip(skip)
}

fn mod_ref(entry: &Value) -> Result<ModRef, ApiError> {
    match entry {
        Value::String(name) => Ok(ModRef { name: name.clone(), config: Value::Null }),
        Value::Object(object) => {
            // A configuration under a name that is not its own would be ignored.
            if let Some(field) = object.keys().find(|field| !matches!(field.as_str(), "name" | "config")) {
                let detail = format!("mods: unknown field '{field}' of a mod; known fields: name, config");
                return Err(ApiError::invalid("mods", detail));
            }
            let name = object.get("name").and_then(Value::as_str).ok_or_else(|| wrong("mods", RIGHT, entry))?;
            Ok(ModRef { name: name.to_owned(), config: object.get("config").cloned().unwrap_or_default() })
        }
        _ => Err(wrong("mods", RIGHT, entry)),
    }
}

fn unknown(error: &UnknownMod, at: Option<usize>, from_model: usize) -> ApiError {
    let param = if at.is_some_and(|index| index < from_model) { "model" } else { "mods" };
    let code = if error.disabled { "mod_disabled" } else { "unknown_mod" };
    ApiError::invalid(param, error.to_string()).code(code)
}

#[cfg(test)]
mod tests {
    use super::suffix;

    #[test]
    fn mods_stand_behind_the_model() {
        let mods = |asked| suffix(asked, ["demo"].into_iter(), |name| name == "a").collect::<Vec<_>>();
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
