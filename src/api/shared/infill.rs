//! Prompts for models that were trained to generate the text between two texts.

use crate::api::shared::{Fields, parameters};
use crate::events::TokenId;
use crate::model::{InfillTokens, TokenizeOptions, Vocabulary};
use crate::server::{ApiError, App, LoadedModel};
use serde_json::Value;

/// Maximum tokens of the answer for which room is reserved if a request does not set their number.
const RESERVED_TOKENS: usize = 128;

/// Returns the model's infill tokens.
///
/// # Errors
/// 501 if the model has none.
pub(crate) fn infill_tokens(vocabulary: &Vocabulary) -> Result<InfillTokens, ApiError> {
    vocabulary.special().infill.ok_or_else(|| {
        ApiError::not_supported(
            "the model was not trained for infilling: its vocabulary has no tokens for prefix, suffix \
             and middle",
        )
    })
}

/// Returns true for models that were trained with the suffix before the prefix, see `--spm-infill`.
pub(crate) fn is_suffix_first(app: &App) -> bool {
    app.config().server.request_defaults.get("spm_infill") == Some(&Value::Bool(true))
}

/// Returns the prompt for the text between two texts, of which the client sent the second one as `suffix`, and the
/// part of the first one that the prompt contains.
///
/// # Errors
/// 501 if the model has no infill tokens.
pub(crate) fn infill_prompt(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prefix: &str,
    suffix: &str,
) -> Result<(Vec<TokenId>, String), ApiError> {
    let vocabulary = loaded.vocabulary();
    let tokens = infill_tokens(vocabulary).map_err(|error| error.at("suffix"))?;
    let mut parts = InfillParts {
        prefix: parameters::encode(vocabulary, prefix, TokenizeOptions::PLAIN),
        suffix: parameters::encode(vocabulary, suffix, TokenizeOptions::PLAIN),
        suffix_first: is_suffix_first(app),
        ..InfillParts::default()
    };
    // Texts that fit are not shortened for a long answer, as in a prompt without suffix.
    let reserve =
        usize::try_from(parameters::n_predict(fields)).map_or(RESERVED_TOKENS, |max| max.min(RESERVED_TOKENS));
    let whole = parts.prefix.len();
    parts.shorten(loaded.engine().context_per_slot() as usize, Some(reserve));
    let kept = if parts.prefix.len() == whole { prefix.to_owned() } else { vocabulary.decode(&parts.prefix) };
    Ok((parts.prompt(vocabulary, tokens), kept))
}

/// The parts of the prompt of an infill request.
#[derive(Default)]
pub(crate) struct InfillParts {
    pub(crate) prefix: Vec<TokenId>,
    pub(crate) suffix: Vec<TokenId>,
    /// Start of the answer, sent as `prompt`.
    pub(crate) start: Vec<TokenId>,
    /// Other files with their separators.
    pub(crate) extra: Vec<TokenId>,
    /// See [`is_suffix_first`].
    pub(crate) suffix_first: bool,
}

impl InfillParts {
    /// Shortens the parts so that they fit in the context next to an answer of `n_predict` tokens, for which at most
    /// half of the context is reserved. If prefix and suffix do not fit, the end of the prefix and the start of the
    /// suffix are kept, with three quarters of the room for the prefix. The other files are cut at their start.
    pub(crate) fn shorten(&mut self, context: usize, n_predict: Option<usize>) {
        let reserve = n_predict.unwrap_or(RESERVED_TOKENS).min(context / 2);
        let room = context.saturating_sub(reserve + self.start.len() + 4);
        let for_suffix = self.suffix.len().min((room / 4).max(room.saturating_sub(self.prefix.len())));
        let for_prefix = self.prefix.len().min(room - for_suffix.min(room));
        self.suffix.truncate(for_suffix);
        self.prefix.drain(..self.prefix.len() - for_prefix);
        let for_extra = self.extra.len().min(room.saturating_sub(for_prefix + for_suffix));
        self.extra.drain(..self.extra.len() - for_extra);
    }

    /// Returns the prompt in llama-server's order: other files, prefix with the start of the answer, suffix, and the
    /// token for the middle.
    pub(crate) fn prompt(mut self, vocabulary: &Vocabulary, tokens: InfillTokens) -> Vec<TokenId> {
        let special = vocabulary.special();
        let mut prompt: Vec<TokenId> = special.bos.filter(|_| special.add_bos).into_iter().collect();
        prompt.append(&mut self.extra);
        let prefix = [vec![tokens.prefix], self.prefix, self.start].concat();
        let suffix = [vec![tokens.suffix], self.suffix].concat();
        let parts = if self.suffix_first { [suffix, prefix] } else { [prefix, suffix] };
        prompt.extend(parts.concat());
        prompt.push(tokens.middle);
        prompt
    }
}

#[cfg(test)]
mod tests {
    use super::InfillParts;

    #[test]
    fn parts_are_shortened_only_if_they_do_not_fit() {
        let shortened = |prefix: usize, suffix: usize, n_predict: Option<usize>| {
            let mut parts = InfillParts {
                prefix: (0..prefix as i32).collect(),
                suffix: (0..suffix as i32).collect(),
                ..InfillParts::default()
            };
            parts.shorten(1024, n_predict);
            let ends = (parts.prefix.last().copied(), parts.suffix.first().copied());
            assert_eq!(ends, (Some(prefix as i32 - 1), Some(0)), "the texts next to the gap remain");
            (parts.prefix.len(), parts.suffix.len())
        };
        assert_eq!(shortened(600, 200, Some(128)), (600, 200));
        assert_eq!(shortened(892 - 200, 200, None), (892 - 200, 200));
        assert_eq!(shortened(600, 200, Some(4096)), (381, 127), "half of the context is reserved");
        assert_eq!(shortened(3000, 3000, Some(128)), (669, 223));
        assert_eq!(shortened(3000, 10, Some(128)), (882, 10));
    }
}
