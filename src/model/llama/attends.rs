//! What can be seen of a model's attention, learnt from the decode of one token before the first run.

use super::AttentionRow;
use super::ffi::CapturedRow;

/// Architectures with layers that attend to summaries of several tokens, or to tokens that are gathered first: place `i` of
/// such a row is not token `i`.
const GATHERED: [&str; 2] = ["deepseek4", "glm5-next"];

/// The attention of a model, as far as it can be captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionSupport {
    /// Layers that attend to tokens, in order; others keep a state of their own.
    pub layer_ids: Vec<u16>,
    /// Heads of each of these layers.
    pub heads: u16,
    /// Whether heads have sinks: learned scores that take a share of each row and are no position, so that rows sum to less
    /// than 1.
    pub sinks: bool,
}

/// Why a model's attention cannot be captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// A recurrent model.
    #[error("its layers keep a state and do not attend to tokens")]
    Nothing,
    /// Rows would have no common shape.
    #[error("its layers have different numbers of heads")]
    Uneven,
    /// Rows would not be indexed by tokens.
    #[error("its layers attend to summaries or choices of tokens, and not to each token")]
    Gathered,
}

impl AttentionSupport {
    /// What the row of a first token shows; `passes` is how often the graph went through the layers for it, and `uneven`
    /// whether layers are missing that have another number of heads.
    pub(super) fn learn(
        architecture: &str,
        row: Option<&AttentionRow>,
        passes: u32,
        uneven: bool,
    ) -> Result<Self, Unsupported> {
        if GATHERED.contains(&architecture) || passes > 1 {
            return Err(Unsupported::Gathered);
        }
        let Some(row) = row.filter(|row| !row.layer_ids.is_empty() && row.heads > 0) else {
            return Err(Unsupported::Nothing);
        };
        if uneven {
            return Err(Unsupported::Uneven);
        }
        // The only token that there is has all that a sink leaves.
        let sinks = row.values.iter().any(|&value| value < 1.0);
        Ok(Self { layer_ids: row.layer_ids.clone(), heads: row.heads, sinks })
    }

    /// Whether the row is one of this model.
    pub(super) fn has(&self, row: &CapturedRow) -> bool {
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
    fn a_first_token_shows_what_can_be_seen() {
        let seen = AttentionSupport::learn("lfm2", Some(&row(&[1, 3], 2, &[1.0; 4])), 1, false).unwrap();
        assert_eq!(seen, AttentionSupport { layer_ids: vec![1, 3], heads: 2, sinks: false });
        let later = |layer_ids: &[u16]| CapturedRow { layer_ids: layer_ids.to_vec(), heads: 2, values: Vec::new() };
        assert!(seen.has(&later(&[1, 3])) && !seen.has(&later(&[1])));
        assert!(AttentionSupport::learn("gpt-oss", Some(&row(&[0], 2, &[1.0, 0.4])), 1, false).unwrap().sinks);
    }

    #[test]
    fn what_cannot_be_seen_is_named() {
        let plain = row(&[0], 2, &[1.0; 2]);
        assert_eq!(AttentionSupport::learn("mamba", None, 1, false), Err(Unsupported::Nothing));
        assert_eq!(AttentionSupport::learn("mamba", Some(&row(&[], 0, &[])), 1, false), Err(Unsupported::Nothing));
        assert_eq!(AttentionSupport::learn("openelm", Some(&plain), 1, true), Err(Unsupported::Uneven));
        assert_eq!(AttentionSupport::learn("deepseek4", Some(&plain), 1, false), Err(Unsupported::Gathered));
        assert_eq!(AttentionSupport::learn("unknown", Some(&plain), 2, false), Err(Unsupported::Gathered));
    }
}
