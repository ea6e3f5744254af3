//! Removal of root's rights from a worker if the server runs as root: always its capabilities, and its user id if other
//! accounts can reach the interpreter.

use super::{FIRST_UID, NOBODY};
use caps::{CapSet, Capability};
use nix::errno::Errno;
use nix::unistd::{Gid, Uid, chown, geteuid, getuid, setgroups, setresgid, setresuid};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Gives up root's user id if this process has it and the worker can run without it: the new user must be able to reach
/// all of `needed`, and the server must be able to kill the worker. Gives `worker_dir` to the new user. Returns false if the
/// process stays root.
///
/// # Errors
/// The change started but could not be completed.
pub fn drop_root(worker_dir: &Path, needed: &[PathBuf]) -> io::Result<bool> {
    let may = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    let allowed = [Capability::CAP_SETUID, Capability::CAP_SETGID, Capability::CAP_CHOWN, Capability::CAP_KILL];
    if !geteuid().is_root() || !allowed.into_iter().all(may) || !needed.iter().all(|path| is_reachable(path)) {
        return Ok(false);
    }
    if !worker_dir.parent().is_none_or(is_reachable) {
        return Ok(false);
    }
    setgroups(&[])?;
    let own = FIRST_UID + std::process::id();
    let id = match setresgid(Gid::from_raw(own), Gid::from_raw(own), Gid::from_raw(own)) {
        Ok(()) => own,
        // A container maps only some ids.
        Err(Errno::EINVAL) => {
            setresgid(Gid::from_raw(NOBODY), Gid::from_raw(NOBODY), Gid::from_raw(NOBODY))?;
            NOBODY
        }
        Err(error) => return Err(error.into()),
    };
    change_owner(worker_dir, id)?;
    setresuid(Uid::from_raw(id), Uid::from_raw(id), Uid::from_raw(id))?;
    Ok(true)
}

/// Gives up all capabilities, including those that root regains when it runs a program.
///
/// # Errors
/// A capability could not be dropped.
pub fn drop_capabilities() -> io::Result<()> {
    let failed = |error: caps::errors::CapsError| io::Error::other(format!("capabilities cannot be dropped: {error}"));
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).map_err(failed)? {
        caps::clear(None, CapSet::Bounding).map_err(failed)?;
    } else if geteuid().is_root() {
        return Err(io::Error::other(
            "the server runs as root without CAP_SETPCAP, so its workers would keep its capabilities; run it as \
             another user",
        ));
    }
    // Kernels before 4.3 have no ambient set.
    let _ = caps::clear(None, CapSet::Ambient);
    for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted] {
        caps::clear(None, set).map_err(failed)?;
    }
    Ok(())
}

/// Returns true if every account can read the file or enter the folder, after resolving links. A missing path counts as
/// reachable, because the worker does not need it.
fn is_reachable(path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else { return true };
    let Ok(found) = fs::metadata(&path) else { return false };
    let wanted = if found.is_dir() { 0o005 } else { 0o004 };
    found.permissions().mode() & wanted == wanted
        && path
            .ancestors()
            .skip(1)
            .all(|folder| fs::metadata(folder).is_ok_and(|found| found.permissions().mode() & 0o001 != 0))
}

/// Changes the owner of a folder and its content.
fn change_owner(path: &Path, id: u32) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            change_owner(&entry?.path(), id)?;
        }
    }
    // Only this user can write there, so there are no links.
    Ok(chown(path, Some(Uid::from_raw(id)), Some(Gid::from_raw(id)))?)
}

/// Returns the number of threads of this user, which count towards the limit of each of the user's processes.
pub fn user_threads() -> u64 {
    let own = getuid().to_string();
    let threads = |process: fs::DirEntry| {
        let status = fs::read_to_string(process.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
        if field("Uid:")? == own { field("Threads:")?.parse::<u64>().ok() } else { None }
    };
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(threads).sum()
}

/// Returns the bytes that the kernel may use for buffers of `descriptors` sockets; they are not part of the process's
/// memory.
pub fn socket_buffers(descriptors: u64) -> u64 {
    const USUAL: u64 = 212_992;
    let default = fs::read_to_string("/proc/sys/net/core/wmem_default").ok();
    let each = default.and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL);
    descriptors.saturating_mul(each)
}
