//! Import of the mods given on the command line.

use crate::mods::python::{LoadError, PythonMods};
use crate::mods::{LocalSource, ModFactory};
use anyhow::bail;
use std::path::Path;
use std::sync::Arc;

/// Imports a file, or the modules of a folder that have mods; `module` selects one of them. A problem of the source is
/// part of the result. A missing source, an unknown module, or a missing Python is an error.
pub async fn load(
    path: &Path,
    module: Option<&str>,
    python: PythonMods,
) -> anyhow::Result<Result<Vec<Arc<dyn ModFactory>>, LoadError>> {
    if !path.exists() {
        bail!("there is no file or folder {}", path.display());
    }
    let (path, module) = (path.to_owned(), module.map(str::to_owned));
    let import = move || {
        let mut source = match LocalSource::read(&path) {
            Ok(source) => source,
            Err(error) => return problem(error),
        };
        if let Some(module) = module {
            source.select(&module).map_err(anyhow::Error::msg)?;
        }
        source.load_all(&python).map_or_else(problem, |mods| Ok(Ok(mods)))
    };
    tokio::task::spawn_blocking(import).await?
}

/// Returns a problem of the source as a result, and any other error as an error.
fn problem<T>(error: LoadError) -> anyhow::Result<Result<T, LoadError>> {
    match error {
        LoadError::Failed { .. } => Ok(Err(error)),
        _ => Err(error.into()),
    }
}
