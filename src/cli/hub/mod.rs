//! Download of models from the Hugging Face Hub, a server with the same API, or a URL, into the cache that Hugging Face's
//! tools and llama.cpp share.
//!
//! The crate hf-hub would add 90 crates, among them a second TLS implementation and the Xet protocol, and neither resumes nor
//! verifies a download; this needs two routes of the hub and the HTTP client of the other commands.

mod cache;
mod download;
mod remote;
mod selection;

pub use download::readable_size;

use super::progress::{Progress, TaskProgress};
use crate::config::flags::EngineFlags;
use crate::config::hub::HubFlags;
use anyhow::{Context as _, bail};
use cache::Cache;
use remote::Remote;
use selection::{FileSelector, HasPath as _};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The use of a cached version whose download fails, for example without network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFallback {
    /// The cached version is used.
    Allowed,
    /// The failure is an error.
    Never,
}

/// Downloads the model that the flags name, unless it is in the cache, and sets it as the model file.
pub async fn set_model(engine: &mut EngineFlags) -> anyhow::Result<()> {
    check(&engine.hub)?;
    let progress = Progress::new(None);
    let downloaded = model_file(&engine.hub, &progress).await;
    progress.end();
    if let Some(file) = downloaded? {
        engine.model = Some(file);
    }
    Ok(())
}

/// Checks that the flags do not contradict each other.
pub fn check(flags: &HubFlags) -> anyhow::Result<()> {
    if flags.hf_file.is_some() && flags.hf_repo.is_none() {
        bail!("--hf-file needs a repository; set it with --hf-repo");
    }
    Ok(())
}

/// Downloads the model that the flags name, unless it is in the cache. Returns its first file; `None` if the flags name no
/// model.
pub async fn model_file(flags: &HubFlags, progress: &Arc<Progress>) -> anyhow::Result<Option<PathBuf>> {
    if !flags.names_model() {
        return Ok(None);
    }
    Ok(download(flags, CacheFallback::Allowed, &progress.task()).await?.into_iter().next())
}

/// Downloads a model unless it is in the cache, and returns its files, the first part first.
pub async fn download(
    flags: &HubFlags,
    fallback: CacheFallback,
    progress: &TaskProgress,
) -> anyhow::Result<Vec<PathBuf>> {
    let cache = Cache::new(HubFlags::cache_dir()?);
    let (repository, wanted) = select(flags)?;
    if flags.offline {
        return cached(flags)?.with_context(|| {
            format!("{repository}{wanted} is not in the cache {}; download it without --offline", cache.dir().display())
        });
    }
    let online = async {
        let remote = Remote::new(HubFlags::endpoint()?, flags.hf_token.clone())?;
        progress.begin(&format!("looking up {repository}"));
        let version = match &flags.model_url {
            Some(url) => remote.files_of_url(url).await?,
            None => remote.files_of_repository(&repository).await?,
        };
        let chosen = wanted.choose(&version.files).with_context(|| {
            format!("{repository} has no model{wanted}; it has {}", selection::list_models(&version.files))
        })??;
        let folder = cache.version(&repository, &version.commit)?;
        let mut paths = Vec::new();
        for file in chosen {
            paths.push(folder.add(file, |partial| download::complete(&remote, file, partial, progress)).await?);
        }
        // This comes last, so that an incomplete download never replaces a complete version.
        folder.set_current()?;
        anyhow::Ok(paths)
    };
    match online.await {
        Err(error) if fallback == CacheFallback::Allowed => match cached(flags) {
            Ok(Some(files)) => {
                tracing::warn!("using the cached version: {error:#}");
                Ok(files)
            }
            _ => Err(error),
        },
        done => done,
    }
}

/// Returns the repository and the file that the flags select.
fn select(flags: &HubFlags) -> anyhow::Result<(String, FileSelector)> {
    match (&flags.hf_repo, &flags.model_url) {
        (Some(name), _) => FileSelector::in_repository(name, flags.hf_file.as_deref()),
        (None, Some(url)) => Ok(remote::select_url(url)),
        (None, None) => bail!("no model to download; select one with --hf-repo or --model-url"),
    }
}

/// Returns the files of the selected model in the cache, the first part first; `None` if the cache lacks it.
fn cached(flags: &HubFlags) -> anyhow::Result<Option<Vec<PathBuf>>> {
    let (repository, wanted) = select(flags)?;
    let mut incomplete = None;
    for files in Cache::new(HubFlags::cache_dir()?).versions(&repository)? {
        match wanted.choose(&files) {
            Some(Ok(chosen)) => return Ok(Some(chosen.into_iter().map(|file| file.file.clone()).collect())),
            Some(Err(error)) => incomplete = incomplete.or(Some(error)),
            None => {}
        }
    }
    incomplete.map_or(Ok(None), Err)
}

/// Returns the arguments of `thunder models pull` for the selected model if a start of the server would download it because
/// the cache lacks it.
pub fn missing_model(flags: &HubFlags) -> anyhow::Result<Option<String>> {
    if !flags.names_model() || flags.offline || cached(flags)?.is_some() {
        return Ok(None);
    }
    let names = [("", &flags.hf_repo), ("--hf-file ", &flags.hf_file), ("--model-url ", &flags.model_url)];
    let arguments = names.iter().filter_map(|(flag, name)| Some(format!("{flag}{}", name.as_ref()?)));
    Ok(Some(arguments.collect::<Vec<_>>().join(" ")))
}

/// A model in the cache.
#[derive(Debug)]
pub struct CachedModel {
    /// Repository and quantization, as `--hf-repo` takes them.
    pub name: String,
    /// Size of all parts.
    pub bytes: u64,
    /// The file, or the first part.
    pub file: PathBuf,
}

/// Returns the folder of the cache and the complete models in it. Of a file with several versions, the one that is used
/// offline.
pub fn cached_models() -> anyhow::Result<(PathBuf, Vec<CachedModel>)> {
    let cache = Cache::new(HubFlags::cache_dir()?);
    let mut models = Vec::new();
    for repository in cache.repositories()? {
        let mut listed = HashSet::new();
        for files in cache.versions(&repository)? {
            for first in files.iter().filter(|file| selection::is_model(file.path())) {
                let Some(Ok(parts)) = FileSelector::File(first.path().to_owned()).choose(&files) else { continue };
                if !listed.insert(first.path().to_owned()) {
                    continue;
                }
                let quantization = selection::quantization(first.path());
                models.push(CachedModel {
                    name: quantization.map_or_else(|| repository.clone(), |word| format!("{repository}:{word}")),
                    bytes: parts.iter().filter_map(|part| Some(part.file.metadata().ok()?.len())).sum(),
                    file: first.file.clone(),
                });
            }
        }
    }
    Ok((cache.dir().to_owned(), models))
}

/// Returns true if a path from a server stays below the folder that it is appended to.
fn is_safe_path(path: &str) -> bool {
    let is_plain = path.len() <= 500 && !path.chars().any(|c| c.is_control() || c == '\\');
    is_plain
        && !path.is_empty()
        && Path::new(path).components().all(|part| matches!(part, std::path::Component::Normal(_)))
}
