//! Grammar constraint on an answer, compatible with other mods.

use super::sequence::{SequenceTracker, end_token};
use crate::events::{EventType, LogLevel, TokenId};
use crate::model::chat::tools::after_reasoning;
use crate::model::grammar::{AcceptResult, Constraint, GrammarMatcher, Trigger};
use crate::mods::{Action, Call, CallEvent, EventSet, LogitEdit, ModInstance, ModLogLine, Reply, ReplySender, RunView};

/// Maximum tokens refused at one position because the grammar does not permit their text after the trigger. The next
/// token is accepted.
const MAX_REFUSED_TOKENS: usize = 64;

/// Instance of a mod that constrains the answer to a grammar.
pub struct GrammarInstance {
    matcher: GrammarMatcher,
    tracker: SequenceTracker,
    /// Configuration field that has the grammar.
    field: String,
    /// True if the grammar waits for a trigger.
    lazy: bool,
    end: TokenId,
    /// Length of the answer, and tokens refused at that length.
    refused: (usize, Vec<TokenId>),
}

impl GrammarInstance {
    /// Compiles the configured grammar. With `trigger`, the grammar applies after that text. Otherwise it applies after
    /// the reasoning at the beginning of the answer, or from the first token on if there is no reasoning.
    pub fn start(constraint: Constraint, trigger: Option<&str>, run: &RunView) -> Result<Self, String> {
        let field = constraint.field.clone();
        let constraint = match trigger {
            Some(text) => constraint.lazy(Trigger::text(text)),
            None => after_reasoning(constraint, &run.answer_format, true, &run.vocabulary),
        };
        let matcher = run.grammars.start_matcher(&constraint).map_err(|error| {
            let (field, error) = constraint.locate_error(error);
            format!("`{field}`: {error}")
        })?;
        Ok(Self {
            matcher,
            tracker: SequenceTracker::default(),
            field,
            lazy: constraint.trigger.is_some(),
            end: end_token(run)?,
            refused: (0, Vec::new()),
        })
    }

    fn update(&mut self, call: &Call<'_>) -> Vec<ModLogLine> {
        let delta = self.tracker.update(call);
        if delta.removed > 0 {
            self.matcher.rewind(delta.removed);
        }
        let mut logs = Vec::new();
        for &token in delta.added {
            if call.run.ends_answer(token) {
                self.matcher.end();
            } else if self.matcher.accept(token, call.run.vocabulary.piece(token)) == AcceptResult::Rejected {
                let text = call.run.vocabulary.decode(&[token]);
                let message = format!(
                    "{text:?} is not permitted by `{}`; the constraint is suspended while it remains",
                    self.field
                );
                logs.push(ModLogLine { level: LogLevel::Warning, message });
            }
        }
        logs
    }

    fn forward(&mut self) -> Option<Action> {
        if self.matcher.is_complete() {
            return Some(Action::ForceTokens(vec![self.end]));
        }
        match self.matcher.mask() {
            Ok(Some(mask)) => Some(Action::AdjustedLogits { edit: LogitEdit::Allow(mask), temperature: None }),
            Ok(None) if self.refused.0 == self.tracker.token_count() && !self.refused.1.is_empty() => {
                let bans = self.refused.1.iter().map(|&token| (token, f32::NEG_INFINITY)).collect();
                Some(Action::AdjustedLogits { edit: LogitEdit::Set(bans), temperature: None })
            }
            Ok(None) => None,
            Err(message) => Some(Action::error(format!("`{}` can no longer be applied: {message}", self.field))),
        }
    }

    /// Returns the correction of a drawn token that the grammar does not permit: a token that completes the trigger may
    /// continue with text that the grammar cannot begin with.
    fn sampled(&mut self, token: TokenId, piece: &[u8]) -> Option<Action> {
        if self.matcher.permits(token, piece) {
            return None;
        }
        let length = self.tracker.token_count();
        if self.refused.0 != length {
            self.refused = (length, Vec::new());
        }
        if self.refused.1.len() == MAX_REFUSED_TOKENS {
            return None;
        }
        self.refused.1.push(token);
        Some(Action::Backtrack { n: 1, tokens: Vec::new() })
    }
}

impl ModInstance for GrammarInstance {
    fn handles(&self) -> EventSet {
        let always = EventSet::new(&[EventType::ForwardPass, EventType::Added]);
        if self.lazy { always.union(EventSet::new(&[EventType::Sampled])) } else { always }
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let logs = self.update(call);
        let action = match call.event {
            CallEvent::ForwardPass { .. } => self.forward(),
            CallEvent::Sampled { token, .. } => self.sampled(token, call.run.vocabulary.piece(token)),
            CallEvent::Added { .. } => {
                self.matcher.prepare();
                // This token may have completed the grammar. If the answer has room for another token, the next step
                // ends it.
                let is_full = call.is_last_event() && !call.ends_answer();
                (is_full && self.matcher.is_complete()).then(|| Action::ForceTokens(vec![self.end]))
            }
            CallEvent::Prefilled => None,
        };
        Some(Reply { action, logs, ..Reply::default() })
    }
}
