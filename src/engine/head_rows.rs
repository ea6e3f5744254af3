//! Checks of the attention heads that a request selects for recording: the heads must exist, and their rows must not be
//! too large.

use super::error::SubmitError;
use super::request::{Overflow, Request};
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
    let (prompt, context) = (request.prompt.len() as u64, context as u64);
    let room = context.saturating_sub(prompt);
    let max_tokens = u64::from(request.limits.max_tokens);
    // Without a maximum, a run that drops tokens never ends for lack of room; its rows end at the maximum of bytes.
    let is_limited = request.overflow != Overflow::Stop && request.limits.requested_max_tokens.is_some();
    let tokens = if is_limited { max_tokens } else { max_tokens.min(room) };
    // The rows of the tokens that do not fit into the context have its length.
    let growing = tokens.min(room);
    let positions = growing * prompt + growing * growing.saturating_sub(1) / 2 + (tokens - growing) * context;
    let position_bytes = row_bytes(stored, layers.len(), heads, 1);
    let bytes = position_bytes.saturating_mul(positions);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Surface;

    /// Returns the bytes of all rows, with a limit of bytes that every request exceeds.
    fn bytes(max_tokens: u32, overflow: Overflow) -> Option<u64> {
        let support = AttentionSupport { layer_ids: (0..64).collect(), heads: 64, sinks: false };
        let mut request = Request::new(vec![1; 1000], Surface::Openai);
        (request.limits.max_tokens, request.overflow, request.stored_heads) = (max_tokens, overflow, StoredHeads::All);
        request.limits.requested_max_tokens = Some(max_tokens).filter(|max| *max < i32::MAX as u32);
        match check(&request, &support, 2000) {
            Err(SubmitError::HeadRowsTooLarge { bytes, .. }) => Some(bytes / (64 * 64 * VALUE_BYTES)),
            _ => None,
        }
    }

    #[test]
    fn rows_of_a_full_context_are_counted() {
        let shift = Overflow::Shift { keep: Some(0), discard: 0 };
        let full = 1000 * 1000 + 1000 * 999 / 2;
        assert_eq!(bytes(9000, Overflow::Stop), Some(full));
        assert_eq!(bytes(9000, shift), Some(full + 8000 * 2000));
        assert_eq!(bytes(2000, Overflow::Evict), Some(full + 1000 * 2000));
        assert_eq!(bytes(i32::MAX as u32, shift), Some(full), "a run without a maximum");
        assert_eq!(bytes(100, shift), bytes(100, Overflow::Stop));
        assert_eq!(bytes(10, shift), None);
    }
}
