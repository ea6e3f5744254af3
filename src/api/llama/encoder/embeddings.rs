//! Embeddings in OpenAI's format and in llama-server's.

use crate::api::shared::encoding::{
    self, EncodedInputs, EncoderUsage, INPUT, InputField, is_base64, is_list, to_base64,
};
use crate::api::shared::error::{LlamaError, OpenAiError};
use crate::api::shared::{Fields, ModelBody};
use crate::model::Vocabulary;
use crate::model::llama::{EncoderOutput, Pooling};
use crate::server::{ApiError, App, LoadedModel};
use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Maximum tokens of a request that returns one vector per token.
const MAX_TOKEN_VECTORS: usize = 16_384;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(embeddings)).route("/embedding", axum::routing::post(embeddings))
}

/// Returns OpenAI's route.
pub(in crate::api::llama) fn openai_router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(openai_embeddings))
}

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct EmbeddingsBody {
    /// A string, token ids, `{prompt_string}`, or a list of these. Also `content`, except on `/v1/embeddings`.
    #[schema(value_type = Value)]
    input: Value,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
    /// `float` or `base64`; on `/v1/embeddings`.
    #[schema(default = "float")]
    encoding_format: Option<String>,
    /// Norm by which vectors are divided, e.g. 2 for the Euclidean norm; -1 leaves them unchanged, 0 scales them to
    /// 16-bit integers.
    #[schema(minimum = -1, maximum = 32, default = 2)]
    embd_normalize: Option<i32>,
    /// Size of the embeddings; must be the model's.
    dimensions: Option<u32>,
}

/// Embeddings in OpenAI's format.
#[derive(Debug, Serialize, ToSchema)]
struct EmbeddingList {
    model: String,
    object: &'static str,
    usage: EncoderUsage,
    data: Vec<Embedding>,
}

/// The embedding of an input.
#[derive(Debug, Serialize, ToSchema)]
struct Embedding {
    object: &'static str,
    /// Index of the input, from 0.
    index: usize,
    embedding: Vector,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoding_format: Option<&'static str>,
}

/// Numbers, or base64 of little-endian 32-bit floats.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

/// The embeddings of an input in llama-server's format.
#[derive(Debug, Serialize, ToSchema)]
struct NativeEmbedding {
    /// Index of the input, from 0.
    index: usize,
    /// One vector, or with pooling `none` one per token, not normalized.
    embedding: Vec<Vec<f32>>,
}

/// Embeds `input`: a string, a list of token ids, or a list of these. `encoding_format` is `float` or `base64`.
/// `embd_normalize` selects the norm by which vectors are divided: default 2, -1 for none.
#[utoipa::path(post, path = "/v1/embeddings", tag = "openai",
    request_body(content = EmbeddingsBody, content_type = "application/json"),
    responses((status = 200, body = EmbeddingList),
              (status = 400, description = "A field is invalid or an input is too long; `error.param` names it"),
              (status = 501, description = "The server was started without `--embedding`")))]
async fn openai_embeddings(body: Result<ModelBody, ApiError>) -> Result<Json<EmbeddingList>, OpenAiError> {
    let ModelBody { app, body, loaded } = body?;
    let pooling = encoding::text_pooling(&loaded)?;
    let base64 = is_base64(Fields::new(&body)?)?;
    let EncodedInputs { vectors, usage } = embed(&app, &loaded, body, pooling).await?;
    let data = vectors.into_iter().enumerate().map(|(index, vector)| Embedding {
        object: "embedding",
        index,
        embedding: if base64 { Vector::Base64(to_base64(&vector)) } else { Vector::Float(vector) },
        encoding_format: base64.then_some("base64"),
    });
    Ok(Json(EmbeddingList { model: loaded.name().to_owned(), object: "list", usage, data: data.collect() }))
}

/// Embeds `input` or `content` and returns a list of vectors per input, like llama-server. Also at `/embedding`.
#[utoipa::path(post, path = "/embeddings", tag = "llama-server",
    request_body(content = EmbeddingsBody, content_type = "application/json"),
    responses((status = 200, body = [NativeEmbedding]),
              (status = 400, description = "A field is invalid or an input is too long; the message names it"),
              (status = 501, description = "The server was started without `--embedding`")))]
async fn embeddings(body: Result<ModelBody, ApiError>) -> Result<Json<Vec<NativeEmbedding>>, LlamaError> {
    let ModelBody { app, body, loaded } = body?;
    let pooling = loaded.encoder().embeddings().map_err(encoding::unavailable)?;
    let width = loaded.model().width().max(1);
    let EncodedInputs { vectors, .. } = embed(&app, &loaded, body, pooling).await?;
    let rows = |vector: Vec<f32>| vector.chunks_exact(width).map(<[f32]>::to_vec).collect();
    let all = vectors.into_iter().enumerate();
    Ok(Json(all.map(|(index, vector)| NativeEmbedding { index, embedding: rows(vector) }).collect()))
}

async fn embed(app: &App, loaded: &LoadedModel, body: Value, pooling: Pooling) -> Result<EncodedInputs, ApiError> {
    let fields = Fields::new(&body)?.with_server_defaults(app);
    let norm = fields.integer("embd_normalize", -1..=32)?.unwrap_or(2);
    let width = loaded.model().width();
    if let Some(requested) = fields.integer("dimensions", 1..=1 << 20)?
        && usize::try_from(requested) != Ok(width)
    {
        let detail = format!("`dimensions` must be {width}, the size of this model's embeddings, got {requested}");
        return Err(ApiError::invalid("dimensions", detail));
    }
    let (field, is_list) = match fields.first_present(&["input", "content"]) {
        Some((field, value)) => (field, is_list(value)),
        None => return Err(ApiError::invalid("input", format!("`input` is missing; send {INPUT}"))),
    };
    let input_field = InputField::new(loaded, field, is_list);
    let tokenize = move |vocabulary: &Vocabulary| {
        let inputs = encoding::inputs(&body[field], input_field, vocabulary)?;
        let tokens: usize = inputs.iter().map(Vec::len).sum();
        if pooling == Pooling::None && tokens > MAX_TOKEN_VECTORS {
            let detail =
                format!("`{field}` must have at most {MAX_TOKEN_VECTORS} tokens with --pooling none, got {tokens}");
            return Err(ApiError::invalid(field, detail));
        }
        Ok(inputs)
    };
    let mut encoded = encoding::encode(loaded, input_field, EncoderOutput::Embedding(pooling), tokenize).await?;
    if pooling != Pooling::None {
        encoded.vectors.iter_mut().for_each(|vector| encoding::normalize(vector, norm));
    }
    Ok(encoded)
}
