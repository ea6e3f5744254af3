//! The cache of Hugging Face's tools: `models--USER--MODEL/{refs/main, blobs/HASH, snapshots/COMMIT/FILE}`, where each file is
//! a link to a blob.

use super::is_safe_path;
use super::remote::{RemoteFile, is_commit};
use super::selection::{HasPath, is_repository};
use anyhow::Context as _;
use std::cmp::Reverse;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The folder of all repositories.
#[derive(Debug, Clone)]
pub struct Cache(PathBuf);

/// A file of a cached repository.
#[derive(Debug, Clone)]
pub struct CachedFile {
    path: String,
    /// The file, which may be a link.
    pub file: PathBuf,
}

impl HasPath for CachedFile {
    fn path(&self) -> &str {
        &self.path
    }
}

/// A version of a repository.
#[derive(Debug)]
pub struct VersionFolder {
    repository: PathBuf,
    commit: String,
}

impl Cache {
    /// Creates the cache in a folder, which may not exist yet.
    pub fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    /// Returns the folder.
    pub fn dir(&self) -> &Path {
        &self.0
    }

    fn repository(&self, name: &str) -> PathBuf {
        self.0.join(format!("models--{}", name.replace('/', "--")))
    }

    /// Returns the names of all repositories, sorted.
    pub fn repositories(&self) -> anyhow::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("cannot read the cache {}", self.0.display()))?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let names = names.filter_map(|name| Some(name.strip_prefix("models--")?.replace("--", "/")));
        let mut names: Vec<String> = names.filter(|name| is_repository(name)).collect();
        names.sort();
        Ok(names)
    }

    /// Returns the files of each version of a repository, sorted by path: the current version, then the others, the newest
    /// first. A version has only the files that were downloaded, so an older one may have a file that the current one lacks.
    pub fn versions(&self, repository: &str) -> anyhow::Result<Vec<Vec<CachedFile>>> {
        let repository = self.repository(repository);
        let Some(current) = current_commit(&repository) else { return Ok(Vec::new()) };
        let snapshots = repository.join("snapshots");
        let cannot_read = || format!("cannot read {}", snapshots.display());
        let entries = match fs::read_dir(&snapshots) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(cannot_read)?,
        };
        let mut versions: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        versions.retain(|version| version.is_dir());
        versions.sort_by_cached_key(|version| {
            let changed = version.metadata().and_then(|folder| folder.modified()).ok();
            Reverse((version.ends_with(&current), changed))
        });
        let read = |version: PathBuf| {
            let mut files = Vec::new();
            collect(&version, &version, &mut files).with_context(cannot_read)?;
            files.sort_by(|a: &CachedFile, b| a.path.cmp(&b.path));
            anyhow::Ok(files)
        };
        versions.into_iter().map(read).collect()
    }

    /// Returns the folder of a version, and creates it if it is missing.
    pub fn version(&self, repository: &str, commit: &str) -> anyhow::Result<VersionFolder> {
        let repository = self.repository(repository);
        for folder in [repository.join("blobs"), repository.join("refs"), repository.join("snapshots").join(commit)] {
            fs::create_dir_all(&folder).with_context(|| {
                format!("cannot create {}; set HF_HOME to use another folder for the cache", folder.display())
            })?;
        }
        Ok(VersionFolder { repository, commit: commit.to_owned() })
    }
}

/// Returns the commit of the branch main, else of any branch.
fn current_commit(repository: &Path) -> Option<String> {
    let refs = repository.join("refs");
    let others = fs::read_dir(&refs).ok()?.flatten().map(|entry| entry.path());
    let commits = std::iter::once(refs.join("main")).chain(others).filter_map(|path| fs::read_to_string(path).ok());
    commits.map(|text| text.trim().to_owned()).find(|commit| is_commit(commit))
}

fn collect(snapshot: &Path, folder: &Path, files: &mut Vec<CachedFile>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let file = entry.path();
        // Links to folders are not followed, since they could form a cycle.
        if entry.file_type()?.is_dir() {
            collect(snapshot, &file, files)?;
        } else if let Some(path) = file.strip_prefix(snapshot).ok().and_then(Path::to_str)
            && file.is_file()
        {
            files.push(CachedFile { path: path.to_owned(), file: file.clone() });
        }
    }
    Ok(())
}

impl VersionFolder {
    /// Returns the path of a file, after `download` has completed a partial file if there is no blob for it.
    pub async fn add<D>(&self, file: &RemoteFile, download: impl FnOnce(File) -> D) -> anyhow::Result<PathBuf>
    where
        D: Future<Output = anyhow::Result<()>>,
    {
        debug_assert!(is_safe_path(&file.path));
        let path = self.repository.join("snapshots").join(&self.commit).join(&file.path);
        if path.is_file() {
            return Ok(path);
        }
        let blob = self.repository.join("blobs").join(&file.hash);
        if !blob.is_file() {
            let partial = self.repository.join("blobs").join(format!("{}.incomplete", file.hash));
            let opened = File::options().read(true).write(true).create(true).truncate(false).open(&partial);
            let opened = opened.with_context(|| format!("cannot write {}", partial.display()))?;
            opened
                .try_lock()
                .with_context(|| format!("another process is downloading {}; wait until it has finished", file.path))?;
            // Another process may have finished the download before the lock was taken.
            if !blob.is_file() {
                download(opened.try_clone()?).await?;
                fs::rename(&partial, &blob).with_context(|| format!("cannot write {}", blob.display()))?;
            }
        }
        link(&blob, &path, file).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Makes this the current version, which offline use prefers.
    pub fn set_current(&self) -> anyhow::Result<()> {
        let path = self.repository.join("refs/main");
        let partial = self.repository.join(format!("refs/.main-{}", std::process::id()));
        let written = fs::write(&partial, &self.commit).and_then(|()| fs::rename(&partial, &path));
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

fn link(blob: &Path, path: &Path, file: &RemoteFile) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    // From snapshots/COMMIT and the folders of the path back to the repository.
    let mut target = PathBuf::from("../..");
    target.extend(file.path.matches('/').map(|_| ".."));
    target.push("blobs");
    target.push(blob.file_name().unwrap_or_default());
    // A broken link is left by a deleted blob.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::os::unix::fs::symlink(target, path)
}
