//! Small models with random weights, one for each way of attending, written as GGUF. The reference reads the same weights.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use thunder::model::Model;
use thunder::model::llama::ModelOptions;

pub const WIDTH: usize = 32;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_WIDTH: usize = WIDTH / HEADS;
pub const LAYERS: usize = 4;
pub const HIDDEN: usize = 48;
pub const EPS: f32 = 1e-6;
/// Attention window of the layers that have one, in tokens.
pub const WINDOW: usize = 12;
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// A way of attending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Grouped queries; neighbours are turned together.
    Llama,
    /// Grouped queries with biases; halves are turned together.
    Qwen2,
    /// Grouped queries with norms, and a window in two of three layers.
    Gemma3,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Gemma3];

    const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Gemma3 => "gemma3",
        }
    }

    pub fn window(self, layer: usize) -> Option<usize> {
        (self == Self::Gemma3 && layer % 3 < 2).then_some(WINDOW)
    }

    pub fn rope_base(self, layer: usize) -> f64 {
        if self == Self::Gemma3 && self.window(layer).is_none() { 1e6 } else { 1e4 }
    }
}

/// Tensors by name: rows, and the length of a row.
pub type Weights = BTreeMap<String, (usize, Vec<f32>)>;

pub struct Variant {
    pub kind: Kind,
    pub weights: Weights,
    pub path: PathBuf,
}

impl Variant {
    pub fn new(kind: Kind) -> Self {
        let weights = weights(kind);
        let path = crate::harness::folder().join(format!("{}.gguf", kind.name()));
        std::fs::write(&path, gguf(kind, &weights)).unwrap();
        Self { kind, weights, path }
    }

    pub fn model(&self) -> Arc<Model> {
        Arc::new(Model::load(&self.path, &ModelOptions::default(), |_| true).unwrap())
    }
}

/// How every byte is spelt in a byte-level vocabulary.
fn letters() -> Vec<char> {
    let shown = |byte: u32| (33..=126).contains(&byte) || (161..=172).contains(&byte) || (174..=255).contains(&byte);
    let mut hidden = 255;
    (0..256)
        .map(|byte| {
            if !shown(byte) {
                hidden += 1;
            }
            char::from_u32(if shown(byte) { byte } else { hidden }).unwrap()
        })
        .collect()
}

fn vocabulary() -> Vec<String> {
    let letters = letters();
    let mut tokens: Vec<String> = CONTROL.iter().map(ToString::to_string).collect();
    tokens.extend(letters.iter().map(char::to_string));
    // A merge that never applies: some there must be.
    tokens.push(format!("{0}{0}", letters[0]));
    tokens
}

fn weights(kind: Kind) -> Weights {
    let mut rng = StdRng::seed_from_u64(6767);
    let mut normal = move |count: usize, scale: f32| -> Vec<f32> {
        let one = |rng: &mut StdRng| {
            let (a, b): (f32, f32) = (rng.random(), rng.random());
            (-2.0 * (1.0 - a).ln()).sqrt() * (std::f32::consts::TAU * b).cos()
        };
        (0..count).map(|_| scale * one(&mut rng)).collect()
    };
    let mut all = Weights::new();
    let mut add = |name: String, outputs: usize, inputs: usize, gain: f32| {
        all.insert(name, (inputs, normal(outputs * inputs, gain / (inputs as f32).sqrt())));
    };
    let kv = KV_HEADS * HEAD_WIDTH;
    add("token_embd.weight".into(), vocabulary().len(), WIDTH, 5.0);
    add("output.weight".into(), vocabulary().len(), WIDTH, 3.0);
    for layer in 0..LAYERS {
        let at = |name: &str| format!("blk.{layer}.{name}");
        add(at("attn_q.weight"), WIDTH, WIDTH, 1.1);
        add(at("attn_k.weight"), kv, WIDTH, 1.1);
        add(at("attn_v.weight"), kv, WIDTH, 1.0);
        add(at("attn_output.weight"), WIDTH, WIDTH, 1.0);
        add(at("ffn_gate.weight"), HIDDEN, WIDTH, 1.0);
        add(at("ffn_up.weight"), HIDDEN, WIDTH, 1.0);
        add(at("ffn_down.weight"), WIDTH, HIDDEN, 0.5);
        if kind == Kind::Qwen2 {
            add(at("attn_q.bias"), 1, WIDTH, 3.0);
            add(at("attn_k.bias"), 1, kv, 3.0);
            add(at("attn_v.bias"), 1, kv, 3.0);
        }
    }
    let mut norm = |name: String, width: usize| {
        let values = (0..width).map(|index| 1.0 + 0.05 * ((index * 7 % 11) as f32 - 5.0)).collect();
        all.insert(name, (width, values));
    };
    norm("output_norm.weight".into(), WIDTH);
    for layer in 0..LAYERS {
        let mut of_layer = |name: &str, width| norm(format!("blk.{layer}.{name}.weight"), width);
        of_layer("attn_norm", WIDTH);
        of_layer("ffn_norm", WIDTH);
        if kind == Kind::Gemma3 {
            of_layer("attn_q_norm", HEAD_WIDTH);
            of_layer("attn_k_norm", HEAD_WIDTH);
            of_layer("post_attention_norm", WIDTH);
            of_layer("post_ffw_norm", WIDTH);
        }
    }
    all
}

