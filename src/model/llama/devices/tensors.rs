//! Tensors that are not placed with their layers.

use super::PlacementError;
use crate::model::llama::gguf::{GgufHeader, GgufTensor};
use regex::Regex;
use std::ffi::CString;

/// llama.cpp's maximum number of layers.
const MAX_LAYERS: u64 = 512;
/// llama.cpp's name of CPU memory.
const CPU: &str = "CPU";
/// Pattern of the names of expert weights, after the number of their layer.
const EXPERTS: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";
/// Pattern of the names of feed-forward weights without experts, after the number of their layer.
const FEED_FORWARD: &str = r"\.ffn_(up|down|gate)\.";

/// Tensors that are not placed with their layers. The first matching rule of a tensor applies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorPlacement {
    /// Regular expressions (ECMAScript in C++) for tensor names, each with llama.cpp's name of a buffer.
    pub named: Vec<(String, String)>,
    /// True if the experts of all layers stay on the CPU.
    pub cpu_moe: bool,
    /// Number of first layers whose experts stay on the CPU.
    pub n_cpu_moe: u32,
    /// Number of first layers whose feed-forward weights without experts stay on the CPU.
    pub n_cpu_ffn: u32,
}

/// A rule in llama.cpp's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRule {
    /// Regular expression to search for in names.
    pub pattern: CString,
    /// llama.cpp's name of the buffer.
    pub buffer: String,
}

impl TensorPlacement {
    /// Returns the rules for a model with this number of layers and these available buffers.
    pub(super) fn rules(&self, layers: u64, buffers: &[&str]) -> Result<Vec<TensorRule>, PlacementError> {
        let named = self.named.iter().map(|(pattern, wanted)| {
            let buffer = buffers.iter().find(|buffer| buffer.eq_ignore_ascii_case(wanted));
            let buffer =
                buffer.ok_or_else(|| PlacementError::Buffer { name: wanted.clone(), available: buffers.join(", ") })?;
            Ok((pattern.clone(), (*buffer).to_owned()))
        });
        let first_layers = |count: u32, part: &str| {
            let count = u64::from(count).min(layers).min(MAX_LAYERS);
            let numbers: Vec<String> = (0..count).map(|layer| layer.to_string()).collect();
            (count > 0).then(|| format!(r"^blk\.({}){part}", numbers.join("|")))
        };
        let from_flags = [
            self.cpu_moe.then(|| EXPERTS.to_owned()),
            first_layers(self.n_cpu_moe, EXPERTS),
            first_layers(self.n_cpu_ffn, FEED_FORWARD),
        ];
        let from_flags = from_flags.into_iter().flatten().map(|pattern| Ok((pattern, CPU.to_owned())));
        let rule = |named: Result<(String, String), PlacementError>| {
            let (pattern, buffer) = named?;
            let contains_nul = |_| PlacementError::Pattern { reason: "it contains a NUL byte".into() };
            Ok(TensorRule { pattern: CString::new(pattern).map_err(contains_nul)?, buffer })
        };
        named.chain(from_flags).map(rule).collect()
    }
}

/// Removes the tensors that these rules keep on the CPU from a header. Patterns that only C++ supports match nothing
/// here.
pub(super) fn without_cpu_tensors(header: &GgufHeader, rules: &[TensorRule]) -> GgufHeader {
    let rules: Vec<_> =
        rules.iter().filter_map(|rule| Some((Regex::new(rule.pattern.to_str().ok()?).ok()?, &rule.buffer))).collect();
    let stays = |tensor: &GgufTensor| {
        let first_match = rules.iter().find(|(pattern, _)| pattern.is_match(&tensor.name));
        first_match.is_some_and(|(_, buffer)| *buffer == CPU)
    };
    let mut header = header.clone();
    header.tensors.retain(|tensor| !stays(tensor));
    header
}

#[cfg(test)]
mod tests {
    use super::{TensorPlacement, without_cpu_tensors};
    use crate::model::llama::gguf::{GgufHeader, GgufTensor};

    fn kept_tensors(placement: &TensorPlacement, names: &[&str]) -> Vec<String> {
        let tensors = names.iter().map(|&name| GgufTensor { name: name.into(), ..GgufTensor::default() }).collect();
        let header = GgufHeader { tensors, ..GgufHeader::default() };
        let rules = placement.rules(3, &["CPU", "CUDA0"]).unwrap();
        without_cpu_tensors(&header, &rules).tensors.into_iter().map(|tensor| tensor.name).collect()
    }

    #[test]
    fn expert_weights_stay_on_the_cpu() {
        let names = [
            "blk.0.ffn_up_exps.weight",
            "blk.1.ffn_gate_up_exps.weight",
            "blk.1.ffn_up.weight",
            "blk.11.ffn_up.weight",
        ];
        assert_eq!(kept_tensors(&TensorPlacement { cpu_moe: true, ..TensorPlacement::default() }, &names), names[2..]);
        assert_eq!(kept_tensors(&TensorPlacement { n_cpu_moe: 1, ..TensorPlacement::default() }, &names), names[1..]);
        let two = TensorPlacement { n_cpu_ffn: 2, ..TensorPlacement::default() };
        assert_eq!(kept_tensors(&two, &names), [names[0], names[1], names[3]]);
        // A number above the number of layers means all layers.
        let all = TensorPlacement { n_cpu_moe: u32::MAX, ..TensorPlacement::default() };
        assert_eq!(kept_tensors(&all, &names), names[2..]);
        assert!(TensorPlacement::default().rules(3, &["CPU"]).unwrap().is_empty());
    }

    #[test]
    fn first_matching_rule_precedes_expert_rules() {
        let named = vec![(r"blk\.0\.ffn_up_exps".into(), "cuda0".into()), ("up".into(), "CPU".into())];
        let placement = TensorPlacement { named, cpu_moe: true, ..TensorPlacement::default() };
        let names =
            ["blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight", "blk.1.attn_q.weight", "blk.1.ffn_up.weight"];
        assert_eq!(kept_tensors(&placement, &names), [names[0], names[2]]);
        let error =
            TensorPlacement { named: vec![("a".into(), "CUDA1".into())], ..placement }.rules(3, &["CPU", "CUDA0"]);
        assert!(error.unwrap_err().to_string().contains("CPU, CUDA0"));
    }
}
