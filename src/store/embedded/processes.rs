//! PostgreSQL processes that an earlier Thunder process left running.
//!
//! The process id in `postmaster.pid` is not enough: another process may have that id by now, or it may be a zombie. So
//! processes are recognized by their command lines: the server's contains our data directory, and those of its children
//! begin with our cluster name.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Maximum duration of a shutdown, which writes a checkpoint.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Identification of the processes of one data directory.
#[derive(Debug, Clone)]
pub struct Processes {
    /// PostgreSQL's data directory, absolute.
    pub data: PathBuf,
    /// The server's `cluster_name`.
    pub cluster: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Server,
    Child,
}

impl Processes {
    /// Stops all processes on the data directory and removes `postmaster.pid`. The caller holds the directory's lock, so
    /// none of them belongs to a running Thunder process. Returns true if there were any.
    pub async fn clear(&self) -> bool {
        let found_any = !self.find().is_empty();
        if found_any {
            self.stop().await;
        }
        // The file is stale, even if an unrelated process has the id in it.
        let _ = fs::remove_file(self.data.join("postmaster.pid"));
        found_any
    }

    /// Stops all processes, with stronger signals if they do not end.
    async fn stop(&self) {
        // Children end with their server, and children that lost their server end by themselves.
        for (to_server, to_children) in
            [(Signal::SIGINT, None), (Signal::SIGQUIT, Some(Signal::SIGQUIT)), (Signal::SIGKILL, Some(Signal::SIGKILL))]
        {
            let mut limit = Duration::from_secs(5);
            for (pid, role) in self.find() {
                let signal = if role == Role::Server { Some(to_server) } else { to_children };
                if let Some(signal) = signal {
                    let _ = kill(Pid::from_raw(pid), signal);
                }
                if role == Role::Server {
                    limit = STOP_TIMEOUT;
                }
            }
            let until = Instant::now() + limit;
            while !self.find().is_empty() && Instant::now() < until {
                sleep(Duration::from_millis(20)).await;
            }
        }
    }

    fn find(&self) -> Vec<(i32, Role)> {
        command_lines()
            .into_iter()
            .filter_map(|(pid, line)| Some((pid, self.role(&line)?)))
            .filter(|(pid, _)| shares_file_system(*pid))
            .collect()
    }

    fn role(&self, line: &str) -> Option<Role> {
        if line.starts_with(&format!("postgres: {}:", self.cluster)) {
            return Some(Role::Child);
        }
        let data = self.data.to_string_lossy();
        // Excludes initdb and, for example, an editor with a file of the directory.
        let (program, rest) = line.split_once([' ', '\0'])?;
        let is_server = Path::new(program).file_name().is_some_and(|name| name == "postgres");
        (is_server
            && rest.split('\0').flat_map(|part| part.split(" -c ")).any(|part| part.trim_start_matches("-D ") == data))
        .then_some(Role::Server)
    }
}

/// Returns false for a process in another mount namespace (a container), where the same path is another directory.
fn shares_file_system(pid: i32) -> bool {
    let mounts = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    mounts(&pid.to_string()).is_none_or(|theirs| mounts("self").is_none_or(|ours| ours == theirs))
}

/// Returns every process id with its command line, arguments separated by NUL or space.
fn command_lines() -> Vec<(i32, String)> {
    if Path::new("/proc/self/cmdline").exists()
        && let Ok(processes) = fs::read_dir("/proc")
    {
        return processes
            .filter_map(|entry| {
                let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
                let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
                Some((pid, String::from_utf8_lossy(&line).into_owned()))
            })
            .collect();
    }
    let Ok(output) = Command::new("ps").args(["-axo", "pid=,command="]).output() else { return Vec::new() };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| {
            let (pid, command) = line.trim_start().split_once(' ')?;
            Some((pid.parse().ok()?, command.trim_start().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_of_this_data_directory_have_a_role() {
        let processes =
            Processes { data: PathBuf::from("/var/lib/thunder/postgres/data"), cluster: "thunder-1a2b".into() };
        let role = |line: &str| processes.role(line);
        assert_eq!(role("/usr/bin/postgres\0-D\0/var/lib/thunder/postgres/data\0-c\0port=5432\0"), Some(Role::Server));
        assert_eq!(role("/usr/bin/postgres -D /var/lib/thunder/postgres/data -c port=5432"), Some(Role::Server));
        assert_eq!(role("postgres: thunder-1a2b: checkpointer "), Some(Role::Child));
        assert_eq!(role("postgres: thunder-ffff: checkpointer "), None);
        assert_eq!(role("/usr/bin/postgres\0-D\0/var/lib/other\0"), None);
        assert_eq!(role("vim /var/lib/thunder/postgres/data"), None);
        assert_eq!(role("/usr/bin/initdb\0-D\0/var/lib/thunder/postgres/data\0"), None);
        assert_eq!(role(""), None);
    }
}
