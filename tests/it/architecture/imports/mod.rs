//! The import table between folders, and the absence of import cycles between files.
//!
//! The reader parses files with `syn`. It collects the paths of `use` items, and qualified paths in code and in macros
//! that begin with `crate`, `super`, `self` or an imported name. A name is resolved through `pub use` to the file that
//! defines it. The table applies to re-exports, too, but a re-export alone does not make a cycle. Tests may import
//! anything.

mod reader;

use reader::{CratePath, Module, read_module};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::LazyLock;

/// Each folder and the folders that it may import; `cli` composes the program and may import all.
const IMPORTS: &[(&str, &[&str])] = &[
    ("events", &[]),
    ("config", &["events"]),
    ("model", &["events"]),
    ("mods", &["events", "model"]),
    ("recording", &["events"]),
    ("engine", &["events", "model", "mods", "recording"]),
    ("trace", &["events"]),
    ("store", &["events", "recording", "trace"]),
    ("server", &["events", "config", "model", "mods", "recording", "engine", "trace", "store"]),
    ("api", &["events", "config", "model", "mods", "recording", "engine", "trace", "store", "server"]),
    ("ui", &["events", "config", "model", "mods", "recording", "engine", "trace", "store", "server", "api::shared"]),
    ("cli", &["events", "config", "model", "mods", "recording", "engine", "trace", "store", "server", "api", "ui"]),
];

/// Modules of `api` that are not protocols: shared code, and the router that combines the protocols.
const SHARED_MODULES: &[&str] = &["shared", "router"];

/// Maximum number of cycles inside one folder; `engine` may have none.
const MAX_CYCLES: usize = 3;

/// The modules of a crate, by path.
struct Crate(BTreeMap<CratePath, Module>);

impl Crate {
    /// Reads files: the path below `src/` and the text of each.
    fn read(files: &[(String, String)]) -> Self {
        let mut modules = BTreeMap::new();
        let mut test_modules = HashSet::new();
        for (file, text) in files {
            let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
            let path: CratePath = match path {
                "lib" => Vec::new(),
                "main" => continue,
                path => path.split('/').map(str::to_owned).collect(),
            };
            let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("src/{file}: {error}"));
            let module = read_module(file, &parsed.items, &path, &mut test_modules);
            modules.insert(path, module);
        }
        modules.retain(|path, _| !(1..=path.len()).any(|length| test_modules.contains(&path[..length])));
        Self(modules)
    }

    /// Returns the module that defines the item of a path, through re-exports.
    fn definition(&self, path: &[String]) -> Option<&Module> {
        self.definition_within(path, 16)
    }

    fn definition_within(&self, path: &[String], depth: usize) -> Option<&Module> {
        if depth == 0 {
            return None;
        }
        let (length, module) =
            (0..=path.len()).rev().find_map(|length| Some((length, self.0.get(&path[..length])?)))?;
        let Some(name) = path.get(length) else { return Some(module) };
        if let Some(target) = module.exports.get(name) {
            let followed: CratePath = target.iter().chain(&path[length + 1..]).cloned().collect();
            return self.definition_within(&followed, depth - 1);
        }
        if !module.items.contains(name) {
            for glob in &module.globs {
                let followed: CratePath = glob.iter().chain(&path[length..]).cloned().collect();
                let found = self.definition_within(&followed, depth - 1);
                if found.is_some_and(|found| found.items.contains(name)) {
                    return found;
                }
            }
        }
        Some(module)
    }

    /// Returns the imports that the table does not permit, with file and line.
    fn forbidden(&self) -> BTreeSet<String> {
        let mut problems = BTreeSet::new();
        for (path, module) in &self.0 {
            let Some(own) = path.first() else { continue };
            let Some((_, allowed)) = IMPORTS.iter().find(|(folder, _)| folder == own) else {
                problems.insert(format!("src/{}: `{own}` is not in the import table", module.file));
                continue;
            };
            for (target, line) in module.paths.iter().chain(&module.imports) {
                let written = target.first();
                let defined = self.definition(target).and_then(|module| module.file.split(['/', '.']).next());
                for folder in [written.map(String::as_str), defined].into_iter().flatten() {
                    let is_allowed = folder == own
                        || !IMPORTS.iter().any(|(known, _)| *known == folder)
                        || allowed.iter().any(|allowed| {
                            let mut parts = allowed.split("::");
                            parts.next() == Some(folder)
                                && parts.next().is_none_or(|part| target.get(1).is_some_and(|name| name == part))
                        });
                    if !is_allowed {
                        let target = target.join("::");
                        problems.insert(format!("src/{}:{line}: `{own}` must not import {target}", module.file));
                    }
                }
                if let Some(problem) = protocol_import(path, target) {
                    problems.insert(format!("src/{}:{line}: {problem}", module.file));
                }
            }
        }
        problems
    }

    /// Returns the files that each file imports. Use of definitions of enclosing modules does not count.
    fn imported_files(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut imported_files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (own, module) in &self.0 {
            let enclosing: Vec<&str> =
                (0..=own.len()).filter_map(|length| Some(self.0.get(&own[..length])?.file.as_str())).collect();
            let targets = module.paths.iter().filter_map(|(path, _)| self.definition(path));
            let files = targets.map(|target| target.file.as_str()).filter(|file| !enclosing.contains(file));
            imported_files.entry(&module.file).or_default().extend(files);
        }
        imported_files
    }

    /// Returns the cycles: sets of files in which each file imports every other one, directly or indirectly.
    fn cycles(&self) -> Vec<Vec<&str>> {
        let imported_files = self.imported_files();
        let reached: BTreeMap<&str, BTreeSet<&str>> = imported_files
            .keys()
            .map(|&file| {
                let (mut reached, mut pending) = (BTreeSet::new(), vec![file]);
                while let Some(next) = pending.pop() {
                    pending.extend(imported_files[next].iter().copied().filter(|&target| reached.insert(target)));
                }
                (file, reached)
            })
            .collect();
        let mut cycles: Vec<Vec<&str>> = Vec::new();
        for (&file, targets) in &reached {
            if targets.contains(file) && !cycles.iter().any(|cycle| cycle.contains(&file)) {
                cycles.push(targets.iter().copied().filter(|target| reached[target].contains(file)).collect());
            }
        }
        cycles
    }
}

