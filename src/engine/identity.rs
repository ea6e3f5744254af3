//! The identity of a model's weights, which a saved state must share: hashes of every byte of its files, computed in the
//! background after the load.

use super::SlotError;
use crate::model::Model;
use crate::model::llama::WeightFile;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// Wait for the hashes before a request is refused; those of a small model are there by then.
const WAIT: Duration = Duration::from_secs(5);
/// Bounds of the advice on when to try again.
const MIN_RETRY_S: u64 = 1;
const MAX_RETRY_S: u64 = 600;

/// The identity that a saved state must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    /// Hash of the model and of the settings that change its computation.
    pub model: u128,
    /// Hashes of the LoRA adapters, by id.
    pub adapters: Vec<u128>,
}

#[derive(Debug, Clone)]
enum Progress {
    /// Bytes that were read since then, of so many.
    Hashing {
        began: Instant,
        read: u64,
        total: u64,
    },
    Known(Arc<Identity>),
    Failed(String),
}

/// The identity of a loaded model, as far as it is known. The computation ends when this is dropped.
#[derive(Debug)]
pub(super) struct Identification(watch::Receiver<Progress>);

impl Identification {
    /// Begins to hash the files of the model and its adapters, or finds their hashes in the folder `cache`.
    pub fn start(model: &Model, cache: Option<PathBuf>) -> Self {
        let (settings, weights) = (model.settings(), model.weights().to_vec());
        let adapters: Vec<WeightFile> = model.adapters().list().iter().map(|adapter| adapter.weights.clone()).collect();
        let total = weights.iter().chain(&adapters).map(WeightFile::bytes).sum();
        let (sender, receiver) = watch::channel(Progress::Hashing { began: Instant::now(), read: 0, total });
        let work = {
            let sender = sender.clone();
            move || {
                let done = identify(settings, &weights, &adapters, cache.as_deref(), &sender);
                let done = done
                    .map_or_else(|error| Progress::Failed(error.to_string()), |known| Progress::Known(Arc::new(known)));
                sender.send_replace(done);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("thunder-hash".into()).spawn(work) {
            sender.send_replace(Progress::Failed(error.to_string()));
        }
        Self(receiver)
    }

    /// Returns the identity, for which it waits a little.
    ///
    /// # Errors
    /// [`SlotError::Hashing`] while it is not known, [`SlotError::Unidentified`] where it cannot be.
    pub async fn known(&self) -> Result<Arc<Identity>, SlotError> {
        let mut state = self.0.clone();
        let is_over = |progress: &Progress| !matches!(progress, Progress::Hashing { .. });
        // The last state says what there is to say, in time or not.
        let _ = timeout(WAIT, state.wait_for(is_over)).await;
        let progress = state.borrow().clone();
        match progress {
            Progress::Known(identity) => Ok(identity),
            Progress::Failed(reason) => Err(SlotError::Unidentified(reason)),
            Progress::Hashing { began, read, total } => {
                let percent = (read * 100).checked_div(total).unwrap_or(0);
                let left = began.elapsed().as_secs().saturating_mul(total - read.min(total)) / read.max(1);
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
    sender: &watch::Sender<Progress>,
) -> std::io::Result<Identity> {
    let mut advance = |more: u64| {
        sender.send_modify(|progress| {
            if let Progress::Hashing { read, .. } = progress {
                *read += more;
            }
        });
        !sender.is_closed()
    };
    let mut hash = |file: &WeightFile| file.hash(cache, &mut advance);
    // The parts of a split model in their order; a model of one file has that file's hash.
    let mut parts = weights.iter().map(&mut hash);
    let first = parts.next().unwrap_or(Ok(0))?;
    let model = parts.try_fold(first, |before, part| {
        let bytes = [before.to_le_bytes(), part?.to_le_bytes()].concat();
        Ok::<_, std::io::Error>(xxhash_rust::xxh3::xxh3_128(&bytes))
    })?;
    drop(parts);
    let adapters = adapters.iter().map(hash).collect::<Result<_, _>>()?;
    Ok(Identity { model: model ^ settings, adapters })
}

#[cfg(test)]
mod tests {
    use super::{Identification, Identity, Progress};
    use crate::engine::SlotError;
    use std::sync::Arc;
    use tokio::sync::watch;
    use tokio::time::Instant;

    #[tokio::test]
    async fn unknown_identity_says_when_to_try_again() {
        let hashing = Progress::Hashing { began: Instant::now(), read: 43, total: 100 };
        let (sender, receiver) = watch::channel(hashing);
        let identification = Identification(receiver);
        let error = identification.known().await.unwrap_err();
        assert!(matches!(error, SlotError::Hashing { percent: 43, retry_after_s: 1.. }), "{error}");
        assert!(error.to_string().contains("43 %; try again in"), "{error}");
        let identity = Arc::new(Identity { model: 5, adapters: vec![6] });
        sender.send_replace(Progress::Known(Arc::clone(&identity)));
        assert_eq!(identification.known().await.unwrap(), identity);
        sender.send_replace(Progress::Failed("gone".into()));
        assert!(matches!(identification.known().await, Err(SlotError::Unidentified(reason)) if reason == "gone"));
    }
}
