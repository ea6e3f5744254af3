//! Banned tokens and phrases. The clients of `KoboldCPP` send phrases as `banned_tokens` or `banned_strings`, and token
//! ids as the text `custom_token_bans`. The mod `ban-phrases` removes phrases.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::parameters;
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::mods::{ModRef, ModRegistry, SelectedMod};
use crate::server::{ApiError, ErrorCode};
use serde_json::{Value, json};

/// Field with phrases and token ids.
const BANNED_TOKENS: &str = "banned_tokens";
/// Another name of that field.
const BANNED_STRINGS: &str = "banned_strings";
/// Field with token ids, separated by commas.
const TOKEN_BANS: &str = "custom_token_bans";
/// The fields with bans.
const FIELDS: [&str; 3] = [BANNED_TOKENS, BANNED_STRINGS, TOKEN_BANS];
/// The mod that removes phrases.
const MOD: &str = "ban-phrases";
/// Maximum number of phrases; `KoboldCPP`'s is lower.
const MAX_PHRASES: usize = 1024;
/// Maximum length of a phrase in characters.
const MAX_PHRASE_CHARS: usize = 1000;

/// The bans of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Bans {
    /// Tokens that are never sampled.
    tokens: Vec<TokenId>,
    /// Phrases that are removed from the answer, in any case of letters.
    phrases: Vec<String>,
}

impl Bans {
    /// Parses the bans; `None` if the body has none.
    ///
    /// # Errors
    /// 400 naming the invalid field.
    pub(super) fn parse(fields: Fields<'_>, vocabulary: &Vocabulary) -> Result<Option<Self>, ApiError> {
        if fields.first_present(&FIELDS).is_none() {
            return Ok(None);
        }
        let mut bans = Self::default();
        for name in [BANNED_TOKENS, BANNED_STRINGS] {
            let list = fields.list(name)?.map(Vec::as_slice).unwrap_or_default();
            let bytes = list.iter().filter_map(Value::as_str).map(str::len).sum();
            let add_all = || list.iter().try_for_each(|entry| bans.add(name, entry, vocabulary));
            parameters::run_in_place(bytes, add_all)?;
        }
        for id in fields.text(TOKEN_BANS)?.unwrap_or_default().split(',').map(str::trim).filter(|id| !id.is_empty()) {
            let token = id.parse().ok().filter(|&token| vocabulary.contains(token));
            let expected = format!("token ids below {}, separated by commas", vocabulary.len());
            bans.tokens.push(token.ok_or_else(|| invalid_value(TOKEN_BANS, &expected, &id.into()))?);
        }
        Ok(Some(bans))
    }

    fn add(&mut self, name: &str, entry: &Value, vocabulary: &Vocabulary) -> Result<(), ApiError> {
        let Some(text) = entry.as_str() else {
            let expected = format!("a list of phrases and token ids below {}", vocabulary.len());
            let token = parameters::token(entry, vocabulary);
            self.tokens.push(token.ok_or_else(|| invalid_value(name, &expected, entry))?);
            return Ok(());
        };
        if self.phrases.len() == MAX_PHRASES || self.tokens.len() > vocabulary.len() {
            return Err(ApiError::invalid(name, format!("`{name}` must have at most {MAX_PHRASES} phrases")));
        }
        if text.chars().count() > MAX_PHRASE_CHARS {
            let expected = format!("a list of phrases of at most {MAX_PHRASE_CHARS} characters");
            return Err(invalid_value(name, &expected, entry));
        }
        let tokens = vocabulary.encode_markup(text);
        // The mod also removes a phrase that consists of other tokens. Control tokens are not part of the text.
        if let [token] = tokens[..] {
            self.tokens.push(token);
            if vocabulary.is_control(token) {
                return Ok(());
            }
        }
        if !text.is_empty() {
            self.phrases.push(text.to_owned());
        }
        Ok(())
    }

    /// Returns the body with the banned tokens as the field that all protocols share. Images are omitted, because they
    /// are large and already read.
    pub(super) fn replace_fields(&self, fields: Fields<'_>) -> Value {
        let mut body = fields.without(&["images", BANNED_TOKENS]);
        body.insert(BANNED_TOKENS.to_owned(), self.tokens.clone().into());
        body.into()
    }

    /// Returns the mod that removes the phrases, if there are any.
    ///
    /// # Errors
    /// 400 if the mod is disabled.
    pub(super) fn mods(self, registry: &ModRegistry) -> Result<Vec<SelectedMod>, ApiError> {
        if self.phrases.is_empty() {
            return Ok(Vec::new());
        }
        let config = json!({ "phrases": self.phrases });
        let selected = registry.select(vec![ModRef { name: MOD.to_owned(), config }]);
        selected.map_err(|error| {
            let detail = format!("`{BANNED_TOKENS}` needs the mod '{MOD}' for phrases: {error}");
            ApiError::invalid(BANNED_TOKENS, detail).code(ErrorCode::ModDisabled)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SpecialTokens;

    /// Returns a vocabulary of bytes, a word and a control token.
    fn vocabulary() -> Vocabulary {
        let bytes = (0..=u8::MAX).map(|byte| Box::from([byte]));
        let pieces = bytes.chain([Box::from(*b"word"), Box::from(*b"<end>")]).collect();
        let control = (0..258).map(|token| token == 257).collect();
        Vocabulary::new(pieces, control, Vec::new(), SpecialTokens::default(), |text, _, _| match text {
            "word" => vec![256],
            "<end>" => vec![257],
            text => text.bytes().map(TokenId::from).collect(),
        })
    }

    #[test]
    fn phrases_and_token_ids_are_separated() {
        let body = json!({"banned_tokens": ["shivers down", "word", "<end>", "", 7], "banned_strings": ["a b"],
                          "custom_token_bans": "1, 2,"});
        let bans = Bans::parse(Fields::new(&body).unwrap(), &vocabulary()).unwrap().unwrap();
        assert_eq!(bans.phrases, ["shivers down", "word", "a b"]);
        assert_eq!(bans.tokens, [256, 257, 7, 1, 2]);
        let body = json!({"prompt": "a", "banned_tokens": null});
        assert_eq!(Bans::parse(Fields::new(&body).unwrap(), &vocabulary()).unwrap(), None);
    }

    #[test]
    fn invalid_bans_are_named() {
        for (body, pointer) in [
            (json!({"banned_tokens": [999]}), "banned_tokens"),
            (json!({"banned_tokens": "x"}), "banned_tokens"),
            (json!({"banned_tokens": vec!["a b"; 2000]}), "banned_tokens"),
            (json!({"banned_strings": [{}]}), "banned_strings"),
            (json!({"banned_strings": ["a".repeat(1001)]}), "banned_strings"),
            (json!({"custom_token_bans": "1,x"}), "custom_token_bans"),
            (json!({"custom_token_bans": "999"}), "custom_token_bans"),
            (json!({"custom_token_bans": [1]}), "custom_token_bans"),
        ] {
            let error = Bans::parse(Fields::new(&body).unwrap(), &vocabulary()).unwrap_err();
            assert_eq!(error.problem().pointer.as_deref(), Some(pointer), "{body}");
        }
    }
}
