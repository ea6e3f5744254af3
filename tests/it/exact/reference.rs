//! A forward pass in 64-bit floats that shares only the weights with llama.cpp. Keys are stored before their rotation
//! to a position, so that a token can move. On request it rounds the values that llama.cpp rounds to 16 bits.

use super::variant::{
    CAP, EPS, EXPERTS, FINAL_CAP, HEADS, HIDDEN, KERNEL, KV_HEADS, Kind, LAYERS, RotationPairs, Variant, WIDTH,
};
use half::f16;
use std::collections::BTreeMap;
use std::ops::Range;
use thunder::events::TokenId;

/// Values that llama.cpp rounds to 16-bit floats before attention uses them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rounding {
    /// Keys and values in the cache, and the queries that are multiplied with such keys.
    pub cache: bool,
    /// Argument and result of GELU, which llama.cpp looks up in a table.
    pub gelu: bool,
}

pub struct Reference {
    pub kind: Kind,
    rounding: Rounding,
    weights: BTreeMap<String, (usize, Vec<f64>)>,
    tokens: Vec<TokenId>,
    /// For each layer and token.
    cache: Vec<Vec<CachedToken>>,
    last: Vec<f64>,
    /// Hidden state of the last token after each layer.
    states: Vec<Vec<f64>>,
    /// Control vectors added to the outputs of layers, by layer.
    pub control: BTreeMap<usize, Vec<f64>>,
}

/// A layer's cached values of a token.
#[derive(Debug, Clone, Default)]
struct CachedToken {
    /// Keys before rotation; for a convolution its inputs.
    key: Vec<f64>,
    /// Values; none for a convolution.
    value: Vec<f64>,
    /// Keys after rotation to this position, and after llama.cpp's rounding.
    rotated: (usize, Vec<f64>),
}

impl Reference {
    pub fn new(variant: &Variant) -> Self {
        let wide =
            |(inputs, values): &(usize, Vec<f32>)| (*inputs, values.iter().map(|&value| f64::from(value)).collect());
        Self {
            kind: variant.kind,
            rounding: Rounding::default(),
            weights: variant.weights.iter().map(|(name, tensor)| (name.clone(), wide(tensor))).collect(),
            tokens: Vec::new(),
            cache: vec![Vec::new(); LAYERS],
            last: Vec::new(),
            states: Vec::new(),
            control: BTreeMap::new(),
        }
    }

    /// Returns the reference with these roundings.
    pub fn with_rounding(variant: &Variant, rounding: Rounding) -> Self {
        Self { rounding, ..Self::new(variant) }
    }

    /// Returns the maximum deviation of rows in the first layer with attention. With the rounding of llama.cpp, its inputs
    /// are equal to those of llama.cpp, except for models with values near the middle between two 16-bit floats.
    pub fn first_layer_tolerance(&self) -> f64 {
        let has_equal_inputs = !self.rounding.cache || !(self.kind.is_gemma() || self.kind == Kind::Lfm2);
        if self.rounding != Rounding::default() && has_equal_inputs { 1e-6 } else { f64::INFINITY }
    }

    /// Returns a cached value or a query after llama.cpp's rounding.
    fn cached(&self, x: f64) -> f64 {
        if self.rounding.cache { f64::from(f16::from_f64(x)) } else { x }
    }

    /// Returns the attention of the last of these tokens: `[layer][head][position]`. Tokens whose position did not
    /// change are not recomputed.
    pub fn row(&mut self, tokens: &[TokenId]) -> &[f64] {
        let same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let keep = same.min(tokens.len() - 1);
        self.tokens.truncate(keep);
        self.cache.iter_mut().for_each(|layer| layer.truncate(keep));
        for &token in &tokens[keep..] {
            self.feed(token);
        }
        &self.last
    }

    /// Returns the hidden state of the last token after a layer.
    pub fn state(&self, layer: usize) -> &[f64] {
        &self.states[layer]
    }

    /// Returns the logits that the output head gives for the hidden state of the last token after a layer.
    pub fn lens(&self, layer: usize) -> Vec<f64> {
        let norm = if self.kind == Kind::Lfm2 { "token_embd_norm" } else { "output_norm" };
        let head = if self.weights.contains_key("output.weight") { "output" } else { "token_embd" };
        let mut logits = self.linear(head, &self.norm(norm, &self.states[layer]));
        if self.kind == Kind::Gemma2 {
            logits.iter_mut().for_each(|logit| *logit = FINAL_CAP * (*logit / FINAL_CAP).tanh());
        }
        logits
    }

    /// Removes tokens. The keys and values of later tokens remain those that were computed with the removed ones.
    pub fn cut(&mut self, range: Range<usize>) {
        self.tokens.drain(range.clone());
        for layer in &mut self.cache {
            layer.drain(range.clone());
        }
    }

    fn weight(&self, name: &str) -> &(usize, Vec<f64>) {
        &self.weights[name]
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.linear_part(name, 0, 1, x)
    }

