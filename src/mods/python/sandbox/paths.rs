//! Files that a Python interpreter opens: its library, its packages, the system's libraries.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Script that prints one path per line. Folders of site-packages are in `sys.path`; a virtual environment has a
/// pyvenv.cfg.
const LIST_PATHS_SCRIPT: &str = r"
import os, sys, sysconfig
found = [p for p in sys.path if os.path.exists(p)]
found += [os.path.join(f, 'pyvenv.cfg') for f in (sys.prefix, os.path.dirname(sys.executable))]
for name in ('stdlib', 'platstdlib'):
    found.append(sysconfig.get_path(name))
if sysconfig.get_config_var('LDLIBRARY') and sysconfig.get_config_var('LIBDIR'):
    found.append(os.path.join(sysconfig.get_config_var('LIBDIR'), sysconfig.get_config_var('LDLIBRARY')))
print('\n'.join(p for p in found if p and os.path.isabs(p) and os.path.realpath(p) != '/'))
";

/// Paths of the system's libraries and settings.
const SYSTEM: &[&str] = &[
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/dev/urandom",
];

/// Returns the paths to read and the files to execute for an interpreter.
pub fn required_paths(python: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    static CACHE: OnceLock<Mutex<HashMap<PathBuf, Vec<PathBuf>>>> = OnceLock::new();
    let mut cache = CACHE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let interpreter_paths = cache.entry(python.to_owned()).or_insert_with(|| list_paths(python));
    let mut read: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).chain(interpreter_paths.iter().cloned()).collect();
    // On Nix and Guix every library has its own folder.
    read.extend(["/nix/store", "/gnu/store"].map(PathBuf::from).into_iter().filter(|store| python.starts_with(store)));
    let mut execute = vec![python.canonicalize().unwrap_or_else(|_| python.to_owned())];
    execute.extend(["/lib64", "/lib"].iter().flat_map(|folder| loaders(Path::new(folder))));
    (read, execute)
}

fn list_paths(python: &Path) -> Vec<PathBuf> {
    let output = Command::new(python).args(["-I", "-c", LIST_PATHS_SCRIPT]).output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect())
        .unwrap_or_default()
}

/// Returns the dynamic loaders of the system, which every program needs.
fn loaders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("ld-")).map(|entry| entry.path()).collect()
}
