//! The operating system account that runs PostgreSQL. PostgreSQL refuses root, so root uses another account.

use crate::store::EmbeddedError;
use nix::unistd::{Gid, Uid, User, chown, getegid, geteuid};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tokio::process::Command;

/// The operating system account that runs PostgreSQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    name: String,
    /// Owner of the data and of the socket's folder.
    pub uid: u32,
    gid: u32,
    /// True if it differs from the account of this process.
    is_other: bool,
}

impl Account {
    /// Returns the account of this process; for root, `postgres` or else `nobody`.
    pub fn choose() -> Result<Self, EmbeddedError> {
        if !geteuid().is_root() {
            let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
            return Ok(Self { name: uid.to_string(), uid, gid, is_other: false });
        }
        // Looked up by name, because initdb needs a passwd entry for the user id.
        ["postgres", "nobody"]
            .into_iter()
            .filter_map(|name| User::from_name(name).ok().flatten())
            .find(|user| !user.uid.is_root())
            .map(|user| Self { name: user.name, uid: user.uid.as_raw(), gid: user.gid.as_raw(), is_other: true })
            .ok_or(EmbeddedError::NoAccount)
    }

    /// Sets the account that runs the command. The standard library drops root's supplementary groups before it changes
    /// the user id.
    pub fn set_account(&self, command: &mut Command) {
        if self.is_other {
            command.uid(self.uid).gid(self.gid);
        }
    }

    /// Makes the account the owner of a file and the only one who can read it.
    pub fn make_private(&self, file: &Path) -> std::io::Result<()> {
        if self.is_other {
            chown(file, Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))?;
        }
        fs::set_permissions(file, fs::Permissions::from_mode(0o600))
    }

    /// Creates a private folder of the account. An existing folder must already belong to the account.
    pub fn create_folder(&self, folder: &Path) -> Result<(), EmbeddedError> {
        let fail = |action| move |source| EmbeddedError::Disk { action, path: folder.to_owned(), source };
        match DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) if self.is_other => chown(folder, Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
                .map_err(|errno| fail("cannot change the owner of")(errno.into())),
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(fail("cannot create")(error)),
            _ => Ok(()),
        }?;
        // Everyone can write to the temp directory, so another user may have created a folder or a link with this name.
        let found = fs::symlink_metadata(folder).map_err(fail("cannot read"))?;
        if !found.is_dir() || found.uid() != self.uid {
            let text = format!("it exists and is not a folder of account '{}'", self.name);
            return Err(fail("cannot use")(std::io::Error::other(text)));
        }
        if found.permissions().mode() & 0o777 != 0o700 {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).map_err(fail("cannot make private"))?;
        }
        Ok(())
    }

    /// Checks that the account can enter a folder and all folders above it. Root can enter every folder, but the
    /// account may not be allowed to.
    pub fn check_can_enter(&self, folder: &Path) -> Result<(), EmbeddedError> {
        if !self.is_other {
            return Ok(());
        }
        let is_closed = |path: &Path| {
            fs::metadata(path).is_ok_and(|found| {
                let mode = found.permissions().mode();
                let bit = if found.uid() == self.uid {
                    0o100
                } else if found.gid() == self.gid {
                    0o010
                } else {
                    0o001
                };
                mode & bit == 0
            })
        };
        match folder
            .ancestors()
            .filter(|path| !path.as_os_str().is_empty())
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .find(|path| is_closed(path))
        {
            Some(path) => Err(EmbeddedError::Unreachable { account: self.name.clone(), folder: PathBuf::from(path) }),
            None => Ok(()),
        }
    }
}
