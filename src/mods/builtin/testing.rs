//! Test utilities for mods: a small vocabulary, a harness for single calls, and simulated runs.

mod simulation;

pub use simulation::{Simulation, SimulationResult};

use crate::events::{RunId, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::AnswerFormat;
use crate::model::chat::family::ModelFamily;
use crate::model::grammar::GrammarCompiler;
use crate::model::llama::NoHiddenStates;
use crate::mods::{Action, Call, CallEvent, ModFactory, ModInstance, Reply, ReplySender, RunView};
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
        owner: None,
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
        stop_tokens: Vec::new(),
        seed: 1,
        hidden_layers: Err(NoHiddenStates::CaptureOff),
    })
}

/// Creates a run whose answers have the format of this family.
pub fn run_of(family: ModelFamily) -> Arc<RunView> {
    let view = run();
    let answer_format = AnswerFormat { syntax: family.syntax().into(), ..(*view.answer_format).clone() };
    Arc::new(RunView { answer_format: answer_format.into(), ..(*view).clone() })
}

/// Harness that calls one mod instance with a sequence: the prompt "> ", then the appended tokens.
pub struct ModHarness {
    pub instance: Box<dyn ModInstance>,
    pub sequence: Vec<TokenId>,
    /// Number of evicted tokens.
    pub evicted: usize,
    /// Index of the first token that followed all evicted ones.
    pub evictions_end: usize,
    pub run: Arc<RunView>,
    step: u32,
}

/// Tokens of the prompt of a [`ModHarness`].
pub const PROMPT: usize = 2;

impl ModHarness {
    pub fn new(factory: &dyn ModFactory, config: &Value) -> Self {
        Self::with_run(factory, config, run())
    }

    pub fn with_run(factory: &dyn ModFactory, config: &Value, run: Arc<RunView>) -> Self {
        let instance = factory.start(config, &run).expect("a configuration that the mod accepts");
        let sequence = run.vocabulary.encode_plain("> ");
        Self { instance, sequence, evicted: 0, evictions_end: 0, run, step: 1 }
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
            evicted: self.evicted,
            evictions_end: self.evictions_end,
            max_tokens: 100,
            event,
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        let new_sender = || {
            let sender = sender.clone();
            ReplySender::new(move |reply| sender.send(reply).unwrap())
        };
        let reply = self.instance.call(&call, &new_sender);
        let reply = reply.unwrap_or_else(|| receiver.recv_timeout(Duration::from_secs(30)).expect("an answer"));
        assert!(reply.action.as_ref().is_none_or(|action| action.permitted_on(call.event_type())));
        reply
    }

    pub fn forward(&mut self, logits: &[f32]) -> Reply {
        self.call(CallEvent::ForwardPass { logits, hidden_states: None })
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
        let tokens = self.run.vocabulary.encode_plain(text);
        tokens.into_iter().map(|token| self.add(token)).filter(|reply| reply.action.is_some()).last()
    }
}
