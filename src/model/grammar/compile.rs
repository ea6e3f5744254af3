//! From a grammar's text to what follows a run.

use super::ahead::MaskWorker;
use super::follower::GrammarMatcher;
use super::trigger::TriggerMatcher;
use super::{Constraint, GrammarError, GrammarSource, gbnf, schema, tokens};
use crate::model::Vocabulary;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Longest source, in bytes.
const MAX_SOURCE_BYTES: usize = 256 * 1024;
/// Most lines of a Lark grammar: each may be a rule that needs another, and the compiler goes down that chain.
const MAX_LINES: usize = 4000;
/// Stack of the compiling thread, which the system gives only as far as it is used.
const STACK: usize = 256 << 20;
/// How long compiling may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many may be compiled at the same time, those included that nobody waits for any more.
const AT_ONCE: usize = 4;
/// Compiled grammars that are kept.
const KEPT: usize = 32;

/// Compiles grammars for one model. Cheap to make: what it needs of the vocabulary is worked out at its first grammar.
pub struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    factory: OnceLock<Result<Arc<ParserFactory>, GrammarError>>,
    ahead: OnceLock<MaskWorker>,
    /// The most recently used last.
    kept: Mutex<Vec<(u128, Matcher)>>,
    compiling: Arc<AtomicUsize>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// For models with this vocabulary.
    #[must_use]
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self {
            vocabulary,
            factory: OnceLock::new(),
            ahead: OnceLock::new(),
            kept: Mutex::new(Vec::new()),
            compiling: Arc::new(AtomicUsize::new(0)),
        }
    }

    /// Compiles a constraint, or takes it from those it has compiled before. Takes milliseconds, seconds at worst: not to be
    /// called on an async thread.
    ///
    /// # Errors
    /// [`GrammarError`], for the person who wrote the grammar.
    pub fn follow(&self, constraint: &Constraint) -> Result<GrammarMatcher, GrammarError> {
        let matcher = self.matcher(&constraint.source)?;
        let environment = self.factory()?.tok_env().clone();
        let ahead = self.ahead.get_or_init(MaskWorker::start).clone();
        Ok(GrammarMatcher::new(matcher, environment, ahead, constraint.trigger.clone().map(TriggerMatcher::new)))
    }

    /// A matcher of its own for one run, at the grammar's start and with its first mask worked out.
    fn matcher(&self, source: &GrammarSource) -> Result<Matcher, GrammarError> {
        let key = key(source);
        if let Some(kept) = self.kept(key) {
            return Ok(kept);
        }
        let grammar = self.translate(source)?;
        let matcher = self.compile(grammar)?;
        let copy = matcher.deep_clone();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.iter().all(|(other, _)| *other != key) {
            if kept.len() == KEPT {
                kept.remove(0);
            }
            kept.push((key, matcher));
        }
        Ok(copy)
    }

    fn kept(&self, key: u128) -> Option<Matcher> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(other, _)| *other == key)?;
        let found = kept.remove(at);
        // One run's work shall not weigh on another's limits: nothing is shared.
        let copy = found.1.deep_clone();
        kept.push(found);
        Some(copy)
    }

    fn translate(&self, source: &GrammarSource) -> Result<TopLevelGrammar, GrammarError> {
        let fits = |text: &str| {
            if text.len() > MAX_SOURCE_BYTES {
                Err(GrammarError::TooLong { bytes: text.len(), limit: MAX_SOURCE_BYTES })
            } else {
                Ok(())
            }
        };
        Ok(match source {
            GrammarSource::JsonSchema(value) => {
                fits(&value.to_string())?;
                TopLevelGrammar::from_json_schema(schema::prepare(value)?)
            }
            GrammarSource::JsonObject => {
                TopLevelGrammar::from_json_schema(schema::prepare(&json!({"type": "object"}))?)
            }
            GrammarSource::Gbnf(text) => {
                fits(text)?;
                TopLevelGrammar::from_lark(gbnf::to_lark(text, &self.vocabulary)?)
            }
            GrammarSource::Lark(text) => {
                fits(text)?;
                let lines = text.lines().count();
                if lines > MAX_LINES {
                    return Err(GrammarError::unsupported(format!(
                        "the grammar has {lines} lines, at most {MAX_LINES} are taken"
                    )));
                }
                TopLevelGrammar::from_lark(text.clone())
            }
            GrammarSource::Regex(text) => {
                fits(text)?;
                // Anchors say what holds anyway.
                let text = text.strip_prefix('^').unwrap_or(text);
                let text = match text.strip_suffix('$') {
                    Some(inner) if !inner.ends_with('\\') => inner,
                    _ => text,
                };
                TopLevelGrammar::from_regex(text)
            }
        })
    }

    fn compile(&self, grammar: TopLevelGrammar) -> Result<Matcher, GrammarError> {
        let factory = self.factory()?;
        let running = Running::begin(&self.compiling).ok_or(GrammarError::Busy)?;
        let (done, result) = sync_channel(1);
        let work = move || {
            let _running = running;
            let mut matcher = Matcher::new(factory.create_parser(grammar));
            let checked = match matcher.get_error() {
                Some(error) => Err(GrammarError::Unsupported(readable(&error))),
                // A grammar that nothing can begin is told now, and not by the run.
                None => match matcher.compute_mask_or_eos() {
                    Ok(mask) if mask.num_set() > 0 => Ok(matcher),
                    Ok(_) => {
                        Err(GrammarError::unsupported("no token of this model can begin an answer of this grammar"))
                    }
                    Err(error) => Err(GrammarError::Unsupported(readable(&error.to_string()))),
                },
            };
            // Nobody waits any more when it took too long.
            let _ = done.send(checked);
        };
        std::thread::Builder::new()
            .name("thunder-grammar".into())
            .stack_size(STACK)
            .spawn(work)
            .map_err(|error| GrammarError::unsupported(format!("the grammar cannot be compiled now: {error}")))?;
        match result.recv_timeout(PATIENCE) {
            Ok(checked) => checked,
            Err(RecvTimeoutError::Timeout) => Err(GrammarError::TooSlow { seconds: PATIENCE.as_secs() }),
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
                    GrammarError::unsupported(format!("this model's vocabulary takes no grammar: {error}"))
                })?;
                *factory.limits_mut() = limits();
                factory.quiet();
                Ok(Arc::new(factory))
            })
            .clone()
    }
}

