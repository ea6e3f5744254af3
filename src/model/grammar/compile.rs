//! Compilation of a grammar's text into a matcher for runs.

use super::deadline::{COMPILE_TIMEOUT, Deadline};
use super::mask_worker::MaskWorker;
use super::matcher::GrammarMatcher;
use super::trigger::TriggerMatcher;
use super::{Constraint, GrammarError, GrammarSource, gbnf, schema, tokens};
use crate::model::Vocabulary;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::json;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Maximum length of a grammar's source in bytes.
pub const MAX_SOURCE_BYTES: usize = 256 * 1024;
/// Maximum lines of a Lark grammar: each may be a rule that refers to the next, and the compiler recurses once per
/// rule.
const MAX_LINES: usize = 4000;
/// Stack of the compiling thread; the system only allocates the used part.
const STACK_BYTES: usize = 256 << 20;
/// Maximum number of concurrent compilations, including those that timed out.
const MAX_CONCURRENT: usize = 4;
/// Maximum number of requests that wait for another compilation to end. Each has a thread.
const MAX_WAITING: usize = 64;
/// Maximum time until another compilation ends.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// Maximum number of cached grammars.
const MAX_CACHED: usize = 32;

/// A compiler of grammars for one model. Cheap to create: the vocabulary is prepared at the first grammar.
pub struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    factory: OnceLock<Result<Arc<ParserFactory>, GrammarError>>,
    mask_worker: OnceLock<MaskWorker>,
    /// Cache entries, the most recently used last.
    cache: Mutex<Vec<(u128, Matcher)>>,
    permits: Arc<CompilePermits>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// Creates a compiler for models with this vocabulary.
    #[must_use]
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self {
            vocabulary,
            factory: OnceLock::new(),
            mask_worker: OnceLock::new(),
            cache: Mutex::new(Vec::new()),
            permits: Arc::default(),
        }
    }

    /// Returns a matcher at the start of a constraint's grammar, which is compiled or cached. Compiling takes
    /// milliseconds, in rare cases seconds, so do not call this on an async thread.
    ///
    /// # Errors
    /// [`GrammarError`], with a message for the author of the grammar.
    pub fn start_matcher(&self, constraint: &Constraint) -> Result<GrammarMatcher, GrammarError> {
        let matcher = self.matcher(&constraint.source)?;
        let environment = self.factory()?.tok_env().clone();
        let mask_worker = self.mask_worker.get_or_init(MaskWorker::start).clone();
        Ok(GrammarMatcher::new(matcher, environment, mask_worker, constraint.trigger.clone().map(TriggerMatcher::new)))
    }

    /// Returns a separate matcher for one run, at the start of the grammar and with its first mask already computed.
    fn matcher(&self, source: &GrammarSource) -> Result<Matcher, GrammarError> {
        let key = cache_key(source);
        if let Some(matcher) = self.cached(key) {
            return Ok(matcher);
        }
        check_length(source)?;
        self.factory()?;
        let permit = CompilePermit::acquire(&self.permits).ok_or(GrammarError::Busy)?;
        // Another request may have compiled it in the meantime.
        if let Some(matcher) = self.cached(key) {
            return Ok(matcher);
        }
        // The permit is kept until the matcher is in the cache, where waiting requests look for it.
        let (matcher, _permit) = self.compile(source, permit)?;
        let copy = matcher.deep_clone();
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.iter().all(|(other, _)| *other != key) {
            if cache.len() == MAX_CACHED {
                cache.remove(0);
            }
            cache.push((key, matcher));
        }
        Ok(copy)
    }

    fn cached(&self, key: u128) -> Option<Matcher> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let at = cache.iter().position(|(other, _)| *other == key)?;
        let found = cache.remove(at);
        // A deep copy, so that the work of one run does not count towards the limits of another.
        let copy = found.1.deep_clone();
        cache.push(found);
        Some(copy)
    }

    /// Translates and compiles a grammar on a separate thread with a time limit.
    fn compile(&self, source: &GrammarSource, permit: CompilePermit) -> Result<(Matcher, CompilePermit), GrammarError> {
        let factory = self.factory()?;
        let (source, vocabulary) = (source.clone(), Arc::clone(&self.vocabulary));
        let deadline = Deadline::start();
        let (done, result) = sync_channel(1);
        let work = move || {
            let compiled = translate(&source, &vocabulary, deadline)
                .and_then(|grammar| create_matcher(&factory, grammar))
                .map_err(|error| if matches!(source, GrammarSource::Lark(_)) { with_position(error) } else { error });
            // The receiver is dropped if the compilation timed out.
            let _ = done.send(compiled.map(|matcher| (matcher, permit)));
        };
        std::thread::Builder::new()
            .name("thunder-grammar".into())
            .stack_size(STACK_BYTES)
            .spawn(work)
            .map_err(|error| GrammarError::unsupported(format!("the grammar cannot be compiled now: {error}")))?;
        match result.recv_timeout(COMPILE_TIMEOUT) {
            Ok(compiled) => compiled,
            Err(RecvTimeoutError::Timeout) => Err(GrammarError::TooSlow { seconds: COMPILE_TIMEOUT.as_secs() }),
            Err(RecvTimeoutError::Disconnected) => Err(GrammarError::unsupported("the grammar cannot be compiled")),
        }
    }

    fn factory(&self) -> Result<Arc<ParserFactory>, GrammarError> {
        self.factory
            .get_or_init(|| {
                if self.vocabulary.is_empty() {
                    return Err(GrammarError::unsupported("the model has no vocabulary"));
                }
                let environment = tokens::environment(&self.vocabulary);
                let mut factory = ParserFactory::new(
                    &environment,
                    InferenceCapabilities::default(),
                    &SlicedBiasComputer::general_slices(),
                )
                .map_err(|error| {
                    GrammarError::unsupported(format!("this model's vocabulary does not support grammars: {error}"))
                })?;
                *factory.limits_mut() = limits();
                factory.quiet();
                Ok(Arc::new(factory))
            })
            .clone()
    }
}

