//! Registry of generations, which other connections can poll and abort by their `genkey`.

use super::perf::{GenerationFigures, GenerationStatistics};
use super::response::KoboldLogprobs;
use crate::api::shared::attention::AttentionEvent;
use crate::events::{Scope, Tenant};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

/// Maximum length of a stored key.
const MAX_KEY_CHARS: usize = 256;
/// Maximum number of ended generations of an owner that are kept.
const MAX_ENDED: usize = 16;
/// Maximum bytes of the ended generations of an owner. The newest one is always kept.
const MAX_ENDED_BYTES: usize = 4 << 20;

/// Active generations by number, and the last ended ones; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Genkeys(Arc<Mutex<Generations>>);

#[derive(Default)]
struct Generations {
    /// Number of the next generation.
    next: u64,
    active: HashMap<u64, ActiveGeneration>,
    /// Newest last.
    ended: VecDeque<EndedGeneration>,
    statistics: HashMap<Option<Tenant>, GenerationStatistics>,
}

/// Owner and key of a generation.
#[derive(PartialEq, Eq)]
struct GenerationKey {
    owner: Option<Tenant>,
    /// The client's key; empty for none.
    key: String,
}

struct ActiveGeneration {
    key: GenerationKey,
    text: Arc<Mutex<String>>,
    aborted: CancellationToken,
}

struct EndedGeneration {
    key: GenerationKey,
    text: String,
    logprobs: Option<Arc<KoboldLogprobs>>,
    /// Approximate size of both.
    bytes: usize,
}

/// A registered generation; dropping it ends it.
pub(super) struct GenerationEntry {
    genkeys: Genkeys,
    number: u64,
    text: Arc<Mutex<String>>,
    aborted: CancellationToken,
}

impl Genkeys {
    /// Registers a generation.
    pub(super) fn register(&self, owner: Option<&Tenant>, key: &str) -> GenerationEntry {
        let (text, aborted) = (Arc::<Mutex<String>>::default(), CancellationToken::new());
        let key = GenerationKey { owner: owner.cloned(), key: key.chars().take(MAX_KEY_CHARS).collect() };
        let mut generations = self.lock();
        let number = generations.next;
        generations.next += 1;
        let active = ActiveGeneration { key, text: Arc::clone(&text), aborted: aborted.clone() };
        generations.active.insert(number, active);
        drop(generations);
        GenerationEntry { genkeys: self.clone(), number, text, aborted }
    }

    /// Returns the text of the newest generation in the scope with that key: the text so far, or if none is active, that
    /// of the newest ended one.
    pub(super) fn text(&self, scope: &Scope, key: &str) -> String {
        let generations = self.lock();
        let active = generations.active.iter().filter(|(_, active)| active.key.matches(scope, key));
        match active.max_by_key(|(number, _)| **number) {
            Some((_, active)) => locked(&active.text).clone(),
            None => generations.newest_ended(scope, key).map(|ended| ended.text.clone()).unwrap_or_default(),
        }
    }

    /// Aborts all generations in the scope with that key. Returns true if there were any.
    pub(super) fn abort(&self, scope: &Scope, key: &str) -> bool {
        let generations = self.lock();
        let mut found = false;
        for active in generations.active.values().filter(|active| active.key.matches(scope, key)) {
            active.aborted.cancel();
            found = true;
        }
        found
    }

    /// Returns the log-probabilities of the newest ended generation in the scope with that key, if it has any.
    pub(super) fn logprobs(&self, scope: &Scope, key: &str) -> Option<Arc<KoboldLogprobs>> {
        self.lock().newest_ended(scope, key).and_then(|ended| ended.logprobs.clone())
    }

    /// Returns the statistics of the generations in the scope.
    pub(super) fn statistics(&self, scope: &Scope) -> GenerationStatistics {
        let generations = self.lock();
        let in_scope = generations.statistics.iter().filter(|(owner, _)| scope.includes(owner.as_ref()));
        in_scope.map(|(_, statistics)| *statistics).fold(GenerationStatistics::default(), GenerationStatistics::merge)
    }

    fn lock(&self) -> MutexGuard<'_, Generations> {
        locked(&self.0)
    }
}

