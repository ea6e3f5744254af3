//! Resolution of the text in a request's `model` field to a model.
//!
//! The text is a model's name or alias, `name/mod-a/mod-b`, or either with a publisher: `publisher/name/mod-a`. The name may
//! have Ollama's default tag: `name:latest`.

/// Returns the longest of `names` with which `requested` begins, and the text after it. A slash must separate the two.
fn split_name<'a, 'n>(requested: &'a str, names: impl Iterator<Item = &'n str>) -> Option<(&'n str, &'a str)> {
    names
        .filter_map(|name| match requested.strip_prefix(name)? {
            "" => Some((name, "")),
            rest => {
                let rest = rest.strip_prefix(":latest").unwrap_or(rest);
                if rest.is_empty() { Some((name, "")) } else { rest.strip_prefix('/').map(|rest| (name, rest)) }
            }
        })
        .max_by_key(|(name, _)| name.len())
}

/// Returns the matching name in `names` and the text after it: names of mods separated by slashes.
pub fn resolve<'a, 'n>(requested: &'a str, names: impl Iterator<Item = &'n str> + Clone) -> Option<(&'n str, &'a str)> {
    split_name(requested, names.clone())
        .or_else(|| requested.split_once('/').and_then(|(_publisher, rest)| split_name(rest, names)))
}

#[cfg(test)]
mod tests {
    use super::resolve;

    const NAMES: [&str; 3] = ["demo", "demo/large", "tiny"];

    #[test]
    fn model_name_may_have_publisher_and_mods() {
        let found = |requested| resolve(requested, NAMES.into_iter());
        assert_eq!(found("demo"), Some(("demo", "")));
        assert_eq!(found("demo/a/b"), Some(("demo", "a/b")));
        assert_eq!(found("demo/large/a"), Some(("demo/large", "a")));
        assert_eq!(found("publisher/tiny"), Some(("tiny", "")));
        assert_eq!(found("publisher/tiny/a"), Some(("tiny", "a")));
        assert_eq!(found("demo:latest"), Some(("demo", "")));
        assert_eq!(found("publisher/demo:latest/a"), Some(("demo", "a")));
        assert_eq!(found("demo:8b"), None);
        assert_eq!(found("demon"), None);
        assert_eq!(found("gpt-4"), None);
        assert_eq!(found("a/b/tiny"), None);
        assert_eq!(found(""), None);
    }
}