    /// Multiplies with one of `parts` equal parts of a matrix, and adds the same part of its bias.
    fn linear_part(&self, name: &str, part: usize, parts: usize, x: &[f64]) -> Vec<f64> {
        let (inputs, matrix) = self.weight(&format!("{name}.weight"));
        let outputs = matrix.len() / inputs / parts;
        let rows = matrix.chunks_exact(*inputs).skip(part * outputs).take(outputs);
        let mut y: Vec<f64> = rows.map(|row| dot(row, x)).collect();
        if let Some((_, bias)) = self.weights.get(&format!("{name}.bias")) {
            y.iter_mut().zip(&bias[part * outputs..]).for_each(|(y, bias)| *y += bias);
        }
        y
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let Some((_, weight)) = self.weights.get(&format!("{name}.weight")) else { return x.to_vec() };
        let chunks = x.chunks_exact(weight.len());
        chunks
            .flat_map(|part| {
                let square = part.iter().map(|x| x * x).sum::<f64>() / part.len() as f64;
                let scale = 1.0 / (square + f64::from(EPS)).sqrt();
                part.iter().zip(weight).map(move |(x, weight)| x * scale * weight).collect::<Vec<_>>()
            })
            .collect()
    }

    /// Rotates each head to a position. Returns the values after llama.cpp's rounding.
    fn rotated_heads(&self, heads: &[f64], position: usize, layer: usize) -> Vec<f64> {
        let (half, base) = (self.kind.head_width() / 2, self.kind.rope_base(layer));
        let mut out = heads.to_vec();
        for i in 0..half {
            let (a, b) = match self.kind.rotation_pairs() {
                RotationPairs::None => break,
                RotationPairs::Neighbors => (2 * i, 2 * i + 1),
                RotationPairs::Halves => (i, i + half),
            };
            let angle = position as f64 * base.powf(-(i as f64) / half as f64);
            let (sin, cos) = angle.sin_cos();
            for head in (0..heads.len()).step_by(2 * half) {
                let (a, b) = (head + a, head + b);
                (out[a], out[b]) = (heads[a] * cos - heads[b] * sin, heads[b] * cos + heads[a] * sin);
            }
        }
        out.iter_mut().for_each(|x| *x = self.cached(*x));
        out
    }

    /// Computes the keys, values and rows of the next token.
    fn feed(&mut self, token: TokenId) {
        let (_, embedding) = self.weight("token_embd.weight");
        let mut x = embedding[token as usize * WIDTH..][..WIDTH].to_vec();
        if self.kind.is_gemma() {
            x.iter_mut().for_each(|x| *x *= (WIDTH as f64).sqrt());
        }
        let mut rows = Vec::new();
        self.states.clear();
        for layer in 0..LAYERS {
            let tensor = |name: &str| format!("blk.{layer}.{name}");
            let y = self.norm(&tensor("attn_norm"), &x);
            let mixed = if self.kind.has_attention(layer) {
                self.attend(layer, &y, &mut rows)
            } else {
                self.convolve(layer, &y)
            };
            let mixed = if self.kind.is_gemma() { self.norm(&tensor("post_attention_norm"), &mixed) } else { mixed };
            x.iter_mut().zip(&mixed).for_each(|(x, y)| *x += y);
            let norm_name = if self.kind == Kind::GptOss { "post_attention_norm" } else { "ffn_norm" };
            let y = self.forward(layer, &self.norm(&tensor(norm_name), &x));
            let y = self.norm(&tensor("post_ffw_norm"), &y);
            x.iter_mut().zip(&y).for_each(|(x, y)| *x += y);
            let added = self.control.get(&layer).into_iter().flatten();
            x.iter_mut().zip(added).for_each(|(x, y)| *x += y);
            self.states.push(x.clone());
        }
        self.tokens.push(token);
        self.last = rows;
    }

