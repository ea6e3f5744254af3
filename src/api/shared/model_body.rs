//! Extractor of a JSON body and the model that it names.

use super::{Fields, parse_json};
use crate::server::{ApiError, App, LoadedModel};
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use serde_json::Value;

/// A JSON body and the model that its field `model` names. Handlers extract it as a `Result` to render an error in the
/// format of their protocol.
pub(crate) struct ModelBody {
    pub(crate) app: App,
    pub(crate) body: Value,
    pub(crate) loaded: LoadedModel,
}

impl FromRequest<App> for ModelBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let body = parse_json(&Bytes::from_request(request, app).await?)?;
        let loaded = app.get_or_load(Fields::new(&body)?.text("model")?).await?;
        Ok(Self { app: app.clone(), body, loaded })
    }
}
