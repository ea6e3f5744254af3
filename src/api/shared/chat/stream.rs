//! The runs of one chat request and their output, parsed into reasoning, text and tool calls.

use super::request::{ChatRequest, ResponseOptions};
use crate::api::shared::generation::{RunClient, RunTimings, Runs};
use crate::engine::{MeasuredToken, Output, PromptProgress, RunMetrics};
use crate::events::{Finish, FinishReason, RunEnd, RunId, Surface, Usage};
use crate::model::Vocabulary;
use crate::model::chat::answer::{AnswerDelta, AnswerFormat, AnswerMessage, AnswerParser, Retraction};
use crate::model::chat::family::ModelFamily;
use crate::mods::tool_calls_of;
use crate::server::{ApiError, LoadedModel};
use serde_json::Value;
use std::sync::Arc;

/// The running answers of one chat request.
pub(crate) struct ChatStream {
    runs: Runs,
    pub(crate) options: ResponseOptions,
    /// The model's name.
    pub(crate) model: String,
    /// Seconds since 1970.
    pub(crate) created: i64,
    pub(crate) vocabulary: Arc<Vocabulary>,
    answers: Vec<ChatAnswer>,
    family: ModelFamily,
}

struct ChatAnswer {
    run: RunId,
    parser: AnswerParser,
    /// Ids of the tool calls.
    call_ids: Vec<String>,
    /// Name and arguments of the calls with which a mod ended the run.
    mod_calls: Vec<(String, String)>,
    /// Length in bytes of each token's text.
    token_bytes: Vec<usize>,
    end: Option<Arc<RunEnd>>,
}

/// New output of one answer.
#[derive(Debug)]
pub(crate) struct ChatUpdate {
    /// Index of the answer, from 0.
    pub(crate) answer: usize,
    pub(crate) deltas: Vec<ChatDelta>,
    /// The tokens that produced the deltas.
    pub(crate) tokens: Vec<MeasuredToken>,
    /// Number of tokens before `tokens` that a mod removed.
    pub(crate) retracted_tokens: usize,
    pub(crate) progress: Option<PromptProgress>,
    /// Set when the answer is complete.
    pub(crate) end: Option<Arc<RunEnd>>,
}

/// An addition to an answer, or a retraction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChatDelta {
    Reasoning(String),
    Content(String),
    /// Start of the tool call with this index.
    ToolCall {
        index: usize,
        id: String,
        name: String,
    },
    /// A part of the arguments of the call with this index.
    ToolArguments {
        index: usize,
        text: String,
    },
    /// The call with this index is complete.
    ToolCallEnd(usize),
    /// Earlier output is retracted.
    Retract(Retraction),
}

/// A tool call in the form that all protocols need.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToolCallRef<'a> {
    pub(crate) id: &'a str,
    pub(crate) name: &'a str,
    /// JSON, unless the answer was cut off inside the arguments.
    pub(crate) arguments: &'a str,
}

impl ChatStream {
    /// Submits the requests and waits for the first output.
    ///
    /// # Errors
    /// Same as [`Runs::start`].
    pub(crate) async fn start(
        client: &RunClient,
        loaded: &LoadedModel,
        request: ChatRequest,
    ) -> Result<Self, ApiError> {
        let created = client.app.now().timestamp();
        let runs = Runs::start(client, loaded, request.requests).await?;
        let answers = runs.started.iter().map(|run| ChatAnswer::new(run.id, &request.answer_format)).collect();
        Ok(Self {
            runs,
            options: request.options,
            model: loaded.name().to_owned(),
            created,
            vocabulary: Arc::clone(loaded.vocabulary()),
            answers,
            family: request.answer_format.syntax.family,
        })
    }

    /// Parses the body of a chat completion and starts its runs on the model that it names.
    ///
    /// # Errors
    /// The body is invalid, the model is not available, or the runs did not start.
    pub(crate) async fn parse_and_start(client: &RunClient, body: &Value, surface: Surface) -> Result<Self, ApiError> {
        let loaded = client.app.get_or_load(body.get("model").and_then(Value::as_str)).await?;
        let request = ChatRequest::parse(&client.app, &loaded, body, surface, &[]).await?;
        Self::start(client, &loaded, request).await
    }

