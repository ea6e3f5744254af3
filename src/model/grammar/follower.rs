//! A grammar that goes along with one run.

use super::ahead::MaskWorker;
use super::trigger::TriggerMatcher;
use crate::events::TokenId;
use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokEnv};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A mask that took longer than this is worked out ahead the next time, beside the model: waking a thread costs some ten
/// microseconds itself.
const WORTH_AHEAD: Duration = Duration::from_micros(80);

/// The tokens that may come next, one bit each.
pub type TokenMask = SimpleVob;

/// A constraint on its way through a run. A clone goes its own way.
pub struct GrammarMatcher {
    core: Arc<Mutex<Core>>,
    environment: TokEnv,
    ahead: MaskWorker,
    /// Before a lazy constraint has begun, and what it needs to go back there.
    watch: Option<TriggerMatcher>,
    /// What became of each token that was appended, in order.
    taken: Vec<Taken>,
    /// Which of them was the trigger.
    trigger: Option<usize>,
}

/// The grammar's state, and the mask that belongs to it once it is known.
struct Core {
    matcher: Matcher,
    mask: Option<Result<Arc<TokenMask>, String>>,
    cost: Duration,
}

/// What a token did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// It came before the trigger.
    Before,
    /// It was the trigger; the text behind it counted as this many tokens.
    Began(usize),
    /// The grammar took it.
    Within,
    /// The grammar did not take it, and says nothing about what follows it.
    Against,
    /// It came after such a token.
    After,
    /// It ended the answer.
    End,
}

/// Whether the grammar took a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptResult {
    /// It did, or it has not begun.
    Fits,
    /// It did not: from here on it says nothing, unless the token is taken away again.
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

    /// The tokens that may come next; `None`: all of them, since the constraint has not begun or was given up.
    ///
    /// # Errors
    /// The grammar has become too complex to go on with; the message says so.
    pub fn mask(&mut self) -> Result<Option<Arc<TokenMask>>, String> {
        if !self.holds() {
            return Ok(None);
        }
        let mut core = lock(&self.core);
        core.work_out();
        core.mask.clone().transpose()
    }

    /// Begins to work out the next mask, if it is worth it; [`GrammarMatcher::mask`] takes it, or does the work itself.
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

    /// Whether a token that no mask was asked for can come next: one may complete a trigger and go on with text that the
    /// grammar does not begin with.
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

    /// Takes a token that was appended to the sequence; for one that ends it, see [`GrammarMatcher::end`].
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

    /// Notes a token that ended the answer, which is no part of it.
    pub fn end(&mut self) {
        self.taken.push(Taken::End);
    }

    /// Whether the answer is complete and nothing can follow it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.holds() && {
            let core = lock(&self.core);
            core.matcher.is_stopped() && !core.matcher.is_error() && core.matcher.stop_reason().is_ok()
        }
    }

    /// Whether the constraint says anything about the next token.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.begun() && !matches!(self.taken.last(), Some(Taken::Against | Taken::After))
    }

    /// Goes back by `count` tokens, as far as it was told of any.
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
            // A failure stays with the matcher, which then says so when it is asked for a mask.
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
