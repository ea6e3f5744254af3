//! The JSON of choices, and log-probabilities in OpenAI's older form, with llama-server's beside it.

use super::read::{Answer, Prompt};
use crate::api::generation::runs::BegunRun;
use crate::api::generation::{self, Probabilities, Told};
use crate::api::openai::shape::{self, NO_LOGPROB};
use crate::events::{Alternative, RunEnd, RunId, TokenId, TokenMeasurement, Usage};
use crate::model::Vocabulary;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// One answer to one prompt.
pub(super) struct Choice {
    index: usize,
    prompt: Prompt,
    /// How probable the tokens of the prompt were, from the second on.
    pub(super) measures: Vec<(TokenMeasurement, Vec<Alternative>)>,
    pub(super) told: Told,
    pub(super) end: Option<Arc<RunEnd>>,
    /// Characters that a stream has sent, and not taken back.
    pub(super) chars: usize,
    echoed: bool,
}

impl Choice {
    pub(super) fn new(index: usize, prompt: Prompt) -> Self {
        let (measures, told) = (Vec::new(), Told::default());
        Self { index, prompt, measures, told, end: None, chars: 0, echoed: false }
    }
}

/// What all chunks of an answer repeat.
pub(super) struct Head {
    pub(super) answer: Answer,
    pub(super) choices: Vec<Choice>,
    pub(super) runs: Vec<BegunRun>,
    pub(super) model: String,
    pub(super) created: i64,
    pub(super) vocabulary: Arc<Vocabulary>,
}

impl Head {
    /// The object with these choices.
    pub(super) fn object(&self, choices: Value) -> Map<String, Value> {
        let mut object = Map::new();
        let id = self.runs.first().map(|run| run.id.to_string()).unwrap_or_default();
        object.insert("id".into(), format!("cmpl-{id}").into());
        object.insert("object".into(), "text_completion".into());
        object.insert("created".into(), self.created.into());
        object.insert("model".into(), self.model.clone().into());
        object.insert("system_fingerprint".into(), shape::FINGERPRINT.into());
        object.insert("choices".into(), choices);
        object
    }

    /// Where the runs can be looked at.
    pub(super) fn thunder(&self) -> Value {
        let runs: Vec<RunId> = self.runs.iter().map(|run| run.id).collect();
        let mut thunder = json!({ "run_id": runs.first(), "replay": runs.first().map(|run| format!("/runs/{run}")) });
        if runs.len() > 1 {
            thunder["run_ids"] = json!(runs);
        }
        thunder
    }

    /// Token counts of all choices; a prompt that has several answers counts once.
    fn usage(&self) -> Value {
        let mut sum = Usage::default();
        for choice in &self.choices {
            let Some(end) = &choice.end else { continue };
            let usage = end.finish.usage;
            sum.completion_tokens += usage.completion_tokens;
            if !choice.prompt.again {
                sum.prompt_tokens += usage.prompt_tokens;
                sum.cached_tokens += usage.cached_tokens;
            }
        }
        shape::usage(sum)
    }

    /// Where the time went: of the choice that took longest.
    fn timings(&self) -> Value {
        let ends = self.choices.iter().filter_map(|choice| choice.end.as_ref());
        let longest = ends.max_by_key(|end| end.finish.prompt_us + end.finish.generation_us);
        longest.map_or(Value::Null, |end| generation::timings(&end.finish))
    }

    /// What the last object of an answer has besides its choices.
    pub(super) fn end(&self, object: &mut Map<String, Value>) {
        object.insert("usage".into(), self.usage());
        object.insert("timings".into(), self.timings());
        if let Some(verbose) = self.verbose() {
            object.insert("__verbose".into(), verbose);
        }
    }

    /// A choice that is complete.
    pub(super) fn whole(&mut self, index: usize) -> Value {
        let choice = &mut self.choices[index];
        let Some(end) = choice.end.clone() else { return Value::Null };
        let measures = std::mem::take(&mut choice.measures);
        let tokens = std::mem::take(&mut choice.told.tokens);
        let echo = self.answer.echo;
        let choice = &self.choices[index];
        let text = if echo { choice.prompt.text.clone() + &end.finish.text } else { end.finish.text.clone() };
        let mut logprobs = self.told_from(0);
        if echo {
            logprobs.prompt(&choice.prompt.tokens, &measures);
        }
        logprobs.answer(&tokens);
        json!({
            "index": index,
            "text": text,
            "logprobs": logprobs.json(),
            "finish_reason": shape::finish_reason(end.finish.reason),
        })
    }

    /// The prompt, which goes before the first text, when it is to be repeated and was not yet.
    pub(super) fn echo(&mut self, index: usize) -> Option<Value> {
        let choice = &mut self.choices[index];
        if !self.answer.echo || std::mem::replace(&mut choice.echoed, true) {
            return None;
        }
        let measures = std::mem::take(&mut choice.measures);
        let choice = &self.choices[index];
        let mut logprobs = self.told_from(0);
        logprobs.prompt(&choice.prompt.tokens, &measures);
        let (text, logprobs) = (choice.prompt.text.clone(), logprobs.json());
        Some(self.piece(index, &text, &logprobs))
    }

