//! ThreadOptions that stay between graphs. Without a pool of its own a context starts and ends threads for every graph, which it
//! does once a decode, and once a layer where attention is captured.

use super::raw;
use crate::model::llama::Numa;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_sys_2 as sys;
use std::ptr::NonNull;
use std::sync::Once;

/// How threads wait, and where they run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadOptions {
    /// How long they look for work before they sleep, in units of 131072 rounds, from 0 to 100: with 1 for some milliseconds,
    /// so that the next decode finds them awake. ggml's own 50 would burn the cores for a tenth of a second.
    pub poll: u32,
    /// From -1, low, to 3, real-time.
    pub priority: i32,
    /// Numbers of the processors that they run on, below 512; empty for any.
    pub processors: Vec<usize>,
    /// Whether each has a processor of its own of those.
    pub strict: bool,
}

impl Default for ThreadOptions {
    fn default() -> Self {
        Self { poll: 1, priority: 0, processors: Vec::new(), strict: false }
    }
}

impl ThreadOptions {
    /// Whether it is said where or how urgently they run.
    #[must_use]
    pub fn are_placed(&self) -> bool {
        self.priority != 0 || self.strict || !self.processors.is_empty()
    }
}

/// Tells llama.cpp how threads and memory go on machines of several nodes; only the first time counts.
pub fn prepare_nodes(numa: Numa) {
    static ONCE: Once = Once::new();
    let strategy = match numa {
        Numa::Distribute => sys::GGML_NUMA_STRATEGY_DISTRIBUTE,
        Numa::Isolate => sys::GGML_NUMA_STRATEGY_ISOLATE,
        Numa::Numactl => sys::GGML_NUMA_STRATEGY_NUMACTL,
    };
    // SAFETY: the backend is initialised, and nothing is computed while the first model is not loaded.
    ONCE.call_once(|| unsafe { sys::llama_numa_init(strategy) });
}

/// Lets this thread compute only where no other wants to. Where threads have no priority of their own nothing changes.
pub fn lower_priority() {
    // SAFETY: a plain system call; 0 is the calling thread.
    #[cfg(target_os = "linux")]
    unsafe {
        nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, 19);
    }
}

/// The threads of one context, the one that decodes included.
#[derive(Debug)]
pub struct ThreadPool(NonNull<sys::ggml_threadpool>);

// SAFETY: a pool may be used by any thread, though only by one at a time.
unsafe impl Send for ThreadPool {}

impl ThreadPool {
    /// Starts `threads - 1` threads; the one that decodes is the last. `None` when llama.cpp makes no pool.
    pub fn start(threads: i32, how: &ThreadOptions) -> Option<Self> {
        // SAFETY: the parameters are a plain structure that llama.cpp fills; the pool is ours until it is freed.
        let pool = unsafe {
            let mut params = sys::ggml_threadpool_params_default(threads);
            params.poll = how.poll;
            params.prio = how.priority;
            params.strict_cpu = how.strict;
            for &processor in &how.processors {
                if let Some(used) = params.cpumask.get_mut(processor) {
                    *used = true;
                }
            }
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

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // SAFETY: the contexts that used it are gone.
        unsafe { sys::ggml_threadpool_free(self.0.as_ptr()) };
    }
}
