//! llama.cpp's image encoder (libmtmd): loading of a projector, splitting of an image into parts, encoding of the
//! parts, and decoding of their embeddings. llama-cpp-2 has no function that returns the embeddings.

use super::loading::with_error_lines;
use super::{raw_context, raw_model};
use crate::events::TokenId;
use crate::model::llama::image_spans::ImageLayout;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;
use std::ffi::CStr;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

/// Parameters of a projector.
#[derive(Debug, Clone, Copy)]
pub struct ProjectorParams {
    /// True to compute on a GPU.
    pub gpu: bool,
    /// Number of threads.
    pub threads: i32,
    /// Minimum tokens of an image; `None` for the projector's.
    pub min_tokens: Option<i32>,
    /// Maximum tokens of an image; `None` for the projector's.
    pub max_tokens: Option<i32>,
}

/// A loaded projector.
#[derive(Debug)]
pub struct Projector {
    context: NonNull<sys::mtmd_context>,
    /// Values per embedding.
    width: usize,
    /// Held during an encoding, of which only one may run at a time.
    encoding: Mutex<()>,
    /// The model, to which the context points. A task may still read an image after the model was unloaded.
    _model: Arc<LlamaModel>,
}

// SAFETY: libmtmd's functions may be called from any thread.
unsafe impl Send for Projector {}
// SAFETY: libmtmd reads images on several threads at once; encodings hold the lock.
unsafe impl Sync for Projector {}

impl Projector {
    /// Loads a projector for a model.
    ///
    /// # Errors
    /// llama.cpp's error lines; empty if it logged none.
    pub fn load(path: &CStr, model: &Arc<LlamaModel>, options: &ProjectorParams) -> Result<Self, Vec<String>> {
        // SAFETY: a plain function without preconditions.
        let mut params = unsafe { sys::mtmd_context_params_default() };
        params.use_gpu = options.gpu;
        params.print_timings = false;
        params.n_threads = options.threads;
        params.image_min_tokens = options.min_tokens.unwrap_or(-1);
        params.image_max_tokens = options.max_tokens.unwrap_or(-1);
        let raw = raw_model(model);
        // SAFETY: the model is loaded, and the projector keeps it.
        let (width, context) = unsafe {
            let width = sys::llama_model_n_embd_inp(raw);
            let load = || NonNull::new(sys::mtmd_init_from_file(path.as_ptr(), raw, params));
            (width, with_error_lines(load)?)
        };
        let width = usize::try_from(width).unwrap_or(0);
        Ok(Self { context, width, encoding: Mutex::new(()), _model: Arc::clone(model) })
    }

    /// Returns the number of values per embedding.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns true if the projector encodes images.
    pub fn has_vision(&self) -> bool {
        // SAFETY: the context exists.
        unsafe { sys::mtmd_support_vision(self.context.as_ptr()) }
    }

    /// Returns true if tokens of an image attend to later tokens of the same image.
    pub fn is_non_causal(&self) -> bool {
        // SAFETY: the context exists, and a null chunk stands for any image.
        unsafe { sys::mtmd_decode_use_non_causal(self.context.as_ptr(), std::ptr::null()) }
    }

    /// Returns true if tokens of an image have positions in several dimensions.
    pub fn has_mrope(&self) -> bool {
        // SAFETY: the context exists.
        unsafe { sys::mtmd_decode_use_mrope(self.context.as_ptr()) }
    }

    /// Decodes an image file and splits it into parts. Returns `None` if llama.cpp rejects the file.
    pub fn tokenize(&self, image: &[u8]) -> Option<ImageParts> {
        let context = self.context.as_ptr();
        // SAFETY: the context exists, and the buffer is read only during the call.
        let bitmap = unsafe {
            let mut options = sys::mtmd_helper_init_opt_default();
            // llama.cpp would pass a damaged image, which could be a video, to ffmpeg; this folder cannot have
            // programs.
            options.video_params.ffmpeg_bin_dir = c"/dev/null".as_ptr();
            sys::mtmd_helper_bitmap_init_from_buf(context, image.as_ptr(), image.len(), false, options)
        };
        self.split(&Bitmap(NonNull::new(bitmap.bitmap)?))
    }