/// llguidance's defaults, which bound a mask to a few milliseconds, with errors for people and not for its authors.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 50_000, verbose_errors: false, ..ParserLimits::default() }
}

/// One of the compilations that may run at the same time.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn begin(count: &Arc<AtomicUsize>) -> Option<Self> {
        let mut now = count.load(Ordering::Acquire);
        while now < AT_ONCE {
            match count.compare_exchange_weak(now, now + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Self(Arc::clone(count))),
                Err(other) => now = other,
            }
        }
        None
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn key(source: &GrammarSource) -> u128 {
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

/// llguidance's message, for people: without the grammar around it, and without names of its settings.
pub(super) fn readable(message: &str) -> String {
    const MAX_CHARS: usize = 300;
    let message = message.trim_start_matches("panic: ");
    let first = message.lines().next().unwrap_or_default();
    // A mistake in a regular expression is told by the last line of a picture of it.
    let reason = message.lines().find_map(|line| line.trim_start().strip_prefix("error: "));
    let text = match (first, reason) {
        ("NoExtensionBias", _) => "no token of this model can go on here as the grammar wants it".to_owned(),
        (first, _) if first.contains("limits.") || first.contains("too big") || first.contains("oo complex") => {
            "the grammar is too large or too entangled; a simpler one is needed".to_owned()
        }
        (first, Some(reason)) => format!("{}: {reason}", first.trim_end_matches(':')),
        (first, None) => first.to_owned(),
    };
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
