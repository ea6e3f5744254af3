//! Logits of one step: the model's logits at the end of the sequence, the edits of mods, and the token drawn from them.
//!
//! The model's logits are copied only if a mod edits them or if they are needed after the next decode overwrites them.

use crate::events::{Alternative, LogitLens, TokenId, TokenMeasurement};
use crate::model::distribution::{self, TokenDistribution};
use crate::model::llama::HiddenStates;
use crate::mods::LogitEdit;

/// Maximum tokens whose change of probability is recorded for an edit of the logits.
const MAX_SHIFTED_TOKENS: usize = 8;

/// Maximum tokens of the logit lens. A client can request 1000 alternatives, which would delay other runs.
const MAX_LENS_TOKENS: usize = 64;

/// Logits, edits and drawn token of the step at the end of the sequence.
#[derive(Default)]
pub struct StepLogits {
    /// Copy of the model's logits.
    saved: Vec<f32>,
    /// True if `saved` holds the logits at the end of the sequence.
    is_saved: bool,
    /// Logits after the edits of mods.
    edited: Option<Vec<f32>>,
    /// Distribution of the edited logits, if it was computed.
    edited_distribution: Option<TokenDistribution>,
    temperature: Option<f32>,
    distribution: Option<TokenDistribution>,
    /// The most probable tokens of the model.
    top: Vec<Alternative>,
    /// The most probable tokens after the sampler, for a client that requested them.
    client_top: Option<Vec<Alternative>>,
    /// Hidden states of the decode that produced the next logits.
    next_hidden_states: Option<HiddenStates>,
    /// Hidden states of the decode that produced the logits.
    hidden_states: Option<HiddenStates>,
    /// Logits of up to [`MAX_LENS_TOKENS`] most probable tokens after each layer.
    lens: Option<LogitLens>,
    drawn: Option<TokenMeasurement>,
    /// Token that speculative decoding drafted for the step.
    drafted: Option<TokenId>,
}

/// Effect of an edit of the logits.
#[derive(Debug, Default)]
pub struct EditEffect {
    /// Tokens whose probability changes most, as `(token, before, after)`.
    pub shifted: Vec<(TokenId, f32, f32)>,
    /// Distribution after the edit, if it was computed.
    pub edited: Option<TokenDistribution>,
}

impl StepLogits {
    /// Sets the hidden states of the decode that produced the next logits.
    pub fn set_hidden_states(&mut self, hidden_states: Option<HiddenStates>) {
        self.next_hidden_states = hidden_states;
    }

    /// Sets the distribution and the most probable tokens of new logits.
    pub fn set_logits(&mut self, logits: &[f32], distribution: TokenDistribution, top: Vec<Alternative>) {
        self.hidden_states = self.next_hidden_states.take();
        let lens_states = self.hidden_states.as_ref().filter(|states| states.has_lens());
        self.lens = lens_states.and_then(|states| read_lens(states, &top, logits));
        self.top = top;
        self.client_top = None;
        self.distribution = Some(distribution);
        self.is_saved = false;
    }

    /// Discards the edits of the previous step.
    pub fn clear_edits(&mut self) {
        self.edited = None;
        self.edited_distribution = None;
        self.temperature = None;
    }

    /// Copies the logits at the end of the sequence, unless they are saved, before the next decode overwrites them.
    pub fn save(&mut self, new_logits: Option<&[f32]>) {
        if let Some(new_logits) = new_logits.filter(|_| !self.is_saved) {
            self.saved.clear();
            self.saved.extend_from_slice(new_logits);
            self.is_saved = true;
        }
    }

    /// Returns the saved logits; `None` unless they are those at the end of the sequence.
    pub fn saved(&self) -> Option<&[f32]> {
        self.is_saved.then_some(self.saved.as_slice())
    }

    /// Marks the saved logits as outdated, because the end of the sequence changed.
    pub fn discard_saved(&mut self) {
        self.is_saved = false;
        self.hidden_states = None;
    }

    /// Returns the hidden states of the last token of the sequence, as far as they were captured.
    pub fn hidden_states(&self) -> Option<&HiddenStates> {
        self.hidden_states.as_ref()
    }

    /// Returns the model's logits: the saved ones, or `new_logits`.
    pub fn raw<'a>(&'a self, new_logits: Option<&'a [f32]>) -> &'a [f32] {
        self.saved().or(new_logits).unwrap_or_default()
    }

    /// Returns the logits after the edits of mods.
    pub fn logits<'a>(&'a self, new_logits: Option<&'a [f32]>) -> &'a [f32] {
        self.edited.as_deref().unwrap_or_else(|| self.raw(new_logits))
    }

    /// Returns the logits that mods have edited.
    pub fn edited(&self) -> Option<&[f32]> {
        self.edited.as_deref()
    }

    /// Returns the distribution of the model's logits.
    pub fn distribution(&self) -> Option<TokenDistribution> {
        self.distribution
    }

