//! The test model with 32-bit weights and a 32-bit cache. With 16-bit values, some processors round products
//! differently for batches of different sizes, and the order of two almost equally probable tokens can change.
//! Tests that compare the texts of differently batched runs use this model.

use super::{TestEngine, test_engine_of};
use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::Path;
use std::sync::{Arc, Mutex};
use thunder::engine::EngineOptions;
use thunder::model::Model;
use thunder::model::llama::{AttentionCapture, CacheType, GgufHeader, ModelOptions};

/// GGUF type numbers.
const F32: u32 = 0;
const F16: u32 = 1;

/// Starts an engine with the 32-bit model, a 32-bit cache and no flash attention, which rounds to 16 bits.
pub async fn exact_engine(parallel: u32, change: impl FnOnce(&mut EngineOptions)) -> TestEngine {
    test_engine_of(exact_model(), parallel, true, |options| {
        options.attention = AttentionCapture::On;
        (options.cache_type_k, options.cache_type_v) = (CacheType::F32, CacheType::F32);
        change(options);
    })
    .await
}

/// Returns the test model with 32-bit weights, which all tests share.
pub fn exact_model() -> Arc<Model> {
    static MODEL: Mutex<Option<Arc<Model>>> = Mutex::new(None);
    let mut model = MODEL.lock().unwrap();
    Arc::clone(model.get_or_insert_with(|| widened_model(0.0)))
}

/// Loads a copy of the test model with 32-bit weights. `noise` is the maximum relative change of each weight.
pub fn widened_model(noise: f32) -> Arc<Model> {
    let path = crate::harness::folder().join(format!("tiny-f32-{noise}.gguf"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
    std::fs::write(&path, with_32_bit_weights(&source, noise)).unwrap();
    load(&path)
}

/// Loads a model without mapping its file into memory.
pub fn load(path: &Path) -> Arc<Model> {
    let options = ModelOptions { no_mmap: true, ..ModelOptions::default() };
    Arc::new(Model::load(path, &options, |_| true).unwrap())
}

/// Returns a GGUF file with the same metadata, and the weights with 32 bits and noise.
fn with_32_bit_weights(source: &Path, noise: f32) -> Vec<u8> {
    let (header, bytes) = (GgufHeader::read(source).unwrap(), std::fs::read(source).unwrap());
    let encoded_name = |name: &str| [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
    let first = encoded_name(&header.tensors[0].name);
    // The list of tensors follows the metadata.
    let metadata_end = bytes.windows(first.len()).position(|window| window == first).unwrap();
    let mut random = StdRng::seed_from_u64(3);
    let (mut file, mut data) = (bytes[..metadata_end].to_vec(), Vec::new());
    for tensor in &header.tensors {
        let stored = &bytes[tensor.offset as usize..][..tensor.size_bytes as usize];
        file.extend(encoded_name(&tensor.name));
        file.extend((tensor.extents.len() as u32).to_le_bytes());
        tensor.extents.iter().for_each(|extent| file.extend(extent.to_le_bytes()));
        file.extend(F32.to_le_bytes());
        file.extend((data.len() as u64).to_le_bytes());
        let values: Vec<f32> = match tensor.kind {
            F32 => stored.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect(),
            F16 => stored.chunks_exact(2).map(|value| f16::from_le_bytes(value.try_into().unwrap()).to_f32()).collect(),
            other => panic!("{} has the type {other}", tensor.name),
        };
        let mut noisy = |value: f32| value * (1.0 + noise * random.random_range(-1.0..1.0_f32));
        data.extend(values.into_iter().flat_map(|value| noisy(value).to_le_bytes()));
        data.resize(data.len().next_multiple_of(32), 0);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}
