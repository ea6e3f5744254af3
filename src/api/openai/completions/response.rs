//! A completion and its chunks, with log-probabilities in OpenAI's older format and in llama-server's.

use super::request::{CompletionOptions, CompletionPrompt};
use crate::api::openai::response::{
    AnswerId, ChunkDetails, CompletionHead, CompletionUsage, NO_LOGPROB, finish_reason, slowest_timings, verbose_answer,
};
use crate::api::shared::generation::runs::StartedRun;
use crate::api::shared::generation::{
    CollectedTokens, LogprobsByText, ProbabilityFormatter, RunTimings, ThunderFields, TokenProbabilities, text_or_bytes,
};
use crate::api::shared::llama_completion::LlamaCompletionFields;
use crate::engine::MeasuredToken;
use crate::events::{Alternative, RunEnd, TokenId, Usage};
use crate::model::Vocabulary;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// A completion.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TextCompletion<'a> {
    #[serde(flatten)]
    head: CompletionHead<'a>,
    choices: Vec<TextChoice>,
    usage: CompletionUsage,
    /// Timings of the slowest choice.
    timings: Option<RunTimings>,
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    verbose: Option<LlamaCompletionFields<'a>>,
    /// The runs of the choices.
    thunder: ThunderFields,
}

/// A chunk of a completion.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TextCompletionChunk<'a> {
    #[serde(flatten)]
    head: CompletionHead<'a>,
    /// A part of one choice, or none in the chunk with the token counts.
    choices: Vec<TextChoice>,
    #[serde(flatten)]
    details: ChunkDetails<'a>,
}

/// One answer to one prompt, or a part of it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TextChoice {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    /// `stop`, `length` or `tool_calls`, at the end.
    finish_reason: Option<&'static str>,
}

/// Log-probabilities of tokens: lists of equal length.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct TextLogprobs {
    /// Text of each token.
    tokens: Vec<String>,
    /// Natural logarithm of each token's probability; null for the first token of a prompt.
    token_logprobs: Vec<Option<f64>>,
    /// The most probable tokens at each position, by text.
    #[schema(value_type = Vec<Option<HashMap<String, f64>>>)]
    top_logprobs: Vec<Option<LogprobsByText>>,
    /// Index of each token's first character.
    text_offset: Vec<usize>,
    /// The same tokens in llama-server's format.
    content: Vec<TokenProbabilities>,
}

/// One answer to one prompt.
pub(super) struct CompletionChoice {
    index: usize,
    prompt: CompletionPrompt,
    /// Measurements of the prompt's tokens, without the first one.
    pub(super) measurements: Vec<MeasuredToken>,
    /// Tokens of the answer; empty with a stream.
    pub(super) tokens: CollectedTokens,
    pub(super) end: Option<Arc<RunEnd>>,
    /// Number of characters sent and not retracted.
    pub(super) chars: usize,
    echoed: bool,
}

impl CompletionChoice {
    pub(super) fn new(index: usize, prompt: CompletionPrompt) -> Self {
        let (measurements, tokens) = (Vec::new(), CollectedTokens::default());
        Self { index, prompt, measurements, tokens, end: None, chars: 0, echoed: false }
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
    fn head(&self) -> CompletionHead<'_> {
        CompletionHead::new("text_completion", AnswerId("cmpl-", self.runs[0].id), self.created, &self.model)
    }

