//! Derivation of a model's answer syntax: known messages are rendered with its chat template, and the texts are
//! compared.
//!
//! Templates are untrusted: a rendering has little fuel and bounded length, the texts are compared in linear time, and
//! a derived form is used only if it parses the rendered calls.

mod calls;
mod probe;
mod segments;

use super::ChatTemplate;
use super::answer::{AnswerFormat, AnswerParser};
use super::family::ModelFamily;
use super::renderer::JinjaRenderer;
use super::syntax::{AnswerSyntax, CallForm, ReasoningMarkers};
use probe::{CONTENT, KnownCall, Probe, REASONING};
use segments::{common_end, common_start, is_marker, segments};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use xxhash_rust::xxh3::xxh3_128;

/// Maximum instructions per rendering of a known message.
pub(super) const FUEL: u64 = 400_000;
/// Maximum length of a marker around ordinary text.
const MAX_MARKER: usize = 80;
/// Number of cached syntaxes.
const MAX_CACHED: usize = 16;

/// Fields in which templates look for reasoning.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

impl AnswerFormat {
    /// Returns the format for a plain prompt and a model with this chat template: no tools are offered.
    #[must_use]
    pub fn plain(template: &str) -> Self {
        Self {
            syntax: derive_cached(template),
            tools: Vec::new(),
            separates_reasoning: true,
            thinking: false,
            single: false,
        }
    }
}

/// Returns the answer syntax for a template, derived or cached.
#[must_use]
pub(super) fn derive_cached(source: &str) -> Arc<AnswerSyntax> {
    static CACHE: Mutex<VecDeque<(u128, Arc<AnswerSyntax>)>> = Mutex::new(VecDeque::new());
    let hash = xxh3_128(source.as_bytes());
    let cache = || CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, syntax)) = cache().iter().find(|(other, _)| *other == hash) {
        return Arc::clone(syntax);
    }
    let syntax = match ChatTemplate::new(Some(source).filter(|source| !source.is_empty()), "", "") {
        Ok(template) => template.syntax(),
        Err(_) => Arc::new(AnswerSyntax::from_markers(source)),
    };
    let mut cache = cache();
    cache.truncate(MAX_CACHED - 1);
    cache.push_front((hash, Arc::clone(&syntax)));
    syntax
}

/// Derives the answer syntax from a template and its text. `arguments_as_text` is true if it expects the arguments of a
/// call as JSON text. Parts that cannot be derived come from the family.
pub(super) fn derive_syntax(template: &JinjaRenderer, source: &str, arguments_as_text: bool) -> AnswerSyntax {
    let mut syntax = AnswerSyntax::from_markers(source);
    if syntax.family == ModelFamily::Harmony {
        return syntax;
    }
    let probe = Probe::new(template, arguments_as_text);
    let (Some(start), Some(plain_answer)) = (probe.after_user(None), probe.answer(CONTENT, None, &[])) else {
        return syntax;
    };
    let renderings = Renderings { start, plain_answer };
    renderings.derive_reasoning(&probe, &mut syntax);
    renderings.derive_text(&mut syntax);
    let tail = renderings.plain_answer.split_once(CONTENT).map(|(_, tail)| tail);
    Renderings::derive_end(&probe, tail, &mut syntax);
    let markers = markers_before(&syntax);
    let rest = |text: &str| renderings.answer_text(text, &markers).to_owned();
    if let Some(form) = calls::derive(&probe, &rest, tail) {
        let derived = AnswerSyntax { calls: vec![form], ..syntax.clone() };
        if parses_known_calls(&derived, &probe, &rest) {
            syntax.calls = add_family_forms(derived.calls, std::mem::take(&mut syntax.calls), syntax.family);
            if let Some(text_marker) = &syntax.text_marker
                && let Some(separator) = syntax.calls[0].separator.marker()
            {
                syntax.ignored_markers.push(format!("{separator}{text_marker}"));
            }
        }
    }
    syntax
}

/// Adds the forms known for the family to the derived ones.
fn add_family_forms(mut derived: Vec<CallForm>, known: Vec<CallForm>, family: ModelFamily) -> Vec<CallForm> {
    if family == ModelFamily::Llama3 && derived[0].is_bare() && derived[0].shape == known[0].shape {
        return known;
    }
    if family == ModelFamily::Mistral {
        let other = |form: &CallForm| form.shape != derived[0].shape && form.list != derived[0].list;
        let others: Vec<CallForm> = known.into_iter().filter(other).collect();
        derived.extend(others);
    }
    derived
}

/// Returns true if the form parses the known calls in their renderings.
fn parses_known_calls(syntax: &AnswerSyntax, probe: &Probe<'_>, rest: &dyn Fn(&str) -> String) -> bool {
    let answer_format = Arc::new(AnswerFormat {
        syntax: Arc::new(syntax.clone()),
        tools: probe::tools(),
        separates_reasoning: true,
        thinking: false,
        single: false,
    });
    let samples = calls::samples(probe);
    let parses = |(text, known): &(String, Vec<KnownCall>)| {
        let mut parser = AnswerParser::new(Arc::clone(&answer_format));
        parser.push(&rest(text));
        parser.finish();
        let parsed = &parser.message().calls;
        // Some templates cannot render several calls, or a call without arguments.
        let optional = known.len() > 1 || known[0].arguments.as_object().is_some_and(serde_json::Map::is_empty);
        let same = parsed.len() == known.len()
            && parsed.iter().zip(known).all(|(call, known)| {
                call.name == known.name
                    && serde_json::from_str::<Value>(&call.arguments).is_ok_and(|value| value == known.arguments)
            });
        same || optional
    };
    !samples.is_empty() && samples.iter().all(parses)
}

