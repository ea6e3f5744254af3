//! Ranking documents by their relevance to a query, in Jina's shape and in that of Text Embeddings Inference.

use super::encoding::{self, Encoded, Usage};
use crate::api::shared::Fields;
use crate::api::shared::fields::invalid_value;
use crate::api::{ApiError, App, LlamaError, Loaded};
use crate::model::Vocabulary;
use crate::model::llama::EncoderOutput;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(rerank))
        .route("/rerank", post(rerank))
        .route("/reranking", post(rerank))
        .route("/v1/reranking", post(rerank))
}

/// Documents by relevance, the most relevant first.
#[derive(Debug, Serialize, ToSchema)]
struct Ranking {
    model: String,
    object: &'static str,
    usage: Usage,
    results: Vec<Ranked>,
}

/// A document's relevance.
#[derive(Debug, Serialize, ToSchema)]
struct Ranked {
    /// Place of the document in the request, from 0.
    index: usize,
    /// The model's score: the higher, the more relevant.
    relevance_score: f32,
    /// The document, where `return_documents` asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
}

/// A document.
#[derive(Debug, Serialize, ToSchema)]
struct Document {
    text: String,
}

/// A text's relevance, as Text Embeddings Inference has it.
#[derive(Debug, Serialize, ToSchema)]
struct Scored {
    /// Place of the text in the request, from 0.
    index: usize,
    /// The model's score: the higher, the more relevant.
    score: f32,
    /// The text, where `return_text` asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// Ranks `documents` by relevance to the `query` and answers with the `top_n` first. With `texts` in the place of
/// `documents`, the answer is that of Text Embeddings Inference: a list of `{index, score}`, with `return_text` also the
/// text. Also at `/rerank`, `/reranking` and `/v1/reranking`.
#[utoipa::path(post, path = "/v1/rerank", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, body = Ranking),
              (status = 400, description = "A field is wrong, or a document too long; the message names it"),
              (status = 501, description = "The server was started without `--reranking`, or the model ranks nothing")))]
async fn rerank(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Response, LlamaError> {
    let (body, loaded) = encoding::request(&app, &body?).await?;
    let is_share = relevance(&loaded)?;
    let fields = Fields::new(&body)?;
    let query = fields.get("query").ok_or_else(|| ApiError::invalid("query", "query is missing; it takes a text"))?;
    let query = encoding::text("query", query)?.to_owned();
    let Some((field, list)) = fields.first_present(&["documents", "texts"]) else {
        return Err(ApiError::invalid("documents", "documents is missing; it takes a list of texts").into());
    };
    let is_jina = field == "documents";
    let field = if is_jina { "documents" } else { "texts" };
    let list = list.as_array().ok_or_else(|| invalid_value(field, "a list of texts", list))?;
    let documents: Vec<String> = encoding::bounded(field, list)?
        .iter()
        .enumerate()
        .map(|(index, value)| {
            let value = value.get("text").unwrap_or(value);
            // An empty one has a score, too.
            value
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| invalid_value(&format!("{field}[{index}]"), "a text", value))
        })
        .collect::<Result<_, _>>()?;
    let top = fields.integer("top_n", 1..=i64::from(u32::MAX))?.map_or(usize::MAX, |top| top as usize);
    let returns_text = fields.flag(if is_jina { "return_documents" } else { "return_text" })?.unwrap_or(false);

    let pairing = loaded.model().pairing();
    let texts = documents.clone();
    let tokenize = move |vocabulary: &Vocabulary| {
        Ok(texts.iter().map(|document| pairing.tokens(vocabulary, &query, document)).collect())
    };
    let Encoded { vectors, usage } = encoding::encode(&loaded, field, true, EncoderOutput::Logits, tokenize).await?;
    let mut ranked: Vec<(usize, f32)> = vectors
        .iter()
        .map(|logits| if is_share { share(logits) } else { logits.first().copied().unwrap_or(0.0) })
        .enumerate()
        .collect();
    ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    ranked.truncate(top);
    let text = |index: usize| returns_text.then(|| documents[index].clone());
    if is_jina {
        let results = ranked.into_iter().map(|(index, relevance_score)| Ranked {
            index,
            relevance_score,
            document: text(index).map(|text| Document { text }),
        });
        let model = loaded.name().to_owned();
        return Ok(Json(Ranking { model, object: "list", usage, results: results.collect() }).into_response());
    }
    let results = ranked.into_iter().map(|(index, score)| Scored { index, score, text: text(index) });
    Ok(Json(results.collect::<Vec<_>>()).into_response())
}

/// Whether the relevance is a share after softmax, not the one logit.
fn relevance(loaded: &Loaded) -> Result<bool, ApiError> {
    let scores = loaded.encoder().scores().map_err(encoding::off)?;
    if scores.labels.len() == 1 || scores.softmax {
        return Ok(scores.softmax);
    }
    Err(ApiError::not_supported(format!(
        "the model '{}' tells {} labels apart ({}) and has no score of relevance; use /classify",
        loaded.name(),
        scores.labels.len(),
        scores.labels.join(", ")
    )))
}

/// The share of the first logit after softmax.
fn share(logits: &[f32]) -> f32 {
    let first = logits.first().copied().unwrap_or(0.0);
    1.0 / logits.iter().map(|logit| (logit - first).exp()).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn the_share_is_that_of_the_first() {
        assert_eq!(share(&[1.0, 1.0]), 0.5);
        assert!((share(&[2.0, 0.0]) - 0.880_797).abs() < 1e-6);
        assert_eq!(share(&[-500.0, 500.0]), 0.0);
    }
}
