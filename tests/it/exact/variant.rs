//! Small models with random weights, one for each kind of attention, as GGUF files and as input of the reference.

use super::gguf::Writer;
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
pub const LAYERS: usize = 4;
pub const HIDDEN: usize = 48;
pub const EPS: f32 = 1e-6;
/// Attention window of the layers that have one, in tokens.
pub const WINDOW: usize = 12;
/// Number of experts of models with experts. All are used, so that rounding does not affect their selection.
pub const EXPERTS: usize = 3;
/// Number of tokens of a short convolution.
pub const KERNEL: usize = 3;
/// Limit of capped scores.
pub const CAP: f32 = 2.0;
/// Limit of capped logits.
pub const FINAL_CAP: f64 = 30.0;
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// A kind of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Grouped queries; adjacent values are rotated together.
    Llama,
    /// Grouped queries with biases; values of the two halves are rotated together.
    Qwen2,
    /// Capped scores; a window in every other layer.
    Gemma2,
    /// Grouped queries with norms; a window in two of three layers.
    Gemma3,
    /// A learned sink for each head, which takes a share of the row; a window in every other layer; experts.
    GptOss,
    /// Scores that decrease with the distance (`ALiBi`) instead of rotated keys.
    Refact,
    /// Every other layer is a short convolution without attention.
    Lfm2,
    /// Like `Llama`, with heads of 64 values, which caches of quantized keys require.
    Wide,
}

/// Pairs of values of a head that are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotationPairs {
    Neighbors,
    Halves,
    None,
}

impl Kind {
    /// Kinds whose cache can have any float type.
    pub const ALL: [Self; 7] =
        [Self::Llama, Self::Qwen2, Self::Gemma2, Self::Gemma3, Self::GptOss, Self::Refact, Self::Lfm2];

    const fn name(self) -> &'static str {
        match self {
            Self::Llama | Self::Wide => "llama",
            Self::Qwen2 => "qwen2",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3",
            Self::GptOss => "gpt-oss",
            Self::Refact => "refact",
            Self::Lfm2 => "lfm2",
        }
    }

    pub const fn head_width(self) -> usize {
        if matches!(self, Self::Wide) { 64 } else { WIDTH / HEADS }
    }

    pub const fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Returns true if every head has a sink.
    pub const fn has_sinks(self) -> bool {
        matches!(self, Self::GptOss)
    }

    /// Returns true if the cache cannot be cut at any position and reused with exact rows.
    pub const fn cannot_be_cut(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3 | Self::GptOss | Self::Lfm2)
    }

    pub fn window(self, layer: usize) -> Option<usize> {
        let has = match self {
            Self::Gemma3 => layer % 3 < 2,
            Self::Gemma2 | Self::GptOss => layer.is_multiple_of(2),
            _ => false,
        };
        has.then_some(WINDOW)
    }

    /// Returns true if the layer has attention.
    pub fn has_attention(self, layer: usize) -> bool {
        self != Self::Lfm2 || layer % 2 == 1
    }

    /// Returns the layers with attention.
    pub fn layers(self) -> Vec<u16> {
        (0..LAYERS).filter(|&layer| self.has_attention(layer)).map(|layer| layer as u16).collect()
    }

    pub const fn rotation_pairs(self) -> RotationPairs {
        match self {
            Self::Llama | Self::Wide => RotationPairs::Neighbors,
            Self::Refact => RotationPairs::None,
            _ => RotationPairs::Halves,
        }
    }

    pub fn rope_base(self, layer: usize) -> f64 {
        if self == Self::Gemma3 && self.window(layer).is_none() { 1e6 } else { 1e4 }
    }

    /// Returns the decrease of a score for each token of distance.
    pub fn slope(self, head: usize) -> f64 {
        if self == Self::Refact { 2_f64.powf(-8.0 * (head + 1) as f64 / HEADS as f64) } else { 0.0 }
    }
}

/// Tensors by name: the length of a row, and the values of all rows.
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

/// Returns the character of each byte in a byte-level vocabulary.
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
    // llama.cpp requires at least one merge; this one never applies.
    tokens.push(format!("{0}{0}", letters[0]));
    tokens
}

