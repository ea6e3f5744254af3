//! Extractors whose rejections are [`ApiError`]s.

use super::ApiError;
use axum::extract::{FromRequest, FromRequestParts};

/// A JSON body.
#[derive(Debug, FromRequest)]
#[from_request(via(axum::Json), rejection(ApiError))]
pub struct Json<T>(pub T);

/// The query string. Use `#[serde(deny_unknown_fields)]` on the struct, so that a misspelt field is an error.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(ApiError))]
pub struct Query<T>(pub T);

/// Parts of the path.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(ApiError))]
pub struct Path<T>(pub T);
