//! The matcher of a grammar for one run.

use super::ahead::MaskWorker;
use super::trigger::TriggerMatcher;
use crate::events::TokenId;
use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokEnv};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum duration of a mask computation to compute the next mask ahead, beside the model; waking a thread alone costs
/// some ten microseconds.
const WORTH_AHEAD: Duration = Duration::from_micros(80);

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
    taken: Vec<Taken>,
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
enum Taken {
    /// The token came before the trigger.
    Before,
    /// The token was the trigger; the text after the trigger counted as this many tokens.
    Began(usize),
    /// The grammar accepted the token.
    Within,
    /// The grammar did not accept the token, and permits anything after it.
    Against,
    /// The token came after an unaccepted one.
    After,
    /// The token ended the answer.
    End,
}

/// The result of offering a token to the grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptResult {
    /// The grammar accepts the token, or the constraint has not begun.
    Fits,
    /// The grammar does not accept the token: it permits anything until the token is removed again.
    Contradicts,
}

impl std::fmt::Debug for GrammarMatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("taken", &self.taken.len()).finish_non_exhaustive()
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
            taken: self.taken.clone(),
            trigger: self.trigger,
        }
    }
}

impl GrammarMatcher {
    pub(super) fn new(matcher: Matcher, environment: TokEnv, ahead: MaskWorker, watch: Option<TriggerMatcher>) -> Self {
        let core = Core { matcher, mask: None, cost: Duration::ZERO };
        Self { core: Arc::new(Mutex::new(core)), environment, ahead, watch, taken: Vec::new(), trigger: None }
    }

    /// Returns the tokens permitted next; `None` for all tokens, if the constraint has not begun or was given up.
    ///
    /// # Errors
    /// The grammar became too complex; the text describes it.
    pub fn mask(&mut self) -> Result<Option<Arc<TokenMask>>, String> {
        if !self.holds() {
            return Ok(None);
        }
        let mut core = lock(&self.core);
        core.work_out();
        core.mask.clone().transpose()
    }

    /// Starts computing the next mask if that is worthwhile; [`GrammarMatcher::mask`] returns it or computes it itself.
    pub fn prepare(&self) {
        if !self.holds() {
            return;
        }
        let worth = {
            let core = lock(&self.core);
            core.mask.is_none() && core.cost > WORTH_AHEAD
        };
        if worth {
            let core = Arc::downgrade(&self.core);
            self.ahead.give(move || {
                if let Some(core) = core.upgrade() {
                    lock(&core).work_out();
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
        match self.watch.as_ref().and_then(|watch| watch.behind(token, piece)) {
            None => true,
            Some(behind) if behind.is_empty() => true,
            Some(behind) => {
                let tokens = self.environment.tok_trie().greedy_tokenize(&behind);
                lock(&self.core).matcher.validate_tokens(&tokens).is_ok_and(|valid| valid == tokens.len())
            }
        }
    }

    /// Records a token that was appended to the sequence; see [`GrammarMatcher::end`] for one that ends it.
    pub fn accept(&mut self, token: TokenId, piece: &[u8]) -> AcceptResult {
        let taken = match self.taken.last() {
            Some(Taken::Against | Taken::After) => Taken::After,
            _ if self.begun() => self.consume(token),
            _ => self.before(token, piece),
        };
        if matches!(taken, Taken::Began(_)) {
            self.trigger = Some(self.taken.len());
        }
        self.taken.push(taken);
        if taken == Taken::Against { AcceptResult::Contradicts } else { AcceptResult::Fits }
    }

    /// Records a token that ended the answer and is not part of it.
    pub fn end(&mut self) {
        self.taken.push(Taken::End);
    }

    /// Returns true if the answer is complete and nothing can follow it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.holds() && {
            let core = lock(&self.core);
            core.matcher.is_stopped() && !core.matcher.is_error() && core.matcher.stop_reason().is_ok()
        }
    }

    /// Returns true if the constraint restricts the next token.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.begun() && !matches!(self.taken.last(), Some(Taken::Against | Taken::After))
    }

    /// Rewinds by `count` tokens, or as many as it has recorded.
    pub fn rewind(&mut self, count: usize) {
        let gone = self.taken.split_off(self.taken.len().saturating_sub(count));
        let steps = gone
            .iter()
            .map(|taken| match taken {
                Taken::Began(tokens) => *tokens,
                Taken::Within => 1,
                Taken::Before | Taken::Against | Taken::After | Taken::End => 0,
            })
            .sum();
        if steps > 0 {
            let mut core = lock(&self.core);
            core.mask = None;
            // The matcher keeps a failure and reports it at the next mask.
            let _ = core.matcher.rollback(steps);
        }
        self.trigger = self.trigger.filter(|&at| at < self.taken.len());
        if let Some(watch) = &mut self.watch {
            watch.pop(gone.iter().filter(|taken| matches!(taken, Taken::Before)).count());
        }
    }

    fn begun(&self) -> bool {
        self.watch.is_none() || self.trigger.is_some()
    }

    fn consume(&mut self, token: TokenId) -> Taken {
        let mut core = lock(&self.core);
        let fits = core.matcher.try_consume_tokens(&[token as u32]).is_ok_and(|consumed| consumed == 1);
        if fits {
            core.mask = None;
            Taken::Within
        } else {
            Taken::Against
        }
    }

    fn before(&mut self, token: TokenId, piece: &[u8]) -> Taken {
        let Some(watch) = &mut self.watch else { return Taken::Before };
        let Some(behind) = watch.behind(token, piece) else {
            watch.push(piece);
            return Taken::Before;
        };
        let tokens = self.environment.tok_trie().greedy_tokenize(&behind);
        let mut core = lock(&self.core);
        match core.matcher.validate_tokens(&tokens) {
            Ok(valid) if valid == tokens.len() && core.matcher.consume_tokens(&tokens).is_ok() => {
                core.mask = None;
                Taken::Began(tokens.len())
            }
            _ => Taken::Against,
        }
    }
}

impl Core {
    fn work_out(&mut self) {
        if self.mask.is_some() {
            return;
        }
        let begun = Instant::now();
        let mask = self.matcher.compute_mask_or_eos().map(Arc::new);
        self.mask = Some(mask.map_err(|error| super::compile::readable(&error.to_string())));
        self.cost = begun.elapsed();
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
