//! The state of a sequence as bytes, which clients receive and send. llama-cpp-2's safe functions do not expose them.

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::session::LlamaStateSeqFlags;

/// The extent of a sequence's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateExtent {
    /// Everything.
    Full,
    /// Everything except the cells of a plain KV cache, that is, the part that represents only the end of the sequence.
    Partial,
}

impl StateExtent {
    const fn flags(self) -> LlamaStateSeqFlags {
        match self {
            Self::Full => LlamaStateSeqFlags::empty(),
            Self::Partial => LlamaStateSeqFlags::PARTIAL_ONLY,
        }
    }
}

/// Returns the state of a sequence in llama.cpp's format; `None` if llama.cpp cannot write it.
pub fn sequence_state(context: &LlamaContext<'_>, sequence: i32, extent: StateExtent) -> Option<Vec<u8>> {
    let flags = extent.flags();
    let size = context.state_seq_get_size_ext(sequence, flags);
    let mut state: Vec<u8> = Vec::with_capacity(size);
    // SAFETY: the vector has room for `size` bytes, the size that llama.cpp reported; nothing decodes in between,
    // because the context is borrowed.
    let written = unsafe { context.state_seq_get_data_ext(state.as_mut_ptr(), sequence, flags) };
    if written != size || size == 0 {
        return None;
    }
    // SAFETY: llama.cpp has just written these bytes.
    unsafe { state.set_len(size) };
    Some(state)
}

/// Replaces the state of a sequence. `state` must have been written by a context of this layout, or validated with
/// [`StateLayout::unpack`](crate::model::llama::StateLayout::unpack). Returns `false` if llama.cpp rejects it; the
/// sequence is then empty.
pub fn set_sequence_state(context: &mut LlamaContext<'_>, sequence: i32, state: &[u8], extent: StateExtent) -> bool {
    // SAFETY: llama.cpp reads only the slice, and every count in it was compared with the context's.
    unsafe { context.state_seq_set_data_ext(state, sequence, extent.flags()) }
}
