//! A small vocabulary and calls on it, for the tests of mods.

use crate::events::{RunId, TokenId};
use crate::model::Vocabulary;
use crate::model::grammar::Grammars;
use crate::mods::{Action, Call, CallEvent, Done, Factory, Pending, Reply, RunView, Session};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Ends a generation.
pub const EOG: TokenId = 256;
/// Pieces beyond single bytes and [`EOG`], from id 257.
const WORDS: [&str; 8] = [" the", " bad", " idea", "bad", " a", " very", "Hello", " b"];

/// The id of a word of the vocabulary.
pub fn word(text: &str) -> TokenId {
    257 + TokenId::try_from(WORDS.iter().position(|word| *word == text).expect("a word of the vocabulary")).unwrap()
}

/// Tokens 0 … 255 are the bytes, 256 ends a generation, then come a few words; the longest piece wins.
pub fn vocabulary() -> Vocabulary {
    let mut pieces: Vec<Box<[u8]>> = (0..=255_u8).map(|byte| Box::from([byte])).collect();
    pieces.push(Box::from(*b"<end>"));
    pieces.extend(WORDS.iter().map(|word| Box::from(word.as_bytes())));
    let mut control = vec![false; pieces.len()];
    control[256] = true;
    Vocabulary::new(pieces, control, vec![EOG], crate::model::Special::default(), |text, _, parse_special| {
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

/// A run on that vocabulary.
pub fn run() -> Arc<RunView> {
    let vocabulary = Arc::new(vocabulary());
    Arc::new(RunView {
        run_id: RunId::now(),
        request_id: "request".into(),
        model: "bytes".into(),
        grammars: Arc::new(Grammars::new(Arc::clone(&vocabulary))),
        vocabulary,
        conversation: None,
        tools: None,
        parameters: Value::Null,
        seed: 1,
    })
}

/// A session and the sequence it works on: the prompt "> ", then what was added.
pub struct Scene {
    pub session: Box<dyn Session>,
    pub sequence: Vec<TokenId>,
    pub run: Arc<RunView>,
    step: u32,
}

pub const PROMPT: usize = 2;

impl Scene {
    pub fn new(factory: &dyn Factory, config: &Value) -> Self {
        let run = run();
        let session = factory.start(config, &run).expect("a configuration that the mod accepts");
        let sequence = run.vocabulary.encode("> ", false, false);
        Self { session, sequence, run, step: 1 }
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
            max_steps: 100,
            event,
        };
        let (later, answer) = std::sync::mpsc::channel();
        let done = Done::new(move |reply| later.send(reply).unwrap());
        let reply = match self.session.call(&call, done) {
            Ok(reply) => reply,
            Err(Pending) => answer.recv_timeout(Duration::from_secs(30)).expect("an answer"),
        };
        assert!(reply.action.as_ref().is_none_or(|action| action.permitted_on(call.event_type())));
        reply
    }

    pub fn forward(&mut self, logits: &[f32]) -> Reply {
        self.call(CallEvent::ForwardPass { logits })
    }

    /// Appends one token as if it was sampled, and applies a Backtrack that the mod answers with.
    pub fn add(&mut self, token: TokenId) -> Reply {
        self.step += 1;
        self.append(&[token], false)
    }

    pub fn append(&mut self, tokens: &[TokenId], forced: bool) -> Reply {
        self.sequence.extend_from_slice(tokens);
        let reply = self.call(CallEvent::Added { tokens, forced });
        if let Some(Action::Backtrack { n, tokens }) = &reply.action {
            self.sequence.truncate(self.sequence.len() - *n as usize);
            self.sequence.extend_from_slice(tokens);
        }
        reply
    }

    /// Adds the text token by token, in the vocabulary's own tokens; returns the last reply with an action.
    pub fn say(&mut self, text: &str) -> Option<Reply> {
        let tokens = self.run.vocabulary.encode(text, false, false);
        tokens.into_iter().map(|token| self.add(token)).filter(|reply| reply.action.is_some()).last()
    }
}
