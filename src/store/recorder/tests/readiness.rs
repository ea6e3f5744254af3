//! Readiness of the store while the recorder cannot write.

use super::*;

/// Records a run in batches of which all but the last one meet an unavailable database and a full disk. Returns the
/// readiness after each batch.
async fn readiness_after_batches(is_durable: bool, batches: usize) -> Vec<bool> {
    let (folder, store) = store().await;
    let mut recorder = recorder(&store);
    recorder.target.metrics = Arc::clone(&store.inner.recorder_metrics);
    let id = system::new_id();
    std::os::unix::fs::symlink("/dev/full", folder.0.join(format!("spool/{id}.spool"))).unwrap();
    let mut batch_writer = BatchWriter::new(Spool::create(&folder.0.join("spool"), id).unwrap());
    store.inner.recorder_pool.close().await;
    recorder.target.writer.pool = store.inner.recorder_pool.clone();
    let start = start();
    let _ack = is_durable.then(|| recorder.target.durability_acks.request(start.run_id));
    recorder.receive(Signal::Started(start));
    let mut readiness = Vec::new();
    for remaining in (0..batches).rev() {
        if remaining == 0 {
            recorder.target.writer = writer(&store);
        }
        batch_writer.start(&mut recorder);
        let (batch, result) = batch_writer.ended().await.unwrap();
        batch_writer.finish(batch, result, &mut recorder);
        readiness.push(store.ready().await.is_ok());
    }
    batch_writer.close();
    store.close().await;
    readiness
}

#[tokio::test]
async fn store_is_not_ready_while_nothing_can_be_recorded() {
    assert_eq!(readiness_after_batches(false, 2).await, [false, true]);
}

/// A durable run is dropped at once, so the following batches have no records.
#[tokio::test]
async fn store_is_not_ready_while_dropped_runs_cannot_be_interrupted() {
    assert_eq!(readiness_after_batches(true, 4).await, [false, false, false, true]);
}
