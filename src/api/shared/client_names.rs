//! Names of fields in errors, for protocols whose fields have other names than those that the parsers read.

use crate::server::ApiError;
use std::collections::HashMap;
use std::iter;

/// Maximum length of a name that is replaced. The pointer of an error may contain a long name that the client chose.
const MAX_NAME_BYTES: usize = 256;

/// Names of fields that the parsers read, each with the name that the client sent.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClientNames(HashMap<String, String>);

impl ClientNames {
    /// Adds the client's name of a field, which also applies to the fields inside it. A later name replaces an earlier one.
    pub(crate) fn add(&mut self, name: impl Into<String>, client_name: impl Into<String>) {
        self.0.insert(name.into(), client_name.into());
    }

    /// Adds names, which replace earlier ones.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Replaces the name of the invalid field in an error with the client's.
    pub(crate) fn restore(&self, error: ApiError) -> ApiError {
        let Some(pointer) = error.pointer() else { return error };
        let inner_fields = pointer.rmatch_indices(['.', '[']).map(|(at, _)| at);
        let mut ends = iter::once(pointer.len()).chain(inner_fields).filter(|&end| end <= MAX_NAME_BYTES);
        let client_name = ends.find_map(|end| {
            let (name, rest) = pointer.split_at(end);
            Some(format!("{}{rest}", self.0.get(name)?))
        });
        match client_name {
            Some(client_name) => error.rename_field(&client_name),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::shared::fields::invalid_value;

    #[test]
    fn error_names_the_field_of_the_client() {
        let mut names = ClientNames::default();
        names.add("stop", "stop_sequences");
        names.add("tools[0]", "tools[1]");
        names.add("tools[0].function", "tools[1]");
        names.add("max_tokens", "max_length");
        names.add("max_tokens", "max_new_tokens");
        for (name, expected) in [
            ("stop", "stop_sequences"),
            ("stop[2]", "stop_sequences[2]"),
            ("stop_tokens", "stop_tokens"),
            ("tools[0].type", "tools[1].type"),
            ("tools[0].function.name", "tools[1].name"),
            ("max_tokens", "max_new_tokens"),
        ] {
            let problem = names.restore(invalid_value(name, "a name", &5.into())).problem();
            assert_eq!(problem.pointer.as_deref(), Some(expected));
            assert_eq!(problem.detail, format!("`{expected}` must be a name, got 5"));
        }
    }

    #[test]
    fn long_name_of_the_client_takes_linear_time() {
        let mut names = ClientNames::default();
        names.add("steering", "vectors");
        let pointer = format!("steering{}", "[".repeat(4 << 20));
        let restored = names.restore(ApiError::invalid(&pointer, ""));
        assert_eq!(restored.pointer(), Some(&*pointer.replacen("steering", "vectors", 1)));
    }

    #[test]
    fn client_name_is_not_replaced() {
        let mut names = ClientNames::default();
        names.add("messages[0]", "system");
        names.add("messages[1]", "messages[0]");
        let error = ApiError::invalid("messages[1].content", "");
        assert_eq!(names.restore(error.clone().with_client_name()).pointer(), Some("messages[1].content"));
        assert_eq!(names.restore(names.restore(error)).pointer(), Some("messages[0].content"));
    }
}
