//! A forward pass in 64-bit floats that shares nothing with llama.cpp but the weights. Keys are kept as they were before they
//! were turned to their positions, so that a token may move.

use super::variant::{EPS, HEAD_WIDTH, HEADS, HIDDEN, KV_HEADS, Kind, LAYERS, Variant, WIDTH};
use std::collections::BTreeMap;
use std::ops::Range;
use thunder::events::TokenId;

pub struct Reference {
    kind: Kind,
    weights: BTreeMap<String, (usize, Vec<f64>)>,
    tokens: Vec<TokenId>,
    /// Of each layer, for each token: keys before they are turned, values.
    cache: Vec<Vec<(Vec<f64>, Vec<f64>)>>,
    last: Vec<f64>,
}

impl Reference {
    pub fn new(variant: &Variant) -> Self {
        let wide =
            |(inputs, values): &(usize, Vec<f32>)| (*inputs, values.iter().map(|&value| f64::from(value)).collect());
        Self {
            kind: variant.kind,
            weights: variant.weights.iter().map(|(name, tensor)| (name.clone(), wide(tensor))).collect(),
            tokens: Vec::new(),
            cache: vec![Vec::new(); LAYERS],
            last: Vec::new(),
        }
    }

    /// What the last of these tokens looks at: `[layer][head][position]`. Tokens that stand where they stood are not computed again.
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

    /// Takes tokens out; what stays keeps what it knew of them.
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
        let (inputs, matrix) = self.weight(&format!("{name}.weight"));
        let mut y: Vec<f64> =
            matrix.chunks_exact(*inputs).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect();
        if let Some((_, bias)) = self.weights.get(&format!("{name}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
        y
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let Some((_, weight)) = self.weights.get(&format!("{name}.weight")) else { return x.to_vec() };
        let widths = x.chunks_exact(weight.len());
        widths
            .flat_map(|part| {
                let square = part.iter().map(|x| x * x).sum::<f64>() / part.len() as f64;
                let scale = 1.0 / (square + f64::from(EPS)).sqrt();
                part.iter().zip(weight).map(move |(x, weight)| x * scale * weight).collect::<Vec<_>>()
            })
            .collect()
    }

    fn turned(&self, head: &[f64], position: usize, layer: usize) -> Vec<f64> {
        let (half, base) = (HEAD_WIDTH / 2, self.kind.rope_base(layer));
        let mut out = head.to_vec();
        for i in 0..half {
            let angle = position as f64 * base.powf(-(i as f64) / half as f64);
            let (sin, cos) = angle.sin_cos();
            let (a, b) = if self.kind == Kind::Llama { (2 * i, 2 * i + 1) } else { (i, i + half) };
            (out[a], out[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
        }
        out
    }

    fn feed(&mut self, token: TokenId) {
        let position = self.tokens.len();
        let (_, embedding) = self.weight("token_embd.weight");
        let mut x = embedding[token as usize * WIDTH..][..WIDTH].to_vec();
        if self.kind == Kind::Gemma3 {
            x.iter_mut().for_each(|x| *x *= (WIDTH as f64).sqrt());
        }
        let mut rows = Vec::new();
        for layer in 0..LAYERS {
            let at = |name: &str| format!("blk.{layer}.{name}");
            let y = self.norm(&at("attn_norm"), &x);
            let q = self.norm(&at("attn_q_norm"), &self.linear(&at("attn_q"), &y));
            let k = self.norm(&at("attn_k_norm"), &self.linear(&at("attn_k"), &y));
            let v = self.linear(&at("attn_v"), &y);
            self.cache[layer].push((k, v));
            let mut mixed = Vec::with_capacity(WIDTH);
            for head in 0..HEADS {
                let kv = head / (HEADS / KV_HEADS) * HEAD_WIDTH;
                let query = self.turned(&q[head * HEAD_WIDTH..][..HEAD_WIDTH], position, layer);
                let score = |(at, (key, _)): (usize, &(Vec<f64>, Vec<f64>))| {
                    if self.kind.window(layer).is_some_and(|window| position - at >= window) {
                        return f64::NEG_INFINITY;
                    }
                    let key = self.turned(&key[kv..][..HEAD_WIDTH], at, layer);
                    query.iter().zip(&key).map(|(a, b)| a * b).sum::<f64>() / (HEAD_WIDTH as f64).sqrt()
                };
                let scores: Vec<f64> = self.cache[layer].iter().enumerate().map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let exp: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let sum: f64 = exp.iter().sum();
                let row: Vec<f64> = exp.iter().map(|exp| exp / sum).collect();
                for i in 0..HEAD_WIDTH {
                    mixed.push(row.iter().zip(&self.cache[layer]).map(|(p, (_, value))| p * value[kv + i]).sum());
                }
                rows.extend(row);
            }
            let y = self.norm(&at("post_attention_norm"), &self.linear(&at("attn_output"), &mixed));
            x.iter_mut().zip(&y).for_each(|(x, y)| *x += y);
            let y = self.norm(&at("ffn_norm"), &x);
            let (gate, up) = (self.linear(&at("ffn_gate"), &y), self.linear(&at("ffn_up"), &y));
            let hidden: Vec<f64> = gate.iter().zip(&up).map(|(gate, up)| self.activated(*gate) * up).collect();
            assert_eq!(hidden.len(), HIDDEN);
            let y = self.norm(&at("post_ffw_norm"), &self.linear(&at("ffn_down"), &hidden));
            x.iter_mut().zip(&y).for_each(|(x, y)| *x += y);
        }
        self.tokens.push(token);
        self.last = rows;
    }

    fn activated(&self, x: f64) -> f64 {
        if self.kind == Kind::Gemma3 {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
        } else {
            x / (1.0 + (-x).exp())
        }
    }
}