    /// Splits an image of this size, without pixels, into parts, which cannot be encoded. Returns `None` if llama.cpp
    /// rejects the size.
    pub fn tokenize_size(&self, width: u32, height: u32) -> Option<ImageParts> {
        // SAFETY: without pixels, libmtmd only keeps the size.
        let bitmap = unsafe { sys::mtmd_bitmap_init(width, height, null()) };
        self.split(&Bitmap(NonNull::new(bitmap)?))
    }

    fn split(&self, bitmap: &Bitmap) -> Option<ImageParts> {
        let context = self.context.as_ptr();
        // SAFETY: a plain function without preconditions.
        let parts = ImageParts(NonNull::new(unsafe { sys::mtmd_input_chunks_init() })?);
        // SAFETY: the marker is a constant of libmtmd; everything that the arguments point to outlives the call.
        let result = unsafe {
            let marker = sys::mtmd_get_marker(context);
            let text_len = CStr::from_ptr(marker).to_bytes().len();
            let text = sys::mtmd_input_text { text: marker, text_len, add_special: false, parse_special: true };
            let mut bitmaps = [bitmap.0.as_ptr().cast_const()];
            sys::mtmd_tokenize(context, parts.0.as_ptr(), &raw const text, bitmaps.as_mut_ptr().cast(), 1)
        };
        (result == 0).then_some(parts)
    }

    /// Encodes all parts of an image and returns their embeddings in order. Returns `None` if llama.cpp fails.
    pub fn encode(&self, parts: &ImageParts) -> Option<Vec<f32>> {
        let _one_at_a_time = self.encoding.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows = Vec::new();
        for part in parts.chunks() {
            // SAFETY: the chunk belongs to `parts`.
            let (kind, tokens) =
                unsafe { (sys::mtmd_input_chunk_get_type(part), sys::mtmd_input_chunk_get_n_tokens(part)) };
            if kind != sys::MTMD_INPUT_CHUNK_TYPE_IMAGE {
                continue;
            }
            // SAFETY: the context exists, and the lock excludes other encodings.
            let output = unsafe {
                if sys::mtmd_encode_chunk(self.context.as_ptr(), part) != 0 {
                    return None;
                }
                sys::mtmd_get_output_embd(self.context.as_ptr())
            };
            let values = tokens.checked_mul(self.width)?;
            // SAFETY: the output has this number of values until the next call.
            rows.extend_from_slice(unsafe { std::slice::from_raw_parts(NonNull::new(output)?.as_ptr(), values) });
        }
        Some(rows)
    }
}

impl Drop for Projector {
    fn drop(&mut self) {
        // SAFETY: the context exists, and nothing uses it afterwards.
        unsafe { sys::mtmd_free(self.context.as_ptr()) };
    }
}

/// A decoded image.
struct Bitmap(NonNull<sys::mtmd_bitmap>);

impl Drop for Bitmap {
    fn drop(&mut self) {
        // SAFETY: the bitmap exists, and nothing uses it afterwards.
        unsafe { sys::mtmd_bitmap_free(self.0.as_ptr()) };
    }
}

/// The parts of an image: tokens of text, and preprocessed pixels.
#[derive(Debug)]
pub struct ImageParts(NonNull<sys::mtmd_input_chunks>);

// SAFETY: a list of plain data, which only its owner accesses.
unsafe impl Send for ImageParts {}

/// One part of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImagePart {
    /// Tokens of the vocabulary.
    Text(Vec<TokenId>),
    /// Preprocessed pixels, which are encoded to embeddings.
    Pixels {
        /// Number of embeddings.
        count: usize,
        /// Columns and rows of patches, which libmtmd knows for few projectors; others have one row.
        grid: (usize, usize),
        /// Positions of the embeddings; `None` for positions that are not supported.
        layout: Option<ImageLayout>,
    },
    /// Anything else.
    Other,
}

impl ImageParts {
    fn chunks(&self) -> impl Iterator<Item = *const sys::mtmd_input_chunk> {
        let list = self.0.as_ptr();
        // SAFETY: the list exists, and indexes are below its length.
        let len = unsafe { sys::mtmd_input_chunks_size(list) };
        // SAFETY: as above.
        (0..len).map(move |index| unsafe { sys::mtmd_input_chunks_get(list, index) })
    }

