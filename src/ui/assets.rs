//! Style sheet, scripts and icon, out of the binary.
//!
//! Every file has an address that begins with a hash over all of them, so relative imports between modules stay
//! within one version and a browser may keep the files for ever. In a debug build the files are read from the
//! source tree at run time, and nothing is kept.

use super::error;
use crate::api::ApiError;
use axum::body::Body;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use rust_embed::{EmbeddedFile, RustEmbed};
use std::fmt::Write as _;
use std::sync::OnceLock;
use xxhash_rust::xxh3::xxh3_64;

#[derive(RustEmbed)]
#[folder = "src/ui/assets/"]
struct Assets;

const FOREVER: &str = "public, max-age=31536000, immutable";

/// The hash over all assets, as it stands in their addresses.
pub(super) fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let mut names: Vec<_> = Assets::iter().collect();
        names.sort();
        let mut all = String::new();
        for name in names {
            if let Some(file) = Assets::get(&name) {
                // Writing to a String cannot fail.
                let _ = writeln!(all, "{name} {:?}", file.metadata.sha256_hash());
            }
        }
        format!("{:016x}", xxh3_64(all.as_bytes()))
    })
}

/// The modules of the replay component, for pages to load at once instead of import by import.
pub(super) fn replay_modules() -> Vec<String> {
    let mut names: Vec<_> =
        Assets::iter().filter(|name| name.starts_with("replay/") && name != "replay/page.js").collect();
    names.sort();
    names.iter().map(|name| format!("/assets/{}/{name}", version())).collect()
}

/// `GET /assets/{version}/{path}`: one file. A version that is not this binary's gets the file all the same, since
/// an open page of the version before may still ask, but nobody keeps it.
pub(super) async fn file(Path((asked, path)): Path<(String, String)>, headers: HeaderMap) -> Response {
    match Assets::get(&path) {
        Some(file) => serve(&path, &file, &headers, asked == version()),
        None => error::render(&headers, &ApiError::not_found("asset", path)),
    }
}

/// `GET /favicon.ico`, which browsers ask for by themselves.
pub(super) async fn icon() -> Redirect {
    Redirect::permanent(&format!("/assets/{}/icon.svg", version()))
}

fn serve(path: &str, file: &EmbeddedFile, headers: &HeaderMap, current: bool) -> Response {
    let tag = format!("\"{:016x}\"", xxh3_64(&file.metadata.sha256_hash()));
    let keep = if current && !cfg!(debug_assertions) { FOREVER } else { "no-cache" };
    let described = [(header::ETAG, tag.clone()), (header::CACHE_CONTROL, keep.to_owned())];
    let known = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    if known.is_some_and(|known| known.split(',').any(|one| one.trim().trim_start_matches("W/") == tag)) {
        return (StatusCode::NOT_MODIFIED, described).into_response();
    }
    let body = Body::from(file.data.clone().into_owned());
    (described, [(header::CONTENT_TYPE, content_type(path))], body).into_response()
}

fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, extension)| extension) {
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::Assets;

    #[test]
    fn modules_import_only_files_that_are_there() {
        for name in Assets::iter().filter(|name| name.ends_with(".js")) {
            let file = Assets::get(&name).unwrap();
            let text = String::from_utf8(file.data.into_owned()).unwrap();
            for line in text.lines().filter(|line| line.starts_with("import ")) {
                let target = line.split('\'').nth(1).unwrap();
                let mut folder: Vec<&str> = name.split('/').collect();
                folder.pop();
                for part in target.split('/') {
                    match part {
                        "." => {}
                        ".." => drop(folder.pop()),
                        part => folder.push(part),
                    }
                }
                assert!(Assets::get(&folder.join("/")).is_some(), "{name} imports {target}");
            }
        }
    }

    #[test]
    fn the_style_sheet_stays_small() {
        let css = Assets::get("app.css").unwrap().data;
        let packed = zstd::encode_all(&css[..], 12).unwrap();
        assert!(packed.len() < 12 * 1024, "app.css is {} bytes packed", packed.len());
    }
}
