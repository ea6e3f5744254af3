//! Capabilities of a context's memory: attention windows, removal of tokens, and supported cache types.

use super::cache_type::CacheType;
use super::ffi;
use crate::model::ModelError;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::{LlamaModel, RopeType};
use std::ops::Range;

/// Number of values of a quantized type that share a scale.
const BLOCK: u32 = 32;

/// Reason why tokens cannot be removed from a recurrent state.
pub(super) const RECURRENT: &str = "tokens cannot be removed from the state of a recurrent model";
/// Reason why a part of a state is unusable: window layers have dropped tokens that it needs.
pub(super) const OUT_OF_WINDOW: &str = "layers with an attention window have dropped the tokens that would re-enter it";
/// Reason why a part of an image cannot be removed.
pub(super) const WITHIN_IMAGE: &str =
    "the tokens of an image cannot be separated in this model; remove the whole image";

/// Capabilities of a context's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryCapabilities {
    /// Attention window of some layers in tokens; 0 if all layers attend to all tokens.
    pub window: u32,
    /// True if there is a state that only represents the end of a sequence.
    pub recurrent: bool,
    /// The reason why tokens cannot be removed from the middle of a sequence.
    pub shift_obstacle: Option<&'static str>,
}

impl MemoryCapabilities {
    pub fn new(model: &LlamaModel, context: &mut LlamaContext<'_>, keys: CacheType) -> Self {
        let recurrent = model.is_recurrent() || model.is_hybrid();
        Self {
            window: ffi::memory::window(model),
            recurrent,
            shift_obstacle: find_shift_obstacle(model, context, keys, recurrent),
        }
    }

    /// Returns the first position that a token at `position` attends to in any layer.
    pub fn first_attended(&self, position: u32) -> u32 {
        if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) }
    }

    /// Returns true if the first `keep` positions of a saved state of `length` positions are usable. For layers with a
    /// window, a saved state contains only the last window.
    pub fn is_prefix_usable(&self, length: u32, keep: u32) -> bool {
        let first = if self.window == 0 { 0 } else { length.saturating_sub(self.window) };
        keep == length || keep == 0 || (!self.recurrent && first <= self.first_attended(keep))
    }

    /// Returns true if all layers have every token that the next token attends to after `ranges` are removed. Before
    /// the removal, all layers have the tokens from position `first` on; `left` tokens remain after it.
    pub fn can_remove(&self, first: u32, ranges: &[Range<u32>], left: u32) -> bool {
        let removed = ranges.iter().map(|range| range.end.min(first).saturating_sub(range.start)).sum::<u32>();
        self.window == 0 || first - removed <= self.first_attended(left)
    }
}

/// Rejects cache types that do not fit the model's heads.
///
/// # Errors
/// [`ModelError::QuantizedHeads`]. llama.cpp checks this only with flash attention; without it, the results are wrong.
pub(super) fn check_cache_types(model: &LlamaModel, keys: CacheType, values: CacheType) -> Result<(), ModelError> {
    for (kind, key) in [(keys, "attention.key_length"), (values, "attention.value_length")] {
        let width = head_width(model, key);
        if kind.is_quantized() && !width.is_multiple_of(BLOCK) {
            return Err(ModelError::QuantizedHeads { cache_type: kind.as_str(), width });
        }
    }
    Ok(())
}

fn head_width(model: &LlamaModel, key: &str) -> u32 {
    super::parameter(model, key).unwrap_or_else(|| model.n_embd().unsigned_abs() / model.n_head().max(1))
}

fn find_shift_obstacle(
    model: &LlamaModel,
    context: &mut LlamaContext<'_>,
    keys: CacheType,
    recurrent: bool,
) -> Option<&'static str> {
    if recurrent {
        return Some(RECURRENT);
    }
    let rope = model.rope_type();
    if matches!(rope, Some(RopeType::MRope | RopeType::IMRope | RopeType::Vision)) {
        return Some("this model has multi-part positions, which cannot be shifted");
    }
    if !ffi::memory::can_shift(context) {
        return Some("this model's keys cannot be shifted to other positions");
    }
    rope?;
    if keys == CacheType::Bf16 {
        return Some("bf16 keys cannot be shifted to other positions; use --cache-type-k f16 or f32");
    }
    // If only a part of a key is rotated, llama.cpp rotates all of a quantized key as if it were that part.
    let rotated: Option<u32> = super::parameter(model, "rope.dimension_count");
    let is_partial = rotated.is_some_and(|rotated| rotated != head_width(model, "attention.key_length"));
    (keys.is_quantized() && is_partial).then_some(
        "quantized keys that the model rotates only in part cannot be shifted to other positions; use --cache-type-k f16 or f32",
    )
}

#[cfg(test)]
mod tests {
    use super::MemoryCapabilities;

    #[test]
    fn window_must_be_complete_to_be_continued() {
        let plain = MemoryCapabilities { window: 0, recurrent: false, shift_obstacle: None };
        let window = MemoryCapabilities { window: 10, ..plain };
        let recurrent = MemoryCapabilities { recurrent: true, ..plain };
        assert!(
            plain.is_prefix_usable(50, 3) && recurrent.is_prefix_usable(50, 50) && recurrent.is_prefix_usable(50, 0)
        );
        assert!(!recurrent.is_prefix_usable(50, 49));
        // The state has positions 40 to 49. A token at 49 attends to 40 and later, a token at 48 to 39 and later.
        assert!(window.is_prefix_usable(50, 49) && !window.is_prefix_usable(50, 48) && window.is_prefix_usable(10, 3));
        assert!(window.can_remove(0, &[5..20], 35) && plain.can_remove(40, &[45..46], 49));
        // Removing tokens before the window keeps it complete; removing tokens inside makes it too short.
        assert!(window.can_remove(40, &[5..20], 35) && !window.can_remove(40, &[44..46], 48));
        assert!(window.can_remove(40, &[5..6, 20..30], 39) && window.can_remove(40, &[5..6, 38..41], 46));
        assert!(!window.can_remove(40, &[5..6, 38..42], 45));
    }
}
