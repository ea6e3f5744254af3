//! A generation request: the prompt, sampling parameters, limits and all other settings of a run.

use crate::engine::error::SubmitError;
use crate::engine::fork::ForkPoint;
use crate::engine::options::DraftLimits;
use crate::events::{ImageFile, ImageRecord, RunMetadata, Span, StoredHeads, Surface, Tenant, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::AnswerFormat;
use crate::model::grammar::Constraint;
use crate::model::llama::{AdapterSet, Image, SamplingParams, image_records};
use crate::mods::SelectedMod;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

/// A generation request. Each API validates its own request type and builds this request from it. The engine checks
/// only what depends on the model and on the engine's settings.
#[derive(Debug, Clone)]
pub struct Request {
    /// Id chosen by the client; `None` for the run's own id.
    pub request_id: Option<String>,
    /// True if the run gets a new id when another active run has the client's id; otherwise the request is rejected.
    pub may_drop_request_id: bool,
    /// API that received the request.
    pub surface: Surface,
    /// The tenant that the run belongs to; `None` on a server without API keys.
    pub owner: Option<Tenant>,
    /// Label of the API key, never the key itself.
    pub user_label: Option<String>,
    /// Metadata from the client.
    pub metadata: RunMetadata,
    /// Tokens of the prompt. Must not be empty, and must fit into the context; see `overflow`.
    pub prompt: Vec<TokenId>,
    /// Images of the prompt, in any order. An image of an earlier request may be omitted as long as the engine caches
    /// it.
    pub images: Vec<Arc<Image>>,
    /// Files of images to record with the run.
    pub image_files: Vec<ImageFile>,
    /// True if the prompt may fill the whole context. The answer then has only one token, which is sampled but never
    /// decoded.
    pub may_fill_context: bool,
    /// Role of each part of the prompt; may be empty.
    pub spans: Vec<Span>,
    /// Beginning of the prompt, shown in lists of runs.
    pub prompt_preview: String,
    /// Messages as sent, for mods and the trace.
    pub conversation: Option<Value>,
    /// Tools as sent, for mods and the trace.
    pub tools: Option<Value>,
    /// Further fields that affect the answer, such as `tool_choice` and `response_format`, as sent; for the trace.
    pub answer_fields: Map<String, Value>,
    /// Format of the answer; `None` for the continuation of a plain prompt, whose answer has the format of the model's
    /// chat template.
    pub answer_format: Option<Arc<AnswerFormat>>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// LoRA adapters and control vectors to apply; `None` for the model's default.
    pub adapters: Option<AdapterSet>,
    /// Grammar constraint on the answer.
    pub constraint: Option<Constraint>,
    /// Limit of reasoning tokens; `None` for no limit.
    pub reasoning_budget: Option<ReasoningBudget>,
    /// Limits and stop conditions.
    pub limits: Limits,
    /// Control tokens that belong to the answer's text, e.g. those that begin a tool call. All other control tokens are
    /// hidden.
    pub visible_tokens: Vec<TokenId>,
    /// Mods, in the order in which they are called.
    pub mods: Vec<SelectedMod>,
    /// True if attention is captured and recorded.
    pub attention: bool,
    /// Heads whose attention rows are recorded, in addition to the reductions over heads.
    pub stored_heads: StoredHeads,
    /// True if the logits of the most probable tokens after each layer are recorded.
    pub lens: bool,
    /// Number of most probable tokens recorded per generated token.
    pub alternatives: usize,
    /// Effect of a recording failure on the run.
    pub record: RecordPolicy,
    /// Slot to run in; the run waits while it is busy. `None` for a free slot, preferably one
    /// with a prefix match.
    pub slot: Option<u32>,
    /// True if the KV state of a matching prefix is reused.
    pub cache_prompt: bool,
    /// Minimum tokens of a chunk of cached state that is shifted to a new position and reused; 0 disables this. The
    /// keys and values of such a chunk were computed after other tokens than those that precede it now.
    pub cache_reuse: usize,
    /// Behavior when the context is full.
    pub overflow: Overflow,
    /// Limits of the drafts of speculative decoding.
    pub drafts: DraftLimits,
    /// Outputs that the API wants besides the answer.
    pub report: ReportOptions,
    /// Step of a recorded run from which the run continues; its prompt is then the recorded one.
    pub fork: Option<Box<ForkPoint>>,
}

impl Request {
    /// Creates a request that continues a prompt, with defaults for everything else: recorded if possible, without
    /// attention.
    #[must_use]
    pub fn new(prompt: Vec<TokenId>, surface: Surface) -> Self {
        Self {
            request_id: None,
            may_drop_request_id: false,
            surface,
            owner: None,
            user_label: None,
            metadata: RunMetadata::default(),
            prompt,
            images: Vec::new(),
            image_files: Vec::new(),
            may_fill_context: false,
            spans: Vec::new(),
            prompt_preview: String::new(),
            conversation: None,
            tools: None,
            answer_fields: Map::new(),
            answer_format: None,
            sampling: SamplingParams::default(),
            adapters: None,
            constraint: None,
            reasoning_budget: None,
            limits: Limits::default(),
            visible_tokens: Vec::new(),
            mods: Vec::new(),
            attention: false,
            stored_heads: StoredHeads::None,
            lens: false,
            alternatives: Self::ALTERNATIVES,
            record: RecordPolicy::default(),
            report: ReportOptions::default(),
            slot: None,
            cache_prompt: true,
            cache_reuse: 0,
            overflow: Overflow::default(),
            fork: None,
            drafts: DraftLimits::default(),
        }
    }

    /// Describes the images of a prompt, which may differ from the request's.
    pub(super) fn describe_images(&self, prompt: &[TokenId]) -> Vec<ImageRecord> {
        let mut records = image_records(&self.images, prompt);
        for record in &mut records {
            record.recorded = self.image_files.iter().any(|file| file.sha256 == record.sha256);
        }
        records
    }

    /// Returns this request's limit for a slot that holds `context` tokens.
    pub(super) fn context_limit(&self, context: usize) -> ContextLimit {
        ContextLimit { context, overflow: self.overflow, may_fill: self.may_fill_context }
    }

    /// Default of [`Request::alternatives`].
    pub const ALTERNATIVES: usize = 10;
}

/// Behavior when the context is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overflow {
    /// Ends the run.
    #[default]
    Stop,
    /// Drops tokens after the first `keep` and shifts the rest, regardless of messages; llama-server's context shift.
    Shift {
        /// Number of tokens kept at the beginning of the prompt, not counting a BOS token; `None` for the whole prompt.
        keep: Option<usize>,
        /// Number of tokens dropped; 0 for half of those after `keep`.
        discard: usize,
    },
    /// Drops whole messages, oldest first. System messages, the last user message and the last assistant message stay.
    /// Needs the prompt's spans.
    Evict,
}

