//! Classification: scores every label for a text.

use crate::api::shared::encoding::{self, EncodedInputs, EncoderUsage, InputField};
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::invalid_value;
use crate::api::shared::{Fields, ModelBody};
use crate::model::llama::EncoderOutput;
use crate::model::{TokenizeOptions, Vocabulary};
use crate::server::{ApiError, App, LoadedModel};
use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(classify)).route("/classify", axum::routing::post(classify))
}

/// Texts to classify.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct ClassifyBody {
    /// A string or a list of strings.
    #[schema(value_type = Value)]
    inputs: Value,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
}

/// The scores of all labels for the inputs.
#[derive(Debug, Serialize, ToSchema)]
struct Classification {
    model: String,
    object: &'static str,
    usage: EncoderUsage,
    predictions: Predictions,
}

/// The labels of one text, or one list per text if `inputs` is a list.
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
    /// The classifier's raw logit, without softmax.
    score: f32,
}

/// Scores every label of the model for `inputs`, a string or a list of strings; highest score first. Also at
/// `/classify`.
#[utoipa::path(post, path = "/v1/classify", tag = "llama-server",
    request_body(content = ClassifyBody, content_type = "application/json"),
    responses((status = 200, body = Classification),
              (status = 400, description = "A field is invalid or an input is too long; the message names it"),
              (status = 501, description = "The server was started without `--reranking`, or the model is not a classifier; \
                                            the message gives the reason")))]
async fn classify(body: Result<ModelBody, ApiError>) -> Result<Json<Classification>, LlamaError> {
    let ModelBody { body, loaded, .. } = body?;
    let labels = labels(&loaded)?;
    let inputs = Fields::new(&body)?.get("inputs");
    let (texts, is_list): (Vec<String>, bool) = match inputs {
        Some(Value::Array(list)) => {
            let parse =
                |(index, value)| encoding::non_empty_string(&format!("inputs[{index}]"), value).map(str::to_owned);
            (encoding::check_inputs("inputs", list)?.iter().enumerate().map(parse).collect::<Result<_, _>>()?, true)
        }
        Some(value @ Value::String(_)) => (vec![encoding::non_empty_string("inputs", value)?.to_owned()], false),
        Some(other) => return Err(invalid_value("inputs", "a string or a list of strings", other).into()),
        None => {
            return Err(ApiError::invalid("inputs", "`inputs` is missing; send a string or a list of strings").into());
        }
    };
    let field = InputField::new(&loaded, "inputs", is_list);
    let options = TokenizeOptions { add_special: true, parse_special: false };
    let tokenize =
        move |vocabulary: &Vocabulary| field.collect(texts.iter().map(|text| Ok(vocabulary.encode(text, options))));
    let EncodedInputs { vectors, usage } = encoding::encode(&loaded, field, EncoderOutput::Logits, tokenize).await?;
    let mut predictions = vectors.iter().map(|logits| sorted_predictions(labels, logits));
    let predictions = if is_list {
        Predictions::Several(predictions.collect())
    } else {
        Predictions::One(predictions.next().unwrap_or_default())
    };
    Ok(Json(Classification { model: loaded.name().to_owned(), object: "list", usage, predictions }))
}

fn labels(loaded: &LoadedModel) -> Result<&[String], ApiError> {
    let scores = loaded.encoder().scores().map_err(encoding::unavailable)?;
    if scores.labels.len() > 1 {
        return Ok(&scores.labels);
    }
    let detail = format!("the model '{}' has one output, so it cannot classify; use /rerank", loaded.name());
    Err(ApiError::not_supported(detail))
}

/// Returns the labels with their scores, highest score first.
fn sorted_predictions(labels: &[String], logits: &[f32]) -> Vec<Prediction> {
    let mut predictions: Vec<Prediction> =
        labels.iter().zip(logits).map(|(label, &score)| Prediction { label: label.clone(), score }).collect();
    predictions.sort_by(|a, b| b.score.total_cmp(&a.score));
    predictions
}