    /// Returns the distribution of edited logits.
    pub fn edited_distribution(&self, edited: &[f32]) -> TokenDistribution {
        self.edited_distribution.unwrap_or_else(|| TokenDistribution::new(edited))
    }

    /// Returns the temperature that a mod chose for the step.
    pub fn temperature(&self) -> Option<f32> {
        self.temperature
    }

    /// Applies an edit. `edited` is the distribution after it, if it was computed. The logits must be saved.
    pub fn edit(&mut self, edit: LogitEdit, temperature: Option<f32>, edited: Option<TokenDistribution>) {
        match edit {
            LogitEdit::Keep => {}
            LogitEdit::Replace(values) => self.edited = Some(values),
            edit => apply_edit(self.edited.get_or_insert_with(|| self.saved.clone()), &edit),
        }
        self.edited_distribution = edited;
        self.temperature = temperature.or(self.temperature);
    }

    /// Returns the effect of an edit without applying it.
    pub fn effect_of(&self, edit: &LogitEdit) -> EditEffect {
        let before = self.edited.as_deref().unwrap_or(&self.saved);
        let mut edited = Vec::new();
        let after = match edit {
            LogitEdit::Keep => return EditEffect { shifted: Vec::new(), edited: self.edited_distribution },
            LogitEdit::Replace(values) => values,
            LogitEdit::Set(_) | LogitEdit::Add(_) | LogitEdit::Allow(_) => {
                edited.extend_from_slice(before);
                apply_edit(&mut edited, edit);
                &edited
            }
        };
        let known = if self.edited.is_none() { self.distribution } else { self.edited_distribution };
        let old = known.unwrap_or_else(|| TokenDistribution::new(before));
        let new = TokenDistribution::new(after);
        let shifted = distribution::top_shifts((old, before), (new, after), MAX_SHIFTED_TOKENS)
            .into_iter()
            .filter(|&(_, change)| change > 0.0)
            .map(|(token, _)| (token, old.prob(before[token as usize]), new.prob(after[token as usize])))
            .collect();
        EditEffect { shifted, edited: Some(new) }
    }

    /// Returns the most probable tokens of the model.
    pub fn top(&self) -> &[Alternative] {
        &self.top
    }

    /// Returns the logits of the most probable tokens after each layer.
    pub fn lens(&self) -> Option<&LogitLens> {
        self.lens.as_ref()
    }

    /// Sets the most probable tokens after the sampler, for a client that requested them.
    pub fn set_client_top(&mut self, top: Vec<Alternative>) {
        self.client_top = Some(top);
    }

    /// Takes the most probable tokens that the client gets.
    pub fn take_client_top(&mut self) -> Vec<Alternative> {
        self.client_top.take().unwrap_or_else(|| std::mem::take(&mut self.top))
    }

    /// Sets the token that speculative decoding drafted for the step.
    pub fn set_drafted(&mut self, token: Option<TokenId>) {
        self.drafted = token;
    }

    /// Takes the token that speculative decoding drafted for the step.
    pub fn take_drafted(&mut self) -> Option<TokenId> {
        self.drafted.take()
    }

    /// Returns the drawn token.
    pub fn drawn(&self) -> Option<&TokenMeasurement> {
        self.drawn.as_ref()
    }

    /// Sets the drawn token.
    pub fn set_drawn(&mut self, drawn: TokenMeasurement) {
        self.drawn = Some(drawn);
    }

    /// Takes the drawn token.
    pub fn take_drawn(&mut self) -> Option<TokenMeasurement> {
        self.drawn.take()
    }
}

/// Returns the logits of the most probable tokens after each layer.
fn read_lens(states: &HiddenStates, top: &[Alternative], logits: &[f32]) -> Option<LogitLens> {
    let tokens: Vec<TokenId> = top.iter().take(MAX_LENS_TOKENS).map(|alternative| alternative.token).collect();
    let last = tokens.iter().map(|&token| logits[token as usize]).collect();
    let lens = states.lens(&tokens, last);
    lens.inspect_err(|error| tracing::error!(%error, "logit lens of a step not recorded")).ok()
}

fn apply_edit(logits: &mut [f32], edit: &LogitEdit) {
    match edit {
        LogitEdit::Keep => {}
        LogitEdit::Set(entries) => entries.iter().for_each(|&(token, value)| logits[token as usize] = value),
        LogitEdit::Add(entries) => {
            for &(token, value) in entries {
                let logit = &mut logits[token as usize];
                // Two large numbers can add up to infinity, which the sampler cannot handle.
                *logit = (*logit + value).min(f32::MAX);
            }
        }
        LogitEdit::Allow(mask) => {
            for (logit, &allowed) in logits.chunks_mut(32).zip(mask.as_slice()) {
                for (bit, logit) in logit.iter_mut().enumerate() {
                    if allowed >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
        LogitEdit::Replace(values) => logits.copy_from_slice(values),
    }
}
