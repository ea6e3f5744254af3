//! `bias-tokens`: makes tokens more or less likely, for clients that know the token ids or words to change.

use super::describe;
use super::support::config::{self, schema};
use crate::events::{EventType, TokenId};
use crate::mods::{
    Action, Call, EventSet, LogitEdit, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `bias-tokens`: makes tokens more or less likely, or bans them.
pub struct BiasTokens;

impl ModFactory for BiasTokens {
    fn describe(&self) -> ModDescription {
        describe(
            "bias-tokens",
            "Makes given tokens more or less likely, or bans them.",
            "Values of `bias` are added to the logits of every step. A token is named by its text, which must be one token (a leading \
             space matters), or by its id: as a number in `ban`, as digits in the keys of `bias`.",
            json!({"bias": {"a": 1.5}, "ban": ["b", 7]}),
            schema(
                &[],
                json!({
                    "bias": {"type": "object", "additionalProperties": {"type": "number"},
                        "description": "Value added to the logit of each token, keyed by text or by the digits of its id."},
                    "ban": {"type": "array", "items": {"type": ["string", "integer"]},
                        "description": "Tokens that are never drawn, by text or id."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let BiasConfig { bias, ban } = config::parse(self, config)?;
        at_most_vocabulary("bias", bias.len(), run)?;
        at_most_vocabulary("ban", ban.len(), run)?;
        let mut edits = Vec::new();
        for (key, value) in &bias {
            let token = if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit()) {
                by_id(key.parse().ok(), key, run)
            } else {
                by_text(key, run)
            };
            let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
            edits.push((
                token.map_err(|message| format!("`bias`: {message}"))?,
                number.ok_or_else(|| format!("`bias`: the value of '{key}' must be a 32-bit number, got {value}"))?,
            ));
        }
        for entry in &ban {
            let token = match entry.as_str() {
                Some(text) => by_text(text, run),
                None => by_id(entry.as_i64(), &entry.to_string(), run),
            };
            edits.push((token.map_err(|message| format!("`ban`: {message}"))?, f32::NEG_INFINITY));
        }
        if edits.is_empty() {
            return Err("`bias` and `ban` are both missing or empty; give at least one token".into());
        }
        Ok(Box::new(Bias { edits }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BiasConfig {
    #[serde(default)]
    bias: Map<String, Value>,
    #[serde(default)]
    ban: Vec<Value>,
}

fn at_most_vocabulary(name: &str, entries: usize, run: &RunView) -> Result<(), String> {
    let max = run.vocabulary.len();
    if entries <= max {
        return Ok(());
    }
    Err(format!("`{name}` must have at most {max} entries, one for each token of the vocabulary, got {entries}"))
}

fn by_id(id: Option<i64>, id_text: &str, run: &RunView) -> Result<TokenId, String> {
    let token = id.and_then(|id| TokenId::try_from(id).ok()).filter(|&token| run.vocabulary.contains(token));
    token.ok_or_else(|| {
        format!(
            "token {id_text} is not in the vocabulary; ids must be from 0 to {}",
            run.vocabulary.len().saturating_sub(1)
        )
    })
}

fn by_text(text: &str, run: &RunView) -> Result<TokenId, String> {
    match run.vocabulary.encode_markup_continuation(text)[..] {
        [] => Err("an empty string is not a token".into()),
        [token] => Ok(token),
        ref several => Err(format!(
            "'{text}' is {} tokens of this model ({}), but a bias applies to single tokens; use the id of one of them",
            several.len(),
            several
                .iter()
                .map(|&token| format!("{token} = {:?}", run.vocabulary.decode(&[token])))
                .collect::<Vec<_>>()
                .join(", ")
        )),
    }
}

struct Bias {
    edits: Vec<(TokenId, f32)>,
}

impl ModInstance for Bias {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass])
    }

    fn call(&mut self, _: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        Some(Action::AdjustedLogits { edit: LogitEdit::Add(self.edits.clone()), temperature: None }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::BiasTokens;
    use crate::mods::builtin::testing::{ModHarness, run, word};
    use crate::mods::{Action, LogitEdit, ModFactory};
    use serde_json::json;

    #[test]
    fn bias_and_ban_accept_text_and_id() {
        let mut harness = ModHarness::new(&BiasTokens, &json!({"bias": {" the": 2.5, "65": -1}, "ban": [" bad", 66]}));
        let Some(Action::AdjustedLogits { edit: LogitEdit::Add(edits), temperature: None }) =
            harness.forward(&[0.0; 4]).action
        else {
            panic!("no edit");
        };
        let banned = f32::NEG_INFINITY;
        assert_eq!(edits, [(word(" the"), 2.5), (65, -1.0), (word(" bad"), banned), (66, banned)]);
    }

    #[test]
    fn errors_name_token() {
        for (config, message) in [
            (
                json!({"ban": ["hi"]}),
                "`ban`: 'hi' is 2 tokens of this model (104 = \"h\", 105 = \"i\"), but a bias applies to single tokens; use the id of one of them",
            ),
            (json!({"bias": {"9999": 1}}), "`bias`: token 9999 is not in the vocabulary; ids must be from 0 to 264"),
            (json!({"bias": {"a": "much"}}), "`bias.a` must be a number, got \"much\""),
            (
                json!({"ban": vec![1; 266]}),
                "`ban` must have at most 265 entries, one for each token of the vocabulary, got 266",
            ),
            (json!({}), "`bias` and `ban` are both missing or empty; give at least one token"),
        ] {
            assert_eq!(BiasTokens.start(&config, &run()).err().unwrap(), message);
        }
    }
}
