//! Rules for the source code: permitted imports, folders that may use a crate or unsafe code, names and documentation.

mod imports;
mod names;
mod timing;

use std::path::{Path, PathBuf};

/// Each restricted crate, with the folders and files that may use it.
const CRATE_FOLDERS: &[(&str, &[&str])] = &[
    ("sqlx", &["store/"]),
    ("refinery", &["store/"]),
    ("llama_cpp_2", &["model/llama/"]),
    ("llama_cpp_sys_2", &["model/llama/"]),
    ("axum", &["api/", "server/", "ui/"]),
    ("anyhow", &["cli/", "main.rs"]),
    ("clap", &["cli/", "config/"]),
    ("minijinja", &["model/chat/"]),
    ("askama", &["ui/"]),
];

/// File names that do not describe the content.
const VAGUE_FILE_NAMES: &[&str] =
    &["utils", "util", "helpers", "helper", "common", "misc", "manager", "service", "core"];

/// Maximum lines of a file without its tests.
const MAX_LINES: usize = 520;

struct Source {
    /// Below `src/`, with forward slashes.
    path: String,
    /// Without comments and without inline tests.
    code: String,
}

fn sources() -> Vec<Source> {
    files("src")
        .into_iter()
        .map(|(path, text)| {
            let production = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            let code = production.lines().filter(|line| !line.trim_start().starts_with("//"));
            Source { path: path["src/".len()..].to_owned(), code: code.collect::<Vec<_>>().join("\n") }
        })
        .collect()
}

/// Returns the path, from the project's root with forward slashes, and the text of every Rust file below a folder.
fn files(folder: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    collect(&root.join(folder), &mut files);
    files
        .into_iter()
        .map(|file| {
            let path = file.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
            (path, std::fs::read_to_string(&file).unwrap())
        })
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Returns true if the code names `word` as the first part of a path, e.g. `sqlx::`.
fn names(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = &code[at + word.len()..];
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '.' || c == '"')
            && after.starts_with("::")
    })
}

#[test]
fn crates_are_used_only_in_permitted_folders() {
    let test_only = |path: &str| ["tests.rs", "checks.rs", "testing.rs"].iter().any(|end| path.ends_with(end));
    for source in sources().iter().filter(|source| !test_only(&source.path)) {
        for (name, folders) in CRATE_FOLDERS {
            if names(&source.code, name) {
                assert!(
                    folders.iter().any(|folder| source.path.starts_with(folder)),
                    "src/{} names {name}",
                    source.path
                );
            }
        }
    }
}

#[test]
fn unsafe_code_is_limited_to_one_folder() {
    for source in sources().iter().filter(|source| !source.path.starts_with("model/llama/ffi")) {
        for (number, line) in source.code.lines().enumerate() {
            let is_unsafe = line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
            assert!(!is_unsafe || line.contains('"'), "src/{}:{}: {line}", source.path, number + 1);
        }
    }
}

#[test]
fn files_are_short_and_have_specific_names() {
    for source in sources() {
        if !source.path.ends_with("tests.rs") {
            let lines = source.code.lines().count();
            assert!(lines <= MAX_LINES, "src/{} has {lines} lines; split it by responsibility", source.path);
        }
        for part in source.path.trim_end_matches(".rs").split('/') {
            assert!(!VAGUE_FILE_NAMES.contains(&part), "src/{}: '{part}' does not describe the content", source.path);
        }
    }
}

#[test]
fn top_level_has_only_expected_files() {
    const KNOWN: &[&str] = &[
        "CHANGELOG.md",
        "Dockerfile",
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE",
        "Makefile",
        "README.md",
        "fixtures",
        "migrations",
        // Files that git ignores: builds, and cases found by property tests.
        "proptest-regressions",
        "src",
        "target",
        "templates",
        "tests",
    ];
    let entries = std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let unexpected: Vec<_> = names.filter(|name| !name.starts_with('.') && !KNOWN.contains(&name.as_str())).collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
}
