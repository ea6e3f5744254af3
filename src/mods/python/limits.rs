use std::time::Duration;

/// What a mod may use.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerLimits {
    /// Time for importing the mod.
    pub import: Duration,
    /// Time for one call.
    pub call: Duration,
    /// Processor time that a worker may use while no call is under way.
    pub idle_cpu: Duration,
    /// A worker that no run has needed for so long is ended; zero keeps it for ever.
    pub idle: Duration,
    /// Workers of one mod, at least 1, where the mod does not say it. A run stays with one of them.
    pub workers: usize,
    /// Address space of a worker in bytes, the mapped libraries included; 0 = no limit.
    pub address_space_bytes: u64,
    /// Largest file a worker can write, in bytes; 0 = no limit. In the sandbox it can write none.
    pub file_size_bytes: u64,
    /// Descriptors of a worker.
    pub open_files: u64,
    /// What a mod can log in one run, in bytes; the rest is dropped.
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
