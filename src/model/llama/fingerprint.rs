//! A fast fingerprint of a model file: its length, its beginning, and samples of its weights.

use std::fs::File;
use std::io::{Read, Result, Seek, SeekFrom};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Number of bytes at the beginning, where a GGUF has its metadata.
const HEAD: u64 = 1 << 20;
/// Number of weight samples.
const SAMPLES: u64 = 64;
/// Size of a sample in bytes.
const SAMPLE: u64 = 16 << 10;

/// Returns a hash that is equal for the same file, and most likely different for every other file: two fine-tunes of
/// one model differ in all their weights.
pub(super) fn hash_file(path: &Path) -> Result<u128> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut hash = Xxh3::new();
    hash.update(&len.to_le_bytes());
    let mut bytes = Vec::new();
    let mut read = |from: u64, count: u64| -> Result<()> {
        bytes.clear();
        file.seek(SeekFrom::Start(from))?;
        file.by_ref().take(count).read_to_end(&mut bytes)?;
        hash.update(&bytes);
        Ok(())
    };
    read(0, HEAD)?;
    for sample in 0..SAMPLES {
        read(len.saturating_sub(SAMPLE) * (sample + 1) / SAMPLES, SAMPLE)?;
    }
    Ok(hash.digest128())
}

/// Returns the hash of a text; 0 for the empty text.
pub(super) fn hash_text(text: &str) -> u128 {
    if text.is_empty() { 0 } else { xxhash_rust::xxh3::xxh3_128(text.as_bytes()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn changed_weight_at_the_end_of_a_file_changes_the_fingerprint() {
        let path = std::env::temp_dir().join(format!("thunder-fingerprint-{}", std::process::id()));
        let mut bytes = vec![7u8; 3 << 20];
        std::fs::write(&path, &bytes).unwrap();
        let first = super::hash_file(&path).unwrap();
        assert_eq!(first, super::hash_file(&path).unwrap());
        *bytes.last_mut().unwrap() = 8;
        std::fs::write(&path, &bytes).unwrap();
        assert_ne!(first, super::hash_file(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
    }
}