impl Generations {
    fn newest_ended(&self, scope: &Scope, key: &str) -> Option<&EndedGeneration> {
        self.ended.iter().rev().find(|ended| ended.key.matches(scope, key))
    }

    /// Keeps an ended generation in place of earlier ones with the same owner and key. The limits apply to each owner,
    /// so that none can remove the answers of others.
    fn keep(&mut self, key: GenerationKey, text: String, logprobs: Option<Arc<KoboldLogprobs>>) {
        let bytes = text.len() + logprobs.as_ref().map_or(0, |logprobs| logprobs.bytes());
        let owner = key.owner.clone();
        self.ended.retain(|ended| ended.key != key);
        self.ended.push_back(EndedGeneration { key, text, logprobs, bytes });
        let own = self.ended.iter().filter(|ended| ended.key.owner == owner);
        let (mut count, mut bytes) = own.fold((0, 0), |(count, bytes), ended| (count + 1, bytes + ended.bytes));
        self.ended.retain(|ended| {
            let is_over = count > MAX_ENDED || (count > 1 && bytes > MAX_ENDED_BYTES);
            let is_removed = is_over && ended.key.owner == owner;
            if is_removed {
                (count, bytes) = (count - 1, bytes - ended.bytes);
            }
            !is_removed
        });
    }

    fn statistics_of(&mut self, owner: Option<&Tenant>) -> &mut GenerationStatistics {
        self.statistics.entry(owner.cloned()).or_default()
    }
}

impl GenerationKey {
    fn matches(&self, scope: &Scope, key: &str) -> bool {
        self.key == key && scope.includes(self.owner.as_ref())
    }
}

impl GenerationEntry {
    /// Appends text that other connections can read.
    pub(super) fn add(&self, text: &str) {
        locked(&self.text).push_str(text);
    }

    /// Removes characters from the end.
    pub(super) fn retract(&self, chars: usize) {
        let mut text = locked(&self.text);
        for _ in 0..chars {
            text.pop();
        }
    }

    /// Applies an event of an answer to `input_ids`. The text is that of the first sample.
    pub(super) fn apply(&self, event: &AttentionEvent) {
        match event {
            AttentionEvent::Token(token) if token.sample == 0 => self.add(token.text()),
            AttentionEvent::Retract { sample: 0, chars, .. } => self.retract(*chars),
            _ => {}
        }
    }

    /// Counts the start of the generation in the statistics.
    pub(super) fn count_start(&self) {
        let mut generations = self.genkeys.lock();
        let active = generations.active.get(&self.number);
        let Some(owner) = active.map(|active| active.key.owner.clone()) else { return };
        generations.statistics_of(owner.as_ref()).add_start();
    }

    /// Ends the generation. Its text and the log-probabilities of its complete answer are kept.
    pub(super) fn end(&self, logprobs: Option<Arc<KoboldLogprobs>>, figures: GenerationFigures) {
        let mut generations = self.genkeys.lock();
        let Some(ActiveGeneration { key, .. }) = generations.active.remove(&self.number) else { return };
        generations.statistics_of(key.owner.as_ref()).add_end(figures);
        generations.keep(key, self.text(), logprobs);
    }

    /// Ends the generation before its answer is complete, unless it has ended. `figures` is `None` if the statistics do
    /// not count it.
    pub(super) fn end_incomplete(&self, figures: Option<GenerationFigures>) {
        let mut generations = self.genkeys.lock();
        let Some(ActiveGeneration { key, .. }) = generations.active.remove(&self.number) else { return };
        if let Some(figures) = figures {
            generations.statistics_of(key.owner.as_ref()).add_end(figures);
        }
        let text = self.text();
        // A rejected request has generated no text and does not replace an earlier answer.
        if !text.is_empty() {
            generations.keep(key, text, None);
        }
    }

    /// Returns the token that cancels the runs when the generation is aborted.
    pub(super) fn aborted(&self) -> CancellationToken {
        self.aborted.clone()
    }

    /// Returns the text so far.
    pub(super) fn text(&self) -> String {
        locked(&self.text).clone()
    }
}

