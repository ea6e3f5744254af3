//! Checks of the attention heads that a request selects for recording: the heads must exist, and their rows must not be
//! too large.

use super::error::SubmitError;
use super::request::Request;
use crate::events::StoredHeads;
use crate::model::llama::AttentionSupport;

/// Maximum bytes of the stored rows of one run.
pub const MAX_BYTES: u64 = 256 << 20;

/// Bytes of a stored value, a 16-bit number.
const VALUE_BYTES: u64 = 2;

/// Returns the bytes of the stored rows of one step.
pub fn row_bytes(stored: &StoredHeads, layers: usize, heads: u16, row_len: u64) -> u64 {
    let count = match stored {
        StoredHeads::None => 0,
        StoredHeads::All => layers * usize::from(heads),
        StoredHeads::Listed(listed) => listed.len(),
    };
    count as u64 * VALUE_BYTES * row_len
}

/// Checks that the selected heads exist, and that their rows are not too large if the answer has its maximum length.
pub fn check(request: &Request, support: &AttentionSupport, context: usize) -> Result<(), SubmitError> {
    let stored = &request.stored_heads;
    let (layers, heads) = (&support.layer_ids, support.heads);
    if let StoredHeads::Listed(listed) = stored
        && let Some(&(layer, head)) = listed.iter().find(|(layer, head)| !layers.contains(layer) || *head >= heads)
    {
        return Err(SubmitError::NoSuchHead { layer, head, layers: layers.clone(), heads });
    }
    let prompt = request.prompt.len() as u64;
    let tokens = u64::from(request.limits.max_tokens).min((context as u64).saturating_sub(prompt));
    let position_bytes = row_bytes(stored, layers.len(), heads, 1);
    let bytes = position_bytes.saturating_mul(tokens * prompt + tokens * tokens.saturating_sub(1) / 2);
    if bytes > MAX_BYTES {
        return Err(SubmitError::HeadRowsTooLarge {
            heads: position_bytes / VALUE_BYTES,
            prompt_tokens: prompt,
            max_tokens: tokens,
            bytes,
        });
    }
    Ok(())
}
