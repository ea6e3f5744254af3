//! Control vectors: their effect on attention rows, and invalid files.

use super::gguf::Writer;
use super::reference::Reference;
use super::variant::{Kind, LAYERS, Variant, WIDTH};
use super::{attention_request, compare, tokens};
use crate::engine::test_engine_of;
use crate::harness::{ErrorTable, folder, model};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thunder::model::Model;
use thunder::model::llama::{AttentionCapture, CacheType, ControlVectors, ModelOptions};

/// Maximum deviation of a value.
const TOLERANCE: f64 = 2e-4;

/// Returns a direction that differs between layers and files.
fn direction(layer: usize, file: usize) -> Vec<f32> {
    (0..WIDTH).map(|at| ((at * 7 + layer * 13 + file * 29) % 17) as f32 / 8.0 - 1.0).collect()
}

/// Writes a file with directions for these layers.
fn vector(folder: &Path, file: usize, layers: &[usize]) -> PathBuf {
    let tensors: Vec<_> = layers.iter().map(|&layer| (format!("direction.{layer}"), direction(layer, file))).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, values)| (name.as_str(), vec![WIDTH], &values[..])).collect();
    let mut writer = Writer::default();
    writer.string("general.architecture", "controlvector");
    let path = folder.join(format!("control-{file}.gguf"));
    std::fs::write(&path, writer.with_tensors(&tensors)).unwrap();
    path
}

fn load(path: &Path, files: &[(PathBuf, f32)], layers: Option<RangeInclusive<u32>>) -> Result<Model, String> {
    let control = ControlVectors { files: files.to_vec(), layers };
    let options = ModelOptions { control, ..ModelOptions::default() };
    Model::load(path, &options, |_| true).map_err(|error| error.to_string())
}

#[tokio::test]
async fn control_vectors_are_added_after_their_layers() {
    let folder = folder();
    let files = [(vector(&folder, 0, &[1, 2]), 0.5), (vector(&folder, 1, &[2, LAYERS + 3]), -1.25)];
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        for layers in [None, Some(2..=9), Some(0..=1)] {
            let mut reference = Reference::new(&variant);
            for layer in (1..=2).filter(|&layer| layers.as_ref().is_none_or(|range| range.contains(&(layer as u32)))) {
                let pair = direction(layer, 0).into_iter().zip(direction(layer, 1));
                let second = if layer == 2 { -1.25 } else { 0.0 };
                let sum = pair.map(|(a, b)| f64::from(a) * 0.5 + f64::from(b) * second);
                reference.control.insert(layer, sum.collect());
            }
            let model = Arc::new(load(&variant.path, &files, layers).unwrap());
            let mut test_engine = test_engine_of(model, 2, true, |options| {
                options.attention = AttentionCapture::On;
                options.cache_type_k = CacheType::F32;
                options.cache_type_v = CacheType::F32;
            })
            .await;
            let prompt = tokens(1, 40);
            let result = test_engine.run(attention_request(prompt.clone(), 5)).await;
            assert_eq!(compare(&result, &prompt, &mut reference, TOLERANCE, false), 5, "{kind:?}");
        }
    }
}

#[test]
fn different_control_vectors_give_different_adapter_sets() {
    let folder = folder();
    let variant = Variant::new(Kind::Llama);
    let (one, two) = (vector(&folder, 0, &[1, 2]), vector(&folder, 1, &[1]));
    let loaded = |files: &[(PathBuf, f32)], layers| {
        let model = load(&variant.path, files, layers).unwrap();
        (model.fingerprint(), model.adapters().default_set())
    };
    let (fingerprint, plain) = loaded(&[], None);
    assert_eq!((fingerprint, plain.clone()), loaded(&[(one.clone(), 0.0)], None));
    let sets = [
        (&[(one.clone(), 1.0)][..], None),
        (&[(one.clone(), -1.0)], None),
        (&[(two, 1.0)], None),
        (&[(one, 1.0)], Some(2..=2)),
    ]
    .map(|(files, layers)| loaded(files, layers));
    assert!(sets.iter().all(|(other, _)| *other == fingerprint));
    let all: Vec<_> = std::iter::once(&plain).chain(sets.iter().map(|(_, set)| set)).collect();
    assert!(all.iter().enumerate().all(|(at, one)| !all[..at].contains(one)), "{all:x?}");
}

#[test]
fn incompatible_control_vector_files_are_rejected() {
    let folder = folder();
    let variant = Variant::new(Kind::Llama);
    let path = folder.join("invalid.gguf");
    let load_error = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        load(&variant.path, &[(path.clone(), 1.0)], None).map(|_| ()).unwrap_err()
    };
    let file = |name: &str, dimensions: &[usize], value: f32| {
        let values = vec![value; dimensions.iter().product()];
        Writer::default().with_tensors(&[(name, dimensions.to_vec(), &values)])
    };
    let valid = file("direction.1", &[WIDTH], 1.0);
    // The type follows the name, the number of dimensions, and the dimension.
    let type_at = valid.windows(11).position(|part| part == b"direction.1").unwrap() + 11 + 4 + 8;
    let half_precision = [&valid[..type_at], &1_u32.to_le_bytes(), &valid[type_at + 4..]].concat();
    let mut errors = ErrorTable::default();
    for (content, bytes) in [
        ("nothing", Vec::new()),
        ("a ZIP file", b"PK\x03\x04 something else".to_vec()),
        ("no tensors", Writer::default().with_tensors(&[])),
        ("a model", std::fs::read(model()).unwrap()),
        ("direction.0", file("direction.0", &[WIDTH], 1.0)),
        ("direction.-1", file("direction.-1", &[WIDTH], 1.0)),
        ("direction.", file("direction.", &[WIDTH], 1.0)),
        ("direction.99999999999999999999", file("direction.99999999999999999999", &[WIDTH], 1.0)),
        ("one value too many", file("direction.1", &[WIDTH + 1], 1.0)),
        ("two dimensions", file("direction.1", &[WIDTH, 2], 1.0)),
        ("NaN", file("direction.1", &[WIDTH], f32::NAN)),
        ("infinity", file("direction.1", &[WIDTH], f32::INFINITY)),
        ("16-bit values", half_precision),
    ] {
        errors.add_text(content, &load_error(&bytes));
    }
    insta::assert_snapshot!("control_vector_errors", errors);
    for len in 0..valid.len() {
        let output = load_error(&valid[..len]);
        assert!(output.contains("incomplete") || output.contains("GGUF"), "{len}: {output}");
    }
    std::fs::write(&path, &valid).unwrap();
    assert!(load(&variant.path, &[(path, 1.0)], None).is_ok());
}
