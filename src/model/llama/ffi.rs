//! The only unsafe code: the evaluation callback through which [`attention`] and [`hidden_states`] are captured while a
//! graph runs, the pointers of contexts and models, and the submodules.
//!
//! llama-cpp-2 has no setter for `llama_context_params.cb_eval` since 0.1.140, so the parameters are cast once to the
//! raw structure; a compile-time assertion checks their size.
#![expect(unsafe_code, reason = "parts of llama.cpp have no safe binding")]

pub(super) mod adapters;
mod attention;
mod attention_rows;
pub(super) mod cpu;
pub(super) mod devices;
mod gpu_backend;
mod hidden_states;
pub(super) mod images;
pub(super) mod loading;
pub(super) mod memory;
pub(super) mod model_info;
mod native_context;
pub(super) mod output_head;
pub(super) mod sequence_state;
pub(super) mod templates;
pub(super) mod tensors;
pub(super) mod threads;

use attention::RowCapture;
pub use attention::RowRequest;
pub use attention_rows::CapturedRow;
use hidden_states::HiddenCapture;
pub use hidden_states::{CapturedHiddenStates, HiddenRequest};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;
pub use native_context::NativeContext;
use output_head::HeadOperations;
use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

const _: () = assert!(
    size_of::<LlamaContextParams>() == size_of::<sys::llama_context_params>(),
    "LlamaContextParams must only wrap llama_context_params"
);

const _: () = assert!(
    size_of::<LlamaModel>() == size_of::<NonNull<sys::llama_model>>(),
    "LlamaModel must only wrap a pointer to llama_model"
);

/// Size of a [`LlamaContext`] in words: the pointer to llama.cpp's context, and a vector.
const WORDS: usize = 4;

const _: () = assert!(
    size_of::<LlamaContext<'static>>() == WORDS * size_of::<usize>(),
    "LlamaContext must consist of a pointer and a vector"
);

/// The captures of the current decode.
#[derive(Debug, Default)]
struct Captures {
    attention: RowCapture,
    hidden: HiddenCapture,
    output_head: OutputHeadProbe,
}

/// The operations of the output head; they are read from one graph.
#[derive(Debug, Default)]
enum OutputHeadProbe {
    /// They are not read.
    #[default]
    Off,
    /// They are read from the next graph with logits.
    Requested,
    /// They were read, or the named operation is not supported.
    Read(Result<HeadOperations, String>),
}

/// Evaluation callback that captures attention rows and hidden states while llama.cpp decodes.
#[derive(Debug, Default)]
pub struct EvalCallback(UnsafeCell<Captures>);

impl EvalCallback {
    /// Creates a callback for a model with this number of layers.
    pub fn new(layers: usize) -> Self {
        Self(UnsafeCell::new(Captures { attention: RowCapture::new(layers), ..Captures::default() }))
    }

    fn compute_on(&mut self, pool: NonNull<sys::ggml_threadpool>, count: i32) {
        self.0.get_mut().attention.compute_on(pool, usize::try_from(count).unwrap_or(1));
    }

    /// Returns true if captured layers ran with flash attention.
    pub fn used_flash_attention(&mut self) -> bool {
        self.0.get_mut().attention.used_flash_attention()
    }

    /// Sets the rows that the next decode captures.
    pub fn request_rows(&mut self, requested: Vec<RowRequest>) {
        self.0.get_mut().attention.request(requested);
    }

    /// Sets the tokens whose hidden states the next decode captures.
    pub fn request_hidden_states(&mut self, requested: Vec<HiddenRequest>) {
        self.0.get_mut().hidden.request(requested);
    }

    /// Makes the next decode that captures something read the operations of the output head.
    pub fn request_output_head(&mut self) {
        self.0.get_mut().output_head = OutputHeadProbe::Requested;
    }

    /// Removes and returns the operations of the output head, or the name of an operation that is not supported. Returns
    /// `None` if no graph had logits.
    pub fn take_output_head(&mut self) -> Option<Result<HeadOperations, String>> {
        match std::mem::take(&mut self.0.get_mut().output_head) {
            OutputHeadProbe::Read(result) => Some(result),
            OutputHeadProbe::Off | OutputHeadProbe::Requested => None,
        }
    }

