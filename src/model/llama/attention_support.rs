//! Support of attention capture, determined by decoding one token before the first run.

use super::AttentionRow;
use super::ffi::CapturedRow;

/// Architectures with layers that attend to summaries or selections of tokens: position `i` of such a row is not token
/// `i`.
const GATHERED_ARCHITECTURES: [&str; 2] = ["deepseek4", "glm5-next"];

/// The attention that can be captured from a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionSupport {
    /// Layers that attend to tokens, in order; other layers keep a recurrent state.
    pub layer_ids: Vec<u16>,
    /// Heads per layer.
    pub heads: u16,
    /// True if heads have sinks: learned scores that take a share of each row without being a position, so that rows
    /// sum to less than 1.
    pub sinks: bool,
}

/// The reason why a model's attention cannot be captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedAttention {
    /// A recurrent model.
    #[error("its layers are recurrent and do not attend to tokens")]
    Recurrent,
    /// Layers have different numbers of heads, so rows have no common shape.
    #[error("its layers have different numbers of heads")]
    UnevenHeads,
    /// Layers attend to gathered tokens, so rows are not indexed by tokens.
    #[error("its layers attend to summaries or selections of tokens, not to each token")]
    Gathered,
}

impl AttentionSupport {
    /// Derives the support from the row of the first token. `passes` is the number of passes through the layers;
    /// `uneven` is true if layers with another number of heads were skipped.
    pub(super) fn from_first_row(
        architecture: &str,
        row: Option<&AttentionRow>,
        passes: u32,
        uneven: bool,
    ) -> Result<Self, UnsupportedAttention> {
        if GATHERED_ARCHITECTURES.contains(&architecture) || passes > 1 {
            return Err(UnsupportedAttention::Gathered);
        }
        let Some(row) = row.filter(|row| !row.layer_ids.is_empty() && row.heads > 0) else {
            return Err(UnsupportedAttention::Recurrent);
        };
        if uneven {
            return Err(UnsupportedAttention::UnevenHeads);
        }
        // The only token receives all attention except the share of the sinks.
        let sinks = row.values.iter().any(|&value| value < 1.0);
        Ok(Self { layer_ids: row.layer_ids.clone(), heads: row.heads, sinks })
    }

    /// Returns true if the row is complete for this model.
    pub(super) fn is_complete(&self, row: &CapturedRow) -> bool {
        row.layer_ids == self.layer_ids && row.heads == self.heads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(layer_ids: &[u16], heads: u16, values: &[f32]) -> AttentionRow {
        AttentionRow { index: 0, row_len: 1, layer_ids: layer_ids.to_vec(), heads, values: values.to_vec() }
    }

    #[test]
    fn first_token_determines_attention_support() {
        let support = AttentionSupport::from_first_row("lfm2", Some(&row(&[1, 3], 2, &[1.0; 4])), 1, false).unwrap();
        assert_eq!(support, AttentionSupport { layer_ids: vec![1, 3], heads: 2, sinks: false });
        let later = |layer_ids: &[u16]| CapturedRow { layer_ids: layer_ids.to_vec(), heads: 2, values: Vec::new() };
        assert!(support.is_complete(&later(&[1, 3])) && !support.is_complete(&later(&[1])));
        assert!(AttentionSupport::from_first_row("gpt-oss", Some(&row(&[0], 2, &[1.0, 0.4])), 1, false).unwrap().sinks);
    }

    #[test]
    fn unsupported_attention_is_reported_with_its_reason() {
        let plain = row(&[0], 2, &[1.0; 2]);
        assert_eq!(AttentionSupport::from_first_row("mamba", None, 1, false), Err(UnsupportedAttention::Recurrent));
        assert_eq!(
            AttentionSupport::from_first_row("mamba", Some(&row(&[], 0, &[])), 1, false),
            Err(UnsupportedAttention::Recurrent)
        );
        assert_eq!(
            AttentionSupport::from_first_row("openelm", Some(&plain), 1, true),
            Err(UnsupportedAttention::UnevenHeads)
        );
        assert_eq!(
            AttentionSupport::from_first_row("deepseek4", Some(&plain), 1, false),
            Err(UnsupportedAttention::Gathered)
        );
        assert_eq!(
            AttentionSupport::from_first_row("unknown", Some(&plain), 2, false),
            Err(UnsupportedAttention::Gathered)
        );
    }
}
