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
    /// The tool calls with which a mod ended the run, in `tool_calls`.
    #[serde(skip_serializing_if = "Option::is_none")]
    thunder: Option<ThunderFields>,
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
    /// Number of characters of the tokens before the next one, including the echoed prompt.
    offset: usize,
    /// Number of characters of each token sent and not retracted.
    token_chars: Vec<usize>,
    echoed: bool,
}

impl CompletionChoice {
    pub(super) fn new(index: usize, prompt: CompletionPrompt) -> Self {
        Self {
            index,
            prompt,
            measurements: Vec::new(),
            tokens: CollectedTokens::default(),
            end: None,
            offset: 0,
            token_chars: Vec::new(),
            echoed: false,
        }
    }

    /// Counts the characters of sent tokens.
    pub(super) fn count(&mut self, tokens: &[MeasuredToken]) {
        let first = self.token_chars.len();
        self.token_chars.extend(tokens.iter().map(visible_chars));
        self.offset += self.token_chars[first..].iter().sum::<usize>();
    }

    /// Removes the last sent tokens from the count.
    pub(super) fn retract(&mut self, tokens: usize) {
        let kept = self.token_chars.len().saturating_sub(tokens);
        self.offset -= self.token_chars.drain(kept..).sum::<usize>();
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
        let mut text = end.finish.text.clone();
        choice.end = Some(end);
        let measurements = std::mem::take(&mut choice.measurements);
        let tokens = std::mem::take(&mut choice.tokens);
        let choice = &self.choices[index];
        let mut logprobs = self.logprobs_from(0);
        if self.options.echo {
            text.insert_str(0, &choice.prompt.text);
            logprobs.push_prompt(&choice.prompt, &measurements);
        }
        logprobs.push_answer(&tokens);
        TextChoice { text, logprobs: logprobs.finish(), ..self.choice_end(index) }
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
        logprobs.push_prompt(&choice.prompt, &measurements);
        let (text, logprobs) = (choice.prompt.text.clone(), logprobs.finish());
        self.choices[index].offset = text.chars().count();
        Some(self.choice_delta(index, text, logprobs))
    }

    /// Returns the log-probabilities of tokens that are about to be streamed.
    pub(super) fn logprobs(&self, index: usize, tokens: &[MeasuredToken]) -> Option<TextLogprobs> {
        let mut logprobs = self.logprobs_from(self.choices[index].offset);
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
        Some(verbose_answer(finish, &self.model, &self.runs.first()?.metrics, &choice.prompt.text, settings))
    }

    /// Returns a part of a choice's text.
    pub(super) fn choice_delta(&self, index: usize, text: String, logprobs: Option<TextLogprobs>) -> TextChoice {
        TextChoice { index: self.choices[index].index, text, logprobs, finish_reason: None, thunder: None }
    }

    /// Returns the last part of a choice, with its finish reason.
    pub(super) fn choice_end(&self, index: usize) -> TextChoice {
        let finish = self.choices[index].end.as_ref().map(|end| &end.finish);
        let tool_calls = finish.and_then(|finish| finish.tool_calls.as_ref());
        TextChoice {
            index,
            text: String::new(),
            logprobs: None,
            finish_reason: finish.map(|finish| finish_reason(finish.reason)),
            thunder: tool_calls.map(|calls| ThunderFields::default().with_tool_calls(Some(calls))),
        }
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
    fn push_prompt(&mut self, prompt: &CompletionPrompt, measurements: &[MeasuredToken]) {
        let texts = self.vocabulary.texts(&prompt.tokens);
        let (start, end) = (self.offset, self.offset + prompt.text.chars().count());
        for (index, (&token, text)) in prompt.tokens.iter().zip(&texts).enumerate() {
            let measured = index.checked_sub(1).and_then(|before| measurements.get(before));
            self.push(token, text, measured.map(|token| (token.measurement.logprob, token.alternatives.as_slice())));
            let mut chars = text.chars().count();
            // The tokenizer may have added a start token and a space, which the text lacks.
            if self.offset == start && !prompt.text.starts_with(text) {
                chars = if self.vocabulary.is_control(token) { 0 } else { chars - usize::from(text.starts_with(' ')) };
            }
            self.offset = end.min(self.offset + chars);
        }
        self.offset = end;
    }

    fn push_answer(&mut self, tokens: &[MeasuredToken]) {
        for token in tokens {
            let MeasuredToken { measurement, alternatives, .. } = token;
            self.push(measurement.token, &measurement.text, Some((measurement.logprob, alternatives)));
            self.offset += visible_chars(token);
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

/// Returns the number of characters that a token adds to the text.
fn visible_chars(token: &MeasuredToken) -> usize {
    if token.is_hidden { 0 } else { token.measurement.text.chars().count() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::TokenMeasurement;
    use crate::model::SpecialTokens;
    use crate::model::grammar::testing::sentencepiece;

    fn measured(token: TokenId, text: &str, is_hidden: bool) -> MeasuredToken {
        let measurement = TokenMeasurement { token, text: text.into(), logprob: None, rank: None, entropy: None };
        MeasuredToken { measurement, alternatives: Vec::new(), is_hidden }
    }

    #[test]
    fn offsets_are_indexes_into_the_text() {
        let vocabulary = sentencepiece();
        let formatter =
            ProbabilityFormatter { vocabulary: &vocabulary, top: 0, after_sampler: false, no_logprob: NO_LOGPROB };
        let lists = TextLogprobs::default();
        let mut builder = LogprobsBuilder { formatter: Some(formatter), vocabulary: &vocabulary, offset: 0, lists };
        // The tokenizer has added a start token and a space.
        let tokens = vec![1, 3 + TokenId::from(b' '), 3 + TokenId::from(b'a'), 3 + TokenId::from(b'b')];
        builder.push_prompt(&CompletionPrompt { tokens, text: "ab".into(), repeated: false }, &[]);
        let answer = [measured(9, "é", false), measured(2, "</s>", true), measured(9, "b", false)];
        builder.push_answer(&answer);
        assert_eq!(builder.finish().unwrap().text_offset, [0, 0, 0, 1, 2, 3, 3]);
        let prompt = CompletionPrompt { tokens: Vec::new(), text: String::new(), repeated: false };
        let mut choice = CompletionChoice::new(0, prompt);
        choice.count(&answer);
        assert_eq!(choice.offset, 2);
        choice.retract(2);
        assert_eq!(choice.offset, 1);
        choice.retract(5);
        assert_eq!(choice.offset, 0);
    }

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
