//! Models of the architectures that llama.cpp implements, with random weights: generation, attention and logit lens.
//!
//! `fixtures/architectures.json` contains the metadata keys and the tensors of a small model of each architecture. The keys
//! come from llama.cpp's own test of its architectures; the tensors are those that llama.cpp creates for these keys. `V`
//! is the size of the vocabulary.

use super::exact::gguf::Writer;
use super::exact::variant::write_vocabulary;
use super::harness::{Server, folder, message_of};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Writes a metadata key with its value.
fn write_key(writer: &mut Writer, name: &str, kind: &str, value: &Value) {
    let bytes = |kind: &str, value: &Value| match kind {
        "u32" => (value.as_u64().unwrap() as u32).to_le_bytes().to_vec(),
        "u64" => value.as_u64().unwrap().to_le_bytes().to_vec(),
        "f32" => (value.as_f64().unwrap() as f32).to_le_bytes().to_vec(),
        "bool" => vec![u8::from(value.as_bool().unwrap())],
        _ => panic!("{name} has the type {kind}"),
    };
    match kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
        None => writer.value(name, kind, &bytes(kind, value)),
        Some(kind) => {
            let values: Vec<Vec<u8>> = value.as_array().unwrap().iter().map(|value| bytes(kind, value)).collect();
            writer.values(name, kind, values.len(), &values.concat());
        }
    }
}

/// Returns the descriptions of the models.
fn descriptions() -> Value {
    let text = std::fs::read_to_string(Path::new(ROOT).join("fixtures/architectures.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the file of a small model of an architecture with random weights.
pub fn small_model(architecture: &str) -> Vec<u8> {
    let models = descriptions();
    model(architecture, &models["base"], &models["architectures"][architecture])
}

/// Returns the file of a small llama model with the vocabulary that `write_vocabulary` writes. It returns the number of
/// tokens.
pub fn small_model_with_vocabulary(write_vocabulary: fn(&mut Writer) -> usize) -> Vec<u8> {
    let models = descriptions();
    model_with_vocabulary("llama", &models["base"], &models["architectures"]["llama"], write_vocabulary)
}

/// Returns the file of a model with random weights.
fn model(architecture: &str, base: &Value, description: &Value) -> Vec<u8> {
    model_with_vocabulary(architecture, base, description, write_vocabulary)
}

fn model_with_vocabulary(
    architecture: &str,
    base: &Value,
    description: &Value,
    write_vocabulary: fn(&mut Writer) -> usize,
) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.string("general.architecture", architecture);
    let tokens = write_vocabulary(&mut writer);
    let mut keys = base.as_object().unwrap().clone();
    description["without"].as_array().unwrap().iter().for_each(|key| drop(keys.remove(key.as_str().unwrap())));
    keys.extend(description["keys"].as_object().unwrap().clone());
    for (key, value) in &keys {
        let name = key.strip_prefix('/').map_or_else(|| format!("{architecture}.{key}"), str::to_owned);
        write_key(&mut writer, &name, value[0].as_str().unwrap(), &value[1]);
    }
    let mut tensors = Vec::new();
    for line in description["tensors"].as_array().unwrap() {
        let mut words = line.as_str().unwrap().split(' ');
        let (name, dimensions) = (words.next().unwrap(), words.next().unwrap());
        let dimensions: Vec<usize> = dimensions
            .split('x')
            .map(|dimension| if dimension == "V" { tokens } else { dimension.parse().unwrap() })
            .collect();
        match words.next() {
            None => tensors.push((name.to_owned(), dimensions)),
            Some(layers) => {
                tensors.extend(layers.split(',').map(|layer| (name.replace('*', layer), dimensions.clone())));
            }
        }
    }
    let count = |dimensions: &[usize]| dimensions.iter().product::<usize>();
    // The values of all tensors are slices of pools of random numbers, each from a different position.
    let mut state = 6767_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.2
    };
    let pool: Vec<f32> = (0..4096).map(|_| random()).collect();
    let largest = tensors.iter().map(|(_, dimensions)| count(dimensions)).max().unwrap();
    let repeated =
        |change: fn(&f32) -> f32| pool.iter().map(change).collect::<Vec<_>>().repeat(1 + largest.div_ceil(pool.len()));
    // The decay of a state is negative, and norms scale by about 1.
    let (decays, norms, others) =
        (repeated(|value| -value.abs()), repeated(|value| 1.0 + value), repeated(|value| *value));
    let tensors: Vec<(&str, Vec<usize>, &[f32])> = tensors
        .iter()
        .enumerate()
        .map(|(number, (name, dimensions))| {
            let values = match name {
                name if name.contains("ssm_a") => &decays,
                name if name.contains("norm") => &norms,
                _ => &others,
            };
            (&**name, dimensions.clone(), &values[number * 37 % pool.len()..][..count(dimensions)])
        })
        .collect();
    writer.with_tensors(&tensors)
}

/// Returns the reason in an error message, without the name of the model.
fn reason(answer: &Value) -> String {
    let message = answer.pointer("/error/message").or_else(|| answer.get("error")).and_then(Value::as_str).unwrap();
    message.rsplit(": ").next().unwrap().split(';').next().unwrap().to_owned()
}

/// Support of a model: "yes", or "no" with the reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Support {
    generation: String,
    attention: String,
    lens: String,
}

