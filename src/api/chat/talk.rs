//! The runs of one request, and what is heard of them.

use super::ask::{Asked, Wishes};
use crate::api::generation::{self, Runs};
use crate::api::{ApiError, App, Caller, Loaded};
use crate::engine::{Output, PromptProgress};
use crate::events::{Alternative, Finish, FinishReason, RunEnd, RunId, TokenMeasurement, Usage};
use crate::model::Vocabulary;
use crate::model::chat::answer::{AnswerDelta, AnswerFormat, AnswerMessage, AnswerParser, Retraction};
use crate::model::chat::family::ModelFamily;
use axum::Extension;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::sync::Arc;

/// Tokens with the alternatives of each.
pub(in crate::api) type Tokens = Vec<(TokenMeasurement, Vec<Alternative>)>;

/// The runs of one request.
pub(in crate::api) struct Talk {
    runs: Runs,
    pub(in crate::api) wishes: Wishes,
    /// The model's name.
    pub(in crate::api) model: String,
    /// Seconds since 1970.
    pub(in crate::api) created: i64,
    pub(in crate::api) vocabulary: Arc<Vocabulary>,
    answers: Vec<Answer>,
    family: ModelFamily,
}

struct Answer {
    run: RunId,
    parser: AnswerParser,
    /// Ids of the calls.
    ids: Vec<String>,
    /// Calls that a mod ended the run with.
    of_mod: Vec<(String, String)>,
    /// Bytes of each token's text.
    tokens: Vec<usize>,
    end: Option<Arc<RunEnd>>,
}

/// What was heard of one answer.
#[derive(Debug)]
pub(in crate::api) struct Heard {
    /// Which answer, from 0 on.
    pub(in crate::api) answer: usize,
    pub(in crate::api) said: Vec<Said>,
    /// The tokens behind it.
    pub(in crate::api) tokens: Tokens,
    /// Tokens that a mod took back, whatever they were read as; those before `tokens`.
    pub(in crate::api) taken_back: usize,
    pub(in crate::api) progress: Option<PromptProgress>,
    /// The answer is over.
    pub(in crate::api) end: Option<Arc<RunEnd>>,
}

/// Something that was said in an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::api) enum Said {
    Reasoning(String),
    Content(String),
    /// A call, which is the answer's `index`th.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// Of the call with that index.
    Arguments {
        index: usize,
        text: String,
    },
    /// The call with that index is complete.
    Called(usize),
    /// Something said before is void.
    Retract(Retraction),
}

/// A call, as all dialects need it.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct CallOf<'a> {
    pub(in crate::api) id: &'a str,
    pub(in crate::api) name: &'a str,
    /// JSON, unless the answer was cut off in it.
    pub(in crate::api) arguments: &'a str,
}

/// Why there is no answer, and the run that leads to it, where there was one.
#[derive(Debug)]
pub(in crate::api) struct Refused {
    pub(in crate::api) error: ApiError,
    pub(in crate::api) run: Option<RunId>,
}

impl Refused {
    /// The answer that says so, as the dialect's error.
    pub(in crate::api) fn respond<E: IntoResponse>(self, dialect: impl FnOnce(ApiError) -> E) -> Response {
        let response = dialect(self.error).into_response();
        match self.run {
            Some(run) => generation::with_run_id(response, run),
            None => response,
        }
    }
}

impl<E: Into<ApiError>> From<E> for Refused {
    fn from(error: E) -> Self {
        Self { error: error.into(), run: None }
    }
}

impl Talk {
    /// Hands the requests to the engine, and waits for the first output, so that a request that fails at once is a plain
    /// error.
    pub(in crate::api) async fn begin(
        app: &App,
        loaded: &Loaded,
        mut asked: Asked,
        headers: &HeaderMap,
        caller: Option<Extension<Caller>>,
    ) -> Result<Self, Refused> {
        for request in &mut asked.requests {
            generation::note_client(request, headers, caller.clone());
        }
        let created = app.now().timestamp();
        let runs = Runs::begin(app.clone(), loaded, asked.requests).await?;
        if let Some(error) = runs.failed_at_once() {
            return Err(Refused { error, run: runs.begun.first().map(|run| run.id) });
        }
        let answers = runs.begun.iter().map(|run| Answer::new(run.id, &asked.reading)).collect();
        Ok(Self {
            runs,
            wishes: asked.wishes,
            model: loaded.name().to_owned(),
            created,
            vocabulary: Arc::clone(loaded.vocabulary()),
            answers,
            family: asked.reading.format.family,
        })
    }

