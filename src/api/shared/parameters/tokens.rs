//! Tokens and prompts in requests.

use crate::api::shared::fields::{Fields, integer, invalid_value};
use crate::events::TokenId;
use crate::model::{TokenizeOptions, Vocabulary};
use crate::server::ApiError;
use serde_json::Value;
use tokio::runtime::{Handle, RuntimeFlavor};

/// Maximum bytes of text that are tokenized while other tasks of the thread wait.
const MAX_INLINE_BYTES: usize = 64 << 10;

/// Tokenizes text.
pub(crate) fn encode(vocabulary: &Vocabulary, text: &str, options: TokenizeOptions) -> Vec<TokenId> {
    run_in_place(text.len(), || vocabulary.encode(text, options))
}

/// Runs work on a text of this length, which may take seconds. If the text is long, other tasks of the thread move to
/// another thread first.
pub(crate) fn run_in_place<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    // Tests have runtimes with one thread, whose tasks cannot move.
    let can_move = || Handle::try_current().is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
    if bytes > MAX_INLINE_BYTES && can_move() { tokio::task::block_in_place(work) } else { work() }
}

/// Parses a token id.
pub(crate) fn token(value: &Value, vocabulary: &Vocabulary) -> Option<TokenId> {
    let id = TokenId::try_from(integer(value)?).ok()?;
    vocabulary.contains(id).then_some(id)
}

/// Parses a list of token ids or of strings that are one token each.
pub(crate) fn tokens(fields: Fields<'_>, name: &str, vocabulary: &Vocabulary) -> Result<Vec<TokenId>, ApiError> {
    let parse = |value: &Value| match value.as_str() {
        Some(text) => match encode(vocabulary, text, TokenizeOptions::MARKUP)[..] {
            [token] => Ok(token),
            ref several => Err(ApiError::invalid(
                name,
                format!(
                    "`{name}`: the string {value} has {} tokens ({several:?}), expected one; send the token ids",
                    several.len()
                ),
            )),
        },
        None => token(value, vocabulary).ok_or_else(|| {
            invalid_value(name, &format!("a list of token ids below {}, or of strings", vocabulary.len()), value)
        }),
    };
    fields.list(name)?.into_iter().flatten().map(parse).collect()
}

/// Parses a list of tokens, which must not be longer than the vocabulary.
pub(super) fn bounded_tokens(
    fields: Fields<'_>,
    name: &str,
    vocabulary: &Vocabulary,
) -> Result<Vec<TokenId>, ApiError> {
    check_entry_count(name, fields.list(name)?.map_or(0, Vec::len), vocabulary)?;
    tokens(fields, name, vocabulary)
}

/// Rejects a list with more entries than the vocabulary has tokens, before it is processed.
pub(super) fn check_entry_count(name: &str, entries: usize, vocabulary: &Vocabulary) -> Result<(), ApiError> {
    let max = vocabulary.len();
    if entries <= max {
        return Ok(());
    }
    let detail =
        format!("`{name}` must have at most {max} entries, one for each token of the vocabulary, got {entries}");
    Err(ApiError::invalid(name, detail))
}

/// Replaces an empty prompt with the BOS token, or with the EOS token if the model has no BOS token, because generation
/// needs at least one token.
pub(crate) fn or_start_token(prompt: Vec<TokenId>, vocabulary: &Vocabulary) -> Vec<TokenId> {
    let special = vocabulary.special();
    match special.bos.or(special.eos) {
        Some(token) if prompt.is_empty() => vec![token],
        _ => prompt,
    }
}

/// Parses a prompt: a string, a list of token ids, or a list of both. `options.add_special` applies to its start.
pub(crate) fn encode_prompt(
    value: &Value,
    name: &str,
    vocabulary: &Vocabulary,
    options: TokenizeOptions,
) -> Result<Vec<TokenId>, ApiError> {
    let expected = || format!("a string, or a list of strings and token ids below {}", vocabulary.len());
    let parts = match value {
        Value::String(text) => return Ok(encode(vocabulary, text, options)),
        Value::Array(parts) => parts,
        other => return Err(invalid_value(name, &expected(), other)),
    };
    let bytes = parts.iter().filter_map(Value::as_str).map(str::len).sum();
    run_in_place(bytes, || {
        let mut tokens = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            match part {
                Value::String(text) => {
                    let add_special = options.add_special && index == 0;
                    tokens.extend(vocabulary.encode(text, TokenizeOptions { add_special, ..options }));
                }
                id => tokens.push(token(id, vocabulary).ok_or_else(|| invalid_value(name, &expected(), id))?),
            }
        }
        Ok(tokens)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_run_while_a_long_text_is_tokenized() {
        let work = tokio::spawn(async {
            let (sender, receiver) = mpsc::channel();
            tokio::spawn(async move { sender.send(()) });
            run_in_place(MAX_INLINE_BYTES + 1, || receiver.recv_timeout(Duration::from_mins(1)))
        });
        work.await.unwrap().unwrap();
    }
}
