//! Threads that stay between graphs. Without a pool of its own a context starts and ends threads for every graph, which it
//! does once a decode, and once a layer where attention is captured.

use super::raw;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_sys_2 as sys;
use std::ptr::NonNull;

/// How long threads look for work before they sleep, in units of 131072 rounds: some milliseconds, so that the next decode
/// finds them awake. ggml's own 50 would burn the cores for a tenth of a second.
const POLL: u32 = 1;

/// The threads of one context, the one that decodes included.
#[derive(Debug)]
pub struct Pool(NonNull<sys::ggml_threadpool>);

// SAFETY: a pool may be used by any thread, though only by one at a time.
unsafe impl Send for Pool {}

impl Pool {
    /// Starts `threads - 1` threads; the one that decodes is the last. `None` when llama.cpp makes no pool.
    pub fn start(threads: i32) -> Option<Self> {
        // SAFETY: the parameters are a plain structure that llama.cpp fills; the pool is ours until it is freed.
        let pool = unsafe {
            let mut params = sys::ggml_threadpool_params_default(threads);
            params.poll = POLL;
            sys::ggml_threadpool_new(&raw mut params)
        };
        NonNull::new(pool).map(Self)
    }

    /// Lets the context decode with these threads. The caller keeps the pool for as long as the context lives. `false` when
    /// the context cannot be reached.
    pub fn attach(&self, context: &mut LlamaContext<'_>) -> bool {
        let Some(context) = raw(context) else { return false };
        // SAFETY: `context` is the context's own pointer, and the pool outlives it.
        unsafe { sys::llama_attach_threadpool(context, self.0.as_ptr(), self.0.as_ptr()) };
        true
    }

    /// Lets the threads sleep until the next decode.
    pub fn rest(&self) {
        // SAFETY: the pool lives; no graph runs, since whoever decodes holds the context.
        unsafe { sys::ggml_threadpool_pause(self.0.as_ptr()) };
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the contexts that used it are gone.
        unsafe { sys::ggml_threadpool_free(self.0.as_ptr()) };
    }
}