/// Size of the context of a run, and the behavior when it is full.
#[derive(Debug, Clone, Copy)]
pub(super) struct ContextLimit {
    /// Context size of a slot, in tokens.
    pub context: usize,
    /// Behavior when the context is full.
    pub overflow: Overflow,
    /// True if the prompt may fill the whole context.
    pub may_fill: bool,
}

impl ContextLimit {
    /// Returns true if a prompt of `tokens` tokens fills the context exactly and is permitted to.
    pub fn is_filled_by(self, tokens: usize) -> bool {
        self.may_fill && tokens == self.context && self.overflow != Overflow::Evict
    }
}

/// Outputs that the API wants besides the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReportOptions {
    /// Probabilities of the prompt's tokens, sent as [`crate::engine::Output::PromptProbabilities`]. They need a decode
    /// of the whole prompt, including the cached part.
    pub prompt_probabilities: bool,
    /// Progress of the prompt, sent as [`crate::engine::Output::PromptProgress`] before the first decode and after each
    /// decode.
    pub progress: bool,
    /// Most probable tokens after the sampler's last stage, instead of those of the model's distribution.
    pub after_sampler: bool,
    /// Every token as soon as it is outside the holdback, including those of a stop string, instead of the text of the
    /// answer.
    pub per_token: bool,
    /// Attention row of each token, in [`crate::engine::TextDelta::rows`]. Needs `attention` and `per_token`.
    pub attention_rows: bool,
    /// Number of other runs of the same client's request, with which the run shares the maximum of queued attention.
    pub siblings: u32,
}

/// Limits and stop conditions of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Maximum tokens in the answer; 0 only evaluates the prompt.
    pub max_tokens: u32,
    /// Maximum steps; ends a run whose mod backtracks endlessly.
    pub max_steps: u32,
    /// Stop strings; the answer ends before them.
    pub stop: Vec<String>,
    /// Tokens that end the run, in addition to the end-of-generation tokens of the vocabulary.
    pub stop_tokens: Vec<TokenId>,
    /// True if end-of-generation tokens are never sampled.
    pub ignore_eos: bool,
    /// Minimum indentation of every line except the first, in characters; 0 for no minimum. The answer ends before a
    /// line with less indentation.
    #[serde(skip_serializing_if = "is_zero")]
    pub min_indent: u32,
    /// Maximum time for the answer, counted from its first token. It never ends the answer before the first line break.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_time: Option<Duration>,
    /// The client's `max_tokens`; `None` if it sent none.
    #[serde(skip)]
    pub requested_max_tokens: Option<u32>,
    /// True if the client sent `max_steps`; a mod that raises the maximum of tokens does not raise it.
    #[serde(skip)]
    pub has_requested_max_steps: bool,
    /// Server-wide maximum of answer tokens; `None` for no maximum. Set by [`Limits::apply_server_limit`].
    #[serde(skip)]
    pub server_max_tokens: Option<u32>,
}