    /// Returns the complete response.
    pub(super) fn completion(&self, choices: Vec<TextChoice>) -> TextCompletion<'_> {
        TextCompletion {
            head: self.head(),
            choices,
            usage: self.usage(),
            timings: self.timings(),
            verbose: self.verbose(),
            thunder: self.thunder(),
        }
    }

    /// Returns a chunk with these choices.
    pub(super) fn chunk(&self, choices: Vec<TextChoice>, thunder: Option<ThunderFields>) -> TextCompletionChunk<'_> {
        let details = ChunkDetails { thunder, ..ChunkDetails::default() };
        TextCompletionChunk { head: self.head(), choices, details }
    }

    /// Returns a chunk with these choices and the fields that only the last chunk of a stream has.
    pub(super) fn last_chunk(
        &self,
        choices: Vec<TextChoice>,
        thunder: Option<ThunderFields>,
    ) -> TextCompletionChunk<'_> {
        let (usage, timings, verbose) = (Some(self.usage()), self.timings(), self.verbose());
        TextCompletionChunk { head: self.head(), choices, details: ChunkDetails { thunder, usage, timings, verbose } }
    }

    /// Returns the ids of the runs and the path of their replay.
    pub(super) fn thunder(&self) -> ThunderFields {
        ThunderFields::runs(self.runs.iter().map(|run| run.id))
    }

    /// Returns the token counts of all choices. A prompt with several answers is counted once.
    fn usage(&self) -> CompletionUsage {
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
        sum.into()
    }

    /// Returns the timings of the slowest choice.
    fn timings(&self) -> Option<RunTimings> {
        slowest_timings(self.choices.iter().filter_map(|choice| Some(&choice.end.as_ref()?.finish)))
    }

    /// Returns a complete choice.
    pub(super) fn complete_choice(&mut self, index: usize, end: Arc<RunEnd>) -> TextChoice {
        let choice = &mut self.choices[index];
        let end = &choice.end.insert(end).finish;
        let (mut text, reason) = (end.text.clone(), end.reason);
        let measurements = std::mem::take(&mut choice.measurements);
        let tokens = std::mem::take(&mut choice.tokens);
        let choice = &self.choices[index];
        let mut logprobs = self.logprobs_from(0);
        if self.options.echo {
            text.insert_str(0, &choice.prompt.text);
            logprobs.push_prompt(&choice.prompt.tokens, &measurements);
        }
        logprobs.push_answer(&tokens);
        TextChoice { index, text, logprobs: logprobs.finish(), finish_reason: Some(finish_reason(reason)) }
    }

    /// Returns the prompt's text as the first part of a choice, if `echo` is set and it was not sent yet.
    pub(super) fn echo_delta(&mut self, index: usize) -> Option<TextChoice> {
        let choice = &mut self.choices[index];
        if !self.options.echo || std::mem::replace(&mut choice.echoed, true) {
            return None;
        }
        let measurements = std::mem::take(&mut choice.measurements);
        let choice = &self.choices[index];
        let mut logprobs = self.logprobs_from(0);
        logprobs.push_prompt(&choice.prompt.tokens, &measurements);
        let (text, logprobs) = (choice.prompt.text.clone(), logprobs.finish());
        Some(self.choice_delta(index, text, logprobs))
    }

    /// Returns the log-probabilities of tokens that are about to be streamed.
    pub(super) fn logprobs(&self, index: usize, tokens: &[MeasuredToken]) -> Option<TextLogprobs> {
        let mut logprobs = self.logprobs_from(self.choices[index].chars);
        logprobs.push_answer(tokens);
        logprobs.finish()
    }

    /// Returns an empty builder for text that starts at the character `offset` of its choice.
    fn logprobs_from(&self, offset: usize) -> LogprobsBuilder<'_> {
        let formatter = ProbabilityFormatter {
            vocabulary: &self.vocabulary,
            top: self.options.logprobs.unwrap_or(0),
            after_sampler: self.options.after_sampler,
            no_logprob: NO_LOGPROB,
        };
        let formatter = self.options.logprobs.map(|_| formatter);
        LogprobsBuilder { formatter, vocabulary: &self.vocabulary, offset, lists: TextLogprobs::default() }
    }

    /// Returns llama-server's details of the first choice, if requested.
    fn verbose(&self) -> Option<LlamaCompletionFields<'_>> {
        let (settings, choice) = (self.options.settings.as_ref()?, self.choices.first()?);
        let finish = &choice.end.as_ref()?.finish;
        let slot = self.runs.first().and_then(|run| run.metrics.slot());
        Some(verbose_answer(finish, &self.model, slot, &choice.prompt.text, settings))
    }

    /// Returns a part of a choice's text.
    pub(super) fn choice_delta(&mut self, index: usize, text: String, logprobs: Option<TextLogprobs>) -> TextChoice {
        let choice = &mut self.choices[index];
        choice.chars += text.chars().count();
        TextChoice { index: choice.index, text, logprobs, finish_reason: None }
    }

    /// Returns the last part of a choice, with its finish reason.
    pub(super) fn choice_end(&self, index: usize) -> TextChoice {
        let reason = self.choices[index].end.as_ref().map(|end| finish_reason(end.finish.reason));
        TextChoice { index, text: String::new(), logprobs: None, finish_reason: reason }
    }
}

