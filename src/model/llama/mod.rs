//! llama.cpp behind plain Rust types: [`Model`], its decode [`Context`] and [`Sampler`].

mod context;
mod ffi;
mod sampler;
mod ubatch;

pub use context::{Captured, Context, ContextOptions};
pub use sampler::{Candidates, Draw, Sampler, SamplerOptions};

use super::vocabulary::{FillIn, Special};
use super::{Error, Vocabulary};
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::token::LlamaToken;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A loaded model.
pub struct Model {
    llama: Arc<LlamaModel>,
    vocabulary: Arc<Vocabulary>,
    card: Card,
    /// llama.cpp writes to the model while it makes a context.
    making_context: Mutex<()>,
}

/// How a model is loaded.
#[derive(Debug, Clone, Default)]
pub struct ModelOptions {
    /// What it is called; `None` for the file's name without folder and extension.
    pub name: Option<String>,
    /// Layers to put on the GPU.
    pub gpu_layers: u32,
}

/// What a person wants to know of a model.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Card {
    /// What it is called.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of the weights.
    pub size_bytes: u64,
    /// Context it was trained with, in tokens.
    pub context_train: u32,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Layers.
    pub layers: u32,
    /// Attention heads per layer.
    pub heads: u32,
    /// Width of the hidden state.
    pub embedding: u32,
    /// The chat template inside the file, if any.
    pub chat_template: Option<String>,
}

impl Model {
    /// Loads a GGUF file; `progress` is called with 0 … 1, and gives the load up by returning false.
    ///
    /// # Errors
    /// [`Error::Unreadable`] and [`Error::Load`].
    pub fn load(
        path: &Path,
        options: &ModelOptions,
        progress: impl FnMut(f32) -> bool + 'static,
    ) -> Result<Self, Error> {
        let shown = path.display().to_string();
        check_magic(path, &shown)?;
        let params = LlamaModelParams::default().with_n_gpu_layers(options.gpu_layers).with_progress_callback(progress);
        let llama = LlamaModel::load_from_file(backend()?, path, &params).map_err(|error| Error::Load {
            path: shown,
            reason: match error {
                llama_cpp_2::LlamaModelLoadError::NullResult => "its log above says why".to_owned(),
                other => other.to_string(),
            },
        })?;
        let llama = Arc::new(llama);
        let vocabulary = Arc::new(read_vocabulary(&llama));
        let card = Card {
            name: options.name.clone().unwrap_or_else(|| file_stem(path)),
            architecture: llama.meta_val_str("general.architecture").unwrap_or_default(),
            parameters: llama.n_params(),
            size_bytes: llama.size(),
            context_train: llama.n_ctx_train(),
            vocabulary: vocabulary.len(),
            layers: llama.n_layer(),
            heads: llama.n_head(),
            embedding: llama.n_embd().unsigned_abs(),
            chat_template: llama.chat_template(None).ok().and_then(|template| template.to_string().ok()),
        };
        Ok(Self { llama, vocabulary, card, making_context: Mutex::new(()) })
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.card.name
    }

    /// Its vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// What a person wants to know of it.
    #[must_use]
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Makes a context to decode in.
    ///
    /// # Errors
    /// [`Error::Context`], usually because the memory could not be had.
    pub fn context(&self, options: &ContextOptions) -> Result<Context<'_>, Error> {
        let _one_at_a_time = self.making_context.lock().unwrap_or_else(PoisonError::into_inner);
        Context::new(&self.llama, backend()?, options)
    }
}

fn file_stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned())
}

/// llama.cpp's backend, initialised once for the process; it can be initialised only once.
///
/// # Errors
/// [`Error::Load`] when llama.cpp refuses.
pub fn backend() -> Result<&'static LlamaBackend, Error> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    BACKEND
        .get_or_init(|| {
            llama_cpp_2::send_logs_to_tracing(llama_cpp_2::LogOptions::default());
            LlamaBackend::init().map_err(|error| error.to_string())
        })
        .as_ref()
        .map_err(|reason| Error::Load { path: "its backend".into(), reason: reason.clone() })
}

/// llama.cpp says only that a load failed; the two usual mistakes are told apart here.
fn check_magic(path: &Path, shown: &str) -> Result<(), Error> {
    let unreadable = |source| Error::Unreadable { path: shown.to_owned(), source };
    let mut magic = [0; 4];
    let read = std::fs::File::open(path).and_then(|mut file| file.read(&mut magic)).map_err(unreadable)?;
    if read < magic.len() || &magic != b"GGUF" {
        return Err(Error::Load { path: shown.to_owned(), reason: "the file does not begin with 'GGUF'".into() });
    }
    Ok(())
}

fn read_vocabulary(llama: &Arc<LlamaModel>) -> Vocabulary {
    let vocab = llama.vocab();
    let count = vocab.n_tokens();
    let tokens = || (0..count).map(LlamaToken::new);
    let valid = |token: LlamaToken| (token.0 >= 0).then_some(token.0);
    let fill_in = match (valid(vocab.fim_pre()), valid(vocab.fim_suf()), valid(vocab.fim_mid())) {
        (Some(prefix), Some(suffix), Some(middle)) => {
            let (repository, file) = (valid(vocab.fim_rep()), valid(vocab.fim_sep()));
            Some(FillIn { prefix, suffix, middle, repository, file })
        }
        _ => None,
    };
    let special =
        Special { bos: valid(vocab.bos()), eos: valid(vocab.eos()), add_bos: vocab.should_add_bos(), fill_in };
    let owner = Arc::clone(llama);
    Vocabulary::new(
        tokens().map(|token| vocab.token_to_piece(token, true, None).into_boxed_slice()).collect(),
        tokens().map(|token| vocab.is_control(token)).collect(),
        tokens().filter(|&token| vocab.is_eog(token)).map(|token| token.0).collect(),
        special,
        move |text, add_special, parse_special| {
            owner
                .vocab()
                .tokenize(text.as_bytes(), add_special, parse_special)
                .into_iter()
                .map(|token| token.0)
                .collect()
        },
    )
}
