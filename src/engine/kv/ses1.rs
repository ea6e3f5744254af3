//! SES1: the snapshot format for the state of a slot, and its validation.
//!
//! A block consists of `"SES1"`, the number of tokens, the tokens and the KV data; all numbers are little-endian. The
//! KV data begins with Thunder's header: model, cache types and a checksum over everything else. The state from
//! llama.cpp follows, without the parts that depend on the number of slots. A block comes from a client or a file and
//! is not trusted: no part of it reaches llama.cpp before [`read`] has checked every number against the context.

mod adapters;

use super::conversation::SlotHistory;
use super::snapshot::{ModelIdentity, Snapshot};
use crate::events::{TokenId, is_image_token};
use crate::model::llama::{AdapterSet, StateError, StateLayout};
use std::ops::Range;
use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 4] = b"SES1";
/// Length of magic and number of tokens.
const HEADER_BYTES: usize = 8;

const KV_MAGIC: &[u8; 4] = b"THKV";
/// Version of the KV data's header and of the layout of llama.cpp's state, which changes with its releases. Versions 1
/// to 3 are rejected: they identified the model only by parts of its file.
const KV_VERSION: u32 = 4;
/// Version with a list of LoRA adapters before llama.cpp's state: their number, then fingerprint and scale of each.
const KV_VERSION_ADAPTERS: u32 = 5;
/// Version with the history of the conversation after that list.
const KV_VERSION_HISTORY: u32 = 6;
/// Version with a list of control vectors between adapters and history: their number, then fingerprint, scale, first and
/// last layer of each.
const KV_VERSION_STEERING: u32 = 7;
/// Length of the KV data's header: magic, version, model, types of keys and values, length, checksum.
const KV_HEADER_BYTES: usize = 4 + 4 + 16 + 2 * TYPE_BYTES + 8 + 8;
/// Upper bound for the bytes of all headers and of the sizes that llama.cpp writes for each layer.
const HEADER_ALLOWANCE: usize = 1 << 20;
/// Length of the name of a cache type.
const TYPE_BYTES: usize = 8;

/// Reason why a block was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ses1Error {
    /// The magic is missing.
    #[error("the state does not begin with 'SES1'")]
    Magic,
    /// The block ends too early.
    #[error("the state is truncated: it has {found} bytes, its header requires {needed}")]
    Truncated {
        /// Number of bytes found.
        found: usize,
        /// Number of bytes needed.
        needed: u64,
    },
    /// The block continues after its end.
    #[error("the state has {0} unexpected bytes after its end")]
    TooLong(u64),
    /// The state has more tokens than the context holds.
    #[error("the state has {tokens} tokens, but the context of a slot holds {context}")]
    TooManyTokens {
        /// Tokens in the state.
        tokens: usize,
        /// Context size of a slot, in tokens.
        context: usize,
    },
    /// A token is not in the vocabulary.
    #[error("token {index} of the state is {token}; ids of this model must be from 0 to {last}")]
    Token {
        /// Index in the list of tokens.
        index: usize,
        /// Id of the token.
        token: TokenId,
        /// Highest valid id.
        last: usize,
    },
    /// The KV data was not written by Thunder.
    #[error("the KV data was not written by Thunder: it does not begin with 'THKV'")]
    KvMagic,
    /// The KV data has an unsupported version.
    #[error("the KV data has version {0}; this server supports versions {KV_VERSION} to {KV_VERSION_STEERING}")]
    Version(u32),
    /// The state belongs to another model.
    #[error("the state was saved with another model")]
    Model,
    /// The state was computed with an adapter that is not loaded.
    #[error("the state was computed with a LoRA adapter that this server has not loaded")]
    Adapter,
    /// The state was computed with a control vector that is not loaded.
    #[error("the state was computed with a control vector that this server has not loaded")]
    ControlVector,
    /// The history contradicts the tokens.
    #[error("the conversation history of the state does not match its tokens")]
    History,
    /// The state has other cache types.
    #[error("the state was saved with a KV cache of {found}; this server uses {expected}")]
    CacheType {
        /// Types of keys and values in the state.
        found: String,
        /// Types of keys and values of this server.
        expected: String,
    },
    /// The checksum does not match.
    #[error("the state is damaged: its checksum does not match")]
    Checksum,
    /// The data of llama.cpp is invalid.
    #[error(transparent)]
    Kv(#[from] StateError),
    /// The model keeps state other than keys, values and recurrent states.
    #[error(
        "states of this model cannot be saved: it has state other than a KV cache and recurrent states, which cannot be validated on restore"
    )]
    NoLayout,
}