/// Returns the reason why an import between two parts of `api` is not permitted, if it is not.
fn protocol_import(path: &[String], target: &[String]) -> Option<String> {
    let (own, other) = (path.get(1)?, target.get(1)?);
    let is_protocol = |name: &str| !SHARED_MODULES.contains(&name);
    let both_in_api = path[0] == "api" && target[0] == "api";
    let is_forbidden = both_in_api && own != other && own != "router" && is_protocol(other) && path.len() > 1;
    is_forbidden.then(|| format!("`api::{own}` must not import {}", target.join("::")))
}

fn folder(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Returns the cycles that are not permitted, each as a line.
fn forbidden_cycles(cycles: &[Vec<&str>]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut inside: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for cycle in cycles {
        let line = cycle.join(" ⇄ ");
        let own = folder(cycle[0]);
        if cycle.iter().any(|file| folder(file) != own) || own.starts_with("engine") {
            problems.push(line);
        } else {
            inside.entry(own).or_default().push(line);
        }
    }
    for (folder, lines) in inside {
        if lines.len() > MAX_CYCLES {
            problems.push(format!("{folder} has {} cycles: {}", lines.len(), lines.join("; ")));
        }
    }
    problems
}

static SOURCE: LazyLock<Crate> = LazyLock::new(|| {
    let files = super::files("src").into_iter().map(|(path, text)| (path["src/".len()..].to_owned(), text));
    Crate::read(&files.collect::<Vec<_>>())
});

#[test]
fn imports_follow_the_table() {
    let problems: Vec<String> = SOURCE.forbidden().into_iter().collect();
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn files_have_no_import_cycles() {
    let problems = forbidden_cycles(&SOURCE.cycles());
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn imports_are_found_in_every_form() {
    let files = |imports: &str| {
        vec![
            ("lib.rs".to_owned(), "pub mod store; pub mod ui; pub mod api;".to_owned()),
            ("ui/mod.rs".to_owned(), "pub mod page;".to_owned()),
            ("ui/page.rs".to_owned(), "pub struct Page; pub fn show() {}".to_owned()),
            ("api/mod.rs".to_owned(), "pub mod openai; pub mod llama;".to_owned()),
            ("api/openai.rs".to_owned(), "pub struct Model;".to_owned()),
            ("api/llama.rs".to_owned(), imports.to_owned()),
            ("store.rs".to_owned(), imports.to_owned()),
        ]
    };
    for imports in [
        "use crate::ui;",
        "use crate::{ui::page::{self, Page}};",
        "use crate::ui::*;",
        "fn f() { crate::ui::page::show() }",
        "fn f() { vec![crate::ui::page::show()]; }",
        "fn f() { use crate::ui::page::Page; }",
        "mod inner { use crate::ui::page as other; }",
        "pub use crate::ui::page::Page;",
    ] {
        let problems = Crate::read(&files(imports)).forbidden();
        for file in ["src/store.rs", "src/api/llama.rs"] {
            assert!(problems.iter().any(|problem| problem.starts_with(file)), "{imports}: {problems:?}");
        }
    }
    for imports in ["use super::openai::Model;", "use crate::api::openai;", "use self::super::openai::{Model as M};"] {
        let problems = Crate::read(&files(imports)).forbidden();
        assert!(problems.iter().any(|problem| problem.starts_with("src/api/llama.rs")), "{imports}: {problems:?}");
    }
    assert_eq!(Crate::read(&files("#[cfg(test)] mod tests { use crate::ui; }")).forbidden(), BTreeSet::new());
}

#[test]
fn cycles_are_found_through_re_exports() {
    let cycle = |first: &str, second: &str| {
        let files = [
            ("lib.rs", "pub mod engine;"),
            ("engine/mod.rs", "mod first; mod second; pub use first::First; pub use second::Second;"),
            ("engine/first.rs", first),
            ("engine/second.rs", second),
        ];
        let files = files.map(|(path, text)| (path.to_owned(), text.to_owned()));
        let parsed = Crate::read(&files);
        forbidden_cycles(&parsed.cycles())
    };
    let first = "use super::Second; pub struct First(Second);";
    let problems = cycle(first, "pub struct Second; fn f() -> super::First { todo!() }");
    assert_eq!(problems, ["engine/first.rs ⇄ engine/second.rs"]);
    assert!(cycle(first, "pub struct Second;").is_empty());
}
