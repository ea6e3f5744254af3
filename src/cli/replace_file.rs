//! Replacement of a user's file, which keeps the previous content if the new one cannot be written.

use anyhow::Context;
use nix::unistd::geteuid;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Replaces the content of a file. If that fails, for example because the disk is full, the previous content stays. If the file
/// is new, only its owner can read it.
pub fn replace_file(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    replace(path, content).with_context(|| format!("cannot write {}", path.display()))
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    // The target of a link is replaced, not the link.
    let Ok(target) = fs::canonicalize(path) else {
        let mut new = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        return new.write_all(content);
    };
    let existing = fs::metadata(&target)?;
    // A device cannot be replaced, a new file would change the owner or be another one than that of the other names, and a
    // read-only file must stay.
    let is_plain = existing.is_file() && existing.nlink() == 1 && existing.uid() == geteuid().as_raw();
    if !is_plain || existing.permissions().readonly() {
        return fs::write(&target, content);
    }
    let partial = partial_path(&target);
    let Ok(mut file) = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial) else {
        // The folder does not permit new files.
        return fs::write(&target, content);
    };
    let written = file
        .set_permissions(existing.permissions())
        .and_then(|()| file.write_all(content))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&partial, &target));
    let Err(error) = written else { return Ok(()) };
    let _ = fs::remove_file(&partial);
    match error.kind() {
        // The file is mounted, as in a container.
        ErrorKind::ResourceBusy | ErrorKind::CrossesDevices => fs::write(&target, content),
        _ => Err(error),
    }
}

fn partial_path(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    name.into()
}

#[cfg(test)]
mod tests {
    use super::{partial_path, replace_file};
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn file_is_replaced_and_keeps_permissions_and_names() {
        let folder = std::env::temp_dir().join(format!("thunder-replace-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let folder = fs::canonicalize(folder).unwrap();
        let path = folder.join("chat.json");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        replace_file(&path, b"first").unwrap();
        assert_eq!(mode(), 0o600);
        let first = fs::metadata(&path).unwrap().ino();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let link = folder.join("link.json");
        symlink(&path, &link).unwrap();
        replace_file(&link, b"second").unwrap();
        let second = fs::metadata(&path).unwrap().ino();
        assert_eq!((fs::read(&path).unwrap(), mode()), (b"second".to_vec(), 0o644));
        assert!(second != first && fs::symlink_metadata(&link).unwrap().is_symlink());
        // The file is overwritten in place if it has other names, and if no new file can be created next to it.
        fs::hard_link(&path, folder.join("other.json")).unwrap();
        replace_file(&path, b"third").unwrap();
        assert_eq!(fs::read(folder.join("other.json")).unwrap(), b"third");
        fs::remove_file(folder.join("other.json")).unwrap();
        fs::create_dir(partial_path(&path)).unwrap();
        replace_file(&path, b"fourth").unwrap();
        assert_eq!((fs::read(&path).unwrap(), fs::metadata(&path).unwrap().ino()), (b"fourth".to_vec(), second));
        // The target of a link is created.
        fs::remove_file(&path).unwrap();
        replace_file(&link, b"fifth").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"fifth");
        fs::remove_dir_all(&folder).unwrap();
    }
}
