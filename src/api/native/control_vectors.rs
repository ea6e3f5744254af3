//! `/api/v1/control-vectors`: the control vectors that requests can name in `steering`.

use crate::events::shortest_f64;
use crate::server::extract::Query;
use crate::server::{ApiError, App, Problem};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The control vectors of a model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ControlVectorsResponse {
    /// The vectors, in the order of the command line.
    control_vectors: Vec<ControlVectorResponse>,
    /// Number of layers of the model.
    layers: u32,
}

/// A control vector.
#[derive(Debug, Serialize, ToSchema)]
pub struct ControlVectorResponse {
    /// Name for requests.
    name: String,
    /// Path of its GGUF file.
    path: String,
    /// Scale in requests without `steering`.
    scale: f64,
    /// First and last layer that it is added to if a request selects none, counted from 0.
    layers: [u32; 2],
    /// Hash of its directions.
    fingerprint: String,
}

/// Query parameters of the list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ControlVectorsParams {
    /// Name of the model; default is the default model.
    model: Option<String>,
}

/// Lists the control vectors of a loaded model with their default scales.
#[utoipa::path(get, path = "/api/v1/control-vectors", tag = "runs",
    params(ControlVectorsParams), responses(
    (status = 200, body = ControlVectorsResponse),
    (status = 404, body = Problem, description = "Unknown model"),
    (status = 503, body = Problem, description = "The model is loading")))]
pub async fn list(
    State(app): State<App>,
    Query(params): Query<ControlVectorsParams>,
) -> Result<Json<ControlVectorsResponse>, ApiError> {
    let loaded = app.get_or_wake(params.model.as_deref()).await?;
    let adapters = loaded.model().adapters();
    let (known, defaults) = (adapters.control_vectors(), adapters.default_set());
    let responses = known.as_slice().iter().enumerate().map(|(id, vector)| {
        let default = defaults.steering().iter().find(|default| default.id == id);
        ControlVectorResponse {
            name: vector.name.to_string(),
            path: vector.path.display().to_string(),
            scale: default.map_or(0.0, |default| shortest_f64(default.scale)),
            layers: known.default_layers(),
            fingerprint: format!("{:032x}", vector.fingerprint),
        }
    });
    Ok(Json(ControlVectorsResponse { control_vectors: responses.collect(), layers: loaded.model().card().layers }))
}
