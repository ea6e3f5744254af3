//! Environment and limits of a worker.

use super::{HEADER, harness, lines, load, python_mods, raised};
use crate::mods::ModOrigin;
use crate::mods::python::sandbox::{SandboxLauncher, SandboxPolicy};
use crate::mods::python::{LoadError, PythonMods};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[test]
fn worker_has_no_server_environment_or_descriptors() {
    let factory = load(
        r#"
import json, resource
@mod
def look(event, actions):
    fds = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    print(json.dumps({"env": sorted(os.environ), "fds": len(fds), "cwd": os.getcwd(), "pgid": os.getpgid(0) == os.getpid(),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0], "stdin": sys.stdin.read(), "pid": os.getpid()}))
"#,
    );
    let mut harness = harness(&factory);
    let reply = harness.add(65);
    let seen: Value = serde_json::from_str(lines(&reply)[0]).unwrap();
    let expected = [
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PATH",
        "TMPDIR",
    ];
    let extra = seen["env"].as_array().unwrap().iter().filter(|name| {
        let name = name.as_str().unwrap();
        // Variables set by Python itself or by macOS.
        !expected.contains(&name) && name != "LC_CTYPE" && !name.starts_with("__CF")
    });
    assert_eq!(extra.count(), 0, "{seen}");
    // 0, 1, 2, the socket, the memory, its map, and the directory that is being listed.
    assert!(seen["fds"].as_u64().unwrap() <= 7, "{seen}");
    assert_eq!((&seen["pgid"], &seen["core"], &seen["stdin"]), (&json!(true), &json!(0), &json!("")));
    let cwd = PathBuf::from(seen["cwd"].as_str().unwrap());
    assert!(cwd.exists());
    drop(harness);
    drop(factory);
    let until = Instant::now() + Duration::from_secs(5);
    while cwd.exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!cwd.exists(), "the worker and its directory end with the mod");
}

#[test]
fn worker_memory_is_limited() {
    let mut mods = python_mods();
    mods.limits.address_space_bytes = 256 << 20;
    let source = format!("{HEADER}@mod\ndef eat(e, a): x = bytearray(1 << 30)\n");
    let factory = mods.load_one("eat", &source, None).unwrap();
    if cfg!(target_os = "linux") {
        assert!(raised(&harness(&factory).add(65)).0.starts_with("MemoryError"));
    }
}

#[test]
fn uploaded_source_without_sandbox_is_rejected() {
    let source = format!("{HEADER}@mod\ndef f(e, a): pass\n");
    let missing = SandboxLauncher::new("/nowhere/thunder".into());
    for (launcher, reason) in
        [(None, "this program cannot start one"), (Some(missing), "/nowhere/thunder cannot be started")]
    {
        let mods = PythonMods { origin: ModOrigin::Uploaded, launcher, ..python_mods() };
        let error = mods.load_one("f", &source, None).err().unwrap();
        assert!(matches!(error, LoadError::NoSandbox { .. }) && error.to_string().contains(reason), "{error}");
        assert!(!error.is_transient());
        assert!(error.to_string().contains("--mod-sandbox off"), "{error}");
        let off = PythonMods { policy: SandboxPolicy::Off, ..mods };
        assert!(off.load_one("f", &source, None).is_ok());
    }
}
