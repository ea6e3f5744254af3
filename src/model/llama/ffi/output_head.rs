//! The operations between the last layer and the logits, read from llama.cpp's graph.

use super::hidden_states::{layer_of_output, original_name};
use super::name_of;
use llama_cpp_sys_2 as sys;
use std::ffi::CStr;

/// Name of the node with the logits.
const LOGITS: &[u8] = b"result_output";
/// Maximum operations of an output head.
const MAX_OPERATIONS: usize = 32;

/// An operation of the output head. Tensors are named as in the model's file.
#[derive(Debug, Clone, PartialEq)]
pub enum HeadOperation {
    /// Division by the root mean square.
    RmsNorm {
        /// Addend to the mean square.
        epsilon: f32,
    },
    /// Normalization to the mean 0 and the variance 1.
    LayerNorm {
        /// Addend to the variance.
        epsilon: f32,
    },
    /// Multiplication by the values of a tensor.
    Multiply {
        /// Name of the tensor.
        tensor: String,
    },
    /// Addition of the values of a tensor.
    Add {
        /// Name of the tensor.
        tensor: String,
    },
    /// Product with each row of a tensor: one value per token of the vocabulary.
    Project {
        /// Name of the tensor.
        tensor: String,
    },
    /// Multiplication by a number, then addition of a number.
    Scale {
        /// The factor.
        factor: f32,
        /// The addend.
        offset: f32,
    },
    /// Hyperbolic tangent.
    Tanh,
}

/// The operations of an output head, in order of their application, with the layer whose output they are applied to.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadOperations {
    /// The operations.
    pub operations: Vec<HeadOperation>,
    /// The layer.
    pub layer: u16,
}

/// Returns true if the node has the logits.
pub(super) fn has_logits(node: &sys::ggml_tensor) -> bool {
    name_of(node) == LOGITS
}

/// Reads the operations that compute the logits from the output of a layer. The error is the name of an operation that
/// is not supported.
///
/// # Safety
/// The graph of the node is alive.
pub(super) unsafe fn read(logits: &sys::ggml_tensor) -> Result<HeadOperations, String> {
    let mut operations = Vec::new();
    let mut node = logits;
    for _ in 0..MAX_OPERATIONS {
        if let Some(layer) = layer_of_output(node) {
            operations.reverse();
            return Ok(HeadOperations { operations, layer });
        }
        let unsupported = || {
            // SAFETY: ggml returns static, zero-terminated names.
            let operation = unsafe { CStr::from_ptr(sys::ggml_op_desc(node)) };
            operation.to_string_lossy().into_owned()
        };
        // SAFETY: a source is null or a tensor of the graph.
        let source = |index: usize| unsafe { node.src[index].as_ref() };
        let weights = |index| source(index).and_then(weights_name);
        let float = |index: usize| f32::from_bits(node.op_params[index].cast_unsigned());
        let (operation, input) = match node.op {
            sys::GGML_OP_RMS_NORM => (Some(HeadOperation::RmsNorm { epsilon: float(0) }), source(0)),
            sys::GGML_OP_NORM => (Some(HeadOperation::LayerNorm { epsilon: float(0) }), source(0)),
            sys::GGML_OP_SCALE => (Some(HeadOperation::Scale { factor: float(0), offset: float(1) }), source(0)),
            // SAFETY: the node is a unary operation.
            sys::GGML_OP_UNARY if unsafe { sys::ggml_get_unary_op(node) } == sys::GGML_UNARY_OP_TANH => {
                (Some(HeadOperation::Tanh), source(0))
            }
            sys::GGML_OP_MUL => (weights(1).map(|tensor| HeadOperation::Multiply { tensor }), source(0)),
            sys::GGML_OP_ADD => (weights(1).map(|tensor| HeadOperation::Add { tensor }), source(0)),
            sys::GGML_OP_MUL_MAT => (weights(0).map(|tensor| HeadOperation::Project { tensor }), source(1)),
            // Selects the tokens with logits.
            sys::GGML_OP_GET_ROWS => {
                node = source(0).ok_or_else(unsupported)?;
                continue;
            }
            _ => (None, None),
        };
        let (Some(operation), Some(input)) = (operation, input) else { return Err(unsupported()) };
        operations.push(operation);
        node = input;
    }
    Err("more than 32 operations".into())
}

/// Returns the name of a tensor of the model: one that no operation computes.
fn weights_name(tensor: &sys::ggml_tensor) -> Option<String> {
    let name = || String::from_utf8(original_name(tensor).to_vec()).ok();
    (tensor.op == sys::GGML_OP_NONE && tensor.view_src.is_null()).then(name)?
}
