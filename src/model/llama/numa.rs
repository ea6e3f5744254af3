/// Placement of threads and memory on NUMA machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numa {
    /// Evenly over all nodes.
    Distribute,
    /// On the node where the program started.
    Isolate,
    /// The placement of numactl.
    Numactl,
}
