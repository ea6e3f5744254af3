//! The test model with 32-bit weights and a 32-bit cache. With 16-bit weights, some processors round products
//! differently for batches of different sizes, and a random model then exchanges two almost equally probable tokens.
//! Tests that compare the texts of differently batched runs use this model.

use super::{Bench, bench_of};
use half::f16;
use std::path::Path;
use std::sync::{Arc, Mutex};
use thunder::engine::EngineOptions;
use thunder::model::Model;
use thunder::model::llama::{CacheType, GgufHeader, ModelOptions};

/// GGUF type numbers.
const F32: u32 = 0;
const F16: u32 = 1;

/// Starts an engine with the 32-bit model and a 32-bit cache.
pub async fn exact_bench(parallel: u32, attention: bool, change: impl FnOnce(&mut EngineOptions)) -> Bench {
    bench_of(exact_model(), parallel, attention, |options| {
        (options.cache_type_k, options.cache_type_v) = (CacheType::F32, CacheType::F32);
        change(options);
    })
    .await
}

pub fn exact_model() -> Arc<Model> {
    static MODEL: Mutex<Option<Arc<Model>>> = Mutex::new(None);
    let mut model = MODEL.lock().unwrap();
    let load = || {
        let path = crate::harness::folder().join("tiny-f32.gguf");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
        std::fs::write(&path, with_32_bit_weights(&source)).unwrap();
        Arc::new(Model::load(&path, &ModelOptions::default(), |_| true).unwrap())
    };
    Arc::clone(model.get_or_insert_with(load))
}

/// Returns a GGUF file with the same metadata and 32-bit weights.
fn with_32_bit_weights(source: &Path) -> Vec<u8> {
    let (header, bytes) = (GgufHeader::read(source).unwrap(), std::fs::read(source).unwrap());
    let name_of = |name: &str| [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
    let first = name_of(&header.tensors[0].name);
    // The list of tensors follows the metadata.
    let metadata_end = bytes.windows(first.len()).position(|window| window == first).unwrap();
    let (mut file, mut data) = (bytes[..metadata_end].to_vec(), Vec::new());
    for tensor in &header.tensors {
        let stored = &bytes[tensor.offset as usize..][..tensor.size_bytes as usize];
        file.extend(name_of(&tensor.name));
        file.extend((tensor.extents.len() as u32).to_le_bytes());
        tensor.extents.iter().for_each(|extent| file.extend(extent.to_le_bytes()));
        file.extend(F32.to_le_bytes());
        file.extend((data.len() as u64).to_le_bytes());
        match tensor.kind {
            F32 => data.extend(stored),
            F16 => {
                let values = stored.chunks_exact(2).map(|value| f16::from_le_bytes(value.try_into().unwrap()).to_f32());
                data.extend(values.flat_map(f32::to_le_bytes));
            }
            other => panic!("{} has the type {other}", tensor.name),
        }
        data.resize(data.len().next_multiple_of(32), 0);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}
