//! `/api/v1/runs/{id}/images/{sha256}`: the recorded files of images.

use crate::events::Scope;
use crate::server::extract::Path;
use crate::server::{ApiError, App, Problem};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// Content-Security-Policy of the response. A browser that opens the file as a page loads nothing and runs no script.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; sandbox";

/// Returns the file of an image of a run, which is recorded if the server was started with `--record-images`. The prompt of
/// the first event lists the images of a run with their hashes.
#[utoipa::path(get, path = "/api/v1/runs/{id}/images/{sha256}", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`"),
           ("sha256" = String, Path, description = "SHA-256 of the file, in hexadecimal")), responses(
    (status = 200, description = "The file: PNG, JPEG, GIF or BMP", content_type = "image/png"),
    (status = 304, description = "The version in If-None-Match is current"),
    (status = 404, body = Problem, description = "Unknown run, or an image that is not recorded with it")))]
pub async fn show(
    State(app): State<App>,
    scope: Scope,
    Path((id, sha256)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    let file = app.store()?.run_image(run.run_id, &sha256).await?;
    let file = file.ok_or_else(|| ApiError::not_found("image", &sha256))?;
    let etag = format!("\"{sha256}\"");
    let head = [
        (header::ETAG, etag.clone()),
        // Browsers ask again, because the run may have been deleted.
        (header::CACHE_CONTROL, "private, no-cache".to_owned()),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY.to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    if headers.get(header::IF_NONE_MATCH).is_some_and(|tags| tags == etag.as_str()) {
        return Ok((StatusCode::NOT_MODIFIED, head).into_response());
    }
    let kind = HeaderValue::from_static(media_type(&file.media_type));
    Ok((head, [(header::CONTENT_TYPE, kind)], file.data.to_vec()).into_response())
}

/// Returns the media type of an image that browsers only display, and that of binary data for all others.
fn media_type(stored: &str) -> &'static str {
    let known = ["image/png", "image/jpeg", "image/gif", "image/bmp"];
    known.into_iter().find(|known| *known == stored).unwrap_or("application/octet-stream")
}

#[cfg(test)]
mod tests {
    use super::media_type;

    #[test]
    fn only_pictures_have_their_own_media_type() {
        assert_eq!(media_type("image/png"), "image/png");
        assert_eq!(media_type("image/svg+xml"), "application/octet-stream");
        assert_eq!(media_type("text/html"), "application/octet-stream");
    }
}