/// Properties of the model that a block must match.
#[derive(Debug, Clone)]
pub struct SnapshotFormat {
    pub vocabulary: usize,
    pub layout: Option<StateLayout>,
}

impl SnapshotFormat {
    /// Returns an upper bound for the bytes of a block.
    pub fn max_bytes(&self) -> Result<usize, Ses1Error> {
        let layout = self.layout.as_ref().ok_or(Ses1Error::NoLayout)?;
        Ok(layout.fixed_bytes()
            + layout.context() * (layout.bytes_per_token() + 2 * size_of::<TokenId>())
            + HEADER_ALLOWANCE)
    }
}

/// Serializes a snapshot to a block.
pub fn write(
    snapshot_format: &SnapshotFormat,
    identity: &ModelIdentity,
    saved: &Snapshot,
) -> Result<Vec<u8>, Ses1Error> {
    let Snapshot { tokens, adapters, history, state, .. } = saved;
    let layout = snapshot_format.layout.as_ref().ok_or(Ses1Error::NoLayout)?;
    let mut kv = Vec::new();
    let version = match (adapters.loras().is_empty(), adapters.steering().is_empty(), history.is_empty()) {
        _ if tokens.is_empty() => KV_VERSION,
        (_, false, _) => KV_VERSION_STEERING,
        (_, true, false) => KV_VERSION_HISTORY,
        (false, true, true) => KV_VERSION_ADAPTERS,
        (true, true, true) => KV_VERSION,
    };
    if version >= KV_VERSION_ADAPTERS {
        adapters::write_loras(adapters.loras(), identity, &mut kv)?;
    }
    if version >= KV_VERSION_STEERING {
        adapters::write_steering(adapters.steering(), &mut kv);
    }
    if version >= KV_VERSION_HISTORY {
        kv.extend(history.to_bytes());
    }
    if !tokens.is_empty() {
        kv.extend(layout.pack(state, tokens)?);
    }
    let mut block = Vec::with_capacity(HEADER_BYTES + 4 * tokens.len() + KV_HEADER_BYTES + kv.len());
    block.extend_from_slice(MAGIC);
    block.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
    for token in tokens {
        block.extend_from_slice(&token.to_le_bytes());
    }
    let types = layout.types();
    block.extend_from_slice(KV_MAGIC);
    block.extend_from_slice(&version.to_le_bytes());
    block.extend_from_slice(&identity.model.to_le_bytes());
    block.extend_from_slice(&type_field(&types.0));
    block.extend_from_slice(&type_field(&types.1));
    block.extend_from_slice(&(kv.len() as u64).to_le_bytes());
    let sum = checksum(&block, &kv);
    block.extend_from_slice(&sum.to_le_bytes());
    block.extend_from_slice(&kv);
    Ok(block)
}

