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

/// Logits of the step at the end of the sequence. Each part has its own lifetime.
#[derive(Default)]
pub struct StepLogits {
    next: NextDecode,
    model: ModelLogits,
    edits: StepEdits,
    draw: StepDraw,
}

/// Data of the decode that gives the next logits; set before these.
#[derive(Default)]
struct NextDecode {
    hidden_states: Option<HiddenStates>,
    /// Token that speculative decoding drafted for the step.
    drafted: Option<TokenId>,
}

/// The model's logits at the end of the sequence. They are valid until the end changes; several steps can begin with
/// them.
#[derive(Default)]
struct ModelLogits {
    /// Copy of the logits. Kept when it is outdated, because the next copy reuses its memory.
    saved: Vec<f32>,
    /// True if `saved` holds the logits.
    is_saved: bool,
    distribution: Option<TokenDistribution>,
    /// The most probable tokens.
    top: Vec<Alternative>,
    /// Hidden states of the decode.
    hidden_states: Option<HiddenStates>,
    /// Logits of up to [`MAX_LENS_TOKENS`] most probable tokens after each layer.
    lens: Option<LogitLens>,
}

/// Edits of mods, from the beginning of a step to its end.
#[derive(Default)]
struct StepEdits {
    /// Logits after the edits.
    logits: Option<Vec<f32>>,
    /// Distribution of these logits, if it was computed.
    distribution: Option<TokenDistribution>,
    temperature: Option<f32>,
}

/// Token drawn in a step, until it is appended or a mod rejects it.
#[derive(Default)]
struct StepDraw {
    token: Option<TokenMeasurement>,
    /// The most probable tokens after the sampler, for a client that requested them.
    client_top: Option<Vec<Alternative>>,
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
    /// Sets the hidden states of the decode that gives the next logits.
    pub fn set_hidden_states(&mut self, hidden_states: Option<HiddenStates>) {
        self.next.hidden_states = hidden_states;
    }

    /// Sets the token that speculative decoding drafted for the step.
    pub fn set_drafted(&mut self, token: Option<TokenId>) {
        self.next.drafted = token;
    }

    /// Takes the token that speculative decoding drafted for the step.
    pub fn take_drafted(&mut self) -> Option<TokenId> {
        self.next.drafted.take()
    }

    /// Sets the model's logits at the end of the sequence: their distribution and their most probable tokens.
    pub fn set_model_logits(&mut self, logits: &[f32], distribution: TokenDistribution, top: Vec<Alternative>) {
        self.discard_model_logits();
        self.model.hidden_states = self.next.hidden_states.take();
        let lens_states = self.model.hidden_states.as_ref().filter(|states| states.has_lens());
        self.model.lens = lens_states.and_then(|states| read_lens(states, &top, logits));
        self.model.top = top;
        self.model.distribution = Some(distribution);
    }

    /// Discards the model's logits, because the end of the sequence changed.
    pub fn discard_model_logits(&mut self) {
        self.model = ModelLogits { saved: std::mem::take(&mut self.model.saved), ..ModelLogits::default() };
    }

    /// Copies the model's logits, unless they are saved, before the next decode overwrites them.
    pub fn save(&mut self, new_logits: Option<&[f32]>) {
        if let Some(new_logits) = new_logits.filter(|_| !self.model.is_saved) {
            self.model.saved.clear();
            self.model.saved.extend_from_slice(new_logits);
            self.model.is_saved = true;
        }
    }

    /// Returns the model's logits if they are saved.
    pub fn saved(&self) -> Option<&[f32]> {
        self.model.is_saved.then_some(self.model.saved.as_slice())
    }

    /// Returns the hidden states of the last token of the sequence, as far as they were captured.
    pub fn hidden_states(&self) -> Option<&HiddenStates> {
        self.model.hidden_states.as_ref()
    }

    /// Returns the distribution of the model's logits.
    pub fn distribution(&self) -> Option<TokenDistribution> {
        self.model.distribution
    }

    /// Returns the most probable tokens of the model.
    pub fn top(&self) -> &[Alternative] {
        &self.model.top
    }