    /// Returns the parts in order.
    pub fn list(&self) -> Vec<ImagePart> {
        // SAFETY: the chunks belong to the list, the tokens of a text chunk live as long as it does, and an
        // image chunk has image tokens.
        let part = |chunk| unsafe {
            match sys::mtmd_input_chunk_get_type(chunk) {
                sys::MTMD_INPUT_CHUNK_TYPE_IMAGE => {
                    let image = sys::mtmd_input_chunk_get_tokens_image(chunk);
                    let grid = (sys::mtmd_image_tokens_get_nx(image), sys::mtmd_image_tokens_get_ny(image));
                    let count = sys::mtmd_input_chunk_get_n_tokens(chunk);
                    let sections = |index| {
                        let position = sys::mtmd_image_tokens_get_decoder_pos(image, 1, index);
                        // The order of `decode_embd_batch::set_position_mrope_2d` in libmtmd.
                        [position.t, position.y, position.x, position.z]
                    };
                    let layout = ImageLayout::from_sections(&(0..count).map(sections).collect::<Vec<_>>());
                    let positions = sys::mtmd_input_chunk_get_n_pos(chunk);
                    let has_length =
                        |layout: &ImageLayout| i64::from(layout.positions(count as u32)) == i64::from(positions);
                    ImagePart::Pixels { count, grid, layout: layout.filter(has_length) }
                }
                sys::MTMD_INPUT_CHUNK_TYPE_TEXT => {
                    let mut len = 0;
                    let tokens = sys::mtmd_input_chunk_get_tokens_text(chunk, &raw mut len);
                    let tokens = NonNull::new(tokens.cast_mut());
                    ImagePart::Text(tokens.map_or_else(Vec::new, |tokens| {
                        std::slice::from_raw_parts(tokens.as_ptr().cast_const(), len).to_vec()
                    }))
                }
                _ => ImagePart::Other,
            }
        };
        self.chunks().map(part).collect()
    }
}

impl Drop for ImageParts {
    fn drop(&mut self) {
        // SAFETY: the list exists, and nothing uses it afterwards.
        unsafe { sys::mtmd_input_chunks_free(self.0.as_ptr()) };
    }
}

/// Embeddings of consecutive tokens of a sequence.
pub struct Embeddings<'a> {
    /// Values per embedding.
    pub width: usize,
    /// The values.
    pub rows: &'a mut [f32],
    /// Positions of the embeddings, one section of M-RoPE after the other.
    pub positions: &'a mut [i32],
    /// The sequence.
    pub sequence: i32,
    /// Nonzero for each embedding whose logits are requested.
    pub outputs: &'a mut [i8],
    /// True if the embeddings attend to each other in both directions. They must then fit into a physical batch.
    pub non_causal: bool,
}

/// Decodes embeddings. `sections` is the number of positions of each. Returns the result of llama.cpp: 0 for success.
pub fn decode_embeddings(context: &mut LlamaContext<'_>, sections: usize, embeddings: Embeddings<'_>) -> i32 {
    const INVALID: i32 = -1;
    let Embeddings { width, rows, positions, sequence, outputs, non_causal } = embeddings;
    let count = outputs.len();
    let is_complete = count > 0 && rows.len() == count * width && positions.len() == count * sections;
    // llama.cpp aborts the process if the embeddings exceed a physical batch without causal attention.
    let fits = !non_causal || count <= context.n_ubatch() as usize;
    let Some(context) = raw_context(context).filter(|_| is_complete && fits) else { return INVALID };
    let mut sequence = sequence;
    let mut sequences = vec![&raw mut sequence; count];
    let mut sequence_counts = vec![1; count];
    let batch = sys::llama_batch {
        n_tokens: count as i32,
        token: null_mut(),
        embd: rows.as_mut_ptr(),
        pos: positions.as_mut_ptr(),
        n_seq_id: sequence_counts.as_mut_ptr(),
        seq_id: sequences.as_mut_ptr(),
        logits: outputs.as_mut_ptr(),
    };
    // SAFETY: `context` is the context's own pointer; all arrays have `count` entries, `rows` has `count` rows of the
    // model's width, `positions` has one entry per section and embedding, and they outlive the call.
    unsafe {
        if !non_causal {
            return sys::llama_decode(context, batch);
        }
        sys::llama_set_causal_attn(context, false);
        let result = sys::llama_decode(context, batch);
        sys::llama_set_causal_attn(context, true);
        result
    }
}
