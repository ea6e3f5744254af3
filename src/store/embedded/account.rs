//! The account that runs PostgreSQL: ours, or another one where ours is root, which PostgreSQL refuses.

use crate::store::EmbeddedError;
use nix::unistd::{Gid, Uid, User, chown, getegid, geteuid};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tokio::process::Command;

/// Who PostgreSQL runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    name: String,
    /// Owner of the data and of the socket's folder.
    pub uid: u32,
    gid: u32,
    /// Whether it is not us.
    other: bool,
}

impl Account {
    /// Our own account; for root `postgres`, else `nobody`.
    pub fn choose() -> Result<Self, EmbeddedError> {
        if !geteuid().is_root() {
            let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
            return Ok(Self { name: uid.to_string(), uid, gid, other: false });
        }
        // by name, since initdb wants a passwd entry for its number
        ["postgres", "nobody"]
            .into_iter()
            .filter_map(|name| User::from_name(name).ok().flatten())
            .find(|user| !user.uid.is_root())
            .map(|user| Self { name: user.name, uid: user.uid.as_raw(), gid: user.gid.as_raw(), other: true })
            .ok_or(EmbeddedError::NoAccount)
    }

    /// Lets a program run as this account. The standard library drops root's supplementary groups before it changes
    /// the number.
    pub fn lend(&self, command: &mut Command) {
        if self.other {
            command.uid(self.uid).gid(self.gid);
        }
    }

    /// Gives a file to the account, which alone may read it then.
    pub fn take(&self, file: &Path) -> std::io::Result<()> {
        if self.other {
            chown(file, Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))?;
        }
        fs::set_permissions(file, fs::Permissions::from_mode(0o600))
    }

    /// Makes a folder that belongs to the account alone; one that is there already must be such a folder.
    pub fn make_folder(&self, folder: &Path) -> Result<(), EmbeddedError> {
        let fail = |action| move |source| EmbeddedError::Disk { action, path: folder.to_owned(), source };
        match DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) if self.other => chown(folder, Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
                .map_err(|errno| fail("cannot give to another account")(errno.into())),
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(fail("cannot create")(error)),
            _ => Ok(()),
        }?;
        // somebody else may have put a folder or a link there first: in the temp directory everybody can
        let found = fs::symlink_metadata(folder).map_err(fail("cannot read"))?;
        if !found.is_dir() || found.uid() != self.uid {
            let text = format!("it is there already and is not a folder of account '{}'", self.name);
            return Err(fail("cannot use")(std::io::Error::other(text)));
        }
        if found.permissions().mode() & 0o777 != 0o700 {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).map_err(fail("cannot close to others"))?;
        }
        Ok(())
    }

    /// Checks that the account can enter a folder and all folders above it. We could, but it is not us.
    pub fn can_enter(&self, folder: &Path) -> Result<(), EmbeddedError> {
        if !self.other {
            return Ok(());
        }
        let closed = |path: &Path| {
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
            .find(|path| closed(path))
        {
            Some(path) => Err(EmbeddedError::Unreachable { account: self.name.clone(), folder: PathBuf::from(path) }),
            None => Ok(()),
        }
    }
}
