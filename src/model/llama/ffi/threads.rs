//! Thread pools that persist between graphs. Without a pool, a context starts and stops threads for every graph: once
//! per decode, and once per layer if attention is captured.

use super::cpu::{self, CpuBackend};
use crate::model::llama::Numa;
use llama_cpp_sys_2 as sys;
use std::ptr::{NonNull, null_mut};
use std::sync::Once;

/// Polling, priority and placement of threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadOptions {
    /// Polling before sleeping, in units of 131072 rounds, from 0 to 100. With 1, threads poll for some milliseconds
    /// and are awake at the next decode; ggml's default of 50 keeps the cores busy for a tenth of a second.
    pub poll: u32,
    /// Priority from -1 (low) to 3 (real-time).
    pub priority: i32,
    /// Indexes of the CPUs to use, below 512; empty for all.
    pub processors: Vec<usize>,
    /// True if each thread is pinned to one of these CPUs.
    pub strict: bool,
}

impl Default for ThreadOptions {
    fn default() -> Self {
        Self { poll: 1, priority: 0, processors: Vec::new(), strict: false }
    }
}

impl ThreadOptions {
    /// Returns true if CPUs or a priority are configured.
    #[must_use]
    pub fn is_customized(&self) -> bool {
        self.priority != 0 || self.strict || !self.processors.is_empty()
    }
}

/// Sets the NUMA placement in llama.cpp; only the first call has an effect.
pub fn init_numa(numa: Numa) {
    static ONCE: Once = Once::new();
    let strategy = match numa {
        Numa::Distribute => sys::GGML_NUMA_STRATEGY_DISTRIBUTE,
        Numa::Isolate => sys::GGML_NUMA_STRATEGY_ISOLATE,
        Numa::Numactl => sys::GGML_NUMA_STRATEGY_NUMACTL,
    };
    // SAFETY: the backend is initialized, and nothing is computed while the first model is not loaded.
    ONCE.call_once(|| unsafe { sys::llama_numa_init(strategy) });
}

/// The threads of one context, including the decoding thread.
#[derive(Debug)]
pub struct ThreadPool {
    pool: NonNull<sys::ggml_threadpool>,
    /// Parks the threads.
    backend: CpuBackend,
}

// SAFETY: any thread may use a pool, but only one at a time.
unsafe impl Send for ThreadPool {}

impl ThreadPool {
    /// Starts `threads - 1` threads; the decoding thread is the last. Returns `None` if llama.cpp cannot create a pool.
    pub fn start(threads: i32, options: &ThreadOptions) -> Option<Self> {
        // SAFETY: fills a plain structure.
        let mut params = unsafe { sys::ggml_threadpool_params_default(threads) };
        params.poll = options.poll;
        params.prio = options.priority;
        params.strict_cpu = options.strict;
        for &processor in &options.processors {
            if let Some(used) = params.cpumask.get_mut(processor) {
                *used = true;
            }
        }
        let backend = CpuBackend::new()?;
        cpu::new_pool(&mut params).map(|pool| Self { pool, backend })
    }

    /// Returns ggml's pool.
    pub(super) fn as_ptr(&self) -> NonNull<sys::ggml_threadpool> {
        self.pool
    }

    /// Parks the threads until the next decode.
    pub fn park(&self) {
        // SAFETY: the pool exists; no graph runs, because the decoding thread holds the context. Replacing a pool parks
        // it.
        unsafe {
            self.backend.set_pool(self.pool.as_ptr());
            self.backend.set_pool(null_mut());
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // SAFETY: the contexts that used it no longer exist.
        unsafe { cpu::free_pool(self.pool) };
    }
}