/// A GGUF under construction.
#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    pairs: u64,
}

impl Writer {
    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    fn key(&mut self, name: &str, kind: u32) {
        Self::text(&mut self.bytes, name);
        self.bytes.extend(kind.to_le_bytes());
        self.pairs += 1;
    }

    fn number(&mut self, name: &str, value: u32) {
        self.key(name, 4);
        self.bytes.extend(value.to_le_bytes());
    }

    fn float(&mut self, name: &str, value: f32) {
        self.key(name, 6);
        self.bytes.extend(value.to_le_bytes());
    }

    fn string(&mut self, name: &str, value: &str) {
        self.key(name, 8);
        Self::text(&mut self.bytes, value);
    }

    fn list(&mut self, name: &str, kind: u32, count: usize, values: &[u8]) {
        self.key(name, 9);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend((count as u64).to_le_bytes());
        self.bytes.extend(values);
    }

    fn strings(&mut self, name: &str, values: &[String]) {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| Self::text(&mut bytes, value));
        self.list(name, 8, values.len(), &bytes);
    }
}

fn gguf(kind: Kind, weights: &Weights) -> Vec<u8> {
    let arch = kind.name();
    let mut w = Writer::default();
    w.string("general.architecture", arch);
    w.string("general.name", "exact");
    let at = |name: &str| format!("{arch}.{name}");
    w.number(&at("context_length"), 1024);
    w.number(&at("embedding_length"), WIDTH as u32);
    w.number(&at("block_count"), LAYERS as u32);
    w.number(&at("feed_forward_length"), HIDDEN as u32);
    w.number(&at("attention.head_count"), HEADS as u32);
    w.number(&at("attention.head_count_kv"), KV_HEADS as u32);
    w.float(&at("attention.layer_norm_rms_epsilon"), EPS);
    w.float(&at("rope.freq_base"), if kind == Kind::Gemma3 { 1e6 } else { 1e4 });
    if kind == Kind::Gemma3 {
        w.number(&at("attention.key_length"), HEAD_WIDTH as u32);
        w.number(&at("attention.value_length"), HEAD_WIDTH as u32);
        w.number(&at("attention.sliding_window"), WINDOW as u32);
        w.number(&at("attention.sliding_window_pattern"), 3);
        w.float(&at("rope.freq_base_swa"), 1e4);
    }
    let tokens = vocabulary();
    w.string("tokenizer.ggml.model", "gpt2");
    w.string("tokenizer.ggml.pre", "qwen2");
    w.strings("tokenizer.ggml.tokens", &tokens);
    let kinds = (0..tokens.len()).flat_map(|id| if id < CONTROL.len() { 3_i32 } else { 1 }.to_le_bytes());
    w.list("tokenizer.ggml.token_type", 5, tokens.len(), &kinds.collect::<Vec<_>>());
    w.strings("tokenizer.ggml.merges", &[format!("{0} {0}", letters()[0])]);
    w.number("tokenizer.ggml.bos_token_id", 0);
    w.number("tokenizer.ggml.eos_token_id", 2);
    let mut file = b"GGUF".to_vec();
    file.extend(3_u32.to_le_bytes());
    file.extend((weights.len() as u64).to_le_bytes());
    file.extend(w.pairs.to_le_bytes());
    file.extend(&w.bytes);
    let (mut offset, mut data) = (0_u64, Vec::new());
    for (name, (inputs, values)) in weights {
        Writer::text(&mut file, name);
        let outputs = values.len() / inputs;
        let extents: &[usize] = if outputs == 1 { &[*inputs] } else { &[*inputs, outputs] };
        file.extend((extents.len() as u32).to_le_bytes());
        extents.iter().for_each(|&extent| file.extend((extent as u64).to_le_bytes()));
        file.extend(0_u32.to_le_bytes());
        file.extend(offset.to_le_bytes());
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        data.resize(data.len().next_multiple_of(32), 0);
        offset = data.len() as u64;
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}
