//! The authenticated caller with its rights.

use crate::config::{KeyHash, Rights, SecurityConfig};
use crate::engine;
use crate::events::{Scope, Tenant};
use crate::server::{ApiError, ErrorKind};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;

/// The authenticated caller; an extractor for every route that needs a key if keys are configured.
#[derive(Debug, Clone)]
pub struct Caller {
    /// A label of the key that does not reveal it; `None` without a key.
    pub label: Option<String>,
    /// Owner of the caller's runs.
    pub tenant: Option<Tenant>,
    /// Runs and other data that the caller may read and change.
    pub scope: Scope,
    /// Rights of the caller to change the server.
    pub rights: Rights,
}

impl Caller {
    /// Creates the caller for `key`; `None` if it sent no key. Without configured keys, the caller has all rights.
    #[must_use]
    pub fn new(security: &SecurityConfig, key: Option<&KeyHash>) -> Self {
        let rights = if security.keys.is_empty() { Rights::ALL } else { key.map(KeyHash::rights).unwrap_or_default() };
        Self { label: key.map(KeyHash::label), tenant: security.owner(key), scope: security.scope(key), rights }
    }

    /// Makes the caller the owner of the run that `request` starts. The label of the key becomes the user label if the
    /// request names no user.
    pub(crate) fn set_owner(&self, request: &mut engine::Request) {
        request.owner.clone_from(&self.tenant);
        if request.user_label.is_none() {
            request.user_label.clone_from(&self.label);
        }
    }

    /// Checks the right to load and unload models.
    ///
    /// # Errors
    /// 403 without it.
    pub(crate) fn require_models(&self) -> Result<(), ApiError> {
        require(self.rights.models, "load or unload models", "models")
    }

    /// Checks the right to change properties of the server.
    ///
    /// # Errors
    /// 403 without it.
    pub(crate) fn require_props(&self) -> Result<(), ApiError> {
        require(self.rights.props, "change properties of the server", "props")
    }
}

fn require(has_right: bool, action: &str, mark: &str) -> Result<(), ApiError> {
    if has_right {
        return Ok(());
    }
    let detail = format!(
        "this key may not {action}; use a key given with --admin-key, or marked `{mark}` or `admin` in the key file"
    );
    Err(ApiError::new(ErrorKind::Forbidden, detail))
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // Routes without authentication have no caller, so their handlers must not extract one.
        parts.extensions.get::<Self>().cloned().ok_or_else(|| ApiError::internal("the route does not support API keys"))
    }
}

impl<S: Sync> FromRequestParts<S> for Scope {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        Ok(Caller::from_request_parts(parts, state).await?.scope)
    }
}

/// Returns the error for keys that a route does not accept: 403 if one only permits sending traces, else 401.
pub(in crate::server) fn rejected_key(security: &SecurityConfig, sent: &[&str]) -> ApiError {
    if sent.iter().any(|sent| security.find_ingest_key(sent).is_some()) {
        return ApiError::new(ErrorKind::Forbidden, "this key only permits `POST /ingest`; use an API key");
    }
    ApiError::new(ErrorKind::Unauthorized, "unknown API key")
}