impl Limits {
    /// Creates limits of `max_tokens` tokens, and of four times as many steps plus 256, since mods may remove tokens.
    #[must_use]
    pub fn new(max_tokens: u32) -> Self {
        Self {
            max_tokens,
            max_steps: max_tokens.saturating_mul(4).saturating_add(256),
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            min_indent: 0,
            max_time: None,
            requested_max_tokens: None,
            has_requested_max_steps: false,
            server_max_tokens: None,
        }
    }

    /// Caps the limits to the server-wide maximum; `None` for no maximum.
    ///
    /// # Errors
    /// The client requested more tokens than the maximum.
    pub fn apply_server_limit(&mut self, max: Option<u32>) -> Result<(), SubmitError> {
        let Some(limit) = max else { return Ok(()) };
        if let Some(requested) = self.requested_max_tokens.filter(|&requested| requested > limit) {
            return Err(SubmitError::TooManyTokens { requested, limit });
        }
        self.server_max_tokens = max;
        self.max_tokens = self.max_tokens.min(limit);
        self.max_steps = self.max_steps.min(Self::new(limit).max_steps);
        Ok(())
    }

    /// Returns the maximum of steps for an answer of `max_tokens` tokens: that of the client if it has set one.
    pub(super) fn max_steps_for(&self, max_tokens: u32) -> u32 {
        if self.has_requested_max_steps { self.max_steps } else { self.max_steps.max(Self::new(max_tokens).max_steps) }
    }

    /// Returns the lower of `tokens` and the server-wide maximum.
    #[must_use]
    pub fn capped(&self, tokens: u32) -> u32 {
        self.server_max_tokens.map_or(tokens, |max| tokens.min(max))
    }

    /// Bans the end-of-generation tokens in `sampling` if the limits ignore them.
    pub(crate) fn ban_end_tokens(&self, sampling: &mut SamplingParams, vocabulary: &Vocabulary) {
        if self.ignore_eos {
            let bans = vocabulary.end_of_generation().iter().map(|&token| (token, f32::NEG_INFINITY));
            sampling.logit_bias.extend(bans);
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

impl Default for Limits {
    /// Returns limits that only the size of the context restricts.
    fn default() -> Self {
        Self::new(i32::MAX as u32)
    }
}

/// Effect of a recording failure on a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordPolicy {
    /// The run fails if it can be neither stored nor spooled.
    Required,
    /// The run continues.
    #[default]
    BestEffort,
    /// Nothing is recorded.
    Off,
}

/// Maximum reasoning tokens, and the markers around reasoning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReasoningBudget {
    /// Maximum reasoning tokens of the whole answer, without the markers.
    pub tokens: u32,
    /// Marker that begins reasoning.
    pub open: String,
    /// Marker that ends reasoning.
    pub close: String,
    /// Tokens appended when the budget is used up; they end with `close`.
    #[serde(alias = "last_words")]
    pub closing_tokens: Vec<TokenId>,
    /// True if the prompt ends within reasoning, which the answer continues.
    #[serde(alias = "begun")]
    pub starts_in_reasoning: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_limit_caps_max_tokens() {
        let mut limits = Limits { requested_max_tokens: None, ..Limits::new(4000) };
        limits.apply_server_limit(Some(100)).unwrap();
        assert_eq!((limits.max_tokens, limits.max_steps, limits.capped(500), limits.capped(50)), (100, 656, 100, 50));
        let mut limits = Limits { requested_max_tokens: Some(101), ..Limits::new(101) };
        let refused = limits.apply_server_limit(Some(100)).unwrap_err();
        assert!(refused.to_string().contains("`max_tokens` is 101"), "{refused}");
        assert_eq!((limits.apply_server_limit(None).is_ok(), limits.capped(500)), (true, 500));
    }

    #[test]
    fn longer_answer_has_more_steps() {
        assert_eq!(Limits::new(16).max_steps_for(1000), 4256);
        assert_eq!(Limits::new(16).max_steps_for(4), 320, "a shorter answer does not have fewer");
        let requested = Limits { has_requested_max_steps: true, ..Limits::new(16) };
        assert_eq!(requested.max_steps_for(1000), 320, "the client's own maximum, also if it is the default");
    }
}
