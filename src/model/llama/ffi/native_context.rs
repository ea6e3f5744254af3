//! A context of llama.cpp that owns the parts whose addresses llama.cpp holds.

use super::threads::ThreadPool;
use super::{EvalCallback, raw_context, set_callback};
use llama_cpp_2::LlamaContextLoadError;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

/// A context of llama.cpp with its evaluation callback and its threads.
#[derive(Debug)]
pub struct NativeContext<'model> {
    // Dropped before the other parts.
    llama: LlamaContext<'model>,
    callback: Option<Box<EvalCallback>>,
    pool: Option<Rc<ThreadPool>>,
}

impl<'model> NativeContext<'model> {
    /// Creates a context, with a callback for its graphs if one is given. It computes on the threads of the pool, which
    /// other contexts may also use.
    pub fn new(
        model: &'model LlamaModel,
        backend: &LlamaBackend,
        mut params: LlamaContextParams,
        callback: Option<EvalCallback>,
        pool: Option<Rc<ThreadPool>>,
    ) -> Result<Self, LlamaContextLoadError> {
        let callback = callback.map(Box::new);
        if let Some(callback) = &callback {
            // SAFETY: the context is dropped before the box, and a decode borrows both.
            unsafe { set_callback(&mut params, callback) };
        }
        let mut context = Self { llama: model.new_context(backend, params)?, callback, pool };
        context.attach_pool();
        Ok(context)
    }

    /// Makes llama.cpp and the callback compute on the pool. The pool is never replaced, because ggml accesses the
    /// previous one in the next graph.
    fn attach_pool(&mut self) {
        let (Some(pool), Some(context)) = (&self.pool, raw_context(&mut self.llama)) else { return };
        // SAFETY: the pointer is the context's own, and the context is dropped before the pool.
        let threads = unsafe {
            sys::llama_attach_threadpool(context, pool.as_ptr().as_ptr(), pool.as_ptr().as_ptr());
            sys::llama_n_threads(context)
        };
        if let Some(callback) = &mut self.callback {
            callback.compute_on(pool.as_ptr(), threads);
        }
    }

    /// Returns the callback.
    pub fn callback(&mut self) -> Option<&mut EvalCallback> {
        self.callback.as_deref_mut()
    }

    /// Returns the pool of threads.
    pub fn pool(&self) -> Option<&Rc<ThreadPool>> {
        self.pool.as_ref()
    }
}

impl<'model> Deref for NativeContext<'model> {
    type Target = LlamaContext<'model>;

    fn deref(&self) -> &Self::Target {
        &self.llama
    }
}

impl DerefMut for NativeContext<'_> {
    /// Callers must not replace the context or swap it with another one, because it would outlive the callback and the
    /// pool that it uses.
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.llama
    }
}