/// Rejects a grammar that is too long to translate.
fn check_length(source: &GrammarSource) -> Result<(), GrammarError> {
    let bytes = match source {
        GrammarSource::JsonSchema(value) => value.to_string().len(),
        GrammarSource::JsonObject => 0,
        GrammarSource::Gbnf(text) | GrammarSource::Lark(text) | GrammarSource::Regex(text) => text.len(),
    };
    if bytes > MAX_SOURCE_BYTES { Err(GrammarError::TooLong { bytes, limit: MAX_SOURCE_BYTES }) } else { Ok(()) }
}

/// Translates a grammar for llguidance.
fn translate(
    source: &GrammarSource,
    vocabulary: &Vocabulary,
    deadline: Deadline,
) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match source {
        GrammarSource::JsonSchema(value) => {
            schema::check(value)?;
            TopLevelGrammar::from_json_schema(schema::prepare(value, true))
        }
        GrammarSource::JsonObject => {
            TopLevelGrammar::from_json_schema(schema::prepare(&json!({"type": "object"}), true))
        }
        GrammarSource::Gbnf(text) => TopLevelGrammar::from_lark(gbnf::to_lark(text, vocabulary, deadline)?),
        GrammarSource::Lark(text) => {
            let lines = text.lines().count();
            if lines > MAX_LINES {
                return Err(GrammarError::unsupported(format!(
                    "the grammar has {lines} lines; the maximum is {MAX_LINES}"
                )));
            }
            TopLevelGrammar::from_lark(text.clone())
        }
        GrammarSource::Regex(text) => {
            // Anchors are redundant, because the whole answer must match.
            let text = text.strip_prefix('^').unwrap_or(text);
            let text = match text.strip_suffix('$') {
                Some(inner) if !inner.ends_with('\\') => inner,
                _ => text,
            };
            TopLevelGrammar::from_regex(text)
        }
    })
}

/// Compiles a translated grammar. Rejects one that no token can start here instead of during the run.
fn create_matcher(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<Matcher, GrammarError> {
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    if let Some(error) = matcher.get_error() {
        return Err(GrammarError::Unsupported(user_message(&error)));
    }
    match matcher.compute_mask_or_eos() {
        Ok(mask) if mask.num_set() > 0 => Ok(matcher),
        Ok(_) => Err(GrammarError::unsupported("no token of this model can start an answer in this grammar")),
        Err(error) => Err(GrammarError::Unsupported(user_message(&error.to_string()))),
    }
}

/// Converts an error of llguidance that starts with a position in the source, `at LINE(COLUMN): `.
fn with_position(error: GrammarError) -> GrammarError {
    let parse = |text: &str| {
        let (position, message) = text.strip_prefix("at ")?.split_once(": ")?;
        let (line, column) = position.strip_suffix(')')?.split_once('(')?;
        Some(GrammarError::Syntax {
            line: line.parse().ok()?,
            column: column.parse().ok()?,
            message: message.to_owned(),
        })
    };
    match &error {
        GrammarError::Unsupported(text) => parse(text).unwrap_or(error),
        _ => error,
    }
}

/// Returns llguidance's default limits, which bound the time of a mask, with fewer lexer states and short error
/// messages.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 50_000, verbose_errors: false, ..ParserLimits::default() }
}