/// Validates a block and returns its snapshot, which has no tokens if the slot was empty.
pub fn read(snapshot_format: &SnapshotFormat, identity: &ModelIdentity, block: &[u8]) -> Result<Snapshot, Ses1Error> {
    let layout = snapshot_format.layout.as_ref().ok_or(Ses1Error::NoLayout)?;
    if !block.starts_with(MAGIC) {
        return Err(Ses1Error::Magic);
    }
    let count = u32::from_le_bytes(field(block, 4..8)?) as usize;
    if count > layout.context() {
        return Err(Ses1Error::TooManyTokens { tokens: count, context: layout.context() });
    }
    let kv_head = HEADER_BYTES + 4 * count;
    let needed = kv_head + KV_HEADER_BYTES;
    let bytes = block.get(HEADER_BYTES..kv_head).filter(|_| block.len() >= needed);
    let bytes = bytes.ok_or(Ses1Error::Truncated { found: block.len(), needed: needed as u64 })?;
    let tokens: Vec<TokenId> = bytes.as_chunks::<4>().0.iter().map(|bytes| TokenId::from_le_bytes(*bytes)).collect();
    let is_unknown = |token: TokenId| {
        !is_image_token(token) && usize::try_from(token).map_or(true, |token| token >= snapshot_format.vocabulary)
    };
    if let Some(index) = tokens.iter().position(|&token| is_unknown(token)) {
        return Err(Ses1Error::Token {
            index,
            token: tokens[index],
            last: snapshot_format.vocabulary.saturating_sub(1),
        });
    }
    let head = &block[kv_head..needed];
    if !head.starts_with(KV_MAGIC) {
        return Err(Ses1Error::KvMagic);
    }
    let version = u32::from_le_bytes(field(head, 4..8)?);
    if !(KV_VERSION..=KV_VERSION_STEERING).contains(&version) {
        return Err(Ses1Error::Version(version));
    }
    if u128::from_le_bytes(field(head, 8..24)?) != identity.model {
        return Err(Ses1Error::Model);
    }
    let types = layout.types();
    if head[24..24 + TYPE_BYTES] != type_field(&types.0)
        || head[24 + TYPE_BYTES..24 + 2 * TYPE_BYTES] != type_field(&types.1)
    {
        let name = |at: usize| String::from_utf8_lossy(&head[at..at + TYPE_BYTES]).trim_end_matches('\0').to_owned();
        let found = format!("{} keys and {} values", name(24), name(24 + TYPE_BYTES));
        return Err(Ses1Error::CacheType { found, expected: format!("{} keys and {} values", types.0, types.1) });
    }
    let kv_len = u64::from_le_bytes(field(head, 24 + 2 * TYPE_BYTES..32 + 2 * TYPE_BYTES)?);
    let kv = &block[needed..];
    if (kv.len() as u64) < kv_len {
        return Err(Ses1Error::Truncated { found: block.len(), needed: (needed as u64).saturating_add(kv_len) });
    }
    if kv.len() as u64 > kv_len {
        return Err(Ses1Error::TooLong(kv.len() as u64 - kv_len));
    }
    let sum = u64::from_le_bytes(field(head, KV_HEADER_BYTES - 8..KV_HEADER_BYTES)?);
    if checksum(&block[..needed - 8], kv) != sum {
        return Err(Ses1Error::Checksum);
    }
    let mut kv = kv;
    let mut adapters = AdapterSet::default();
    if version >= KV_VERSION_ADAPTERS {
        adapters = AdapterSet::new(adapters::read_loras(identity, &mut kv)?);
    }
    if version >= KV_VERSION_STEERING {
        adapters = adapters.with_steering(adapters::read_steering(identity, &mut kv)?);
    }
    let history = if version >= KV_VERSION_HISTORY {
        SlotHistory::from_bytes(&mut kv, &tokens, snapshot_format.vocabulary).ok_or(Ses1Error::History)?
    } else {
        SlotHistory::default()
    };
    let (state, images) = match (tokens.is_empty(), kv.is_empty()) {
        (true, true) => Default::default(),
        (true, false) => return Err(StateError::TooLong(kv.len()).into()),
        (false, _) => layout.unpack(kv, &tokens)?,
    };
    Ok(Snapshot { tokens, adapters, history, state, images })
}

fn checksum(head: &[u8], kv: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(head);
    hash.update(kv);
    hash.digest()
}

fn type_field(name: &str) -> [u8; TYPE_BYTES] {
    let mut field = [0; TYPE_BYTES];
    let len = name.len().min(TYPE_BYTES);
    field[..len].copy_from_slice(&name.as_bytes()[..len]);
    field
}

