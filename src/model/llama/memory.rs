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

/// Architectures that rotate the keys of some layers only, which llama.cpp does not take into account when it shifts keys.
const PARTLY_ROTATED: [&str; 7] = ["afmoe", "cohere2", "cohere2moe", "exaone-moe", "llama4", "muse-glimmer", "smollm3"];
/// The same, for models whose layers have an attention window.
const PARTLY_ROTATED_WITH_WINDOW: [&str; 2] = ["exaone4", "smallthinker"];
/// Architectures that add a learned vector for each position.
const LEARNED_POSITIONS: [&str; 2] = ["gpt2", "starcoder"];

/// Attention window of some layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionWindow {
    /// All layers attend to all tokens.
    None,
    /// A token attends to this number of tokens, the last of which is itself.
    Sliding(u32),
    /// Positions are divided into chunks of this length, and a token attends to those of its chunk.
    Chunked(u32),
}

impl AttentionWindow {
    fn new(model: &LlamaModel, architecture: &str) -> Self {
        match ffi::model_info::window(model) {
            0 => Self::None,
            width if architecture == "llama4" => Self::Chunked(width),
            width => Self::Sliding(width),
        }
    }

    /// Returns the first position that a token at `position` attends to in any layer.
    #[must_use]
    pub fn first_attended(self, position: u32) -> u32 {
        match self {
            Self::None => 0,
            Self::Sliding(width) => (position + 1).saturating_sub(width),
            Self::Chunked(width) => position / width * width,
        }
    }

    /// Returns true if all layers attend to all tokens.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::None
    }
}

/// Capabilities of a context's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryCapabilities {
    pub window: AttentionWindow,
    /// True if there is a state that only represents the end of a sequence.
    pub recurrent: bool,
    /// The reason why tokens cannot be removed from the middle of a sequence.
    pub shift_obstacle: Option<&'static str>,
}

impl MemoryCapabilities {
    pub fn new(model: &LlamaModel, context: &mut LlamaContext<'_>, keys: CacheType) -> Self {
        let recurrent = model.is_recurrent() || model.is_hybrid();
        let architecture = model.meta_val_str("general.architecture").unwrap_or_default();
        let window = AttentionWindow::new(model, &architecture);
        let obstacle = if recurrent { Some(RECURRENT) } else { find_shift_obstacle(model, context, keys) };
        let shift_obstacle = obstacle.or_else(|| find_position_obstacle(&architecture, window));
        Self { window, recurrent, shift_obstacle }
    }

    /// Returns the first position that a token at `position` attends to in any layer.
    pub fn first_attended(&self, position: u32) -> u32 {
        self.window.first_attended(position)
    }

    /// Returns true if the first `keep` positions of a saved state of `length` positions are usable. For layers with a
    /// window, a saved state contains only what its last token attends to.
    pub fn is_prefix_usable(&self, length: u32, keep: u32) -> bool {
        let first = self.first_attended(length.saturating_sub(1));
        keep == length || keep == 0 || (!self.recurrent && first <= self.first_attended(keep))
    }

    /// Returns true if all layers have every token that the next token attends to after `ranges` are removed. Before
    /// the removal, all layers have the tokens from position `first` on; `left` tokens remain after it.
    pub fn can_remove(&self, first: u32, ranges: &[Range<u32>], left: u32) -> bool {
        let removed = ranges.iter().map(|range| range.end.min(first).saturating_sub(range.start)).sum::<u32>();
        self.window.is_none() || first - removed <= self.first_attended(left)
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

fn find_shift_obstacle(model: &LlamaModel, context: &mut LlamaContext<'_>, keys: CacheType) -> Option<&'static str> {
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

/// Returns the reason why the architecture's positions prevent a shift.
fn find_position_obstacle(architecture: &str, window: AttentionWindow) -> Option<&'static str> {
    if LEARNED_POSITIONS.contains(&architecture) {
        return Some("this model has learned positions, which cannot be shifted");
    }
    let is_partly_rotated = PARTLY_ROTATED.contains(&architecture)
        || (!window.is_none() && PARTLY_ROTATED_WITH_WINDOW.contains(&architecture));
    is_partly_rotated
        .then_some("llama.cpp cannot shift the keys of this model, because some of its layers do not rotate them")
}

#[cfg(test)]
mod tests {
    use super::{AttentionWindow, MemoryCapabilities, find_position_obstacle};

    #[test]
    fn window_must_be_complete_to_be_continued() {
        let plain = MemoryCapabilities { window: AttentionWindow::None, recurrent: false, shift_obstacle: None };
        let window = MemoryCapabilities { window: AttentionWindow::Sliding(10), ..plain };
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

    #[test]
    fn chunk_must_be_complete_to_be_continued() {
        let window = AttentionWindow::Chunked(10);
        let chunked = MemoryCapabilities { window, recurrent: false, shift_obstacle: None };
        assert_eq!([0, 9, 10, 25].map(|position| window.first_attended(position)), [0, 0, 10, 20]);
        // The state has positions 20 to 24.
        assert!(
            chunked.is_prefix_usable(25, 24) && chunked.is_prefix_usable(25, 20) && !chunked.is_prefix_usable(25, 19)
        );
        assert!(chunked.can_remove(20, &[3..5], 23) && !chunked.can_remove(20, &[3..5], 19));
    }

    #[test]
    fn keys_of_layers_without_rotation_are_not_shifted() {
        let obstacle = |architecture, window| find_position_obstacle(architecture, window).is_some();
        let window = AttentionWindow::Sliding(10);
        assert!(
            obstacle("smollm3", AttentionWindow::None)
                && obstacle("cohere2", window)
                && obstacle("gpt2", AttentionWindow::None)
        );
        assert!(obstacle("llama4", AttentionWindow::Chunked(10)) && obstacle("cohere2moe", window));
        assert!(!obstacle("llama", AttentionWindow::None) && !obstacle("gemma3", window));
    }
}
