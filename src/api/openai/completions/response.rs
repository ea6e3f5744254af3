//! JSON of completions, with log-probabilities in OpenAI's older format and in llama-server's.

use super::request::{CompletionOptions, CompletionPrompt};
use crate::api::openai::response::{self, NO_LOGPROB};
use crate::api::shared::generation;
use crate::api::shared::generation::runs::StartedRun;
use crate::api::shared::generation::{ProbabilityFormatter, SentTokens};
use crate::events::{Alternative, RunEnd, RunId, TokenId, TokenMeasurement, Usage};
use crate::model::Vocabulary;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// One answer to one prompt.
pub(super) struct CompletionChoice {
    index: usize,
    prompt: CompletionPrompt,
    /// Measurements of the prompt's tokens, from the second one on.
    pub(super) measures: Vec<(TokenMeasurement, Vec<Alternative>)>,
    pub(super) sent: SentTokens,
    pub(super) end: Option<Arc<RunEnd>>,
    /// Number of characters sent and not retracted.
    pub(super) chars: usize,
    echoed: bool,
}

impl CompletionChoice {
    pub(super) fn new(index: usize, prompt: CompletionPrompt) -> Self {
        let (measures, sent) = (Vec::new(), SentTokens::default());
        Self { index, prompt, measures, sent, end: None, chars: 0, echoed: false }
    }
}

/// The state of a completion's choices, and the fields that all its chunks repeat.
pub(super) struct CompletionBuilder {
    pub(super) options: CompletionOptions,
    pub(super) choices: Vec<CompletionChoice>,
    pub(super) runs: Vec<StartedRun>,
    pub(super) model: String,
    pub(super) created: i64,
    pub(super) vocabulary: Arc<Vocabulary>,
}

impl CompletionBuilder {
    /// Returns the response object with these choices.
    pub(super) fn with_choices(&self, choices: Value) -> Map<String, Value> {
        let mut object = Map::new();
        let id = self.runs.first().map(|run| run.id.to_string()).unwrap_or_default();
        object.insert("id".into(), format!("cmpl-{id}").into());
        object.insert("object".into(), "text_completion".into());
        object.insert("created".into(), self.created.into());
        object.insert("model".into(), self.model.clone().into());
        object.insert("system_fingerprint".into(), response::FINGERPRINT.into());
        object.insert("choices".into(), choices);
        object
    }

    /// Returns the ids of the runs and the path of their replay.
    pub(super) fn thunder(&self) -> Value {
        let runs: Vec<RunId> = self.runs.iter().map(|run| run.id).collect();
        let mut thunder = json!({ "run_id": runs.first(), "replay": runs.first().map(|run| format!("/runs/{run}")) });
        if runs.len() > 1 {
            thunder["run_ids"] = json!(runs);
        }
        thunder
    }

    /// Returns the token counts of all choices. A prompt with several answers is counted once.
    fn usage(&self) -> Value {
        let mut sum = Usage::default();
        for choice in &self.choices {
            let Some(end) = &choice.end else { continue };
            let usage = end.finish.usage;
            sum.completion_tokens += usage.completion_tokens;
            if !choice.prompt.repeated {
                sum.prompt_tokens += usage.prompt_tokens;
                sum.cached_tokens += usage.cached_tokens;
            }
        }
        response::usage(sum)
    }

    /// Returns the timings of the slowest choice.
    fn timings(&self) -> Value {
        let ends = self.choices.iter().filter_map(|choice| choice.end.as_ref());
        let longest = ends.max_by_key(|end| end.finish.prompt_us + end.finish.generation_us);
        longest.map_or(Value::Null, |end| generation::timings(&end.finish))
    }

    /// Adds the fields that only the last object of an answer has.
    pub(super) fn add_totals(&self, object: &mut Map<String, Value>) {
        object.insert("usage".into(), self.usage());
        object.insert("timings".into(), self.timings());
        if let Some(verbose) = self.verbose() {
            object.insert("__verbose".into(), verbose);
        }
    }

    /// Returns a complete choice.
    pub(super) fn complete_choice(&mut self, index: usize) -> Value {
        let choice = &mut self.choices[index];
        let Some(end) = choice.end.clone() else { return Value::Null };
        let measures = std::mem::take(&mut choice.measures);
        let tokens = std::mem::take(&mut choice.sent.tokens);
        let echo = self.options.echo;
        let choice = &self.choices[index];
        let text = if echo { choice.prompt.text.clone() + &end.finish.text } else { end.finish.text.clone() };
        let mut logprobs = self.logprobs_from(0);
        if echo {
            logprobs.prompt(&choice.prompt.tokens, &measures);
        }
        logprobs.answer(&tokens);
        json!({
            "index": index,
            "text": text,
            "logprobs": logprobs.json(),
            "finish_reason": response::finish_reason(end.finish.reason),
        })
    }

