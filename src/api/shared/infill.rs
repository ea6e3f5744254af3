//! Prompts for models that were trained to generate the text between two texts.

use crate::api::shared::parameters;
use crate::events::TokenId;
use crate::model::{InfillTokens, Vocabulary};
use crate::server::ApiError;

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

/// Returns the prompt for the text between two texts.
pub(crate) fn infill_prompt(vocabulary: &Vocabulary, tokens: InfillTokens, prefix: &str, suffix: &str) -> Vec<TokenId> {
    let parts = InfillParts {
        prefix: parameters::encode(vocabulary, prefix, false, false),
        suffix: parameters::encode(vocabulary, suffix, false, false),
        ..InfillParts::default()
    };
    parts.prompt(vocabulary, tokens, usize::MAX, None)
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
    /// True for models that were trained with the suffix before the prefix.
    pub(crate) suffix_first: bool,
}

impl InfillParts {
    /// Returns the prompt in llama-server's order: other files, prefix with the start of the answer, suffix, and the
    /// token for the middle. If prefix and suffix do not fit, the end of the prefix and the start of the suffix are
    /// kept, with three quarters of the room for the prefix. The other files are cut at their start.
    pub(crate) fn prompt(
        mut self,
        vocabulary: &Vocabulary,
        tokens: InfillTokens,
        context: usize,
        n_predict: Option<usize>,
    ) -> Vec<TokenId> {
        let room = context.saturating_sub(n_predict.unwrap_or(128).min(context / 2) + self.start.len() + 4);
        let for_suffix = self.suffix.len().min((room / 4).max(room.saturating_sub(self.prefix.len())));
        let for_prefix = self.prefix.len().min(room - for_suffix.min(room));
        self.suffix.truncate(for_suffix);
        self.prefix.drain(..self.prefix.len() - for_prefix);
        let for_extra = self.extra.len().min(room.saturating_sub(for_prefix + for_suffix));
        self.extra.drain(..self.extra.len() - for_extra);
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
