//! Memory shared with a worker: an anonymous file. Python maps it; the server reads and writes it with system calls, so
//! that a worker cannot crash the server by truncating it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// Alignment of regions, sufficient for every element type.
const PAGE: u64 = 4096;

/// The file and its free regions.
pub struct SharedMemory {
    file: File,
    space: Mutex<Space>,
}

#[derive(Default)]
struct Space {
    end: u64,
    free: Vec<MemoryRegion>,
}

/// A region of the memory that belongs to one mod instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl SharedMemory {
    /// Creates an empty memory.
    ///
    /// # Errors
    /// The system cannot create the file.
    pub fn create() -> io::Result<Self> {
        Ok(Self { file: anonymous_file()?, space: Mutex::default() })
    }

    /// Returns a descriptor for the worker.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// Allocates a region of `bytes` or more.
    ///
    /// # Errors
    /// The memory cannot grow.
    pub fn allocate(&self, bytes: u64) -> io::Result<MemoryRegion> {
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let mut space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fitting) = space.free.iter().position(|region| region.bytes == bytes) {
            return Ok(space.free.swap_remove(fitting));
        }
        let region = MemoryRegion { offset: space.end, bytes };
        self.file.set_len(space.end + bytes)?;
        space.end += bytes;
        Ok(region)
    }

    /// Frees a region, which no call may be using.
    pub fn free(&self, region: MemoryRegion) {
        self.space.lock().unwrap_or_else(PoisonError::into_inner).free.push(region);
    }

    /// Writes at byte `at` of the region.
    ///
    /// # Errors
    /// The system is out of memory.
    pub fn write(&self, region: &MemoryRegion, at: u64, bytes: &[u8]) -> io::Result<()> {
        debug_assert!(at + bytes.len() as u64 <= region.bytes);
        self.file.write_all_at(bytes, region.offset + at)
    }

    /// Reads `count` numbers from the start of the region.
    ///
    /// # Errors
    /// The worker has truncated the memory.
    pub fn read(&self, region: &MemoryRegion, count: usize) -> io::Result<Vec<f32>> {
        let mut numbers = vec![0.0_f32; count];
        self.file.read_exact_at(bytemuck::cast_slice_mut(&mut numbers), region.offset)?;
        Ok(numbers)
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn anonymous_file() -> io::Result<File> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    Ok(memfd_create("thunder-mod", MFdFlags::MFD_CLOEXEC)?.into())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn anonymous_file() -> io::Result<File> {
    let path = std::env::temp_dir().join(format!("thunder-mod-{}", crate::events::system::new_id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::SharedMemory;

    #[test]
    fn regions_are_disjoint_and_reused() {
        let memory = SharedMemory::create().unwrap();
        let (first, second) = (memory.allocate(5000).unwrap(), memory.allocate(10).unwrap());
        assert_eq!((first.offset, first.bytes, second.offset), (0, 8192, 8192));
        memory.write(&first, 4, bytemuck::cast_slice(&[2.5_f32])).unwrap();
        assert_eq!(memory.read(&first, 2).unwrap(), [0.0, 2.5]);
        assert_eq!(memory.read(&second, 2).unwrap(), [0.0, 0.0]);
        memory.free(first);
        assert_eq!(memory.allocate(8000).unwrap().offset, 0);
        assert_eq!(memory.allocate(8000).unwrap().offset, 12288);
    }

    #[test]
    fn read_of_truncated_memory_fails() {
        let memory = SharedMemory::create().unwrap();
        let region = memory.allocate(4096).unwrap();
        std::fs::File::from(memory.descriptor().unwrap()).set_len(0).unwrap();
        assert!(memory.read(&region, 10).is_err());
    }
}