/// Renderings of the start of an answer and of a plain answer, without the text up to the user's message.
struct Renderings {
    start: String,
    plain_answer: String,
}

impl Renderings {
    /// Returns the length of the text before the answer itself.
    fn header_len(&self, text: &str) -> usize {
        if text.starts_with(&self.start) { self.start.len() } else { common_start(&self.start, text) }
    }

    /// Returns the answer in a rendering, without empty reasoning before it.
    fn answer_text<'t>(&self, text: &'t str, markers: &[String]) -> &'t str {
        let whole = &text[self.header_len(text)..];
        let mut rest = whole;
        loop {
            let trimmed = rest.trim_start();
            match markers.iter().find(|marker| trimmed.starts_with(marker.as_str())) {
                Some(marker) => rest = &trimmed[marker.len()..],
                None if rest.len() == whole.len() => return whole,
                None => return trimmed,
            }
        }
    }

    fn derive_reasoning(&self, probe: &Probe<'_>, syntax: &mut AnswerSyntax) {
        let found = REASONING_FIELDS.iter().find_map(|field| {
            let with_text = probe.answer(CONTENT, Some(field), &[]);
            let has_reasoning = |text: &String| text.contains(REASONING);
            with_text
                .filter(has_reasoning)
                .or_else(|| probe.answer("", Some(field), &[probe::call(0)]).filter(has_reasoning))
        });
        let Some((before, after)) = found.as_ref().and_then(|text| text.split_once(REASONING)) else {
            return;
        };
        let Some(close) =
            segments(after).into_iter().find(|segment| !segment.trim().is_empty()).filter(|s| is_marker(s))
        else {
            return;
        };
        let header = self
            .header_len(&self.plain_answer)
            .min(self.header_len(before))
            .min(common_start(&self.plain_answer, before));
        let open = before.get(header..).unwrap_or_default().trim();
        let last = segments(before.trim_end()).last().copied().unwrap_or_default();
        // A marker that also precedes a plain answer does not belong to the reasoning.
        let precedes_text =
            self.plain_answer.split_once(CONTENT).is_some_and(|(before, _)| before.trim_end().ends_with(last));
        let open = if open.is_empty() && is_marker(last) && !precedes_text { last } else { open };
        // The prompt may start the reasoning with a different text.
        let open_in_prompt = self.start.get(header..).unwrap_or_default().trim();
        let open = if open.is_empty() { open_in_prompt } else { open };
        syntax.reasoning_markers = ReasoningMarkers::new(open, close);
        // A separate message may follow, whose header is not part of the text.
        let Some((_, rest)) = after.split_once(close) else { return };
        let Some((between, _)) = rest.split_once(CONTENT) else { return };
        let text_open =
            self.plain_answer.split_once(CONTENT).map_or("", |(before, _)| &before[self.header_len(before)..]);
        let between = between.strip_suffix(text_open).unwrap_or(between);
        add_ignored_text(syntax, between);
    }

    /// Derives the markers before an answer's text.
    fn derive_text(&self, syntax: &mut AnswerSyntax) {
        let Some((before, _)) = self.plain_answer.split_once(CONTENT) else { return };
        let open = self.answer_text(before, &markers_before(syntax));
        if open.contains('<') || open.contains('[') {
            add_ignored_text(syntax, open);
        } else if open.ends_with('\n') && !open.trim().is_empty() && open.len() <= MAX_MARKER {
            syntax.text_marker = Some(open.to_owned());
        }
    }

    /// Derives the markers after an answer's text: those before the token that ends the turn.
    fn derive_end(probe: &Probe<'_>, tail: Option<&str>, syntax: &mut AnswerSyntax) {
        let (Some(tail), Some(called)) = (tail, probe.calls(&[probe::call(0)])) else { return };
        let (own, common) = tail.split_at(tail.len() - common_end(tail, &called));
        let mut ends: Vec<&str> = segments(own).into_iter().filter(|segment| is_marker(segment)).collect();
        let common: Vec<&str> = segments(common).into_iter().filter(|segment| is_marker(segment)).collect();
        if common.len() > 1 {
            ends.push(common[0]);
        }
        for end in ends {
            add_ignored_text(syntax, end);
        }
    }
}

/// Returns texts that may precede an answer's text or its calls.
fn markers_before(syntax: &AnswerSyntax) -> Vec<String> {
    let reasoning = [&syntax.reasoning_markers.open, &syntax.reasoning_markers.close];
    reasoning.into_iter().chain(&syntax.ignored_markers).filter(|marker| !marker.is_empty()).cloned().collect()
}

/// Adds a text that is not part of the answer's text.
fn add_ignored_text(syntax: &mut AnswerSyntax, text: &str) {
    let text = text.trim();
    let is_short = text.len() > 2 && text.len() <= MAX_MARKER;
    if is_short
        && segments(text).into_iter().any(is_marker)
        && syntax.reasoning_markers.open != text
        && !syntax.ignored_markers.iter().any(|known| known == text)
    {
        syntax.ignored_markers.push(text.to_owned());
    }
}

#[cfg(test)]
pub(super) mod tests;
