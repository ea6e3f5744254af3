use super::{
    config::{ConfigFields, schema},
    describe,
};
use crate::events::{EventType, TokenId};
use crate::mods::{
    Action, Call, EventSet, LogitEdit, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde_json::{Value, json};
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
        let fields = ConfigFields::parse(config, &["bias", "ban"])?;
        let mut edits = Vec::new();
        if let Some(bias) = fields.get("bias") {
            let expected = "`bias` must be an object of numbers by token, e.g. {\" maybe\": -2.5}";
            let entries = bias.as_object().ok_or_else(|| format!("{expected}, got {bias}"))?;
            at_most_vocabulary("bias", entries.len(), run)?;
            for (key, value) in entries {
                let token = if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit()) {
                    by_id(key.parse().ok(), key, run)
                } else {
                    by_text(key, run)
                };
                let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
                edits.push((
                    token.map_err(|message| format!("`bias`: {message}"))?,
                    number.ok_or_else(|| format!("`bias`: the value of '{key}' must be a number, got {value}"))?,
                ));
            }
        }
        if let Some(ban) = fields.get("ban") {
            let expected = "`ban` must be a list of texts and token ids, e.g. [\" never\", 1234]";
            let entries = ban.as_array().ok_or_else(|| format!("{expected}, got {ban}"))?;
            at_most_vocabulary("ban", entries.len(), run)?;
            for entry in entries {
                let token = match entry {
                    Value::String(text) => by_text(text, run),
                    Value::Number(id) => by_id(id.as_i64(), &id.to_string(), run),
                    _ => return Err(format!("{expected}, got {entry} in it")),
                };
                edits.push((token.map_err(|message| format!("`ban`: {message}"))?, f32::NEG_INFINITY));
            }
        }
        if edits.is_empty() {
            return Err("`bias` and `ban` are both missing or empty; give at least one token".into());
        }
        Ok(Box::new(Bias { edits }))
    }
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
    match run.vocabulary.encode_continuation(text, true)[..] {
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
            (json!({"bias": {"a": "much"}}), "`bias`: the value of 'a' must be a number, got \"much\""),
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
