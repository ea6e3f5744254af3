use super::{SubmitError, ThinkingBudget};
use crate::events::{Span, Surface, TokenId};
use crate::model::chat::answer::AnswerFormat;
use crate::model::grammar::Constraint;
use crate::model::llama::{AdapterSet, SamplingParams};
use crate::mods::SelectedMod;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

/// One validated generation request. Every surface builds one through its own wire types; nothing behind it checks again.
#[derive(Debug, Clone)]
pub struct Request {
    /// The client's id; `None` lets the engine use the run's.
    pub request_id: Option<String>,
    /// True if the run gets a new id when another run has the client's; otherwise it is refused.
    pub may_drop_request_id: bool,
    /// Where it came from.
    pub surface: Surface,
    /// Who asked: a label, never a key.
    pub user_label: Option<String>,
    /// The prompt's tokens; at least one, and fewer than the context.
    pub prompt: Vec<TokenId>,
    /// The prompt may have as many tokens as the context: the answer is then one token, which needs no place.
    pub may_fill_context: bool,
    /// Which part of the prompt came from whom; may be empty.
    pub spans: Vec<Span>,
    /// What a person would recognise the run by.
    pub prompt_preview: String,
    /// The messages as sent, for mods and the trace.
    pub conversation: Option<Value>,
    /// The tools as sent.
    pub tools: Option<Value>,
    /// Further fields that shape the answer, such as `tool_choice` and `response_format`, as sent; for the trace.
    pub answer_fields: Map<String, Value>,
    /// How the answer is read; `None` for what continues a plain prompt, which is read as the model's family writes.
    pub reading: Option<Arc<AnswerFormat>>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// The LoRA adapters that hold; `None` for the model's usual ones.
    pub adapters: Option<AdapterSet>,
    /// What the answer must be.
    pub constraint: Option<Constraint>,
    /// How long it may think; `None` for as long as it likes.
    pub thinking: Option<ThinkingBudget>,
    /// When to end.
    pub limits: Limits,
    /// Control tokens that are part of the answer's text, e.g. those that begin a tool call; others are not.
    pub visible: Vec<TokenId>,
    /// Mods in order.
    pub mods: Vec<SelectedMod>,
    /// Whether attention is captured and recorded.
    pub attention: bool,
    /// How many alternatives are recorded per token.
    pub alternatives: usize,
    /// What recording failures do to the run.
    pub record: RecordPolicy,
    /// The slot to run in, which must exist; the run waits while it is busy. `None` takes the free slot whose state it
    /// shares most of.
    pub slot: Option<u32>,
    /// Whether the KV state that a slot holds of the prompt's beginning is used.
    pub cache_prompt: bool,
    /// Pieces of at least that many tokens, further behind in a slot's state than in the prompt, are moved up and used; 0 for
    /// none. They keep what they knew of the tokens that stood before them.
    pub cache_reuse: usize,
    /// What happens when the context is full.
    pub overflow: Overflow,
    /// What the surface wants to hear of besides the answer.
    pub report: ReportOptions,
}

impl Request {
    /// A request for a continuation of that prompt, with a default for everything else: recorded as well as possible,
    /// ten alternatives a token, no mods, as many tokens as the context holds.
    #[must_use]
    pub fn new(prompt: Vec<TokenId>, surface: Surface) -> Self {
        Self {
            request_id: None,
            may_drop_request_id: false,
            surface,
            user_label: None,
            prompt,
            may_fill_context: false,
            spans: Vec::new(),
            prompt_preview: String::new(),
            conversation: None,
            tools: None,
            answer_fields: Map::new(),
            reading: None,
            sampling: SamplingParams::default(),
            adapters: None,
            constraint: None,
            thinking: None,
            limits: Limits::default(),
            visible: Vec::new(),
            mods: Vec::new(),
            attention: false,
            alternatives: Self::ALTERNATIVES,
            record: RecordPolicy::default(),
            report: ReportOptions::default(),
            slot: None,
            cache_prompt: true,
            cache_reuse: 0,
            overflow: Overflow::default(),
        }
    }

    /// Returns true for a prompt of so many tokens that leaves no place in the context and needs none.
    pub(super) fn fills_context(&self, tokens: usize, context: usize) -> bool {
        self.may_fill_context && tokens == context && self.overflow != Overflow::Evict
    }

