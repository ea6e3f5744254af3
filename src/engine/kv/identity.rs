//! Identity of a model: hashes of all its files, computed in the background after loading. A saved state is valid only
//! for a model with the same identity.

use super::error::SlotError;
use super::snapshot::{ModelIdentity, VectorIdentity};
use crate::events::system;
use crate::model::Model;
use crate::model::llama::WeightFile;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// Time for which a request waits for the identity.
const IDENTITY_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum `Retry-After` delay.
const MIN_RETRY_S: u64 = 1;
/// Maximum `Retry-After` delay.
const MAX_RETRY_S: u64 = 600;

#[derive(Debug, Clone)]
enum HashProgress {
    Hashing {
        started: Instant,
        /// Bytes read so far.
        read: u64,
        /// Bytes of all files.
        total: u64,
    },
    Known(Arc<ModelIdentity>),
    Failed(String),
}

/// Handle to the identity of a loaded model, which is computed in the background. Dropping the handle cancels the
/// computation.
#[derive(Debug)]
pub struct IdentityWatch(watch::Receiver<HashProgress>);

impl IdentityWatch {
    /// Starts to hash the files of the model and its adapters. Hashes in the folder `cache` are not computed again.
    pub fn start(model: &Model, cache: Option<PathBuf>) -> Self {
        let (settings, weights) = (model.settings(), model.weights().to_vec());
        let adapters: Vec<WeightFile> =
            model.adapters().loras().iter().map(|adapter| adapter.weights.clone()).collect();
        let vectors = model.adapters().control_vectors().as_slice().iter();
        let vectors: Vec<VectorIdentity> = vectors
            .map(|vector| VectorIdentity { name: Arc::clone(&vector.name), fingerprint: vector.fingerprint })
            .collect();
        let total = weights.iter().chain(&adapters).map(WeightFile::bytes).sum();
        let (sender, receiver) = watch::channel(HashProgress::Hashing { started: Instant::now(), read: 0, total });
        let work = {
            let sender = sender.clone();
            move || {
                let outcome = identify(settings, &weights, &adapters, cache.as_deref(), &sender);
                let outcome = outcome.map_or_else(
                    |error| HashProgress::Failed(error.to_string()),
                    |known| HashProgress::Known(Arc::new(ModelIdentity { vectors, ..known })),
                );
                sender.send_replace(outcome);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("thunder-hash".into()).spawn(work) {
            sender.send_replace(HashProgress::Failed(error.to_string()));
        }
        Self(receiver)
    }

    /// Returns the identity; waits for it for up to [`IDENTITY_TIMEOUT`].
    ///
    /// # Errors
    /// [`SlotError::Hashing`] while the hash is computed, [`SlotError::Unidentified`] if it failed.
    pub async fn wait(&self) -> Result<Arc<ModelIdentity>, SlotError> {
        let mut state = self.0.clone();
        let is_over = |progress: &HashProgress| !matches!(progress, HashProgress::Hashing { .. });
        // After a timeout, the current progress is reported.
        let _ = timeout(IDENTITY_TIMEOUT, state.wait_for(is_over)).await;
        let progress = state.borrow().clone();
        match progress {
            HashProgress::Known(identity) => Ok(identity),
            HashProgress::Failed(reason) => Err(SlotError::Unidentified(reason)),
            HashProgress::Hashing { started, read, total } => {
                let percent = (read * 100).checked_div(total).unwrap_or(0);
                let left = started.elapsed().as_secs().saturating_mul(total - read.min(total)) / read.max(1);
                Err(SlotError::Hashing { percent, retry_after_s: left.clamp(MIN_RETRY_S, MAX_RETRY_S) })
            }
        }
    }
}

fn identify(
    settings: u128,
    weights: &[WeightFile],
    adapters: &[WeightFile],
    cache: Option<&std::path::Path>,
    sender: &watch::Sender<HashProgress>,
) -> std::io::Result<ModelIdentity> {
    let mut add_progress = |more: u64| {
        sender.send_modify(|progress| {
            if let HashProgress::Hashing { read, .. } = progress {
                *read += more;
            }
        });
        !sender.is_closed()
    };
    let mut hash = |file: &WeightFile| file.hash(cache, system::now(), &mut add_progress);
    // A model in one file has the hash of that file; the hashes of several files are combined in order.
    let mut parts = weights.iter().map(&mut hash);
    let first = parts.next().unwrap_or(Ok(0))?;
    let model = parts.try_fold(first, |before, part| {
        let bytes = [before.to_le_bytes(), part?.to_le_bytes()].concat();
        Ok::<_, std::io::Error>(xxhash_rust::xxh3::xxh3_128(&bytes))
    })?;
    drop(parts);
    let adapters = adapters.iter().map(hash).collect::<Result<_, _>>()?;
    Ok(ModelIdentity { model: model ^ settings, adapters, vectors: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::{HashProgress, IdentityWatch, ModelIdentity};
    use crate::engine::kv::error::SlotError;
    use std::sync::Arc;
    use tokio::sync::watch;
    use tokio::time::Instant;

    #[tokio::test]
    async fn unfinished_hash_reports_retry_delay() {
        let hashing = HashProgress::Hashing { started: Instant::now(), read: 43, total: 100 };
        let (sender, receiver) = watch::channel(hashing);
        let identity_watch = IdentityWatch(receiver);
        let error = identity_watch.wait().await.unwrap_err();
        assert!(matches!(error, SlotError::Hashing { percent: 43, retry_after_s: 1.. }), "{error}");
        assert!(error.to_string().contains("43%; try again in"), "{error}");
        let identity = Arc::new(ModelIdentity { model: 5, adapters: vec![6], vectors: Vec::new() });
        sender.send_replace(HashProgress::Known(Arc::clone(&identity)));
        assert_eq!(identity_watch.wait().await.unwrap(), identity);
        sender.send_replace(HashProgress::Failed("gone".into()));
        assert!(matches!(identity_watch.wait().await, Err(SlotError::Unidentified(reason)) if reason == "gone"));
    }
}