    /// Returns the id of the first answer's run.
    pub(crate) fn run(&self) -> RunId {
        self.answers[0].run
    }

    /// Returns the run id of every answer.
    pub(crate) fn runs(&self) -> impl Iterator<Item = RunId> {
        self.answers.iter().map(|answer| answer.run)
    }

    /// Returns the number of answers.
    pub(crate) fn len(&self) -> usize {
        self.answers.len()
    }

    /// Returns the metrics of an answer's run.
    pub(crate) fn metrics(&self, answer: usize) -> &RunMetrics {
        &self.runs.started[answer].metrics
    }

    /// Returns the slot of an answer's run.
    pub(crate) fn slot(&self, answer: usize) -> Option<u32> {
        self.metrics(answer).slot()
    }

    /// Returns the number of cached prompt tokens; 0 until the prompt is evaluated.
    pub(crate) fn cached_tokens(&self, answer: usize) -> u32 {
        self.runs.started[answer].metrics.prompt.get().map_or(0, |prompt| prompt.cached)
    }

    /// Returns the timings of a running answer.
    pub(crate) fn partial_timings(&self, answer: usize) -> Option<RunTimings> {
        let prompt = self.runs.started[answer].metrics.prompt.get()?;
        Some(RunTimings::partial(prompt, self.answers[answer].token_bytes.len() as u32))
    }

    /// Returns the next update, or `None` when all answers are complete.
    ///
    /// # Errors
    /// A run failed, or the server is stopping.
    pub(crate) async fn next(&mut self) -> Result<Option<ChatUpdate>, ApiError> {
        let Some((index, output)) = self.runs.next().await? else { return Ok(None) };
        let family = self.family;
        let answer = &mut self.answers[index];
        let mut update = ChatUpdate {
            answer: index,
            deltas: Vec::new(),
            tokens: Vec::new(),
            retracted_tokens: 0,
            progress: None,
            end: None,
        };
        match output {
            Output::Text(delta) => {
                answer.add_tokens(&delta.tokens);
                let pieces = answer.parser.push(&delta.text);
                update.deltas = answer.deltas(pieces, family);
                update.tokens = delta.tokens;
            }
            Output::Retract { chars, tokens } => {
                answer.remove_tokens(tokens);
                let pieces = answer.parser.retract(chars);
                update.deltas = answer.deltas(pieces, family);
                update.retracted_tokens = tokens;
            }
            Output::Ended(end) => {
                let is_cut = end.finish.reason == FinishReason::Length;
                let pieces = if is_cut { answer.parser.finish_cut() } else { answer.parser.finish() };
                update.deltas = answer.deltas(pieces, family);
                if let Some(payload) = &end.finish.tool_calls {
                    update.deltas.extend(answer.add_mod_calls(payload, family));
                }
                answer.end = Some(Arc::clone(&end));
                update.end = Some(end);
            }
            Output::PromptProgress(progress) => update.progress = Some(progress),
            Output::PromptProbabilities(_) => {}
        }
        Ok(Some(update))
    }

    /// Returns the complete message of an answer so far.
    pub(crate) fn message(&self, answer: usize) -> &AnswerMessage {
        self.answers[answer].parser.message()
    }

    /// Returns the tool calls of an answer.
    pub(crate) fn calls(&self, answer: usize) -> Vec<ToolCallRef<'_>> {
        let ChatAnswer { parser, call_ids, mod_calls, .. } = &self.answers[answer];
        let own = parser.message().calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str()));
        let all = own.chain(mod_calls.iter().map(|(name, arguments)| (name.as_str(), arguments.as_str())));
        call_ids.iter().zip(all).map(|(id, (name, arguments))| ToolCallRef { id, name, arguments }).collect()
    }

    /// Returns the finish record of an answer that has ended.
    pub(crate) fn finish(&self, answer: usize) -> Option<&Finish> {
        self.answers[answer].end.as_deref().map(|end| &end.finish)
    }

    /// Returns the finish reason of an answer; `Stop` for one that was cancelled or failed.
    pub(crate) fn reason(&self, answer: usize) -> FinishReason {
        match self.finish(answer).map(|finish| finish.reason) {
            Some(FinishReason::Length) => FinishReason::Length,
            _ if !self.answers[answer].call_ids.is_empty() => FinishReason::ToolCalls,
            _ => FinishReason::Stop,
        }
    }

    /// Returns the number of reasoning tokens in all answers, including their markers.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        self.answers.iter().map(ChatAnswer::reasoning_tokens).sum()
    }

    /// Returns the token counts of all answers; the prompt is counted once.
    pub(crate) fn usage(&self) -> Usage {
        let mut total = Usage::default();
        for (index, finish) in (0..self.len()).filter_map(|answer| self.finish(answer)).enumerate() {
            if index == 0 {
                total = finish.usage;
            } else {
                total.completion_tokens += finish.usage.completion_tokens;
            }
        }
        total
    }
}

