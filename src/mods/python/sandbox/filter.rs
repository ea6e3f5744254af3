//! Filter of the system calls of a worker: only those that Python and numpy need to compute are allowed.
//!
//! Refused calls fail with EPERM, so that the mod gets a `PermissionError`. `clone3` fails with ENOSYS, so that the C
//! library starts its threads with `clone`, whose flags the filter can inspect.

use nix::libc;
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};
use std::collections::BTreeMap;

/// Calls that are allowed with any arguments.
const ALLOWED: &[i64] = &[
    // Existing descriptors.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    // The socket to the server, and pairs of connected sockets.
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_socketpair,
    // Files; Landlock decides which.
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_umask,
    libc::SYS_fadvise64,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_mincore,
    libc::SYS_membarrier,
    // Threads of the process, and time.
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_setitimer,
    libc::SYS_getitimer,
    libc::SYS_restart_syscall,
    // Signals within the process.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    // Identity and system information.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getgroups,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
    // The launcher executes Python. Landlock decides which programs can run, and they inherit the sandbox.
    libc::SYS_execve,
    libc::SYS_wait4,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Calls that exist only on this architecture; most are older forms of the calls above.
#[cfg(target_arch = "x86_64")]
const OLDER: &[i64] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_getpgrp,
    libc::SYS_getrlimit,
    libc::SYS_arch_prctl,
    libc::SYS_time,
    libc::SYS_alarm,
    libc::SYS_pause,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[i64] = &[];

/// Requests of `ioctl`: terminal checks, number of readable bytes, and flags of a descriptor.
const IOCTLS: &[u64] = &[libc::TCGETS, libc::TIOCGWINSZ, libc::FIONREAD, libc::FIONBIO, libc::FIOCLEX, libc::FIONCLEX];

/// Commands of `fcntl`, without those that send a signal to another process.
const FCNTLS: &[i32] = &[libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL];

/// Flags that `fcntl` must not set. The server shares the open file of the memory: with `O_APPEND` each of its writes
/// would enlarge the memory.
const FORBIDDEN_FILE_FLAGS: i32 = libc::O_APPEND | libc::O_ASYNC | libc::O_DIRECT;

/// Options of `prctl`: names of threads and of memory.
const PRCTLS: &[i32] = &[libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];

/// Options of `setsockopt` at the socket level. Buffer sizes are not allowed, because buffers use kernel memory outside
/// of the worker's limits.
const SOCKET_OPTIONS: &[i32] =
    &[libc::SO_RCVTIMEO, libc::SO_SNDTIMEO, libc::SO_LINGER, libc::SO_KEEPALIVE, libc::SO_REUSEADDR];

/// Advice of `madvise` on a worker's own pages. Two kinds are not allowed: one marks physical memory as broken, the
/// other merges pages with those of other processes, whose content could then be inferred from the duration of writes.
const ADVICE: &[i32] = &[
    libc::MADV_NORMAL,
    libc::MADV_RANDOM,
    libc::MADV_SEQUENTIAL,
    libc::MADV_WILLNEED,
    libc::MADV_DONTNEED,
    libc::MADV_FREE,
    libc::MADV_DONTFORK,
    libc::MADV_DOFORK,
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
    libc::MADV_DONTDUMP,
    libc::MADV_DODUMP,
    libc::MADV_COLD,
    libc::MADV_PAGEOUT,
    libc::MADV_POPULATE_READ,
    libc::MADV_POPULATE_WRITE,
];

/// Flags of `clone` that create namespaces.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Permanently restricts this thread and the programs that it executes.
///
/// # Errors
/// The kernel does not support such filters on this architecture.
pub fn install() -> Result<(), Error> {
    programs()?.iter().try_for_each(|program| apply_filter(program))
}

/// Returns the filter for `clone3` and the filter for all other calls.
fn programs() -> Result<[BpfProgram; 2], Error> {
    let arch = std::env::consts::ARCH.try_into()?;
    let refused = |errno: i32| SeccompAction::Errno(errno.cast_unsigned());
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let clone3 = SeccompFilter::new(clone3, SeccompAction::Allow, refused(libc::ENOSYS), arch)?;
    let rest = SeccompFilter::new(rules()?, refused(libc::EPERM), SeccompAction::Allow, arch)?;
    Ok([clone3.try_into()?, rest.try_into()?])
}

fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().chain(OLDER).map(|&call| (call, Vec::new())).collect();
    let own = u64::from(std::process::id());
    for call in [libc::SYS_kill, libc::SYS_tgkill] {
        rules.insert(call, one_of(0, &SeccompCmpArgLen::Dword, &[own])?);
    }
    rules.insert(libc::SYS_ioctl, one_of(1, &SeccompCmpArgLen::Dword, IOCTLS)?);
    let words = |values: &[i32]| values.iter().map(|&value| u64::from(value.cast_unsigned())).collect::<Vec<u64>>();
    let mut fcntls = one_of(1, &SeccompCmpArgLen::Dword, &words(FCNTLS))?;
    let forbidden_flags = SeccompCmpOp::MaskedEq(u64::from(FORBIDDEN_FILE_FLAGS.cast_unsigned()));
    fcntls.push(SeccompRule::new(vec![
        SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, u64::from(libc::F_SETFL.cast_unsigned()))?,
        SeccompCondition::new(2, SeccompCmpArgLen::Dword, forbidden_flags, 0)?,
    ])?);
    rules.insert(libc::SYS_fcntl, fcntls);
    rules.insert(libc::SYS_prctl, one_of(0, &SeccompCmpArgLen::Dword, &words(PRCTLS))?);
    rules.insert(libc::SYS_madvise, one_of(2, &SeccompCmpArgLen::Dword, &words(ADVICE))?);
    let socket_rule = |option: u64| {
        let is = |argument, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
        SeccompRule::new(vec![is(1, u64::from(libc::SOL_SOCKET.cast_unsigned()))?, is(2, option)?])
    };
    let options = words(SOCKET_OPTIONS).into_iter().map(socket_rule).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_setsockopt, options);
    // Only to the connected peer, because a datagram could be addressed to any named socket.
    rules.insert(libc::SYS_sendto, one_of(4, &SeccompCmpArgLen::Qword, &[0])?);
    // The process can read its own limits but not set them.
    let [is_own, is_read] = [(0, SeccompCmpArgLen::Dword), (2, SeccompCmpArgLen::Qword)]
        .map(|(argument, length)| SeccompCondition::new(argument, length, SeccompCmpOp::Eq, 0));
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![is_own?, is_read?])?]);
    // Only threads, no processes and no namespaces.
    let thread = libc::CLONE_THREAD as u64;
    let masked = SeccompCmpOp::MaskedEq(thread | NAMESPACES);
    let is_thread = SeccompCondition::new(0, SeccompCmpArgLen::Qword, masked, thread)?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![is_thread])?]);
    Ok(rules)
}

/// Allows the call if the argument is one of the values.
fn one_of(
    argument: u8,
    length: &SeccompCmpArgLen,
    values: &[u64],
) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let rule = |&value: &u64| {
        SeccompRule::new(vec![SeccompCondition::new(argument, length.clone(), SeccompCmpOp::Eq, value)?])
    };
    values.iter().map(rule).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn filters_fit_kernel_instruction_limit() {
        // BPF_MAXINSNS
        assert!(super::programs().unwrap().iter().all(|program| program.len() <= 4096));
    }
}
