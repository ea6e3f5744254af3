//! Defaults: folders, thread count and the bundled model.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The demo model.
static BUNDLED: &[u8] = include_bytes!("../../fixtures/models/demo.gguf");

/// Returns the path of the bundled model and unpacks it to `cache` if it is missing.
///
/// # Errors
/// The file cannot be written.
pub fn bundled_model(cache: &Path) -> std::io::Result<PathBuf> {
    // The path contains the hash, so a release with another model uses another file, and a complete file stays valid.
    let dir = cache.join("models").join(format!("{:016x}", xxhash_rust::xxh3::xxh3_64(BUNDLED)));
    let path = dir.join("demo.gguf");
    if std::fs::metadata(&path).is_ok_and(|file| file.len() == BUNDLED.len() as u64) {
        return Ok(path);
    }
    // The data directory itself must be accessible to the database's account.
    std::fs::create_dir_all(cache.parent().unwrap_or(cache))?;
    DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    let partial = dir.join(format!("{}.part", std::process::id()));
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    file.write_all(BUNDLED)?;
    file.sync_all()?;
    std::fs::rename(&partial, &path)?;
    Ok(path)
}

/// Returns the default data directory. If Thunder runs as root, the database runs as another user, who must be able to
/// enter it.
pub(super) fn data_dir() -> Option<PathBuf> {
    if nix::unistd::Uid::effective().is_root() {
        return Some(PathBuf::from("/var/lib/thunder"));
    }
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(data) = variable("XDG_DATA_HOME").filter(|path| path.is_absolute()) {
        return Some(data.join("thunder"));
    }
    let home = variable("HOME")?;
    Some(if cfg!(target_os = "macos") {
        home.join("Library/Application Support/thunder")
    } else {
        home.join(".local/share/thunder")
    })
}

/// Returns the machine's memory if the system reports it.
pub(super) fn memory_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    kib.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Returns the number of physical cores. llama.cpp's threads wait for each other at barriers, so another process on one of
/// their cores delays all of them. PostgreSQL and the workers of mods therefore run at a lower priority.
pub(super) fn threads() -> i32 {
    let logical = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let cores: BTreeSet<String> = (0..1024)
        .map_while(|cpu| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
        })
        .collect();
    let physical = if cores.is_empty() { logical } else { cores.len().min(logical) };
    i32::try_from(physical.max(1)).unwrap_or(1)
}