/// Returns the support of a model.
async fn support(server: &Server, name: &str) -> Support {
    let no = || "no".to_owned();
    let body = json!({"model": name, "prompt": "Once upon", "max_tokens": 4, "ignore_eos": true, "seed": 1});
    let (status, answer) = server.post("/v1/completions", &body).await;
    if status != 200 {
        return Support { generation: format!("no: {}", reason(&answer)), attention: no(), lens: no() };
    }
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{name}: {answer}");
    let body = json!({"model": name, "input_ids": [10, 11, 12], "max_new_tokens": 2, "return_attention": true,
                      "ignore_eos": true});
    let (status, answer) = server.post("/api/v1/generate", &body).await;
    let attention = if status == 200 {
        assert_eq!(answer["attention_data"].as_array().map(Vec::len), Some(2), "{name}: {answer}");
        "yes".to_owned()
    } else {
        format!("no: {}", reason(&answer))
    };
    let body = json!({"model": name, "prompt": "Once upon", "max_tokens": 2, "lens": true, "ignore_eos": true});
    let (status, answer) = server.post("/v1/completions", &body).await;
    let lens = if status == 200 { "yes".to_owned() } else { format!("no: {}", reason(&answer)) };
    Support { generation: "yes".to_owned(), attention, lens }
}

#[tokio::test]
async fn architectures_of_llama_cpp_generate_as_the_handbook_says() {
    let models = descriptions();
    let folder = folder();
    let architectures = models["architectures"].as_object().unwrap();
    for (name, description) in architectures {
        std::fs::write(folder.join(format!("{name}.gguf")), model(name, &models["base"], description)).unwrap();
    }
    // llama.cpp would abort the process at the first token of this model.
    let mut wide = architectures["minimax-m3"].clone();
    wide["keys"]["rope.dimension_count"] = json!(["u32", 64]);
    std::fs::write(folder.join("wide-rope.gguf"), model("minimax-m3", &models["base"], &wide)).unwrap();
    let server =
        Server::start(&["--models-dir", folder.to_str().unwrap(), "--models-max", "2", "-c", "128", "-np", "1"]);
    server.wait_ready().await;
    let (status, answer) = server.post("/v1/completions", &json!({"model": "wide-rope", "prompt": "Once"})).await;
    let reason = "`rope.dimension_count` must be at most 32, the size of a head, got 64";
    assert!(status == 503 && message_of(&answer).contains(reason), "{answer}");
    let mut supported: BTreeMap<Support, Vec<&str>> = BTreeMap::new();
    for name in architectures.keys() {
        supported.entry(support(&server, name).await).or_default().push(name);
    }
    let full = Support { generation: "yes".into(), attention: "yes".into(), lens: "yes".into() };
    let others = supported.remove(&full).unwrap().join("`, `");
    let mut table = String::from("| Generation | Attention | Logit lens | Architectures |\n|---|---|---|---|\n");
    for (Support { generation, attention, lens }, names) in supported.iter().rev() {
        writeln!(table, "| {generation} | {attention} | {lens} | `{}` |", names.join("`, `")).unwrap();
    }
    writeln!(table, "\nAll others generate text, return attention and have a logit lens: `{others}`.").unwrap();
    super::handbook::assert_generated("models.md", "architectures", &table);
}
