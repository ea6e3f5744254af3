//! Checks for values in a header that llama.cpp does not check when it loads a file, but with which it aborts the process
//! or accesses invalid memory at the first token or image.
//!
//! A value is an error only if no usable file has it. A decode of a text in a separate process finds the other values; see
//! [`probe`](crate::model::llama::probe()).

use super::{F32, GgufHeader, GgufScalar, GgufTensor};
use std::ops::RangeInclusive;

/// Type numbers of floats of up to 32 bits: F32, F16 and BF16. Some GPUs compute norms and biases of 16 bits, too.
const FLOAT_TYPES: [u32; 3] = [F32, 1, 30];
/// Type numbers of integers and 64-bit floats, which llama.cpp cannot multiply.
const UNCOMPUTABLE_TYPES: RangeInclusive<u32> = 24..=28;
/// Part of the names of tensors that are tables of indexes.
const INDEX_TABLE: &str = "tid2eid";
/// Alignment in bytes of the weights in memory. The weights of a mapped file have the alignment of their offsets.
const MEMORY_ALIGNMENT: u64 = 32;

impl GgufHeader {
    /// Checks the epsilons of the norms and the types of the tensors.
    ///
    /// # Errors
    /// The reason, with the name of the key or tensor.
    pub fn check_values(&self) -> Result<(), String> {
        self.check_epsilons()?;
        self.check_types()
    }

    /// Checks that llama.cpp can compute with the types of all tensors.
    ///
    /// # Errors
    /// The reason, with the name of the tensor.
    pub fn check_types(&self) -> Result<(), String> {
        self.tensors.iter().try_for_each(GgufTensor::check_type)
    }

    /// Checks that the weights are aligned in a mapped file.
    ///
    /// # Errors
    /// The reason, with the name of the tensor.
    pub fn check_alignment(&self) -> Result<(), String> {
        let Some(first) = self.tensors.iter().min_by_key(|tensor| tensor.offset) else { return Ok(()) };
        if first.offset.is_multiple_of(MEMORY_ALIGNMENT) {
            return Ok(());
        }
        Err(format!(
            "tensor '{}' of a mapped file must begin at a multiple of {MEMORY_ALIGNMENT} bytes, but begins at byte {}; use \
             --no-mmap, or a file whose general.alignment is at least {MEMORY_ALIGNMENT}",
            first.name, first.offset
        ))
    }

    /// Checks the epsilons and the tensor types of a projector, and that it has attention heads if it has attention.
    ///
    /// # Errors
    /// The reason, with the name of the key.
    pub fn check_projector(&self) -> Result<(), String> {
        self.check_epsilons()?;
        self.check_types()?;
        for (key, blocks) in
            [("clip.vision.attention.head_count", "v.blk."), ("clip.audio.attention.head_count", "a.blk.")]
        {
            let has_attention =
                || self.tensors.iter().any(|tensor| tensor.name.starts_with(blocks) && tensor.name.contains(".attn_q"));
            if self.integer(key) == Some(0) && has_attention() {
                return Err(format!("`{key}` must be at least 1, got 0"));
            }
        }
        Ok(())
    }

    fn check_epsilons(&self) -> Result<(), String> {
        for (key, value) in &self.metadata {
            if let GgufScalar::Float(epsilon) = value
                && key.ends_with("_epsilon")
                && (epsilon.is_nan() || *epsilon < 0.0)
            {
                return Err(format!("`{key}` must be at least 0, got {epsilon}"));
            }
        }
        Ok(())
    }

    /// Checks that the number of rotary dimensions is even, and that the heads have enough values for them. Not for files of
    /// architectures that do not rotate, which may have any number.
    ///
    /// # Errors
    /// The reason, with the name of the key.
    pub fn check_rotary_dimensions(&self) -> Result<(), String> {
        let Some(rotated) = self.parameter("rope.dimension_count") else { return Ok(()) };
        if !rotated.is_multiple_of(2) {
            return Err(format!("`rope.dimension_count` must be even, got {rotated}"));
        }
        let head_size = self.parameter("attention.key_length").or_else(|| {
            let heads = self.parameter("attention.head_count").filter(|&heads| heads > 0)?;
            Some(self.parameter("embedding_length")? / heads)
        });
        match head_size {
            Some(size) if rotated > size => {
                Err(format!("`rope.dimension_count` must be at most {size}, the size of a head, got {rotated}"))
            }
            _ => Ok(()),
        }
    }
}