impl ChatAnswer {
    fn new(run: RunId, format: &Arc<AnswerFormat>) -> Self {
        let parser = AnswerParser::new(Arc::clone(format));
        Self { run, parser, call_ids: Vec::new(), mod_calls: Vec::new(), token_bytes: Vec::new(), end: None }
    }

    fn add_tokens(&mut self, tokens: &[MeasuredToken]) {
        self.token_bytes.extend(tokens.iter().map(|token| token.measurement.text.len()));
    }

    fn remove_tokens(&mut self, tokens: usize) {
        self.token_bytes.truncate(self.token_bytes.len().saturating_sub(tokens));
    }

    /// Counts the tokens of reasoning, including their markers.
    fn reasoning_tokens(&self) -> u32 {
        let reasoning = self.parser.reasoning_ranges();
        let starts = self.token_bytes.iter().scan(0usize, |at, bytes| {
            let start = *at;
            *at += bytes;
            Some(start)
        });
        starts.filter(|start| reasoning.iter().any(|range| range.contains(start))).count() as u32
    }

    fn deltas(&mut self, pieces: Vec<AnswerDelta>, family: ModelFamily) -> Vec<ChatDelta> {
        let delta = |piece: AnswerDelta| match piece {
            AnswerDelta::Reasoning(text) => ChatDelta::Reasoning(text),
            AnswerDelta::Content(text) => ChatDelta::Content(text),
            AnswerDelta::Call(name) => {
                let (index, id) = (self.call_ids.len(), self.new_call_id(family));
                self.call_ids.push(id.clone());
                ChatDelta::ToolCall { index, id, name }
            }
            AnswerDelta::Arguments(text) => {
                ChatDelta::ToolArguments { index: self.call_ids.len().saturating_sub(1), text }
            }
            AnswerDelta::CallEnd => ChatDelta::ToolCallEnd(self.call_ids.len().saturating_sub(1)),
            AnswerDelta::Retract(retraction) => {
                self.call_ids.truncate(self.call_ids.len().saturating_sub(retraction.calls));
                ChatDelta::Retract(retraction)
            }
        };
        pieces.into_iter().map(delta).collect()
    }

    /// Returns a unique id for the next call, in the format that the family's template accepts.
    fn new_call_id(&self, family: ModelFamily) -> String {
        let run = self.run.0.simple().to_string();
        let index = self.call_ids.len();
        if family == ModelFamily::Mistral {
            // Mistral's template accepts nine letters and digits: seven random digits of the run's id, then the call's
            // number.
            return format!("{}{:02}", &run[run.len() - 7..], index % 100);
        }
        format!("call_{run}_{index}")
    }

    fn add_mod_calls(&mut self, payload: &Value, family: ModelFamily) -> Vec<ChatDelta> {
        let mut deltas = Vec::new();
        for call in tool_calls_of(payload) {
            let function = call.get("function").filter(|function| function.is_object()).unwrap_or(call);
            let arguments = match function.get("arguments").or_else(|| function.get("parameters")) {
                None | Some(Value::Null) => "{}".to_owned(),
                Some(Value::String(text)) => text.clone(),
                Some(value) => value.to_string(),
            };
            let own = call.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
            let (index, id) = (self.call_ids.len(), own.map_or_else(|| self.new_call_id(family), str::to_owned));
            let name = function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
            self.call_ids.push(id.clone());
            self.mod_calls.push((name.clone(), arguments.clone()));
            deltas.extend([
                ChatDelta::ToolCall { index, id, name },
                ChatDelta::ToolArguments { index, text: arguments },
                ChatDelta::ToolCallEnd(index),
            ]);
        }
        deltas
    }
}