/// Writes a tokenizer of bytes. Returns its number of tokens.
pub fn write_vocabulary(w: &mut Writer) -> usize {
    let tokens = vocabulary();
    w.string("tokenizer.ggml.model", "gpt2");
    w.string("tokenizer.ggml.pre", "qwen2");
    w.strings("tokenizer.ggml.tokens", &tokens);
    w.numbers("tokenizer.ggml.token_type", (0..tokens.len()).map(|id| if id < CONTROL.len() { 3 } else { 1 }));
    w.strings("tokenizer.ggml.merges", &[format!("{0} {0}", letters()[0])]);
    w.number("tokenizer.ggml.bos_token_id", 0);
    w.number("tokenizer.ggml.eos_token_id", 2);
    tokens.len()
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
    let (q, kv) = (HEADS * kind.head_width(), KV_HEADS * kind.head_width());
    add("token_embd.weight".into(), vocabulary().len(), WIDTH, 5.0);
    if kind != Kind::Gemma2 {
        add("output.weight".into(), vocabulary().len(), WIDTH, 3.0);
    }
    for layer in 0..LAYERS {
        let tensor = |name: &str| format!("blk.{layer}.{name}");
        if kind.has_attention(layer) {
            add(tensor("attn_q.weight"), q, WIDTH, 1.1);
            add(tensor("attn_k.weight"), kv, WIDTH, 1.1);
            add(tensor("attn_v.weight"), kv, WIDTH, 1.0);
            add(tensor("attn_output.weight"), WIDTH, q, 1.0);
        } else {
            add(tensor("shortconv.in_proj.weight"), 3 * WIDTH, WIDTH, 1.0);
            add(tensor("shortconv.conv.weight"), WIDTH, KERNEL, 1.0);
            add(tensor("shortconv.out_proj.weight"), WIDTH, WIDTH, 1.0);
        }
        if matches!(kind, Kind::Qwen2 | Kind::GptOss) {
            add(tensor("attn_q.bias"), 1, WIDTH, 3.0);
            add(tensor("attn_k.bias"), 1, kv, 3.0);
            add(tensor("attn_v.bias"), 1, kv, 3.0);
        }
        if kind == Kind::GptOss {
            add(tensor("attn_output.bias"), 1, WIDTH, 1.0);
            add(tensor("ffn_gate_inp.weight"), EXPERTS, WIDTH, 1.0);
            add(tensor("ffn_gate_inp.bias"), 1, EXPERTS, 1.0);
            for (name, outputs, inputs) in [("gate", HIDDEN, WIDTH), ("up", HIDDEN, WIDTH), ("down", WIDTH, HIDDEN)] {
                add(tensor(&format!("ffn_{name}_exps.weight")), EXPERTS * outputs, inputs, 0.7);
                add(tensor(&format!("ffn_{name}_exps.bias")), EXPERTS, outputs, 1.0);
            }
        } else {
            add(tensor("ffn_gate.weight"), HIDDEN, WIDTH, 1.0);
            add(tensor("ffn_up.weight"), HIDDEN, WIDTH, 1.0);
            add(tensor("ffn_down.weight"), WIDTH, HIDDEN, 0.5);
        }
    }
    if kind.has_sinks() {
        // The share of the sink rises from the first head to the last.
        let sinks: Vec<f32> = (0..HEADS).map(|head| 2.0 * head as f32).collect();
        all.extend((0..LAYERS).map(|layer| (format!("blk.{layer}.attn_sinks.weight"), (HEADS, sinks.clone()))));
    }
    norms(kind, &mut all);
    all
}

fn norms(kind: Kind, all: &mut Weights) {
    let mut norm = |name: String, width: usize| {
        let values = (0..width).map(|index| 1.0 + 0.05 * ((index * 7 % 11) as f32 - 5.0)).collect();
        all.insert(name, (width, values));
    };
    norm(if kind == Kind::Lfm2 { "token_embd_norm.weight" } else { "output_norm.weight" }.into(), WIDTH);
    for layer in 0..LAYERS {
        let mut layer_norm = |name: &str, width| norm(format!("blk.{layer}.{name}.weight"), width);
        layer_norm("attn_norm", WIDTH);
        if kind != Kind::GptOss {
            layer_norm("ffn_norm", WIDTH);
        }
        if kind == Kind::Gemma3 || kind == Kind::Lfm2 && kind.has_attention(layer) {
            layer_norm("attn_q_norm", kind.head_width());
            layer_norm("attn_k_norm", kind.head_width());
        }
        if kind.is_gemma() || kind == Kind::GptOss {
            layer_norm("post_attention_norm", WIDTH);
        }
        if kind.is_gemma() {
            layer_norm("post_ffw_norm", WIDTH);
        }
    }
}

fn gguf(kind: Kind, weights: &Weights) -> Vec<u8> {
    let arch = kind.name();
    let mut w = Writer::default();
    w.string("general.architecture", arch);
    w.string("general.name", "exact");
    let key = |name: &str| format!("{arch}.{name}");
    w.number(&key("context_length"), 1024);
    w.number(&key("embedding_length"), WIDTH as u32);
    w.number(&key("block_count"), LAYERS as u32);
    w.number(&key("feed_forward_length"), HIDDEN as u32);
    w.number(&key("attention.head_count"), HEADS as u32);
    if kind == Kind::Lfm2 {
        let heads = |layer| if kind.has_attention(layer) { KV_HEADS as i32 } else { 0 };
        w.numbers(&key("attention.head_count_kv"), (0..LAYERS).map(heads));
        w.number(&key("shortconv.l_cache"), KERNEL as u32);
    } else {
        w.number(&key("attention.head_count_kv"), KV_HEADS as u32);
    }
    w.float(&key("attention.layer_norm_rms_epsilon"), EPS);
    w.float(&key("rope.freq_base"), if kind == Kind::Gemma3 { 1e6 } else { 1e4 });
    w.number(&key("attention.key_length"), kind.head_width() as u32);
    w.number(&key("attention.value_length"), kind.head_width() as u32);
    if kind == Kind::Gemma3 {
        w.number(&key("attention.sliding_window_pattern"), 3);
        w.float(&key("rope.freq_base_swa"), 1e4);
    }
    if kind.window(0).is_some() {
        w.number(&key("attention.sliding_window"), WINDOW as u32);
    }
    if kind == Kind::Gemma2 {
        w.float(&key("attn_logit_softcapping"), CAP);
        w.float(&key("final_logit_softcapping"), FINAL_CAP as f32);
    }
    if kind == Kind::GptOss {
        w.number(&key("expert_count"), EXPERTS as u32);
        w.number(&key("expert_used_count"), EXPERTS as u32);
        w.number(&key("expert_feed_forward_length"), HIDDEN as u32);
    }
    write_vocabulary(&mut w);
    let tensors: Vec<_> = weights
        .iter()
        .map(|(name, (inputs, values))| {
            let outputs = values.len() / inputs;
            let dimensions = match outputs {
                1 => vec![*inputs],
                _ if name.ends_with("_exps.weight") => vec![*inputs, outputs / EXPERTS, EXPERTS],
                _ => vec![*inputs, outputs],
            };
            (name.as_str(), dimensions, values.as_slice())
        })
        .collect();
    w.with_tensors(&tensors)
}