impl GgufTensor {
    /// Checks that llama.cpp can compute with the type of the tensor.
    fn check_type(&self) -> Result<(), String> {
        let name = self.name.as_str();
        // Norms and biases are added to, or multiplied with, floats; llama.cpp's converter writes 32-bit floats.
        let elementwise = ["norm.weight", ".bias"].iter().any(|suffix| name.ends_with(suffix));
        if elementwise && !FLOAT_TYPES.contains(&self.kind) {
            return Err(format!("tensor '{name}' must consist of floats of up to 32 bits, got type {}", self.kind));
        }
        let multiplied = [".weight", ".lora_a", ".lora_b"].iter().any(|suffix| name.ends_with(suffix));
        if multiplied && UNCOMPUTABLE_TYPES.contains(&self.kind) && !name.contains(INDEX_TABLE) {
            return Err(format!(
                "tensor '{name}' must consist of floats of up to 32 bits or of quantized values, got type {}",
                self.kind
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GgufHeader, GgufScalar, GgufTensor};

    fn with_tensor(name: &str, kind: u32, offset: u64) -> GgufHeader {
        let tensor = GgufTensor { name: name.into(), kind, offset, ..GgufTensor::default() };
        GgufHeader { tensors: vec![tensor], ..GgufHeader::default() }
    }

    fn with_value(key: &str, value: GgufScalar) -> GgufHeader {
        let mut header = GgufHeader::default();
        header.metadata.insert("general.architecture".into(), GgufScalar::Text("llama".into()));
        header.metadata.insert(key.into(), value);
        header
    }

    #[test]
    fn types_that_llama_cpp_cannot_compute_with_are_errors() {
        let check = |name, kind| with_tensor(name, kind, 0).check_types();
        for (name, kind) in [
            ("blk.0.attn_norm.weight", 8),
            ("blk.0.attn_q.bias", 26),
            ("blk.0.attn_q.weight", 24),
            ("token_embd.weight", 28),
            ("blk.0.attn_q.weight.lora_b", 28),
        ] {
            let error = check(name, kind).unwrap_err();
            assert!(error.contains(name) && error.ends_with(&format!("got type {kind}")), "{error}");
        }
        for (name, kind) in [
            ("blk.0.attn_norm.weight", 0),
            ("blk.0.attn_norm.weight", 1),
            ("blk.0.attn_q.bias", 30),
            ("blk.0.ffn_gate_tid2eid.weight", 26),
            ("blk.0.ssm_conv1d.weight", 30),
            ("blk.0.attn_q.weight", 39),
            ("blk.0.time_mix_lerp_x", 1),
            ("d2t", 27),
        ] {
            assert_eq!(check(name, kind), Ok(()));
        }
    }

    #[test]
    fn mapped_weights_must_be_aligned() {
        assert_eq!(with_tensor("output.weight", 0, 64).check_alignment(), Ok(()));
        let error = with_tensor("output.weight", 0, 65).check_alignment().unwrap_err();
        assert!(error.contains("'output.weight'") && error.contains("general.alignment"), "{error}");
    }

    #[test]
    fn epsilons_are_positive_and_rotary_dimensions_even() {
        let key = "llama.attention.layer_norm_rms_epsilon";
        let check = |value: f64| with_value(key, GgufScalar::Float(value)).check_values();
        assert_eq!([0.0, 1e-6, f64::INFINITY].map(check), [const { Ok(()) }; 3]);
        assert_eq!(check(-1.0).unwrap_err(), format!("`{key}` must be at least 0, got -1"));
        assert!(check(f64::NAN).is_err() && check(f64::NEG_INFINITY).is_err());
        let error =
            with_value("llama.rope.dimension_count", GgufScalar::Integer(3)).check_rotary_dimensions().unwrap_err();
        assert_eq!(error, "`rope.dimension_count` must be even, got 3");
    }

    #[test]
    fn projector_with_attention_has_heads() {
        let key = "clip.vision.attention.head_count";
        let mut header = with_value(key, GgufScalar::Integer(0));
        assert_eq!(header.check_projector(), Ok(()));
        header.tensors = with_tensor("v.blk.0.attn_qkv.weight", 1, 0).tensors;
        assert_eq!(header.check_projector().unwrap_err(), format!("`{key}` must be at least 1, got 0"));
    }
}