impl Drop for GenerationEntry {
    fn drop(&mut self) {
        self.end_incomplete(None);
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(genkeys: &Genkeys, key: &str) -> String {
        genkeys.text(&Scope::All, key)
    }

    #[test]
    fn text_of_ended_generation_is_kept_until_next_one() {
        let genkeys = Genkeys::default();
        let first = genkeys.register(None, "a");
        first.add("first");
        drop(first);
        assert_eq!((text(&genkeys, "a").as_str(), genkeys.abort(&Scope::All, "a")), ("first", false));
        drop(genkeys.register(None, "a"));
        assert_eq!(text(&genkeys, "a"), "first", "a request without an answer replaces nothing");
        let second = genkeys.register(None, "a");
        assert_eq!((text(&genkeys, "a").as_str(), text(&genkeys, "b").as_str()), ("", ""));
        second.add("second");
        second.end(None, GenerationFigures::aborted(None, 1, 7));
        assert_eq!((text(&genkeys, "a").as_str(), second.text().as_str()), ("second", "second"));
    }

    #[test]
    fn ended_generations_are_limited_in_number_and_bytes() {
        let genkeys = Genkeys::default();
        let generate = |key: &str, bytes: usize| genkeys.register(None, key).add(&"x".repeat(bytes));
        (0..=MAX_ENDED).for_each(|number| generate(&number.to_string(), 1));
        assert_eq!((text(&genkeys, "0").len(), text(&genkeys, "1").len()), (0, 1));
        generate("long", MAX_ENDED_BYTES);
        assert_eq!((text(&genkeys, "16").len(), text(&genkeys, "long").len()), (0, MAX_ENDED_BYTES));
    }

    #[test]
    fn limits_of_ended_generations_apply_to_each_owner() {
        let genkeys = Genkeys::default();
        let generate = |owner: &str, key: &str, bytes: usize| {
            genkeys.register(Some(&Tenant::from(owner)), key).add(&"x".repeat(bytes));
        };
        generate("ann", "a", 5);
        (0..2 * MAX_ENDED).for_each(|number| generate("bob", &number.to_string(), 1));
        generate("bob", "long", 2 * MAX_ENDED_BYTES);
        assert_eq!((text(&genkeys, "a").len(), text(&genkeys, "31").len()), (5, 0));
    }

    #[test]
    fn logprobs_count_as_bytes_of_ended_generations() {
        let genkeys = Genkeys::default();
        let generate = |key: &str| {
            let entry = genkeys.register(None, key);
            entry.add("x");
            entry.end(Some(Arc::new(KoboldLogprobs::with_tokens(10_000))), GenerationFigures::aborted(None, 1, 7));
        };
        (0..MAX_ENDED).for_each(|number| generate(&number.to_string()));
        let kept = (0..MAX_ENDED).filter(|number| genkeys.logprobs(&Scope::All, &number.to_string()).is_some()).count();
        assert!((1..MAX_ENDED).contains(&kept), "{kept}");
        assert!(genkeys.logprobs(&Scope::All, "15").is_some(), "the newest one is kept");
    }

    #[test]
    fn statistics_count_only_started_generations() {
        let genkeys = Genkeys::default();
        let statistics = || {
            let statistics = genkeys.statistics(&Scope::All);
            (statistics.last_start.is_some(), statistics.ended)
        };
        drop(genkeys.register(None, "rejected"));
        assert_eq!(statistics(), (false, 0));
        let disconnected = genkeys.register(None, "disconnected");
        disconnected.count_start();
        disconnected.end_incomplete(Some(GenerationFigures::aborted(None, 1, 7)));
        drop(disconnected);
        assert_eq!(statistics(), (true, 1));
    }

    #[test]
    fn generations_of_other_tenants_are_hidden() {
        let genkeys = Genkeys::default();
        let tenant = |name: &str| Tenant::from(name);
        let scope = |name: &str| Scope::Owned { tenant: Some(tenant(name)), includes_unowned: false };
        let entry = genkeys.register(Some(&tenant("ann")), "");
        entry.add("secret");
        entry.end(None, GenerationFigures::aborted(None, 1, 7));
        assert_eq!(
            (genkeys.text(&scope("ann"), "").as_str(), genkeys.text(&scope("bob"), "").as_str()),
            ("secret", "")
        );
        let [ann, bob] = ["ann", "bob"].map(|name| genkeys.statistics(&scope(name)).ended);
        assert_eq!((ann, bob), (1, 0));
    }
}
