//! Models with a projector, and prompts with images.

use crate::engine::request_tokens;
use crate::images::sized_bmp;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thunder::engine::Request;
use thunder::events::TokenId;
use thunder::model::Model;
use thunder::model::llama::{Image, ImageOptions, ModelOptions};

/// Files of a model and of its projector.
pub(super) type Files = (&'static str, &'static str);

pub(super) const MROPE: Files = ("vision/qwen2vl", "vision/qwen2vl-mmproj");
/// M-RoPE, and layers with a recurrent state.
pub(super) const HYBRID: Files = ("vision/qwen35", "vision/qwen2vl-mmproj");
/// Layers with a window, and images with non-causal attention.
pub(super) const NON_CAUSAL: Files = ("memories/window", "vision/gemma3-mmproj");
pub(super) const ALL: [Files; 3] = [MROPE, HYBRID, NON_CAUSAL];

/// A part of a prompt.
#[derive(Clone, Copy)]
pub(super) enum Part {
    Text(&'static str),
    /// Width, height and pattern.
    Image(u32, u32, u32),
}

use Part::{Image as Picture, Text};

pub(super) const QUESTION: Part = Text("<|im_start|>user\nWhat is the weather like in the valley, and what is this?");
pub(super) const END: Part = Text("Answer in one short sentence.<|im_end|>\n<|im_start|>assistant\n");
pub(super) const WIDE: Part = Picture(140, 84, 3);
pub(super) const TALL: Part = Picture(84, 196, 5);

/// A prompt with images.
#[derive(Clone)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<TokenId>,
    pub(super) images: Vec<Arc<Image>>,
    /// Text with a marker for each image.
    pub(super) text: String,
    pub(super) files: Vec<Vec<u8>>,
}

impl Prompt {
    pub(super) fn new(model: &Model, parts: &[Part]) -> Self {
        let mut prompt = Self { tokens: Vec::new(), images: Vec::new(), text: String::new(), files: Vec::new() };
        for &part in parts {
            match part {
                Text(text) => {
                    prompt.tokens.extend(model.vocabulary().encode_markup(text));
                    prompt.text += text;
                }
                Picture(width, height, seed) => {
                    let file = sized_bmp(width, height, seed);
                    let image = model.images().unwrap().tokenize(&file).unwrap();
                    prompt.tokens.extend(image.tokens());
                    prompt.text += "<__media__>";
                    prompt.images.push(image);
                    prompt.files.push(file);
                }
            }
        }
        prompt
    }

    /// Returns the first `len` tokens, followed by `more`.
    pub(super) fn then(&self, len: usize, more: &[TokenId]) -> Self {
        Self { tokens: [&self.tokens[..len], more].concat(), ..self.clone() }
    }

    /// Returns the prompt without the text after the last token of an image.
    pub(super) fn until_image_end(&self) -> Self {
        let last = self.tokens.iter().rposition(|&token| token < -1).unwrap();
        self.then(last + 1, &[])
    }

    /// Returns the index of the first token of the first image.
    pub(super) fn image_start(&self) -> usize {
        self.tokens.iter().position(|&token| token < -1).unwrap()
    }

    pub(super) fn request(&self, count: u32) -> Request {
        Request { images: self.images.clone(), ..request_tokens(self.tokens.clone(), count) }
    }
}

pub(super) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(format!("{name}.gguf"))
}

pub(super) fn load((model, projector): Files) -> Arc<Model> {
    let images =
        ImageOptions { projector: path(projector), gpu: false, threads: 1, min_tokens: None, max_tokens: None };
    let options = ModelOptions { images: Some(images), ..ModelOptions::default() };
    Arc::new(Model::load(&path(model), &options, |_| true).unwrap())
}
