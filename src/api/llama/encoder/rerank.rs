//! Reranks documents by relevance to a query, in Jina's format and in that of Text Embeddings Inference.

use crate::api::shared::encoding::{self, EncodedInputs, EncoderUsage, InputField};
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::invalid_value;
use crate::api::shared::{Fields, ModelBody};
use crate::model::Vocabulary;
use crate::model::llama::EncoderOutput;
use crate::server::{ApiError, App, LoadedModel};
use axum::Json;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
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

/// Documents to rank.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct RerankBody {
    /// The query.
    query: String,
    /// The documents: strings, or objects with `text`. Also `texts`, which selects the format of TEI.
    #[schema(value_type = Vec<Value>)]
    documents: Vec<Value>,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
    /// Maximum number of results.
    #[schema(minimum = 1)]
    top_n: Option<u32>,
    /// Return the documents too. With `texts` the field is `return_text`.
    #[schema(default = false)]
    return_documents: Option<bool>,
}

/// Documents sorted by relevance, the most relevant first.
#[derive(Debug, Serialize, ToSchema)]
struct Ranking {
    model: String,
    object: &'static str,
    usage: EncoderUsage,
    results: Vec<RankedDocument>,
}

/// The relevance of a document.
#[derive(Debug, Serialize, ToSchema)]
struct RankedDocument {
    /// Index of the document in the request, from 0.
    index: usize,
    /// The model's score; higher is more relevant.
    relevance_score: f32,
    /// The document, if `return_documents` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
}

/// A document.
#[derive(Debug, Serialize, ToSchema)]
struct Document {
    text: String,
}

/// The relevance of a text in the format of Text Embeddings Inference.
#[derive(Debug, Serialize, ToSchema)]
struct ScoredText {
    /// Index of the text in the request, from 0.
    index: usize,
    /// The model's score; higher is more relevant.
    score: f32,
    /// The text, if `return_text` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// Ranks `documents` by relevance to `query` and returns the first `top_n`. With `texts` instead of `documents` the
/// response has the format of Text Embeddings Inference: a list of `{index, score}`, with `return_text` also the text.
/// Also at `/rerank`, `/reranking` and `/v1/reranking`.
#[utoipa::path(post, path = "/v1/rerank", tag = "llama-server",
    request_body(content = RerankBody, content_type = "application/json"),
    responses((status = 200, body = Ranking),
              (status = 400, description = "A field is invalid or a document is too long; the message names it"),
              (status = 501, description = "The server was started without `--reranking`, or the model is not a reranker")))]
async fn rerank(body: Result<ModelBody, ApiError>) -> Result<Response, LlamaError> {
    let ModelBody { body, loaded, .. } = body?;
    let is_probability = scores_are_probabilities(&loaded)?;
    let fields = Fields::new(&body)?;
    let query = fields.get("query").ok_or_else(|| ApiError::invalid("query", "`query` is missing; send a string"))?;
    let query = encoding::non_empty_string("query", query)?.to_owned();
    let Some((field, list)) = fields.first_present(&["documents", "texts"]) else {
        return Err(ApiError::invalid("documents", "`documents` is missing; send a list of strings").into());
    };
    let is_jina = field == "documents";
    let list = list.as_array().ok_or_else(|| invalid_value(field, "a list of strings", list))?;
    let documents: Arc<[String]> = encoding::check_inputs(field, list)?
        .iter()
        .enumerate()
        .map(|(index, value)| {
            let value = value.get("text").unwrap_or(value);
            // An empty document gets a score too.
            value
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| invalid_value(&format!("{field}[{index}]"), "a string", value))
        })
        .collect::<Result<_, _>>()?;
    let top = fields.integer("top_n", 1..=i64::from(u32::MAX))?.map_or(usize::MAX, |top| top as usize);
    let return_text = fields.flag(if is_jina { "return_documents" } else { "return_text" })?.unwrap_or(false);

    let template = loaded.model().rerank_template();
    let texts = Arc::clone(&documents);
    let field = InputField::new(&loaded, field, true);
    let tokenize = move |vocabulary: &Vocabulary| {
        let pairs = template.pair_tokenizer(vocabulary, &query);
        field.collect(texts.iter().map(|document| Ok(pairs.encode(document))))
    };
    let EncodedInputs { vectors, usage } = encoding::encode(&loaded, field, EncoderOutput::Logits, tokenize).await?;
    let mut ranked: Vec<(usize, f32)> = vectors
        .iter()
        .map(|logits| if is_probability { first_probability(logits) } else { logits.first().copied().unwrap_or(0.0) })
        .enumerate()
        .collect();
    ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    ranked.truncate(top);
    let text = |index: usize| return_text.then(|| documents[index].clone());
    if is_jina {
        let results = ranked.into_iter().map(|(index, relevance_score)| RankedDocument {
            index,
            relevance_score,
            document: text(index).map(|text| Document { text }),
        });
        let model = loaded.name().to_owned();
        return Ok(Json(Ranking { model, object: "list", usage, results: results.collect() }).into_response());
    }
    let results = ranked.into_iter().map(|(index, score)| ScoredText { index, score, text: text(index) });
    Ok(Json(results.collect::<Vec<_>>()).into_response())
}

/// Returns true if the model's score is a probability after softmax, false if it is a single logit.
fn scores_are_probabilities(loaded: &LoadedModel) -> Result<bool, ApiError> {
    let scores = loaded.encoder().scores().map_err(encoding::unavailable)?;
    if scores.labels.len() == 1 || scores.softmax {
        return Ok(scores.softmax);
    }
    Err(ApiError::not_supported(format!(
        "the model '{}' is a classifier with {} labels ({}) and has no relevance score; use /classify",
        loaded.name(),
        scores.labels.len(),
        scores.labels.join(", ")
    )))
}

/// Returns the first logit's probability after softmax.
fn first_probability(logits: &[f32]) -> f32 {
    let first = logits.first().copied().unwrap_or(0.0);
    1.0 / logits.iter().map(|logit| (logit - first).exp()).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::first_probability;

    #[test]
    fn score_is_softmax_of_first_logit() {
        assert_eq!(first_probability(&[1.0, 1.0]), 0.5);
        assert!((first_probability(&[2.0, 0.0]) - 0.880_797).abs() < 1e-6);
        assert_eq!(first_probability(&[-500.0, 500.0]), 0.0);
    }
}