/// Builder of the log-probabilities of tokens.
struct LogprobsBuilder<'a> {
    /// `None` if the client did not request log-probabilities.
    formatter: Option<ProbabilityFormatter<'a>>,
    vocabulary: &'a Vocabulary,
    offset: usize,
    lists: TextLogprobs,
}

impl LogprobsBuilder<'_> {
    /// Appends the tokens of the prompt. The first has no predecessor and therefore no probability.
    fn push_prompt(&mut self, tokens: &[TokenId], measurements: &[MeasuredToken]) {
        let texts = self.vocabulary.texts(tokens);
        for (index, (&token, text)) in tokens.iter().zip(&texts).enumerate() {
            let measured = index.checked_sub(1).and_then(|before| measurements.get(before));
            self.push(token, text, measured.map(|token| (token.measurement.logprob, token.alternatives.as_slice())));
        }
    }

    fn push_answer(&mut self, tokens: &[MeasuredToken]) {
        for MeasuredToken { measurement, alternatives } in tokens {
            self.push(measurement.token, &measurement.text, Some((measurement.logprob, alternatives)));
        }
    }

    fn push(&mut self, token: TokenId, text: &str, measured: Option<(Option<f32>, &[Alternative])>) {
        let Some(formatter) = self.formatter else { return };
        let logprob = measured.map(|(logprob, _)| logprob.unwrap_or(NO_LOGPROB));
        let others = measured.map_or(&[][..], |(_, others)| &others[..others.len().min(formatter.top)]);
        let lists = &mut self.lists;
        lists.tokens.push(text.to_owned());
        lists.token_logprobs.push(logprob.map(f64::from));
        lists.text_offset.push(self.offset);
        self.offset += text.chars().count();
        lists.top_logprobs.push(logprob.map(|logprob| {
            let mut top = LogprobsByText::default();
            for other in others.iter().filter(|other| other.token != token) {
                top.insert(text_or_bytes(self.vocabulary.piece(other.token)), formatter.ln(other.prob).into());
            }
            // OpenAI always lists the sampled token. It has the same text and value as in the other lists, for clients
            // that compare them.
            if formatter.top > 0 {
                top.set_sampled(text, logprob.into());
            }
            top
        }));
        lists.content.push(formatter.entry(token, logprob, others));
    }

    /// Returns the lists, or `None` if they are empty.
    fn finish(self) -> Option<TextLogprobs> {
        Some(self.lists).filter(|lists| !lists.tokens.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SpecialTokens;

    #[test]
    fn sampled_part_of_a_character_is_listed_once() {
        let pieces: Vec<Box<[u8]>> =
            ["ä".as_bytes(), &"ä".as_bytes()[..1], &"日".as_bytes()[..1]].map(Box::from).into();
        let vocabulary =
            Vocabulary::new(pieces, vec![false; 3], Vec::new(), SpecialTokens::default(), |_, _, _| Vec::new());
        let formatter =
            ProbabilityFormatter { vocabulary: &vocabulary, top: 3, after_sampler: false, no_logprob: NO_LOGPROB };
        let lists = TextLogprobs::default();
        let mut builder = LogprobsBuilder { formatter: Some(formatter), vocabulary: &vocabulary, offset: 0, lists };
        let others: Vec<Alternative> =
            [(1, 0.5), (0, 0.25), (2, 0.125)].map(|(token, prob)| Alternative { token, text: "?".into(), prob }).into();
        builder.push(1, "", Some((Some(-0.693), &others)));
        let top = serde_json::to_value(&builder.finish().unwrap().top_logprobs[0]).unwrap();
        let keys: Vec<&String> = top.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["ä", r"bytes:\xe6", ""]);
        assert_eq!(top[""], f64::from(-0.693f32));
        // Another token with the same text is more probable than the sampled one.
        let lists = TextLogprobs::default();
        let mut builder = LogprobsBuilder { formatter: Some(formatter), vocabulary: &vocabulary, offset: 0, lists };
        builder.push(1, "ä", Some((Some(-2.0), &others[1..])));
        let top = serde_json::to_value(&builder.finish().unwrap().top_logprobs[0]).unwrap();
        assert_eq!(top["ä"], -2.0);
    }
}