    /// The log-probabilities of tokens that a stream is about to send.
    pub(super) fn logprobs(&self, index: usize, tokens: &[(TokenMeasurement, Vec<Alternative>)]) -> Value {
        if tokens.is_empty() {
            return Value::Null;
        }
        let mut logprobs = self.told_from(self.choices[index].chars);
        logprobs.answer(tokens);
        logprobs.json()
    }

    /// No log-probabilities yet, of a text that begins at that character of its choice.
    fn told_from(&self, offset: usize) -> Logprobs<'_> {
        let probabilities = Probabilities {
            vocabulary: &self.vocabulary,
            top: self.answer.logprobs.unwrap_or(0),
            after_sampler: self.answer.after_sampler,
            no_logprob: NO_LOGPROB,
        };
        Logprobs::new(self.answer.logprobs.map(|_| probabilities), &self.vocabulary, offset)
    }

    /// How a choice came about, under llama-server's names, where that was asked for; all are the first one's.
    fn verbose(&self) -> Option<Value> {
        let (settings, choice) = (self.answer.settings.as_ref()?, self.choices.first()?);
        let finish = &choice.end.as_ref()?.finish;
        let slot = self.runs.first().and_then(|run| run.metrics.slot.get().copied());
        Some(shape::verbose(finish, &self.model, slot, &choice.prompt.text, settings))
    }

    /// A piece of a choice's text.
    pub(super) fn piece(&mut self, index: usize, text: &str, logprobs: &Value) -> Value {
        let choice = &mut self.choices[index];
        choice.chars += text.chars().count();
        json!({ "index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": null })
    }

    /// The end of a choice.
    pub(super) fn finish(&self, index: usize) -> Value {
        let reason = self.choices[index].end.as_ref().map(|end| shape::finish_reason(end.finish.reason));
        json!({ "index": index, "text": "", "logprobs": null, "finish_reason": reason })
    }
}

/// Four lists of equal length, as OpenAI has them, and `content`, as llama-server has it.
struct Logprobs<'a> {
    /// `None` when nothing was asked for.
    probabilities: Option<Probabilities<'a>>,
    vocabulary: &'a Vocabulary,
    offset: usize,
    texts: Vec<Value>,
    values: Vec<Value>,
    tops: Vec<Value>,
    offsets: Vec<Value>,
    content: Vec<Value>,
}

impl<'a> Logprobs<'a> {
    fn new(probabilities: Option<Probabilities<'a>>, vocabulary: &'a Vocabulary, offset: usize) -> Self {
        let none = Vec::new;
        let (texts, values, tops, offsets, content) = (none(), none(), none(), none(), none());
        Self { probabilities, vocabulary, offset, texts, values, tops, offsets, content }
    }

    /// The tokens of the prompt; nothing goes before the first, so that it has no probability.
    fn prompt(&mut self, tokens: &[TokenId], measures: &[(TokenMeasurement, Vec<Alternative>)]) {
        let texts = self.vocabulary.texts(tokens);
        for (index, (&token, text)) in tokens.iter().zip(&texts).enumerate() {
            let measured = index.checked_sub(1).and_then(|before| measures.get(before));
            self.push(token, text, measured.map(|(measure, others)| (measure.logprob, others.as_slice())));
        }
    }

    fn answer(&mut self, tokens: &[(TokenMeasurement, Vec<Alternative>)]) {
        for (measure, others) in tokens {
            self.push(measure.token, &measure.text, Some((measure.logprob, others)));
        }
    }

    fn push(&mut self, token: TokenId, text: &str, measured: Option<(Option<f32>, &[Alternative])>) {
        let Some(told) = self.probabilities else { return };
        let logprob = measured.map(|(logprob, _)| logprob.unwrap_or(NO_LOGPROB));
        let others = measured.map_or(&[][..], |(_, others)| &others[..others.len().min(told.top)]);
        self.texts.push(json!(text));
        self.values.push(json!(logprob));
        self.offsets.push(json!(self.offset));
        self.offset += text.chars().count();
        let mut named: Map<String, Value> =
            others.iter().map(|other| (other.text.clone(), json!(told.ln(other.prob)))).collect();
        // OpenAI tells the token that stands there in any case.
        if let Some(logprob) = logprob.filter(|_| told.top > 0) {
            named.insert(text.to_owned(), json!(logprob));
        }
        self.tops.push(if measured.is_some() { Value::Object(named) } else { Value::Null });
        self.content.push(told.entry(token, logprob, others));
    }

    fn json(self) -> Value {
        if self.probabilities.is_none() || self.texts.is_empty() {
            return Value::Null;
        }
        json!({
            "tokens": self.texts,
            "token_logprobs": self.values,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
            "content": self.content,
        })
    }
}