    /// The first answer's run.
    pub(in crate::api) fn run(&self) -> RunId {
        self.answers[0].run
    }

    /// Each answer's run.
    pub(in crate::api) fn runs(&self) -> impl Iterator<Item = RunId> {
        self.answers.iter().map(|answer| answer.run)
    }

    /// How many answers there are.
    pub(in crate::api) fn len(&self) -> usize {
        self.answers.len()
    }

    /// The slot of an answer.
    pub(in crate::api) fn slot(&self, answer: usize) -> Option<u32> {
        self.runs.begun[answer].metrics.slot.get().copied()
    }

    /// Tokens of an answer's prompt whose state was there already; 0 until the prompt is evaluated.
    pub(in crate::api) fn cached_tokens(&self, answer: usize) -> u32 {
        self.runs.begun[answer].metrics.prompt.get().map_or(0, |prompt| prompt.cached)
    }

    /// Where the time of an answer went so far.
    pub(in crate::api) fn timings_so_far(&self, answer: usize) -> Option<Value> {
        let prompt = self.runs.begun[answer].metrics.prompt.get()?;
        Some(generation::timings_so_far(prompt, self.answers[answer].tokens.len() as u32))
    }

    /// What is heard next; `None` when all answers are over.
    ///
    /// # Errors
    /// A run failed, or the server stops.
    pub(in crate::api) async fn next(&mut self) -> Result<Option<Heard>, ApiError> {
        let Some((index, output)) = self.runs.next().await? else { return Ok(None) };
        let family = self.family;
        let answer = &mut self.answers[index];
        let mut heard =
            Heard { answer: index, said: Vec::new(), tokens: Vec::new(), taken_back: 0, progress: None, end: None };
        match output {
            Output::Text(delta) => {
                answer.note(&delta.tokens);
                let pieces = answer.parser.push(&delta.text);
                heard.said = answer.told(pieces, family);
                heard.tokens = delta.tokens;
            }
            Output::Retract { chars, tokens } => {
                answer.take_back(tokens);
                let pieces = answer.parser.retract(chars);
                heard.said = answer.told(pieces, family);
                heard.taken_back = tokens;
            }
            Output::Ended(end) => {
                if let Some(error) = generation::failure(&end, answer.run) {
                    return Err(error);
                }
                let pieces = answer.parser.finish(end.finish.reason == FinishReason::Length);
                heard.said = answer.told(pieces, family);
                if let Some(payload) = &end.finish.tool_calls {
                    // The calls of a mod are the whole answer: what the model wrote before them is not.
                    heard.said.extend(answer.parser.void_content().map(Said::Retract));
                    heard.said.extend(answer.take_calls_of_mod(payload, family));
                }
                answer.end = Some(Arc::clone(&end));
                heard.end = Some(end);
            }
            Output::Progress(progress) => heard.progress = Some(progress),
            Output::Prompt(_) => {}
        }
        Ok(Some(heard))
    }

    /// Everything that an answer said.
    pub(in crate::api) fn message(&self, answer: usize) -> &AnswerMessage {
        self.answers[answer].parser.message()
    }