    /// Returns the prompt's text as the first piece of a choice, if `echo` is set and it was not sent yet.
    pub(super) fn echo_delta(&mut self, index: usize) -> Option<Value> {
        let choice = &mut self.choices[index];
        if !self.options.echo || std::mem::replace(&mut choice.echoed, true) {
            return None;
        }
        let measures = std::mem::take(&mut choice.measures);
        let choice = &self.choices[index];
        let mut logprobs = self.logprobs_from(0);
        logprobs.prompt(&choice.prompt.tokens, &measures);
        let (text, logprobs) = (choice.prompt.text.clone(), logprobs.json());
        Some(self.choice_delta(index, &text, &logprobs))
    }

    /// Returns the log-probabilities of tokens that are about to be streamed.
    pub(super) fn logprobs(&self, index: usize, tokens: &[(TokenMeasurement, Vec<Alternative>)]) -> Value {
        if tokens.is_empty() {
            return Value::Null;
        }
        let mut logprobs = self.logprobs_from(self.choices[index].chars);
        logprobs.answer(tokens);
        logprobs.json()
    }

    /// Returns an empty list of log-probabilities for text that starts at this character of its choice.
    fn logprobs_from(&self, offset: usize) -> Logprobs<'_> {
        let probabilities = ProbabilityFormatter {
            vocabulary: &self.vocabulary,
            top: self.options.logprobs.unwrap_or(0),
            after_sampler: self.options.after_sampler,
            no_logprob: NO_LOGPROB,
        };
        Logprobs::new(self.options.logprobs.map(|_| probabilities), &self.vocabulary, offset)
    }

    /// Returns llama-server's `__verbose` object for the first choice, if requested.
    fn verbose(&self) -> Option<Value> {
        let (settings, choice) = (self.options.settings.as_ref()?, self.choices.first()?);
        let finish = &choice.end.as_ref()?.finish;
        let slot = self.runs.first().and_then(|run| run.metrics.slot.get().copied());
        Some(response::verbose(finish, &self.model, slot, &choice.prompt.text, settings))
    }

    /// Returns a piece of a choice's text.
    pub(super) fn choice_delta(&mut self, index: usize, text: &str, logprobs: &Value) -> Value {
        let choice = &mut self.choices[index];
        choice.chars += text.chars().count();
        json!({ "index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": null })
    }

    /// Returns the last object of a choice, with its finish reason.
    pub(super) fn choice_end(&self, index: usize) -> Value {
        let reason = self.choices[index].end.as_ref().map(|end| response::finish_reason(end.finish.reason));
        json!({ "index": index, "text": "", "logprobs": null, "finish_reason": reason })
    }
}

/// Log-probabilities: four lists of equal length as in OpenAI's API, and `content` as in llama-server's.
struct Logprobs<'a> {
    /// `None` if the client did not request log-probabilities.
    probabilities: Option<ProbabilityFormatter<'a>>,
    vocabulary: &'a Vocabulary,
    offset: usize,
    texts: Vec<Value>,
    values: Vec<Value>,
    tops: Vec<Value>,
    offsets: Vec<Value>,
    content: Vec<Value>,
}

impl<'a> Logprobs<'a> {
    fn new(probabilities: Option<ProbabilityFormatter<'a>>, vocabulary: &'a Vocabulary, offset: usize) -> Self {
        let none = Vec::new;
        let (texts, values, tops, offsets, content) = (none(), none(), none(), none(), none());
        Self { probabilities, vocabulary, offset, texts, values, tops, offsets, content }
    }

    /// Appends the tokens of the prompt. The first has no predecessor and therefore no probability.
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
        let Some(formatter) = self.probabilities else { return };
        let logprob = measured.map(|(logprob, _)| logprob.unwrap_or(NO_LOGPROB));
        let others = measured.map_or(&[][..], |(_, others)| &others[..others.len().min(formatter.top)]);
        self.texts.push(json!(text));
        self.values.push(json!(logprob));
        self.offsets.push(json!(self.offset));
        self.offset += text.chars().count();
        let mut named: Map<String, Value> =
            others.iter().map(|other| (other.text.clone(), json!(formatter.ln(other.prob)))).collect();
        // OpenAI always lists the drawn token.
        if let Some(logprob) = logprob.filter(|_| formatter.top > 0) {
            named.insert(text.to_owned(), json!(logprob));
        }
        self.tops.push(if measured.is_some() { Value::Object(named) } else { Value::Null });
        self.content.push(formatter.entry(token, logprob, others));
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
