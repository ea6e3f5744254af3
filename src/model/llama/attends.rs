//! What can be seen of a model's attention, learnt from the decode of one token before the first run.

use super::Captured;
use super::ffi::CapturedRow;

/// Architectures with layers that attend to summaries of several tokens, or to tokens that are gathered first: place `i` of
/// such a row is not token `i`.
const GATHERED: [&str; 2] = ["deepseek4", "glm5-next"];

/// The attention of a model, as far as it can be captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attends {
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
pub enum Unseen {
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

impl Attends {
    /// What the row of a first token shows; `passes` is how often the graph went through the layers for it, and `uneven`
    /// whether layers are missing that have another number of heads.
    pub(super) fn learn(architecture: &str, row: Option<&Captured>, passes: u32, uneven: bool) -> Result<Self, Unseen> {
        if GATHERED.contains(&architecture) || passes > 1 {
            return Err(Unseen::Gathered);
        }
        let Some(row) = row.filter(|row| !row.layer_ids.is_empty() && row.heads > 0) else {
            return Err(Unseen::Nothing);
        };
        if uneven {
            return Err(Unseen::Uneven);
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

    fn row(layer_ids: &[u16], heads: u16, values: &[f32]) -> Captured {
        Captured { index: 0, row_len: 1, layer_ids: layer_ids.to_vec(), heads, values: values.to_vec() }
    }

    #[test]
    fn a_first_token_shows_what_can_be_seen() {
        let seen = Attends::learn("lfm2", Some(&row(&[1, 3], 2, &[1.0; 4])), 1, false).unwrap();
        assert_eq!(seen, Attends { layer_ids: vec![1, 3], heads: 2, sinks: false });
        let later = |layer_ids: &[u16]| CapturedRow { layer_ids: layer_ids.to_vec(), heads: 2, values: Vec::new() };
        assert!(seen.has(&later(&[1, 3])) && !seen.has(&later(&[1])));
        assert!(Attends::learn("gpt-oss", Some(&row(&[0], 2, &[1.0, 0.4])), 1, false).unwrap().sinks);
    }

    #[test]
    fn what_cannot_be_seen_is_named() {
        let plain = row(&[0], 2, &[1.0; 2]);
        assert_eq!(Attends::learn("mamba", None, 1, false), Err(Unseen::Nothing));
        assert_eq!(Attends::learn("mamba", Some(&row(&[], 0, &[])), 1, false), Err(Unseen::Nothing));
        assert_eq!(Attends::learn("openelm", Some(&plain), 1, true), Err(Unseen::Uneven));
        assert_eq!(Attends::learn("deepseek4", Some(&plain), 1, false), Err(Unseen::Gathered));
        assert_eq!(Attends::learn("unknown", Some(&plain), 2, false), Err(Unseen::Gathered));
    }
}