fn field<const N: usize>(bytes: &[u8], range: Range<usize>) -> Result<[u8; N], Ses1Error> {
    let needed = range.end as u64;
    let found = bytes.get(range).and_then(|bytes| bytes.try_into().ok());
    found.ok_or(Ses1Error::Truncated { found: bytes.len(), needed })
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::VectorIdentity;
    use super::*;
    use crate::model::llama::{AttentionWindow, ImageSpans, ScaledAdapter, ScaledVector};
    use proptest::prelude::*;

    /// Position of the checksum in a block of `count` tokens.
    const fn checksum_at(count: usize) -> usize {
        HEADER_BYTES + 4 * count + KV_HEADER_BYTES - 8
    }

    /// Returns the state that llama.cpp writes for `count` tokens and one layer with 16 bytes per key and value.
    fn state(count: u32) -> Vec<u8> {
        let mut out = vec![1, 2, 3, 4];
        for number in [0, 1, count] {
            out.extend(number.to_le_bytes());
        }
        for position in 0..count {
            for number in [position, 1, 0] {
                out.extend(number.to_le_bytes());
            }
        }
        for number in [0u32, 1, 0, 0] {
            out.extend(number.to_le_bytes());
        }
        for _ in 0..2 {
            out.extend(1i32.to_le_bytes());
            out.extend(16u64.to_le_bytes());
            out.extend(std::iter::repeat_n(7, 16 * count as usize));
        }
        out
    }

    fn format() -> SnapshotFormat {
        SnapshotFormat { vocabulary: 100, layout: StateLayout::from_state(&state(1), 64, AttentionWindow::None) }
    }

    /// Returns a block of `count` tokens, with an adapter if `adapted` and a control vector if `steered`.
    fn saved(count: u32, adapted: bool, steered: bool) -> (ModelIdentity, Vec<u8>) {
        let vectors = vec![VectorIdentity { name: "calm".into(), fingerprint: 13 }];
        let identity = ModelIdentity { model: 5, adapters: vec![11, 12], vectors };
        let adapter = ScaledAdapter { id: 1, scale: 0.5 };
        let vector = ScaledVector { id: 0, name: "calm".into(), scale: 2.0, layers: [1, 3], fingerprint: 13 };
        let snapshot = Snapshot {
            tokens: (0..count as TokenId).collect(),
            adapters: AdapterSet::new(adapted.then_some(adapter))
                .with_steering(Vec::from_iter(steered.then_some(vector))),
            history: SlotHistory::default(),
            state: state(count),
            images: ImageSpans::default(),
        };
        let block = write(&format(), &identity, &snapshot).unwrap();
        (identity, block)
    }

    proptest! {
        /// Reading a changed block never panics, even with a correct checksum. An accepted block round-trips.
        #[test]
        fn hostile_blocks_are_rejected(
            count in 0u32..12, adapted: bool, steered: bool,
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            number in prop::option::of((any::<prop::sample::Index>(), any::<u32>())),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let (identity, block) = saved(count, adapted, steered);
            let restored = read(&format(), &identity, &block).unwrap().adapters;
            let expected = [adapted && count > 0, steered && count > 0];
            prop_assert_eq!([!restored.loras().is_empty(), !restored.steering().is_empty()], expected);
            let mut hostile = block;
            for (at, byte) in edits {
                let at = at.index(hostile.len());
                hostile[at] = byte;
            }
            if let Some((at, number)) = number {
                let at = at.index(hostile.len() - 3);
                hostile[at..at + 4].copy_from_slice(&number.to_le_bytes());
            }
            if let Some(cut) = cut {
                hostile.truncate(cut.index(hostile.len()));
            }
            let _ = read(&format(), &identity, &hostile);
            let at = checksum_at(count as usize);
            if hostile.len() >= at + 8 {
                let sum = checksum(&hostile[..at], &hostile[at + 8..]);
                hostile[at..at + 8].copy_from_slice(&sum.to_le_bytes());
            }
            if let Ok(snapshot) = read(&format(), &identity, &hostile) {
                let again = read(&format(), &identity, &write(&format(), &identity, &snapshot).unwrap()).unwrap();
                prop_assert_eq!((again.tokens, again.adapters), (snapshot.tokens, snapshot.adapters));
                prop_assert_eq!(again.state, snapshot.state);
            }
        }

        #[test]
        fn arbitrary_blocks_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let (identity, _) = saved(0, false, false);
            let _ = read(&format(), &identity, &bytes);
            let _ = read(&format(), &identity, &[&MAGIC[..], &bytes].concat());
        }
    }
}
