//! Resource limits of workers.

use std::time::Duration;

/// Nice value of workers, added to that of the server.
pub const EXTRA_NICE: i32 = 5;

/// Maximum threads of a worker. Numerical libraries start one per processor.
pub const MAX_THREADS: u64 = 512;

/// Resource limits of a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerLimits {
    /// Maximum time of an import of the mod's source.
    pub import: Duration,
    /// Maximum time of one call.
    pub call: Duration,
    /// Maximum CPU time that a worker may use between calls, besides one processor while calls follow each other, else a tenth of one; zero = no limit.
    pub idle_cpu: Duration,
    /// Time after which an unused worker is ended; zero keeps it.
    pub idle: Duration,
    /// Maximum workers of a mod that does not specify a number; 1 or more. A run stays with one of them.
    pub workers: usize,
    /// Maximum address space of a worker in bytes, including mapped libraries; 0 = no limit.
    pub address_space_bytes: u64,
    /// Maximum size of a file that a worker can write, in bytes; 0 = no limit. In the sandbox a worker cannot write
    /// files.
    pub file_size_bytes: u64,
    /// Maximum open descriptors of a worker.
    pub open_files: u64,
    /// Maximum log bytes of a mod in one run; the rest is dropped.
    pub run_log_bytes: usize,
}

impl Default for WorkerLimits {
    fn default() -> Self {
        Self {
            import: Duration::from_secs(30),
            call: Duration::from_secs(1),
            idle_cpu: Duration::from_secs(5),
            idle: Duration::from_mins(10),
            workers: 1,
            address_space_bytes: 4 << 30,
            file_size_bytes: 256 << 20,
            open_files: 256,
            run_log_bytes: 4 << 20,
        }
    }
}
