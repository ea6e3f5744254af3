//! Test utilities for mods: a small vocabulary, a harness for single calls, and simulated runs.

use crate::events::{RunId, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::AnswerFormat;
use crate::model::chat::family::ModelFamily;
use crate::model::grammar::GrammarCompiler;
use crate::mods::{Action, Call, CallEvent, LogitEdit, ModFactory, ModInstance, Pending, Reply, ReplySender, RunView};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// End-of-generation token.
pub const EOG: TokenId = 256;
/// Pieces other than single bytes and [`EOG`], from id 257.
const WORDS: [&str; 8] = [" the", " bad", " idea", "bad", " a", " very", "Hello", " b"];

/// Returns the id of a word of the vocabulary.
pub fn word(text: &str) -> TokenId {
    257 + TokenId::try_from(WORDS.iter().position(|word| *word == text).expect("a word of the vocabulary")).unwrap()
}

/// Creates a vocabulary: tokens 0 … 255 are bytes, 256 ends a generation, then a few words follow. The longest piece
/// wins.
pub fn vocabulary() -> Vocabulary {
    let mut pieces: Vec<Box<[u8]>> = (0..=255_u8).map(|byte| Box::from([byte])).collect();
    pieces.push(Box::from(*b"<end>"));
    pieces.extend(WORDS.iter().map(|word| Box::from(word.as_bytes())));
    let mut control = vec![false; pieces.len()];
    control[256] = true;
    Vocabulary::new(pieces, control, vec![EOG], crate::model::SpecialTokens::default(), |text, _, parse_special| {
        let mut rest = text;
        let mut tokens = Vec::new();
        while !rest.is_empty() {
            if parse_special && let Some(after) = rest.strip_prefix("<end>") {
                tokens.push(EOG);
                rest = after;
                continue;
            }
            let longest = WORDS.iter().filter(|word| rest.starts_with(**word)).max_by_key(|word| word.len());
            if let Some(piece) = longest {
                tokens.push(word(piece));
                rest = &rest[piece.len()..];
            } else {
                let first = rest.chars().next().map_or(1, char::len_utf8);
                tokens.extend(rest[..first].bytes().map(TokenId::from));
                rest = &rest[first..];
            }
        }
        tokens
    })
}

/// Creates a run with that vocabulary.
pub fn run() -> Arc<RunView> {
    let vocabulary = Arc::new(vocabulary());
    Arc::new(RunView {
        run_id: RunId::now(),
        request_id: "request".into(),
        model: "bytes".into(),
        grammars: Arc::new(GrammarCompiler::new(Arc::clone(&vocabulary))),
        vocabulary,
        conversation: None,
        tools: None,
        images: Vec::new(),
        answer_format: Arc::new(AnswerFormat {
            syntax: ModelFamily::Hermes.syntax().into(),
            tools: Vec::new(),
            separates_reasoning: true,
            thinking: false,
            single: false,
        }),
        parameters: Value::Null,
        seed: 1,
    })
}

/// Harness that calls one mod instance with a sequence: the prompt "> ", then the appended tokens.
pub struct ModHarness {
    pub instance: Box<dyn ModInstance>,
    pub sequence: Vec<TokenId>,
    pub run: Arc<RunView>,
    step: u32,
}

/// Tokens of the prompt of a [`ModHarness`].
pub const PROMPT: usize = 2;

impl ModHarness {
    pub fn new(factory: &dyn ModFactory, config: &Value) -> Self {
        let run = run();
        let instance = factory.start(config, &run).expect("a configuration that the mod accepts");
        let sequence = run.vocabulary.encode("> ", false, false);
        Self { instance, sequence, run, step: 1 }
    }

    pub fn text(&self) -> String {
        self.run.vocabulary.decode(&self.sequence[PROMPT..])
    }

    pub fn call(&mut self, event: CallEvent<'_>) -> Reply {
        let call = Call {
            run: &self.run,
            step: self.step,
            sequence: &self.sequence,
            prompt_len: PROMPT,
            evicted: 0,
            max_steps: 100,
            event,
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        let done = ReplySender::new(move |reply| sender.send(reply).unwrap());
        let reply = match self.instance.call(&call, done) {
            Ok(reply) => reply,
            Err(Pending) => receiver.recv_timeout(Duration::from_secs(30)).expect("an answer"),
        };
        assert!(reply.action.as_ref().is_none_or(|action| action.permitted_on(call.event_type())));
        reply
    }

    pub fn forward(&mut self, logits: &[f32]) -> Reply {
        self.call(CallEvent::ForwardPass { logits })
    }

    /// Appends a sampled token, and applies a Backtrack that the mod replies with.
    pub fn add(&mut self, token: TokenId) -> Reply {
        self.step += 1;
        self.append(&[token], false)
    }

    pub fn append(&mut self, tokens: &[TokenId], forced: bool) -> Reply {
        self.sequence.extend_from_slice(tokens);
        let logprobs = vec![None; tokens.len()];
        let reply = self.call(CallEvent::Added { tokens, logprobs: &logprobs, forced });
        if let Some(Action::Backtrack { n, tokens }) = &reply.action {
            self.sequence.truncate(self.sequence.len() - *n as usize);
            self.sequence.extend_from_slice(tokens);
        }
        reply
    }

    /// Adds a text token by token; returns the last reply with an action.
    pub fn write_text(&mut self, text: &str) -> Option<Reply> {
        let tokens = self.run.vocabulary.encode(text, false, false);
        tokens.into_iter().map(|token| self.add(token)).filter(|reply| reply.action.is_some()).last()
    }
}

/// Simulated run of mods with a scripted model. It follows the rules of the engine.
pub struct Simulation {
    pub run: Arc<RunView>,
    pub prompt: String,
    /// Text that the model writes as long as the answer is a prefix of it; NUL ends the answer. Afterwards the model
    /// writes random text.
    pub script: String,
    /// Scripts after the first one; each replaces the previous script when a mod removes that from the answer.
    pub next_scripts: Vec<String>,
    /// Preferred characters of random text.
    pub alphabet: &'static str,
    pub seed: u64,
    pub max_tokens: usize,
}

/// Result of a simulated run.
#[derive(Debug, Default)]
pub struct SimulationResult {
    pub text: String,
    pub tokens: Vec<TokenId>,
    /// True if the run ended with an end-of-generation token.
    pub ended: bool,
    pub error: Option<String>,
    pub logs: Vec<String>,
    /// Number of actions that won an event.
    pub controls: usize,
    /// Number of tokens that were retracted after they were sent.
    pub retracted: usize,
    /// Number of sampled tokens.
    pub draws: usize,
    /// True if the limit of steps ended the run.
    pub reached_max_steps: bool,
}

impl Default for Simulation {
    fn default() -> Self {
        Self {
            run: run(),
            prompt: "> ".into(),
            script: String::new(),
            next_scripts: Vec::new(),
            alphabet: "abcdefghijklmnopqrstuvwxyz .",
            seed: 1,
            max_tokens: 100,
        }
    }
}

/// A simulated run in progress.
struct SimulationState {
    simulation: Simulation,
    instances: Vec<Box<dyn ModInstance>>,
    script: Vec<TokenId>,
    sequence: Vec<TokenId>,
    prompt: usize,
    step: u32,
    random: u64,
    logits: Vec<f32>,
    sent: usize,
    result: SimulationResult,
}

impl Simulation {
    pub fn run_mods(self, mods: &[(&dyn ModFactory, Value)]) -> SimulationResult {
        let start = |(factory, config): &(&dyn ModFactory, Value)| factory.start(config, &self.run).unwrap();
        let instances = mods.iter().map(start).collect();
        let vocabulary = &self.run.vocabulary;
        let sequence = vocabulary.encode(&self.prompt, false, false);
        let mut state = SimulationState {
            instances,
            script: script(&self.script, vocabulary),
            prompt: sequence.len(),
            sequence,
            step: 0,
            random: self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            logits: Vec::new(),
            sent: 0,
            result: SimulationResult::default(),
            simulation: self,
        };
        let max_steps = 4 * state.simulation.max_tokens as u32 + 256;
        while state.step < max_steps && state.step_once() {}
        state.result.reached_max_steps = state.step >= max_steps;
        state.result.tokens = state.sequence.split_off(state.prompt);
        let vocabulary = &state.simulation.run.vocabulary;
        let text: Vec<TokenId> = state.result.tokens.iter().copied().filter(|&token| token != EOG).collect();
        state.result.text = vocabulary.decode(&text);
        state.result
    }
}

fn script(text: &str, vocabulary: &Vocabulary) -> Vec<TokenId> {
    let mut tokens = vocabulary.encode(text.trim_end_matches('\0'), false, false);
    tokens.extend(text.ends_with('\0').then_some(EOG));
    tokens
}

impl SimulationState {
    /// Runs one step. Returns `false` if the run has ended.
    fn step_once(&mut self) -> bool {
        self.step += 1;
        let model = self.model();
        self.logits.clone_from(&model);
        let (action, mut temperature) = self.dispatch(&CallEvent::ForwardPass { logits: &[] });
        if let Some(action) = action {
            return self.apply(action, 0);
        }
        let token = match temperature.take() {
            Some(0.0) => self.logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |best| best.0),
            temperature => {
                let Some(token) = self.draw(temperature.unwrap_or(1.0)) else {
                    self.result.error = Some("no token can be drawn".into());
                    return false;
                };
                token
            }
        };
        let token = token as TokenId;
        self.result.draws += 1;
        let logprob = logprob(&model, token);
        let text = self.simulation.run.vocabulary.decode(&[token]);
        if let (Some(action), _) = self.dispatch(&CallEvent::Sampled { token, text: &text, logprob }) {
            return self.apply(action, 1);
        }
        self.append(&[token], &[Some(logprob)], false)
    }

    fn model(&mut self) -> Vec<f32> {
        let answer = &self.sequence[self.prompt..];
        let vocabulary = &self.simulation.run.vocabulary;
        let is_preferred = |token: TokenId| {
            !vocabulary.is_control(token)
                && vocabulary.piece(token).iter().all(|byte| self.simulation.alphabet.as_bytes().contains(byte))
        };
        let mut logits: Vec<f32> =
            (0..vocabulary.len() as TokenId).map(|token| if is_preferred(token) { 0.0 } else { -5.0 }).collect();
        if self.script.starts_with(answer) && answer.len() < self.script.len() {
            logits[self.script[answer.len()] as usize] = 20.0;
        }
        logits
    }

    fn draw(&mut self, temperature: f32) -> Option<usize> {
        let weights: Vec<f32> = self.logits.iter().map(|logit| (logit / temperature).exp()).collect();
        let sum: f32 = weights.iter().sum();
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let mut left = (self.random >> 40) as f32 / (1 << 24) as f32 * sum;
        let mut last = None;
        for (token, weight) in weights.into_iter().enumerate().filter(|(_, weight)| *weight > 0.0) {
            last = Some(token);
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        last
    }

    /// Dispatches an event to all mods. Returns the action that wins the event, and the temperature for the token.
    fn dispatch(&mut self, event: &CallEvent<'_>) -> (Option<Action>, Option<f32>) {
        let (mut winner, mut temperature) = (None, None);
        for instance in &mut self.instances {
            let event = match *event {
                CallEvent::ForwardPass { .. } => CallEvent::ForwardPass { logits: &self.logits },
                CallEvent::Sampled { token, text, logprob } => CallEvent::Sampled { token, text, logprob },
                CallEvent::Added { tokens, logprobs, forced } => CallEvent::Added { tokens, logprobs, forced },
                CallEvent::Prefilled => CallEvent::Prefilled,
            };
            let call = Call {
                run: &self.simulation.run,
                step: self.step,
                sequence: &self.sequence,
                prompt_len: self.prompt,
                evicted: 0,
                max_steps: self.simulation.max_tokens as u32,
                event,
            };
            if !instance.handles().contains(call.event_type()) {
                continue;
            }
            let kind = call.event_type();
            let reply = instance.call(&call, ReplySender::new(|_| {})).expect("a built-in mod replies immediately");
            self.result.logs.extend(reply.logs.into_iter().map(|log| log.message));
            match reply.action {
                None | Some(Action::Noop) => {}
                Some(action) => {
                    assert!(action.permitted_on(kind), "{action:?} on {kind:?}");
                    if let Action::AdjustedLogits { edit, temperature: own } = action {
                        edit_logits(&mut self.logits, edit);
                        temperature = own.or(temperature);
                    } else if winner.is_none() {
                        winner = Some(action);
                    }
                }
            }
        }
        (winner, temperature)
    }

    /// Applies an action. `drawn` is the number of sampled tokens that are not in the sequence yet; a Backtrack counts
    /// them.
    fn apply(&mut self, action: Action, drawn: usize) -> bool {
        self.result.controls += 1;
        match action {
            Action::ForceTokens(tokens) => self.force(tokens),
            Action::Backtrack { n, tokens } => {
                assert!(n > 0, "a Backtrack without tokens");
                let removed = n as usize - drawn;
                let length = self.sequence.len();
                assert!(removed <= length - self.prompt, "a Backtrack exceeds the answer");
                let was_removed = self.script.starts_with(&self.sequence[self.prompt..]) && removed > 0;
                self.sequence.truncate(length - removed);
                self.result.retracted += self.sent.saturating_sub(self.sequence.len() - self.prompt);
                self.sent = self.sent.min(self.sequence.len() - self.prompt);
                if was_removed && !self.simulation.next_scripts.is_empty() {
                    self.script = script(&self.simulation.next_scripts.remove(0), &self.simulation.run.vocabulary);
                }
                tokens.is_empty() || self.force(tokens)
            }
            Action::EmitError { message, .. } => {
                self.result.error = Some(message);
                false
            }
            other => panic!("{other:?}"),
        }
    }

    fn force(&mut self, mut tokens: Vec<TokenId>) -> bool {
        if let Some(end) = tokens.iter().position(|&token| token == EOG) {
            tokens.truncate(end + 1);
        }
        let room = self.simulation.max_tokens - (self.sequence.len() - self.prompt);
        let ends = usize::from(tokens.last() == Some(&EOG));
        if tokens.len() - ends > room {
            tokens.truncate(room);
        }
        self.step += 1;
        let logprobs: Vec<Option<f32>> = tokens
            .iter()
            .map(|&token| {
                let logits = self.model();
                self.sequence.push(token);
                Some(logprob(&logits, token))
            })
            .collect();
        self.sequence.truncate(self.sequence.len() - tokens.len());
        !tokens.is_empty() && self.append(&tokens, &logprobs, true)
    }

    fn append(&mut self, tokens: &[TokenId], logprobs: &[Option<f32>], forced: bool) -> bool {
        self.sequence.extend_from_slice(tokens);
        if let (Some(action), _) = self.dispatch(&CallEvent::Added { tokens, logprobs, forced }) {
            return self.step < 4 * self.simulation.max_tokens as u32 + 256 && self.apply(action, 0);
        }
        let length = self.sequence.len() - self.prompt;
        let held = self.instances.iter().map(|instance| instance.holdback()).max().unwrap_or(0);
        self.sent = self.sent.max(length.saturating_sub(held));
        self.result.ended = tokens.last() == Some(&EOG);
        !self.result.ended && length < self.simulation.max_tokens
    }
}

fn edit_logits(logits: &mut Vec<f32>, edit: LogitEdit) {
    match edit {
        LogitEdit::Keep => {}
        LogitEdit::Set(entries) => entries.into_iter().for_each(|(token, value)| logits[token as usize] = value),
        LogitEdit::Add(entries) => entries.into_iter().for_each(|(token, value)| logits[token as usize] += value),
        LogitEdit::Allow(mask) => {
            for (token, logit) in logits.iter_mut().enumerate() {
                if !mask.is_allowed(token as u32) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        LogitEdit::Replace(values) => *logits = values,
    }
}

fn logprob(logits: &[f32], token: TokenId) -> f32 {
    let sum: f32 = logits.iter().map(|logit| logit.exp()).sum();
    logits[token as usize] - sum.ln()
}
