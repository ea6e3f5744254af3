//! Keeps a session's own state in step with the answer, whatever the mods beside it do to that.

use crate::events::TokenId;
use crate::mods::{Call, CallEvent, RunView};

/// How long the answer was at the last call.
#[derive(Debug, Default)]
pub struct Trail {
    tokens: usize,
}

/// What became of the answer since then.
#[derive(Debug)]
pub struct Moved<'a> {
    /// Tokens that were taken off its end.
    pub removed: usize,
    /// Tokens that were then appended.
    pub added: &'a [TokenId],
    /// For each of these its log-probability, where it is known; empty where nothing is.
    pub logprobs: &'a [Option<f32>],
}

impl Moved<'_> {
    /// The log-probability of each token that was added.
    pub fn each_logprob(&self) -> impl Iterator<Item = Option<f32>> {
        (0..self.added.len()).map(move |index| self.logprobs.get(index).copied().flatten())
    }
}

impl Trail {
    /// Takes note of a call. The session must handle `Added`: each token is added once, and only there.
    pub fn follow<'a>(&mut self, call: &Call<'a>) -> Moved<'a> {
        let (added, logprobs): (&[TokenId], &[Option<f32>]) = match call.event {
            CallEvent::Added { tokens, logprobs, .. } => (tokens, logprobs),
            _ => (&[], &[]),
        };
        let kept = call.length() - added.len();
        let removed = self.tokens.saturating_sub(kept);
        self.tokens = call.length();
        Moved { removed, added, logprobs }
    }

    /// Tokens of the answer.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// The token with which a mod ends an answer.
pub fn end_token(run: &RunView) -> Result<TokenId, String> {
    let vocabulary = &run.vocabulary;
    let special = vocabulary.special();
    [special.eot, special.eos]
        .into_iter()
        .flatten()
        .chain(vocabulary.end_of_generation().iter().copied())
        .find(|&token| vocabulary.is_end_of_generation(token))
        .ok_or_else(|| "the model has no end-of-generation token to end an answer with".into())
}

/// Whether the token ends the run's answer.
pub fn ends(run: &RunView, token: TokenId) -> bool {
    let stop = run.parameters.pointer("/limits/stop_tokens").and_then(serde_json::Value::as_array);
    run.vocabulary.is_end_of_generation(token)
        || stop.is_some_and(|tokens| tokens.iter().any(|stop| stop.as_i64() == Some(token.into())))
}

/// Whether the run ends with the token that was just added, as far as a mod can know: it says so, or it is the last that fits.
pub fn is_over(call: &Call<'_>) -> bool {
    call.length() >= call.max_steps as usize
        || matches!(call.event, CallEvent::Added { tokens: [.., last], .. } if ends(call.run, *last))
}