    /// Removes and returns the captured hidden states, in the order of their requests.
    pub fn take_hidden_states(&mut self) -> Vec<CapturedHiddenStates> {
        self.0.get_mut().hidden.take()
    }

    /// Returns the number of passes of the decode through the layers.
    pub fn passes(&mut self) -> u32 {
        self.0.get_mut().attention.passes()
    }

    /// Returns true if some layers were skipped because their number of heads differs from the first layer's.
    pub fn has_uneven_heads(&mut self) -> bool {
        self.0.get_mut().attention.has_uneven_heads()
    }

    /// Removes and returns the captured rows, in the order of their requests.
    pub fn take_rows(&mut self) -> Vec<CapturedRow> {
        self.0.get_mut().attention.take()
    }
}

/// Makes llama.cpp call `callback` for every graph node of contexts created with `params`.
///
/// # Safety
/// While such a context exists, `callback` must not move, and must be accessed only between decodes.
unsafe fn set_callback(params: &mut LlamaContextParams, callback: &EvalCallback) {
    // SAFETY: the assertion above ensures that the wrapper has the size of its only field, which is therefore at offset
    // 0.
    let raw = unsafe { &mut *std::ptr::from_mut(params).cast::<sys::llama_context_params>() };
    raw.cb_eval = Some(on_node);
    raw.cb_eval_user_data = callback.0.get().cast::<c_void>();
}

/// Returns the pointer to llama.cpp's context. Rust does not specify the order of fields. The vector, which only GPU
/// samplers fill, is empty: its words are 0, 0 and an alignment. So the only word that can be an address is the
/// pointer.
fn raw_context(context: &mut LlamaContext<'_>) -> Option<*mut sys::llama_context> {
    const MIN_ADDRESS: usize = 4096;
    // SAFETY: the assertion above ensures the number of words, and a pointer with a vector has no padding.
    let words: [usize; WORDS] = unsafe { std::ptr::from_mut(context).cast::<[usize; WORDS]>().read() };
    let mut addresses = words.into_iter().filter(|&word| word >= MIN_ADDRESS);
    match (addresses.next(), addresses.next()) {
        (Some(address), None) => Some(std::ptr::with_exposed_provenance_mut(address)),
        _ => None,
    }
}

/// Returns the pointer to llama.cpp's model.
fn raw_model(model: &LlamaModel) -> *mut sys::llama_model {
    // SAFETY: the assertion above ensures that the wrapper has the size of its only field, this pointer.
    unsafe { std::mem::transmute_copy(model) }
}

/// Handles a call of ggml's scheduler: first with `ask`, which queries whether a node is needed; then, for a needed
/// node, with its data.
unsafe extern "C" fn on_node(tensor: *mut sys::ggml_tensor, ask: bool, user_data: *mut c_void) -> bool {
    // SAFETY: `user_data` is the state of the callback given in `set_callback`, which outlives the context; llama.cpp
    // calls from the thread that runs llama_decode, during which nothing else accesses the callback.
    let captures = unsafe { &mut *user_data.cast::<Captures>() };
    // SAFETY: the scheduler passes a live node.
    let tensor = unsafe { &*tensor };
    let Captures { attention, hidden, output_head } = captures;
    if attention.is_idle() && hidden.is_idle() {
        return !ask;
    }
    if ask {
        if matches!(output_head, OutputHeadProbe::Requested) && output_head::has_logits(tensor) {
            // SAFETY: the graph lives as long as its nodes.
            *output_head = OutputHeadProbe::Read(unsafe { output_head::read(tensor) });
        }
        // A layer's output is not an attention node.
        return hidden.needs(tensor) || attention.needs(tensor);
    }
    hidden.capture(tensor);
    attention.capture(tensor);
    true
}

fn name_of(tensor: &sys::ggml_tensor) -> &[u8] {
    // SAFETY: ggml keeps names zero-terminated within their 64 bytes.
    unsafe { CStr::from_ptr(tensor.name.as_ptr()) }.to_bytes()
}
