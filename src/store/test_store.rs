//! An embedded store for unit tests.

use super::{Database, Store};
use crate::events::system;
use std::path::PathBuf;

/// A temporary folder, which is removed when it is dropped.
pub struct TestFolder(pub PathBuf);

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Opens an empty store in a new folder.
pub async fn open() -> (TestFolder, Store) {
    let folder = TestFolder(std::env::temp_dir().join(format!("thunder-store-{}", system::new_id())));
    let store = Store::open(Database::Embedded { data_dir: folder.0.clone() }, |_| {}).await.unwrap();
    (folder, store)
}