    /// Returns the logits of the most probable tokens after each layer.
    pub fn lens(&self) -> Option<&LogitLens> {
        self.model.lens.as_ref()
    }

    /// Returns the model's logits: the saved ones, or `new_logits`.
    pub fn model_logits<'a>(&'a self, new_logits: Option<&'a [f32]>) -> &'a [f32] {
        let logits = self.saved().or(new_logits);
        debug_assert!(logits.is_some(), "the logits at the end of the sequence are neither saved nor new");
        logits.unwrap_or_default()
    }

    /// Begins a step: discards the edits and the drawn token of the previous one.
    pub fn begin_step(&mut self) {
        self.edits = StepEdits::default();
        self.draw = StepDraw::default();
    }

    /// Returns the logits after the edits of mods; the model's logits without an edit.
    pub fn edited_or_model_logits<'a>(&'a self, new_logits: Option<&'a [f32]>) -> &'a [f32] {
        self.edited().unwrap_or_else(|| self.model_logits(new_logits))
    }

    /// Returns the logits that mods have edited.
    pub fn edited(&self) -> Option<&[f32]> {
        self.edits.logits.as_deref()
    }

    /// Returns the distribution of edited logits.
    pub fn edited_distribution(&self, edited: &[f32]) -> TokenDistribution {
        self.edits.distribution.unwrap_or_else(|| TokenDistribution::new(edited))
    }

    /// Returns the temperature that a mod chose for the step.
    pub fn temperature(&self) -> Option<f32> {
        self.edits.temperature
    }

    /// Applies an edit. `edited` is the distribution after it, if it was computed. The logits must be saved.
    pub fn edit(&mut self, edit: LogitEdit, temperature: Option<f32>, edited: Option<TokenDistribution>) {
        match edit {
            LogitEdit::Keep => {}
            LogitEdit::Replace(values) => self.edits.logits = Some(values),
            edit => apply_edit(self.edits.logits.get_or_insert_with(|| self.model.saved.clone()), &edit),
        }
        self.edits.distribution = edited;
        self.edits.temperature = temperature.or(self.edits.temperature);
    }

    /// Returns the effect of an edit without applying it.
    pub fn effect_of(&self, edit: &LogitEdit) -> EditEffect {
        let before = self.edited().unwrap_or(&self.model.saved);
        let mut edited = Vec::new();
        let after = match edit {
            LogitEdit::Keep => return EditEffect { shifted: Vec::new(), edited: self.edits.distribution },
            LogitEdit::Replace(values) => values,
            LogitEdit::Set(_) | LogitEdit::Add(_) | LogitEdit::Allow(_) => {
                edited.extend_from_slice(before);
                apply_edit(&mut edited, edit);
                &edited
            }
        };
        let known = if self.edited().is_none() { self.model.distribution } else { self.edits.distribution };
        let old = known.unwrap_or_else(|| TokenDistribution::new(before));
        let new = TokenDistribution::new(after);
        let shifted = distribution::top_shifts((old, before), (new, after), MAX_SHIFTED_TOKENS)
            .into_iter()
            .filter(|&(_, change)| change > 0.0)
            .map(|(token, _)| (token, old.prob(before[token as usize]), new.prob(after[token as usize])))
            .collect();
        EditEffect { shifted, edited: Some(new) }
    }

    /// Sets the drawn token, and the most probable tokens after the sampler for a client that requested them.
    pub fn set_drawn(&mut self, token: TokenMeasurement, client_top: Option<Vec<Alternative>>) {
        self.draw = StepDraw { token: Some(token), client_top };
    }

    /// Returns the drawn token.
    pub fn drawn(&self) -> Option<&TokenMeasurement> {
        self.draw.token.as_ref()
    }

    /// Takes the drawn token, with the most probable tokens that the client gets, to append it.
    pub fn take_drawn(&mut self) -> Option<(TokenMeasurement, Vec<Alternative>)> {
        let StepDraw { token, client_top } = std::mem::take(&mut self.draw);
        let token = token?;
        Some((token, client_top.unwrap_or_else(|| std::mem::take(&mut self.model.top))))
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
