//! Simulated runs of mods with a scripted model.

use super::{EOG, run};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::mods::{Action, Call, CallEvent, LogitEdit, ModFactory, ModInstance, RunView};
use serde_json::Value;
use std::sync::Arc;

/// Simulated run of mods with a scripted model. It follows the rules of the engine.
pub struct Simulation {
    pub run: Arc<RunView>,
    pub prompt: String,
    /// Text that the model writes as long as the answer is a prefix of it; NUL ends the answer. Afterwards the model
    /// writes random text.
    pub script: String,
    /// Scripts after the first one. Each replaces the previous script when a mod removes a part of that script from the
    /// answer.
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
        let sequence = vocabulary.encode_plain(&self.prompt);
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
    let mut tokens = vocabulary.encode_plain(text.trim_end_matches('\0'));
    tokens.extend(text.ends_with('\0').then_some(EOG));
    tokens
}

impl SimulationState {
    /// Runs one step. Returns `false` if the run has ended.
    fn step_once(&mut self) -> bool {
        self.step += 1;
        let model = self.model();
        self.logits.clone_from(&model);
        let (action, mut temperature) = self.dispatch(&CallEvent::ForwardPass { logits: &[], hidden_states: None });
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
        let max = self.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = self.logits.iter().map(|logit| ((logit - max) / temperature).exp()).collect();
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
                CallEvent::ForwardPass { .. } => CallEvent::ForwardPass { logits: &self.logits, hidden_states: None },
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
                evictions_end: 0,
                max_tokens: self.simulation.max_tokens as u32,
                event,
            };
            if !instance.handles().contains(call.event_type()) {
                continue;
            }
            let kind = call.event_type();
            let reply = instance.call(&call, &|| unreachable!()).expect("a built-in mod replies immediately");
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
    /// them. Returns `false` if the run has ended.
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
