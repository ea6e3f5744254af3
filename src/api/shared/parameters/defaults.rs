//! Validation of the default fields of requests, which the server's flags set.

use super::bias::unknown_tokens;
use super::sampling::{SAMPLERS, sampler_stages};
use super::{MAX_TOKENS_FIELDS, MinTokens, SeveralConstraints, context_settings, limits, parse_constraint, sampling};
use crate::api::shared::fields::{Fields, integer};
use crate::engine::SubmitError;
use crate::model::{Model, SpecialTokens, Vocabulary};
use crate::server::ApiError;
use serde_json::{Map, Value};

/// Fields with token ids or texts that become tokens.
const TOKEN_FIELDS: [&str; 3] = ["logit_bias", "banned_tokens", "stop_tokens"];

/// Checks the types of the default fields for sampling, limits, context and constraint. Numbers out of range are clamped.
/// Without a model, tokens are not checked, and only the syntax of a grammar is. Returns a note for each value that is
/// ignored, as in llama-server.
///
/// # Errors
/// The error that a request without these fields would get.
pub fn check_request_defaults(defaults: &Map<String, Value>, model: Option<&Model>) -> Result<Vec<String>, ApiError> {
    let no_tokens = Vocabulary::new(Vec::new(), Vec::new(), Vec::new(), SpecialTokens::default(), |_, _, _| Vec::new());
    let vocabulary = model.map_or(&no_tokens, |model| model.vocabulary());
    let mut defaults = defaults.clone();
    if model.is_none() {
        TOKEN_FIELDS.iter().for_each(|name| drop(defaults.remove(*name)));
    }
    let body = Value::Object(Map::new());
    let fields = Fields::new(&body)?.with_defaults(&defaults);
    sampling(fields, vocabulary)?;
    limits(fields, vocabulary, u32::MAX, MinTokens::Zero)?;
    context_settings(fields)?;
    if let Some(constraint) = parse_constraint(fields, SeveralConstraints::Reject)? {
        let checked = match model.filter(|model| model.generates()) {
            Some(model) => model.grammars().start_matcher(&constraint).map(drop),
            None => constraint.source.check_syntax(),
        };
        checked.map_err(|error| SubmitError::Constraint { field: constraint.field, error })?;
    }
    Ok(if model.is_some() { unknown_token_notes(fields, vocabulary) } else { value_notes(fields)? })
}

fn unknown_token_notes(fields: Fields<'_>, vocabulary: &Vocabulary) -> Vec<String> {
    let unknown = fields.get("logit_bias").map(|biases| unknown_tokens(biases, vocabulary)).unwrap_or_default();
    let note = |token| format!("the default `logit_bias` of token {token} is ignored: the model has no such token");
    unknown.into_iter().map(note).collect()
}

fn value_notes(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let stages = fields.get(SAMPLERS).map(sampler_stages).transpose()?.unwrap_or_default();
    let note = |name: String| format!("the stage {name:?} of the default `samplers` is ignored: it is unknown");
    let mut notes: Vec<String> = stages.into_iter().filter_map(Result::err).map(note).collect();
    if let Some((name, value)) = fields.first_present(&MAX_TOKENS_FIELDS)
        && let Some(count) = integer(value).filter(|count| *count < -1)
    {
        notes.push(format!("the default {count} of `{name}` has the effect of -1, as many tokens as fit"));
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn defaults_are_checked_like_fields_of_requests() {
        let check = |defaults: Value| {
            let checked = check_request_defaults(defaults.as_object().unwrap(), None);
            checked.map_err(|error| error.problem()).map_err(|problem| problem.pointer.unwrap_or(problem.detail))
        };
        let valid = json!({"n_predict": -1, "temperature": 0.5, "samplers": ["top_k"], "logit_bias": [[9_999_999, 200.0]],
            "n_keep": -1, "grammar": "root ::= <[5]>"});
        assert_eq!(check(valid), Ok(Vec::new()));
        for (field, value) in [
            ("n_predict", json!("many")),
            ("temperature", json!("hot")),
            ("top_k", json!(1.5)),
            ("samplers", json!([5])),
            ("grammar", json!("root ::= [")),
            ("json_schema", json!([])),
        ] {
            assert_eq!(check(json!({ field: value })), Err(field.to_owned()));
        }
    }

    #[test]
    fn defaults_that_llama_server_accepts_are_clamped_or_ignored() {
        let defaults = json!({"temperature": -1, "top_p": 1.5, "min_p": 2, "presence_penalty": -12, "adaptive_decay": 1,
            "top_k": -5, "dry_base": 0.5, "repeat_last_n": -1, "n_keep": -7, "n_predict": -2, "samplers": ["top_k", "foo", ""],
            "logit_bias": [[-5, 1.0], [9, 1.0]]});
        let defaults = defaults.as_object().unwrap();
        let notes = check_request_defaults(defaults, None).unwrap();
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(notes[0].contains("\"foo\"") && notes[2].contains("-2"), "{notes:?}");
        let vocabulary =
            Vocabulary::new(Vec::new(), Vec::new(), Vec::new(), SpecialTokens::default(), |_, _, _| Vec::new());
        let body = json!({});
        let fields = Fields::new(&body).unwrap().with_defaults(defaults);
        assert_eq!(unknown_token_notes(fields, &vocabulary).len(), 2);
        for fields in [fields, fields.lenient()] {
            let sampling = sampling(fields, &vocabulary).unwrap();
            assert_eq!((sampling.temperature, sampling.top_p, sampling.presence_penalty), (0.0, 1.0, -10.0));
            assert_eq!((sampling.top_k, sampling.repeat_last_n, sampling.samplers.len()), (0, -1, 1));
            assert!(sampling.dry_base >= 1.0);
            assert!(sampling.logit_bias.is_empty());
            assert_eq!(limits(fields, &vocabulary, 9, MinTokens::One).unwrap().requested_max_tokens, None);
        }
        let zero = json!({"n_predict": 0});
        let fields = Fields::new(&body).unwrap().with_defaults(zero.as_object().unwrap());
        assert_eq!(limits(fields, &vocabulary, 9, MinTokens::One).unwrap().requested_max_tokens, Some(1));
        let sent = json!({"samplers": "kf"});
        let letters = Fields::new(&body).unwrap().with_defaults(sent.as_object().unwrap());
        assert_eq!(sampling(letters, &vocabulary).unwrap().samplers.len(), 1);
        assert!(sampling(Fields::new(&sent).unwrap(), &vocabulary).is_err());
    }
}