/// The compilations of one compiler.
#[derive(Default)]
struct CompilePermits {
    counts: Mutex<PermitCounts>,
    freed: Condvar,
}

#[derive(Default)]
struct PermitCounts {
    active: usize,
    waiting: usize,
}

/// A permit for one concurrent compilation.
struct CompilePermit(Arc<CompilePermits>);

impl CompilePermit {
    /// Waits for a permit. Returns `None` if none becomes free in time, or too many requests wait.
    fn acquire(permits: &Arc<CompilePermits>) -> Option<Self> {
        let mut counts = permits.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.active >= MAX_CONCURRENT {
            if counts.waiting >= MAX_WAITING {
                return None;
            }
            counts.waiting += 1;
            let is_full = |counts: &mut PermitCounts| counts.active >= MAX_CONCURRENT;
            let freed = permits.freed.wait_timeout_while(counts, MAX_WAIT, is_full);
            (counts, _) = freed.unwrap_or_else(PoisonError::into_inner);
            counts.waiting -= 1;
            if counts.active >= MAX_CONCURRENT {
                return None;
            }
        }
        counts.active += 1;
        drop(counts);
        Some(Self(Arc::clone(permits)))
    }
}

impl Drop for CompilePermit {
    fn drop(&mut self) {
        self.0.counts.lock().unwrap_or_else(PoisonError::into_inner).active -= 1;
        self.0.freed.notify_one();
    }
}

fn cache_key(source: &GrammarSource) -> u128 {
    let schema;
    let (kind, text) = match source {
        GrammarSource::JsonSchema(value) => {
            schema = value.to_string();
            ("schema", schema.as_str())
        }
        GrammarSource::JsonObject => ("object", ""),
        GrammarSource::Gbnf(text) => ("gbnf", text.as_str()),
        GrammarSource::Lark(text) => ("lark", text.as_str()),
        GrammarSource::Regex(text) => ("regex", text.as_str()),
    };
    xxhash_rust::xxh3::xxh3_128(format!("{kind}\0{text}").as_bytes())
}

/// Shortens an error message of llguidance: removes the text of the grammar and the names of internal settings.
pub(super) fn user_message(message: &str) -> String {
    const MAX_CHARS: usize = 300;
    let message = message.trim_start_matches("panic: ");
    let first = message.lines().next().unwrap_or_default();
    // For a regular expression, the last line of llguidance's diagram contains the error.
    let reason = message.lines().find_map(|line| line.trim_start().strip_prefix("error: "));
    let text = match (first, reason) {
        ("NoExtensionBias", _) => "no token of this model can continue this grammar here".to_owned(),
        (first, _) if first.contains("limits.") || first.contains("too big") || first.contains("oo complex") => {
            "the grammar is too large or too complex; simplify it".to_owned()
        }
        (first, Some(reason)) => format!("{}: {reason}", first.trim_end_matches(':')),
        (first, None) => first.to_owned(),
    };
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::{CompilePermit, GrammarCompiler, MAX_CONCURRENT};
    use crate::model::grammar::testing::vocabulary;
    use crate::model::grammar::{GrammarError, GrammarSource};

    #[test]
    fn translation_counts_as_compilation() {
        let grammars = GrammarCompiler::new(vocabulary());
        let compile = || grammars.matcher(&GrammarSource::Gbnf("root ::= x".into())).err();
        let permits: Vec<_> = (0..MAX_CONCURRENT).map(|_| CompilePermit::acquire(&grammars.permits)).collect();
        assert_eq!(compile(), Some(GrammarError::Busy));
        drop(permits);
        assert!(matches!(compile(), Some(GrammarError::Syntax { .. })));
    }

    #[test]
    fn more_grammars_than_permits_wait_for_each_other() {
        let grammars = GrammarCompiler::new(vocabulary());
        let compile =
            |number: usize| grammars.matcher(&GrammarSource::Regex(format!("a{{1,{}}}", number % 12 + 1))).err();
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..24).map(|number| scope.spawn(move || compile(number))).collect();
            assert!(all.into_iter().all(|thread| thread.join().unwrap().is_none()));
        });
    }
}
