//! Classification: every label of a text with its logit.

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
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(classify)).route("/classify", axum::routing::post(classify))
}

/// What the model says of the inputs.
#[derive(Debug, Serialize, ToSchema)]
struct Classification {
    model: String,
    object: &'static str,
    usage: Usage,
    predictions: Predictions,
}

/// The labels of a text, or a list of such lists where `inputs` was a list.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum Predictions {
    One(Vec<Prediction>),
    Several(Vec<Vec<Prediction>>),
}

/// A label and its score.
#[derive(Debug, Serialize, ToSchema)]
struct Prediction {
    label: String,
    /// The classifier's logit, as it is: no softmax.
    score: f32,
}

/// Scores every label of the model for `inputs`, a text or a list of texts; the highest first. Also at `/classify`.
#[utoipa::path(post, path = "/v1/classify", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, body = Classification),
              (status = 400, description = "A field is wrong, or an input too long; the message names it"),
              (status = 501, description = "The server was started without `--reranking`, or the model is no classifier; \
                                            the message says why")))]
async fn classify(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Classification>, LlamaError> {
    let (body, loaded) = encoding::request(&app, &body?).await?;
    let labels = labels(&loaded)?;
    let inputs = Fields::new(&body)?.get("inputs");
    let (texts, is_list): (Vec<String>, bool) = match inputs {
        Some(Value::Array(list)) => {
            let one = |(index, value)| encoding::text(&format!("inputs[{index}]"), value).map(str::to_owned);
            (encoding::bounded("inputs", list)?.iter().enumerate().map(one).collect::<Result<_, _>>()?, true)
        }
        Some(value @ Value::String(_)) => (vec![encoding::text("inputs", value)?.to_owned()], false),
        Some(other) => return Err(invalid_value("inputs", "a text or a list of texts", other).into()),
        None => return Err(ApiError::invalid("inputs", "inputs is missing; it takes a text or a list of texts").into()),
    };
    let tokenize =
        move |vocabulary: &Vocabulary| Ok(texts.iter().map(|text| vocabulary.encode(text, true, false)).collect());
    let Encoded { vectors, usage } =
        encoding::encode(&loaded, "inputs", is_list, EncoderOutput::Logits, tokenize).await?;
    let mut predictions = vectors.iter().map(|logits| sorted(labels, logits));
    let predictions = if is_list {
        Predictions::Several(predictions.collect())
    } else {
        Predictions::One(predictions.next().unwrap_or_default())
    };
    Ok(Json(Classification { model: loaded.name().to_owned(), object: "list", usage, predictions }))
}

fn labels(loaded: &Loaded) -> Result<&[String], ApiError> {
    let scores = loaded.encoder().scores().map_err(encoding::off)?;
    if scores.labels.len() > 1 {
        return Ok(&scores.labels);
    }
    let detail =
        format!("the model '{}' has one output: it ranks and tells no labels apart; use /rerank", loaded.name());
    Err(ApiError::not_supported(detail))
}

fn sorted(labels: &[String], logits: &[f32]) -> Vec<Prediction> {
    let mut predictions: Vec<Prediction> =
        labels.iter().zip(logits).map(|(label, &score)| Prediction { label: label.clone(), score }).collect();
    predictions.sort_by(|a, b| b.score.total_cmp(&a.score));
    predictions
}