    /// Alternatives that are recorded for each token, unless the answer needs more.
    pub const ALTERNATIVES: usize = 10;
}

/// What happens when the context is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overflow {
    /// The run ends.
    #[default]
    Stop,
    /// Tokens behind the first `keep` go, whatever they are, and the rest moves up. As llama-server's context shift.
    Shift {
        /// Tokens of the prompt's beginning that stay, a BOS token not counted; `None` for the whole prompt.
        keep: Option<usize>,
        /// Tokens that go; 0 for half of those behind `keep`.
        discard: usize,
    },
    /// Whole messages go, oldest first; system messages, the last user message and the last assistant message stay. Needs the
    /// prompt's spans.
    Evict,
}

/// What a surface wants to hear of besides the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReportOptions {
    /// How probable each token of the prompt was: an [`super::Output::Prompt`]. The whole prompt is decoded for it, whatever
    /// state there was.
    pub prompt_probabilities: bool,
    /// Progress of the prompt: an [`super::Output::Progress`] before its first decode and after each.
    pub progress: bool,
    /// Alternatives as they stood after the sampler's last stage, instead of the model's.
    pub after_sampler: bool,
    /// Every token as soon as it stands, those of a stop string included, instead of the text of the answer. What a mod
    /// takes back is told as [`super::TextDelta::taken_back`].
    pub per_token: bool,
    /// With each token the attention that it was drawn with, in [`super::TextDelta::rows`]. Needs `attention` and `per_token`.
    pub attention_rows: bool,
}

/// When a run ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Most tokens in the answer; 0 only evaluates the prompt.
    pub max_tokens: u32,
    /// Most steps; bounds a mod that backtracks for ever.
    pub max_steps: u32,
    /// Texts that end the run; the answer stops before them.
    pub stop: Vec<String>,
    /// Tokens that end the run, besides the vocabulary's end-of-generation tokens.
    pub stop_tokens: Vec<TokenId>,
    /// Do not end at end-of-generation tokens: they are never drawn.
    pub ignore_eos: bool,
    /// Least indentation of every line but the first, in characters; the answer ends before one that has less. 0 for any.
    #[serde(skip_serializing_if = "is_zero")]
    pub min_indent: u32,
    /// Most time for the answer, counted from its first token; it ends after its first line break.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_time: Option<Duration>,
    /// What the client asked for as `max_tokens`; `None` where it left that to the server.
    #[serde(skip)]
    pub requested_max_tokens: Option<u32>,
    /// Most tokens that the server lets any run have; `None` for any number. [`Limits::apply_server_limit`] sets it.
    #[serde(skip)]
    pub server_max_tokens: Option<u32>,
}

impl Limits {
    /// At most that many tokens, and enough steps for a mod that takes every token back a few times.
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
            server_max_tokens: None,
        }
    }

    /// Holds the run to what the server lets any run have; `None` for any number.
    ///
    /// # Errors
    /// The client asked for more.
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

    /// As many tokens, or as many as the server lets any run have.
    #[must_use]
    pub fn capped(&self, tokens: u32) -> u32 {
        self.server_max_tokens.map_or(tokens, |max| tokens.min(max))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

impl Default for Limits {
    /// As many tokens as the context holds.
    fn default() -> Self {
        Self::new(i32::MAX as u32)
    }
}

/// What a recording failure does to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordPolicy {
    /// The run fails when it can be neither stored nor spooled.
    Required,
    /// The run goes on.
    #[default]
    BestEffort,
    /// Nothing is recorded.
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_longer_than_the_server_lets_it_be() {
        let mut open = Limits { requested_max_tokens: None, ..Limits::new(4000) };
        open.apply_server_limit(Some(100)).unwrap();
        assert_eq!((open.max_tokens, open.max_steps, open.capped(500), open.capped(50)), (100, 656, 100, 50));
        let mut asked = Limits { requested_max_tokens: Some(101), ..Limits::new(101) };
        let refused = asked.apply_server_limit(Some(100)).unwrap_err();
        assert!(refused.to_string().contains("max_tokens is 101"), "{refused}");
        assert_eq!((asked.apply_server_limit(None).is_ok(), asked.capped(500)), (true, 500));
    }
}
