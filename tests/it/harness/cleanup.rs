//! Cleanup when the test process ends, also after a crash.

use nix::unistd::Pid;
use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The files of the tests take up to 2.3 GB at the same time.
#[cfg(target_os = "linux")]
const MIN_FREE_BYTES: u64 = 8 << 30;

/// Reads lines `start PID` and `end PID` until the test process ends. Then it ends each process without an `end` line and
/// removes the folder. A process has 10 seconds for its own cleanup.
const SCRIPT: &str = r#"
    pids=' '
    while read -r word pid; do
        case $word in
            start) pids="$pids$pid " ;;
            end) pids="${pids%% $pid *} ${pids#* $pid }" ;;
        esac
    done
    for pid in $pids; do kill "$pid"; done
    for i in $(seq 200); do
        alive=
        for pid in $pids; do kill -0 "$pid" && alive=1; done
        [ "$alive" ] || break
        sleep 0.05
    done
    for pid in $pids; do kill -9 "$pid"; done
    rm -rf "$1"
"#;

/// The shell that runs [`SCRIPT`]; its input closes when the test process ends.
static SHELL: LazyLock<Mutex<ChildStdin>> = LazyLock::new(|| {
    let mut shell = Command::new("sh");
    shell.args(["-c", SCRIPT, "sh"]).arg(root());
    // Its own process group, so that Ctrl-C does not end it.
    shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    Mutex::new(shell.spawn().unwrap().stdin.take().unwrap())
});

/// Returns the folder of everything that this test process writes.
///
/// Its path is short, because Unix sockets are below it. It is outside of home directories, because PostgreSQL runs as
/// another user if the tests run as root, and that user cannot enter a private home directory. It is in memory if there
/// is room, because each test's database consists of 300 files.
fn root() -> PathBuf {
    static PARENT: LazyLock<PathBuf> = LazyLock::new(|| memory_folder().unwrap_or_else(std::env::temp_dir));
    PARENT.join(format!("thunder-it-{}", std::process::id()))
}

/// Returns the folder of files in memory, if `TMPDIR` names no other folder and there is room in it and in memory.
#[cfg(target_os = "linux")]
fn memory_folder() -> Option<PathBuf> {
    use nix::sys::statvfs::{FsFlags, statvfs};
    let folder = Path::new("/dev/shm");
    let found = statvfs(folder).ok().filter(|found| !found.flags().contains(FsFlags::ST_NOEXEC))?;
    let memory = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10;
    let free = available.min(found.blocks_available() * found.fragment_size());
    (std::env::var_os("TMPDIR").is_none() && free >= MIN_FREE_BYTES).then(|| folder.to_owned())
}

#[cfg(not(target_os = "linux"))]
fn memory_folder() -> Option<PathBuf> {
    None
}

/// Creates an empty folder, which is removed when the test process ends.
pub fn folder() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let path = root().join(COUNT.fetch_add(1, Ordering::Relaxed).to_string());
    std::fs::create_dir_all(&path).unwrap();
    LazyLock::force(&SHELL);
    path
}

/// A process that the shell ends together with the test process, unless this value is dropped earlier.
pub struct Tracked(Pid);

impl Tracked {
    pub fn new(pid: Pid) -> Self {
        send_line("start", pid);
        Self(pid)
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        send_line("end", self.0);
    }
}

fn send_line(word: &str, pid: Pid) {
    let mut shell = SHELL.lock().unwrap_or_else(PoisonError::into_inner);
    writeln!(shell, "{word} {pid}").unwrap();
}

/// Asserts that no process of PostgreSQL runs on a data directory.
pub fn assert_no_postgres(data_dir: &Path, log: &str) {
    // The processes end shortly after the program that started them.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_mins(1) {
        if postgres_processes(data_dir).is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("still running: {:?}\n{log}", postgres_processes(data_dir));
}

/// Returns the command lines of PostgreSQL's processes on a data directory.
fn postgres_processes(data_dir: &Path) -> Vec<String> {
    let folder = data_dir.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|process| String::from_utf8(std::fs::read(process.path().join("cmdline")).ok()?).ok())
        .filter(|line| {
            let program = Path::new(line.split('\0').next().unwrap_or_default()).file_name().unwrap_or_default();
            (program == "postgres" || program == "initdb") && line.contains(folder)
        })
        .collect()
}
