//! The matcher of a grammar for one run.

use super::mask_worker::MaskWorker;
use super::trigger::TriggerMatcher;
use crate::events::TokenId;
use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokEnv};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum duration of the last mask computation for which the next mask is prefetched on the mask worker. Waking that
/// thread alone takes tens of microseconds.
const MIN_COST_TO_PREFETCH: Duration = Duration::from_micros(80);

/// The tokens permitted next, one bit each.
pub type TokenMask = SimpleVob;

/// The state of a constraint in one run. Clones are independent.
pub struct GrammarMatcher {
    core: Arc<Mutex<Core>>,
    environment: TokEnv,
    mask_worker: MaskWorker,
    /// Search for the trigger of a lazy constraint. Kept after the trigger for rewinding.
    trigger_matcher: Option<TriggerMatcher>,
    /// The effect of each appended token, in order.
    effects: Vec<TokenEffect>,
    /// Index of the trigger in `effects`.
    trigger: Option<usize>,
}

/// The state of the grammar, and its next mask if it was computed.
struct Core {
    matcher: Matcher,
    mask: Option<Result<Arc<TokenMask>, String>>,
    cost: Duration,
}

/// The effect of an appended token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenEffect {
    /// The token came before the trigger.
    BeforeTrigger,
    /// The token was the trigger. The grammar consumed this number of tokens for the text after it.
    Trigger(usize),
    /// The grammar accepted the token.
    Accepted,
    /// The grammar did not accept the token. It permits any tokens after it.
    Rejected,
    /// The token came after a rejected one.
    Unconstrained,
    /// The token ended the answer.
    End,
}

/// The result of offering a token to the grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptResult {
    /// The grammar accepts the token, or the constraint has not begun.
    Accepted,
    /// The grammar does not accept the token. It permits any tokens until this one is removed.
    Rejected,
}

impl std::fmt::Debug for GrammarMatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarMatcher").field("effects", &self.effects.len()).finish_non_exhaustive()
    }
}

impl Clone for GrammarMatcher {
    fn clone(&self) -> Self {
        let core = lock(&self.core);
        let core = Core { matcher: core.matcher.deep_clone(), mask: core.mask.clone(), cost: core.cost };
        Self {
            core: Arc::new(Mutex::new(core)),
            environment: Arc::clone(&self.environment),
            mask_worker: self.mask_worker.clone(),
            trigger_matcher: self.trigger_matcher.clone(),
            effects: self.effects.clone(),
            trigger: self.trigger,
        }
    }
}

impl GrammarMatcher {
    pub(super) fn new(
        matcher: Matcher,
        environment: TokEnv,
        mask_worker: MaskWorker,
        trigger_matcher: Option<TriggerMatcher>,
    ) -> Self {
        let core = Core { matcher, mask: None, cost: Duration::ZERO };
        Self {
            core: Arc::new(Mutex::new(core)),
            environment,
            mask_worker,
            trigger_matcher,
            effects: Vec::new(),
            trigger: None,
        }
    }

    /// Returns the tokens permitted next; `None` for all tokens, if the constraint has not begun or a token was
    /// rejected.
    ///
    /// # Errors
    /// The grammar became too complex; the text describes it.
    pub fn mask(&mut self) -> Result<Option<Arc<TokenMask>>, String> {
        if !self.is_active() {
            return Ok(None);
        }
        let mut core = lock(&self.core);
        core.compute_mask();
        core.mask.clone().transpose()
    }

    /// Starts computing the next mask on the mask worker if that is worthwhile. [`GrammarMatcher::mask`] works without
    /// this call.
    pub fn prepare(&self) {
        if !self.is_active() {
            return;
        }
        let is_worthwhile = {
            let core = lock(&self.core);
            core.mask.is_none() && core.cost > MIN_COST_TO_PREFETCH
        };
        if is_worthwhile {
            let core = Arc::downgrade(&self.core);
            self.mask_worker.send(move || {
                if let Some(core) = core.upgrade() {
                    lock(&core).compute_mask();
                }
            });
        }
    }

    /// Returns true if a token that was sampled without a mask is permitted. A token is not permitted if it completes
    /// the trigger and continues with text that does not match the grammar.
    #[must_use]
    pub fn permits(&self, token: TokenId, piece: &[u8]) -> bool {
        if self.has_begun() || self.has_rejected() {
            return true;
        }
        match self.trigger_matcher.as_ref().and_then(|trigger_matcher| trigger_matcher.text_after_trigger(token, piece))
        {
            None => true,
            Some(text_after_trigger) if text_after_trigger.is_empty() => true,
            Some(text_after_trigger) => {
                let tokens = self.environment.tok_trie().greedy_tokenize(&text_after_trigger);
                lock(&self.core).matcher.validate_tokens(&tokens).is_ok_and(|valid| valid == tokens.len())
            }
        }
    }

