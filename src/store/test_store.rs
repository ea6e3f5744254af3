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

/// Inserts the ended runs `$1` to `$2` of the first hour of 2100. The store's maintenance counts past days only.
pub const INSERT_RUNS: &str = "
    insert into runs (run_id, request_id, created_at, status, surface, mods, prompt_preview, output_preview,
        prompt_tokens, completion_tokens, cached_tokens, events, backtracked, forced, actions, errors, error_text,
        has_attention, surprise_strip, search, mod_call_names)
    select (lpad(to_hex(4102444800000 + n), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid, 'r' || n,
        now(), 'done', 'openai', '{}', '', '', 1, 1, 0, 1, 0, 0, 0, 0, '', false, '', '', '{}'
    from generate_series($1::integer, $2::integer) n";
