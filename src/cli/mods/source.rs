//! The source of mods given on the command line: a file, or a folder that is a package.

use crate::mods::python::{LoadError, PythonMods, read_source};
use crate::mods::{ModFactory, ModSource};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Texts in a source that define a mod.
const MOD_DEFINITIONS: &[&str] = &["@mod", "create_mod(", "self_prompt_mod("];

/// The mods of a file, or of one module of a folder.
pub struct FoundMods {
    /// Text of the file, or all files of the folder.
    pub source: ModSource,
    /// Module in a folder.
    pub module: Option<String>,
    /// Mods of the file or module.
    pub mods: Vec<Arc<dyn ModFactory>>,
}

/// Imports a file, or the modules of a folder that have mods; `module` selects one of them. A problem of the source is
/// part of the result. A missing source, or a missing Python, is an error.
pub async fn load(
    path: &Path,
    module: Option<&str>,
    python: PythonMods,
) -> anyhow::Result<Result<Vec<FoundMods>, LoadError>> {
    let (name, source, modules) = if path.is_dir() {
        let (package, files) = package(path)?;
        let modules = modules(path, &files, module)?;
        (package, ModSource::Files(files), modules)
    } else {
        if module.is_some() {
            bail!("--module is for folders, and {} is not a folder", path.display());
        }
        if !path.is_file() {
            bail!("there is no file {}", path.display());
        }
        let text = read_source(path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (name, ModSource::Text(text), vec![None])
    };
    tokio::task::spawn_blocking(move || import(&name, &source, modules, &python)).await?
}

fn import(
    name: &str,
    source: &ModSource,
    modules: Vec<Option<String>>,
    python: &PythonMods,
) -> anyhow::Result<Result<Vec<FoundMods>, LoadError>> {
    let mut found: Vec<FoundMods> = Vec::new();
    for module in modules {
        let mods = match source.load_all(name, module.as_deref(), python) {
            Ok(mods) => mods,
            Err(error @ LoadError::Failed { .. }) => return Ok(Err(error)),
            Err(error) => return Err(error.into()),
        };
        for own in mods.iter().map(|factory| factory.describe().name) {
            let has_name = |other: &&FoundMods| other.mods.iter().any(|factory| factory.describe().name == own);
            if let Some(other) = found.iter().find(has_name) {
                let (first, second) = (other.module.as_deref().unwrap_or(name), module.as_deref().unwrap_or(name));
                bail!("a mod '{own}' is in {first} and in {second}; choose a module with --module");
            }
        }
        found.push(FoundMods { source: source.clone(), module, mods });
    }
    Ok(Ok(found))
}

/// Returns the package name of a folder and its Python files by path, including the folder's name, without tests.
fn package(folder: &Path) -> anyhow::Result<(String, BTreeMap<String, String>)> {
    let absolute = folder.canonicalize().with_context(|| format!("cannot read {}", folder.display()))?;
    let name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if !is_module(&name) {
        bail!(
            "a folder of mods is a Python package, and '{name}' is not a valid package name; use letters, digits and '_'"
        );
    }
    let mut files = BTreeMap::new();
    read(&absolute, &name, &mut files)?;
    if files.is_empty() {
        bail!("there is no Python file in {}", folder.display());
    }
    Ok((name, files))
}

fn read(folder: &Path, under: &str, files: &mut BTreeMap<String, String>) -> anyhow::Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let Some(stem) = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()) else { continue };
        let is_python = path.extension().is_some_and(|kind| kind == "py");
        if path.is_dir() && is_module(&stem) && stem != "__pycache__" && path.extension().is_none() {
            read(&path, &format!("{under}/{stem}"), files)?;
        } else if is_python && is_module(&stem) && !stem.starts_with("test_") && stem != "conftest" {
            let text = read_source(&path).with_context(|| format!("cannot read {}", path.display()))?;
            files.insert(format!("{under}/{stem}.py"), text);
        }
    }
    Ok(())
}

/// Returns the modules to import: the selected one, or those that define mods.
fn modules(
    folder: &Path,
    files: &BTreeMap<String, String>,
    named: Option<&str>,
) -> anyhow::Result<Vec<Option<String>>> {
    let name_of = |path: &str| path.trim_end_matches(".py").trim_end_matches("/__init__").replace('/', ".");
    if let Some(named) = named {
        let all: Vec<String> = files.keys().map(|path| name_of(path)).collect();
        let module =
            all.iter().find(|name| *name == named || name.split_once('.').is_some_and(|(_, own)| own == named));
        let module =
            module.with_context(|| format!("there is no module {named}; the folder has {}", all.join(", ")))?;
        return Ok(vec![Some(module.clone())]);
    }
    let defining_files =
        files.iter().filter(|(_, text)| MOD_DEFINITIONS.iter().any(|definition| text.contains(definition)));
    let modules: Vec<_> = defining_files.map(|(path, _)| Some(name_of(path))).collect();
    if modules.is_empty() {
        bail!("no file of {} has a mod; put @mod before a function(event, actions, tokenizer)", folder.display());
    }
    Ok(modules)
}

fn is_module(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