    fn attend(&mut self, layer: usize, y: &[f64], rows: &mut Vec<f64>) -> Vec<f64> {
        let tensor = |name: &str| format!("blk.{layer}.{name}");
        let (position, width) = (self.tokens.len(), self.kind.head_width());
        let q = self.norm(&tensor("attn_q_norm"), &self.linear(&tensor("attn_q"), y));
        let k = self.norm(&tensor("attn_k_norm"), &self.linear(&tensor("attn_k"), y));
        let v = self.linear(&tensor("attn_v"), y);
        let value = v.into_iter().map(|v| self.cached(v)).collect();
        let rotated = (position, self.rotated_heads(&k, position, layer));
        self.cache[layer].push(CachedToken { key: k, value, rotated });
        for at in 0..position {
            let cached = &self.cache[layer][at];
            if cached.rotated.0 != at {
                self.cache[layer][at].rotated = (at, self.rotated_heads(&cached.key, at, layer));
            }
        }
        let mut mixed = Vec::with_capacity(q.len());
        for head in 0..HEADS {
            let kv = head / (HEADS / KV_HEADS) * width;
            let query = self.rotated_heads(&q[head * width..][..width], position, layer);
            let score = |(at, cached): (usize, &CachedToken)| {
                if self.kind.window(layer).is_some_and(|window| position - at >= window) {
                    return f64::NEG_INFINITY;
                }
                let score = dot(&query, &cached.rotated.1[kv..][..width]) / (width as f64).sqrt();
                let cap = f64::from(CAP);
                let score = if self.kind == Kind::Gemma2 { cap * (score / cap).tanh() } else { score };
                score - self.kind.slope(head) * (position - at) as f64
            };
            let scores: Vec<f64> = self.cache[layer].iter().enumerate().map(score).collect();
            let sink =
                self.weights.get(&tensor("attn_sinks.weight")).map_or(f64::NEG_INFINITY, |(_, sinks)| sinks[head]);
            let max = scores.iter().copied().fold(sink, f64::max);
            let exp: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = exp.iter().sum::<f64>() + (sink - max).exp();
            let row: Vec<f64> = exp.iter().map(|exp| exp / sum).collect();
            let mut sums = vec![0.0; width];
            for (share, cached) in row.iter().zip(&self.cache[layer]) {
                add_scaled(&mut sums, *share, &cached.value[kv..][..width]);
            }
            mixed.extend(sums);
            rows.extend(row);
        }
        self.linear(&tensor("attn_output"), &mixed)
    }

    /// Computes a gated convolution over the last tokens.
    fn convolve(&mut self, layer: usize, y: &[f64]) -> Vec<f64> {
        let tensor = |name: &str| format!("blk.{layer}.{name}");
        let parts = self.linear(&tensor("shortconv.in_proj"), y);
        let (b, c, x) = (&parts[..WIDTH], &parts[WIDTH..2 * WIDTH], &parts[2 * WIDTH..]);
        let key = b.iter().zip(x).map(|(b, x)| b * x).collect();
        self.cache[layer].push(CachedToken { key, ..CachedToken::default() });
        let (_, kernel) = self.weight(&tensor("shortconv.conv.weight"));
        let mixed: Vec<f64> = (0..WIDTH)
            .map(|i| {
                let back = self.cache[layer].iter().rev().zip(kernel[i * KERNEL..][..KERNEL].iter().rev());
                c[i] * back.map(|(cached, weight)| cached.key[i] * weight).sum::<f64>()
            })
            .collect();
        self.linear(&tensor("shortconv.out_proj"), &mixed)
    }

    fn forward(&self, layer: usize, y: &[f64]) -> Vec<f64> {
        let tensor = |name: &str| format!("blk.{layer}.{name}");
        if self.kind != Kind::GptOss {
            let (gate, up) = (self.linear(&tensor("ffn_gate"), y), self.linear(&tensor("ffn_up"), y));
            let hidden: Vec<f64> = gate.iter().zip(&up).map(|(gate, up)| self.activated(*gate) * up).collect();
            assert_eq!(hidden.len(), HIDDEN);
            return self.linear(&tensor("ffn_down"), &hidden);
        }
        let exp: Vec<f64> = self.linear(&tensor("ffn_gate_inp"), y).iter().map(|score| score.exp()).collect();
        let sum: f64 = exp.iter().sum();
        let mut mixed = vec![0.0; WIDTH];
        for (expert, share) in exp.iter().map(|exp| exp / sum).enumerate() {
            let gate = self.linear_part(&tensor("ffn_gate_exps"), expert, EXPERTS, y);
            let up = self.linear_part(&tensor("ffn_up_exps"), expert, EXPERTS, y);
            let hidden: Vec<f64> = gate.iter().zip(&up).map(|(gate, up)| clamped_swiglu(*gate, *up)).collect();
            let down = self.linear_part(&tensor("ffn_down_exps"), expert, EXPERTS, &hidden);
            mixed.iter_mut().zip(&down).for_each(|(mixed, down)| *mixed += share * down);
        }
        mixed
    }

    fn activated(&self, x: f64) -> f64 {
        if self.kind.is_gemma() {
            let rounded = |x: f64| if self.rounding.gelu { f64::from(f16::from_f64(x)) } else { x };
            let x = rounded(x);
            rounded(0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh()))
        } else {
            x / (1.0 + (-x).exp())
        }
    }
}

/// Returns the dot product. A `while` loop, because iterators are slow without optimization.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (mut sum, mut i) = (0.0, 0);
    while i < a.len() {
        sum += a[i] * b[i];
        i += 1;
    }
    sum
}

/// Adds `scale * values` to `sums`.
fn add_scaled(sums: &mut [f64], scale: f64, values: &[f64]) {
    let mut i = 0;
    while i < sums.len() {
        sums[i] += scale * values[i];
        i += 1;
    }
}

/// Computes the activation of gpt-oss.
fn clamped_swiglu(gate: f64, up: f64) -> f64 {
    let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
    gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0)
}
