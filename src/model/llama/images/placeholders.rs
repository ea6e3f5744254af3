//! Placeholders of images: token ids that stand for embeddings in a sequence.

use crate::events::TokenId;
use sha2::{Digest, Sha256};

/// The placeholders of an image.
pub(super) struct Placeholders {
    seed: [u8; 32],
    /// Number of hashes that were computed.
    blocks: u64,
    /// Ids of the last hash, in reverse order.
    block: Vec<TokenId>,
}

impl Placeholders {
    pub(super) fn new(seed: [u8; 32]) -> Self {
        Self { seed, blocks: 0, block: Vec::new() }
    }
}

impl Iterator for Placeholders {
    type Item = TokenId;

    fn next(&mut self) -> Option<TokenId> {
        if self.block.is_empty() {
            let mut hash = Sha256::new();
            hash.update(self.seed);
            hash.update(self.blocks.to_le_bytes());
            self.blocks += 1;
            let hash: [u8; 32] = hash.finalize().into();
            let ids = hash.as_chunks::<4>().0.iter().rev().map(|bytes| placeholder(u32::from_le_bytes(*bytes)));
            self.block.extend(ids);
        }
        self.block.pop()
    }
}

/// Returns an id below -1.
fn placeholder(hash: u32) -> TokenId {
    -2 - (hash % (i32::MAX as u32 - 2)) as TokenId
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::is_image_token;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn placeholders_are_negative_and_differ_between_images(one: [u8; 32], other: [u8; 32]) {
            let ids = |seed| Placeholders::new(seed).take(64).collect::<Vec<_>>();
            prop_assert!(ids(one).iter().all(|&id| is_image_token(id)));
            prop_assert_eq!(ids(one), ids(one));
            prop_assert_eq!(ids(one)[..2] == ids(other)[..2], one == other);
        }

        #[test]
        fn every_hash_gives_a_negative_id(hash: u32) {
            prop_assert!(is_image_token(placeholder(hash)));
        }
    }
}
