//! Resolution of the text in a request's `model` field to a model.
//!
//! The text is a model's name or alias, `name/mod-a/mod-b`, or either with a publisher: `publisher/name/mod-a`. Ollama's
//! default tag `:latest` may be after a name or at the end; a name with it is also found without it.

const DEFAULT_TAG: &str = ":latest";

/// Returns a name without Ollama's default tag.
pub fn without_tag(text: &str) -> &str {
    text.strip_suffix(DEFAULT_TAG).unwrap_or(text)
}

/// Returns the longest of `names` with which `requested` begins, and the text after it. A slash must separate the two.
/// A name with the same tag as `requested` takes precedence.
fn longest_match<'a, 'n>(requested: &'a str, names: impl Iterator<Item = &'n str>) -> Option<(&'n str, &'a str)> {
    names
        .filter_map(|name| {
            let rest = requested.strip_prefix(without_tag(name))?;
            match rest.strip_prefix(DEFAULT_TAG).unwrap_or(rest) {
                "" => Some((name, "")),
                rest => rest.strip_prefix('/').map(|rest| (name, without_tag(rest))),
            }
        })
        .max_by_key(|(name, _)| (requested.starts_with(name), name.len()))
}

/// Returns the matching name in `names` and the text after it: names of mods separated by slashes.
pub fn resolve<'a, 'n>(requested: &'a str, names: impl Iterator<Item = &'n str> + Clone) -> Option<(&'n str, &'a str)> {
    longest_match(requested, names.clone())
        .or_else(|| requested.split_once('/').and_then(|(_publisher, rest)| longest_match(rest, names)))
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
        assert_eq!(found("demo/a/b:latest"), Some(("demo", "a/b")));
        assert_eq!(found("demo:8b"), None);
        assert_eq!(found("demon"), None);
        assert_eq!(found("gpt-4"), None);
        assert_eq!(found("a/b/tiny"), None);
        assert_eq!(found(""), None);
    }

    #[test]
    fn name_with_the_default_tag_is_found_without_it() {
        let found = |requested| resolve(requested, ["llama3:latest", "demo", "demo:latest"].into_iter());
        for requested in ["llama3", "llama3:latest", "llama3/", "publisher/llama3"] {
            assert_eq!(found(requested), Some(("llama3:latest", "")), "{requested}");
        }
        assert_eq!(found("llama3/a"), Some(("llama3:latest", "a")));
        assert_eq!(found("llama3:8b"), None);
        assert_eq!(found("demo"), Some(("demo", "")));
        assert_eq!(found("demo:latest"), Some(("demo:latest", "")));
    }
}