    /// Records a token that was appended to the sequence; see [`GrammarMatcher::end`] for one that ends it.
    pub fn accept(&mut self, token: TokenId, piece: &[u8]) -> AcceptResult {
        let effect = if self.has_rejected() {
            TokenEffect::Unconstrained
        } else if self.has_begun() {
            self.consume(token)
        } else {
            self.accept_before_trigger(token, piece)
        };
        if matches!(effect, TokenEffect::Trigger(_)) {
            self.trigger = Some(self.effects.len());
        }
        self.effects.push(effect);
        if effect == TokenEffect::Rejected { AcceptResult::Rejected } else { AcceptResult::Accepted }
    }

    /// Records a token that ended the answer and is not part of it.
    pub fn end(&mut self) {
        self.effects.push(TokenEffect::End);
    }

    /// Returns true if the answer is complete and nothing can follow it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_active() && {
            let core = lock(&self.core);
            core.matcher.is_stopped() && !core.matcher.is_error() && core.matcher.stop_reason().is_ok()
        }
    }

    /// Returns true if the constraint restricts the next token.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.has_begun() && !self.has_rejected()
    }

    /// Rewinds by `count` tokens, but not beyond the start.
    pub fn rewind(&mut self, count: usize) {
        let removed = self.effects.split_off(self.effects.len().saturating_sub(count));
        let steps = removed
            .iter()
            .map(|effect| match effect {
                TokenEffect::Trigger(tokens) => *tokens,
                TokenEffect::Accepted => 1,
                TokenEffect::BeforeTrigger | TokenEffect::Rejected | TokenEffect::Unconstrained | TokenEffect::End => 0,
            })
            .sum();
        if steps > 0 {
            let mut core = lock(&self.core);
            core.mask = None;
            // The matcher stores an error and returns it with the next mask.
            let _ = core.matcher.rollback(steps);
        }
        self.trigger = self.trigger.filter(|&at| at < self.effects.len());
        if let Some(trigger_matcher) = &mut self.trigger_matcher {
            trigger_matcher.pop(removed.iter().filter(|effect| matches!(effect, TokenEffect::BeforeTrigger)).count());
        }
    }

    fn has_begun(&self) -> bool {
        self.trigger_matcher.is_none() || self.trigger.is_some()
    }

    /// Returns true if the grammar rejected a token that has not been removed.
    fn has_rejected(&self) -> bool {
        matches!(self.effects.last(), Some(TokenEffect::Rejected | TokenEffect::Unconstrained))
    }

    fn consume(&mut self, token: TokenId) -> TokenEffect {
        let mut core = lock(&self.core);
        let fits = core.matcher.try_consume_tokens(&[token as u32]).is_ok_and(|consumed| consumed == 1);
        if fits {
            core.mask = None;
            TokenEffect::Accepted
        } else {
            TokenEffect::Rejected
        }
    }

    fn accept_before_trigger(&mut self, token: TokenId, piece: &[u8]) -> TokenEffect {
        let Some(trigger_matcher) = &mut self.trigger_matcher else { return TokenEffect::BeforeTrigger };
        let Some(text_after_trigger) = trigger_matcher.text_after_trigger(token, piece) else {
            trigger_matcher.push(piece);
            return TokenEffect::BeforeTrigger;
        };
        let tokens = self.environment.tok_trie().greedy_tokenize(&text_after_trigger);
        let mut core = lock(&self.core);
        match core.matcher.validate_tokens(&tokens) {
            Ok(valid) if valid == tokens.len() && core.matcher.consume_tokens(&tokens).is_ok() => {
                core.mask = None;
                TokenEffect::Trigger(tokens.len())
            }
            _ => TokenEffect::Rejected,
        }
    }
}

impl Core {
    fn compute_mask(&mut self) {
        if self.mask.is_some() {
            return;
        }
        let started = Instant::now();
        let mask = self.matcher.compute_mask_or_eos().map(Arc::new);
        self.mask = Some(mask.map_err(|error| super::compile::user_message(&error.to_string())));
        self.cost = started.elapsed();
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