    /// The calls of an answer.
    pub(in crate::api) fn calls(&self, answer: usize) -> Vec<CallOf<'_>> {
        let Answer { parser, ids, of_mod, .. } = &self.answers[answer];
        let own = parser.message().calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str()));
        let all = own.chain(of_mod.iter().map(|(name, arguments)| (name.as_str(), arguments.as_str())));
        ids.iter().zip(all).map(|(id, (name, arguments))| CallOf { id, name, arguments }).collect()
    }

    /// How an answer ended.
    pub(in crate::api) fn finish(&self, answer: usize) -> Option<&Finish> {
        self.answers[answer].end.as_deref().map(|end| &end.finish)
    }

    /// Why an answer ended, in OpenAI's words.
    pub(in crate::api) fn reason(&self, answer: usize) -> &'static str {
        match self.finish(answer).map(|finish| finish.reason) {
            Some(FinishReason::Length) => "length",
            _ if !self.answers[answer].ids.is_empty() => "tool_calls",
            _ => "stop",
        }
    }

    /// Tokens of thoughts in all answers, their markers included.
    pub(in crate::api) fn reasoning_tokens(&self) -> u32 {
        self.answers.iter().map(Answer::reasoning_tokens).sum()
    }

    /// Token counts of all answers; the prompt is counted once.
    pub(in crate::api) fn usage(&self) -> Usage {
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

impl Answer {
    fn new(run: RunId, reading: &Arc<AnswerFormat>) -> Self {
        let parser = AnswerParser::new(Arc::clone(reading));
        Self { run, parser, ids: Vec::new(), of_mod: Vec::new(), tokens: Vec::new(), end: None }
    }

    fn note(&mut self, tokens: &[(TokenMeasurement, Vec<Alternative>)]) {
        self.tokens.extend(tokens.iter().map(|(token, _)| token.text.len()));
    }

    fn take_back(&mut self, tokens: usize) {
        self.tokens.truncate(self.tokens.len().saturating_sub(tokens));
    }

    /// Tokens of its thoughts, their markers included.
    fn reasoning_tokens(&self) -> u32 {
        let thoughts = self.parser.thoughts();
        let starts = self.tokens.iter().scan(0usize, |at, bytes| {
            let start = *at;
            *at += bytes;
            Some(start)
        });
        starts.filter(|start| thoughts.iter().any(|thought| thought.contains(start))).count() as u32
    }

    fn told(&mut self, pieces: Vec<AnswerDelta>, family: ModelFamily) -> Vec<Said> {
        let told = |piece: AnswerDelta| match piece {
            AnswerDelta::Reasoning(text) => Said::Reasoning(text),
            AnswerDelta::Content(text) => Said::Content(text),
            AnswerDelta::Call(name) => {
                let (index, id) = (self.ids.len(), self.id(family));
                self.ids.push(id.clone());
                Said::Call { index, id, name }
            }
            AnswerDelta::Arguments(text) => Said::Arguments { index: self.ids.len().saturating_sub(1), text },
            AnswerDelta::Called => Said::Called(self.ids.len().saturating_sub(1)),
            AnswerDelta::Retract(retraction) => {
                self.ids.truncate(self.ids.len().saturating_sub(retraction.calls));
                Said::Retract(retraction)
            }
        };
        pieces.into_iter().map(told).collect()
    }

    /// An id for the next call: unique, and of the form that the family's template takes back.
    fn id(&self, family: ModelFamily) -> String {
        let run = self.run.0.simple().to_string();
        let index = self.ids.len();
        if family == ModelFamily::Mistral {
            // Nine letters and digits: the run's last, which are random, and the call's number.
            return format!("{}{:02}", &run[run.len() - 7..], index % 100);
        }
        format!("call_{run}_{index}")
    }

    fn take_calls_of_mod(&mut self, payload: &Value, family: ModelFamily) -> Vec<Said> {
        let mut said = Vec::new();
        let payload = payload.get("tool_calls").unwrap_or(payload);
        for call in payload.as_array().map_or(std::slice::from_ref(payload), Vec::as_slice) {
            let function = call.get("function").filter(|function| function.is_object()).unwrap_or(call);
            let arguments = match function.get("arguments").or_else(|| function.get("parameters")) {
                None | Some(Value::Null) => "{}".to_owned(),
                Some(Value::String(text)) => text.clone(),
                Some(value) => value.to_string(),
            };
            let own = call.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
            let (index, id) = (self.ids.len(), own.map_or_else(|| self.id(family), str::to_owned));
            let name = function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
            self.ids.push(id.clone());
            self.of_mod.push((name.clone(), arguments.clone()));
            said.extend([
                Said::Call { index, id, name },
                Said::Arguments { index, text: arguments },
                Said::Called(index),
            ]);
        }
        said
    }
}
