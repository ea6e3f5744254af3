//! The matcher of a grammar for one run.

use super::mask_worker::MaskWorker;
use super::trigger::TriggerMatcher;
use crate::events::TokenId;
use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokEnv};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum duration of a mask computation to compute the next mask ahead, beside the model; waking a thread alone costs
/// some ten microseconds.
const MIN_COST_TO_PREFETCH: Duration = Duration::from_micros(80);

/// The tokens permitted next, one bit each.
pub type TokenMask = SimpleVob;

/// The state of a constraint in one run. Clones are independent.
pub struct GrammarMatcher {
    core: Arc<Mutex<Core>>,
    environment: TokEnv,
    ahead: MaskWorker,
    /// Looks for the trigger of a lazy constraint; also needed to rewind to the time before it.
    watch: Option<TriggerMatcher>,
    /// The effect of each appended token, in order.
    effects: Vec<TokenEffect>,
    /// Index of the trigger among them.
    trigger: Option<usize>,
}

/// The grammar's state, and its mask once it is computed.
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
    /// The token was the trigger; the text after the trigger counted as this many tokens.
    Trigger(usize),
    /// The grammar accepted the token.
    Accepted,
    /// The grammar did not accept the token, and permits anything after it.
    Rejected,
    /// The token came after an unaccepted one.
    Unconstrained,
    /// The token ended the answer.
    End,
}

/// The result of offering a token to the grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptResult {
    /// The grammar accepts the token, or the constraint has not begun.
    Accepted,
    /// The grammar does not accept the token: it permits anything until the token is removed again.
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
            ahead: self.ahead.clone(),
            watch: self.watch.clone(),
            effects: self.effects.clone(),
            trigger: self.trigger,
        }
    }
}

impl GrammarMatcher {
    pub(super) fn new(matcher: Matcher, environment: TokEnv, ahead: MaskWorker, watch: Option<TriggerMatcher>) -> Self {
        let core = Core { matcher, mask: None, cost: Duration::ZERO };
        Self { core: Arc::new(Mutex::new(core)), environment, ahead, watch, effects: Vec::new(), trigger: None }
    }

    /// Returns the tokens permitted next; `None` for all tokens, if the constraint has not begun or was given up.
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

    /// Starts computing the next mask if that is worthwhile; [`GrammarMatcher::mask`] returns it or computes it itself.
    pub fn prepare(&self) {
        if !self.is_active() {
            return;
        }
        let worth = {
            let core = lock(&self.core);
            core.mask.is_none() && core.cost > MIN_COST_TO_PREFETCH
        };
        if worth {
            let core = Arc::downgrade(&self.core);
            self.ahead.send(move || {
                if let Some(core) = core.upgrade() {
                    lock(&core).compute_mask();
                }
            });
        }
    }

    /// Returns true if a token that was sampled without a mask is permitted: it may complete a trigger and continue
    /// with text that the grammar does not begin with.
    #[must_use]
    pub fn permits(&self, token: TokenId, piece: &[u8]) -> bool {
        if self.begun() {
            return true;
        }
        match self.watch.as_ref().and_then(|watch| watch.text_after_trigger(token, piece)) {
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
        let effect = match self.effects.last() {
            Some(TokenEffect::Rejected | TokenEffect::Unconstrained) => TokenEffect::Unconstrained,
            _ if self.begun() => self.consume(token),
            _ => self.before(token, piece),
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
        self.begun() && !matches!(self.effects.last(), Some(TokenEffect::Rejected | TokenEffect::Unconstrained))
    }

    /// Rewinds by `count` tokens, or as many as it has recorded.
    pub fn rewind(&mut self, count: usize) {
        let gone = self.effects.split_off(self.effects.len().saturating_sub(count));
        let steps = gone
            .iter()
            .map(|effects| match effects {
                TokenEffect::Trigger(tokens) => *tokens,
                TokenEffect::Accepted => 1,
                TokenEffect::BeforeTrigger | TokenEffect::Rejected | TokenEffect::Unconstrained | TokenEffect::End => 0,
            })
            .sum();
        if steps > 0 {
            let mut core = lock(&self.core);
            core.mask = None;
            // The matcher keeps a failure and reports it at the next mask.
            let _ = core.matcher.rollback(steps);
        }
        self.trigger = self.trigger.filter(|&at| at < self.effects.len());
        if let Some(watch) = &mut self.watch {
            watch.pop(gone.iter().filter(|effect| matches!(effect, TokenEffect::BeforeTrigger)).count());
        }
    }

    fn begun(&self) -> bool {
        self.watch.is_none() || self.trigger.is_some()
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

    fn before(&mut self, token: TokenId, piece: &[u8]) -> TokenEffect {
        let Some(watch) = &mut self.watch else { return TokenEffect::BeforeTrigger };
        let Some(text_after_trigger) = watch.text_after_trigger(token, piece) else {
            watch.push(piece);
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
        let begun = Instant::now();
        let mask = self.matcher.compute_mask_or_eos().map(Arc::new);
        self.mask = Some(mask.map_err(|error| super::compile::user_message(&error.to_string())));
        self.cost = begun.elapsed();
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
