//! Serves style sheet, scripts and icon from the binary.
//!
//! The URL of every file starts with a hash of all files, so that relative imports between modules stay within one
//! version and browsers can cache files indefinitely. Debug builds read the files from the source tree at run time and
//! disable caching.

use super::error;
use crate::server::ApiError;
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

const CACHE_FOREVER: &str = "public, max-age=31536000, immutable";

/// Returns the hash of all assets, as used in their URLs.
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

/// Returns the URLs of a script and of the modules that it loads first, for preloading. Modules imported later are not
/// included.
pub(super) fn modules(script: &str) -> Vec<String> {
    let mut names = vec![script.to_owned()];
    let mut read = 0;
    while let Some(name) = names.get(read).cloned() {
        for import in imports(&name) {
            if !names.contains(&import) {
                names.push(import);
            }
        }
        read += 1;
    }
    names.iter().map(|name| format!("/assets/{}/{name}", version())).collect()
}

/// Returns the text of a file.
///
/// # Panics
/// The file does not exist. All names are constants or imports of scripts, which tests check.
pub(super) fn text(name: &str) -> String {
    let file = Assets::get(name).unwrap_or_else(|| panic!("src/ui/assets has no file {name}"));
    String::from_utf8_lossy(&file.data).into_owned()
}

/// Returns a script without indentation and lines of comments, a fifth smaller when compressed. Lines keep their numbers,
/// so that errors in a browser name the lines of the source.
pub(super) fn without_comments(script: &str) -> String {
    let mut out = String::with_capacity(script.len());
    let mut is_comment = false;
    for line in script.lines().map(str::trim_start) {
        is_comment |= line.starts_with("/*");
        if !is_comment && !line.starts_with("//") {
            out.push_str(line);
        }
        is_comment &= !line.contains("*/");
        out.push('\n');
    }
    out
}

/// Returns true for the dashboard's own scripts. Vendored files are served unchanged.
fn is_own_script(path: &str) -> bool {
    std::path::Path::new(path).extension().is_some_and(|kind| kind == "js") && !path.starts_with("vendor/")
}

/// Returns the files that a module imports statically.
pub(super) fn imports(module: &str) -> Vec<String> {
    let Some(file) = Assets::get(module) else { return Vec::new() };
    let text = String::from_utf8_lossy(&file.data);
    // An import of several names has its file on its last line.
    let is_import = |line: &&str| line.starts_with("import ") || line.starts_with("} from ");
    let targets = text.lines().filter(is_import).filter_map(|line| line.split('\'').nth(1));
    targets.map(|target| resolve(module, target)).collect()
}

/// Resolves `./file` or `../file` relative to a module.
pub(super) fn resolve(module: &str, target: &str) -> String {
    let mut folder: Vec<&str> = module.split('/').collect();
    folder.pop();
    for part in target.split('/') {
        match part {
            "." => {}
            ".." => drop(folder.pop()),
            part => folder.push(part),
        }
    }
    folder.join("/")
}

/// `GET /assets/{version}/{path}`: returns one file. Another version returns the same file without caching: an open
/// page of an earlier version may still request a style sheet, or a module that has not changed.
pub(super) async fn file(Path((requested, path)): Path<(String, String)>, headers: HeaderMap) -> Response {
    match Assets::get(&path) {
        Some(file) => serve(&path, &file, &headers, requested == version()),
        None => error::render(&headers, &ApiError::not_found("asset", path)),
    }
}

/// `GET /favicon.ico`, which browsers request automatically.
pub(super) async fn icon() -> Redirect {
    Redirect::permanent(&format!("/assets/{}/icon.svg", version()))
}

fn serve(path: &str, file: &EmbeddedFile, headers: &HeaderMap, is_current: bool) -> Response {
    let tag = format!("\"{:016x}\"", xxh3_64(&file.metadata.sha256_hash()));
    let cache_control = if is_current && !cfg!(debug_assertions) { CACHE_FOREVER } else { "no-cache" };
    let described = [(header::ETAG, tag.clone()), (header::CACHE_CONTROL, cache_control.to_owned())];
    let cached_tags = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    if cached_tags
        .is_some_and(|cached_tags| cached_tags.split(',').any(|one| one.trim().trim_start_matches("W/") == tag))
    {
        return (StatusCode::NOT_MODIFIED, described).into_response();
    }
    let body = if is_own_script(path) {
        Body::from(without_comments(&String::from_utf8_lossy(&file.data)))
    } else {
        Body::from(file.data.clone().into_owned())
    };
    (described, [(header::CONTENT_TYPE, content_type(path))], body).into_response()
}

fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, extension)| extension) {
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("json") => "application/json",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::{Assets, imports, is_own_script, resolve, without_comments};
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;
    use std::path::Path;

    #[test]
    fn modules_import_only_existing_files() {
        for name in Assets::iter().filter(|name| name.ends_with(".js") && !name.starts_with("vendor/")) {
            let text = String::from_utf8(Assets::get(&name).unwrap().data.into_owned()).unwrap();
            let later = text.split("import('").skip(1).map(|rest| resolve(&name, rest.split('\'').next().unwrap()));
            for target in imports(&name).into_iter().chain(later) {
                assert!(Assets::get(&target).is_some(), "{name} imports {target}");
            }
        }
    }

    #[test]
    fn replay_preloads_required_modules() {
        let modules = super::modules("replay/page.js");
        let has = |name: &str| modules.iter().any(|module| module.ends_with(name));
        assert!(
            has("/replay/page.js") && has("/replay/run-columns.js") && has("/dom.js") && has("/shell.js"),
            "{modules:?}"
        );
        assert!(!has("/replay/attention.js") && !has("/replay/live.js") && !has("/replay/fold.js"), "{modules:?}");
    }

    #[test]
    fn scripts_lose_comments_and_indentation_but_keep_their_lines() {
        let script = "// One.\n/** Two. */\nlet x = 'a//b';\n/**\n * Three.\n */\nif (x) {\n  f(); // four\n}\n";
        assert_eq!(without_comments(script), "\n\nlet x = 'a//b';\n\n\n\nif (x) {\nf(); // four\n}\n");
        for name in Assets::iter().filter(|name| is_own_script(name)) {
            let text = String::from_utf8(Assets::get(&name).unwrap().data.into_owned()).unwrap();
            for line in without_comments(&text).lines() {
                let has_even = line.matches('`').count().is_multiple_of(2);
                assert!(has_even, "{name}: a template literal of several lines would lose its indentation: {line}");
            }
            for line in text.lines().filter(|line| line.trim_start().starts_with(['*', '/'])) {
                let after = line.split_once("*/").map_or("", |(_, after)| after);
                assert!(after.is_empty(), "{name}: code after a comment would be removed: {line}");
            }
        }
    }

    #[test]
    fn size_of_replay_scripts_is_limited() {
        let prefix = format!("/assets/{}/", super::version());
        let preloaded: Vec<_> =
            super::modules("replay/page.js").iter().map(|url| url.trim_start_matches(&prefix).to_owned()).collect();
        let size = packed_size(&preloaded);
        assert!(size <= 40 * 1024, "the modules that the page of a run loads first have {size} bytes compressed");
        let later: Vec<_> = Assets::iter()
            .map(std::borrow::Cow::into_owned)
            .filter(|name| name.starts_with("replay/") && !preloaded.contains(name))
            .collect();
        let size = packed_size(&later);
        assert!(size <= 22 * 1024, "the modules that the replay loads on demand have {size} bytes compressed");
    }

    /// Returns the size of scripts, as they are served and compressed together.
    fn packed_size(names: &[String]) -> usize {
        let all: String = names.iter().map(|name| without_comments(&super::text(name))).collect();
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(all.as_bytes()).unwrap();
        encoder.finish().unwrap().len()
    }

    #[test]
    fn vendored_files_match_their_manifest() {
        let folder = "vendor/codemirror-6";
        let read = |name: &str| Assets::get(&format!("{folder}/{name}")).unwrap();
        let manifest = String::from_utf8(read("VENDOR.toml").data.into_owned()).unwrap();
        let hash = read("codemirror.js").metadata.sha256_hash();
        let hash = crate::events::hex(&hash);
        assert!(
            manifest.contains(&format!("sha256 = \"{hash}\"")),
            "codemirror.js differs from the hash in VENDOR.toml: {hash}"
        );
        assert!(!read("LICENSE").data.is_empty());
    }

    #[test]
    fn style_sheets_of_every_page_exist_and_have_a_limited_size() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("templates");
        let sheets = |template: &Path| {
            let html = std::fs::read_to_string(template).unwrap();
            let links = html.split("<link rel=\"stylesheet\" href=\"{{ shell.assets }}/").skip(1);
            links.map(|rest| super::text(rest.split('"').next().unwrap())).collect::<String>()
        };
        let shared = sheets(&folder.join("base.html"));
        assert!(!shared.is_empty());
        for entry in std::fs::read_dir(&folder).unwrap() {
            let template = entry.unwrap().path();
            if template.extension().is_some_and(|kind| kind == "html") {
                let css = shared.clone() + &sheets(&template);
                let size = zstd::encode_all(css.as_bytes(), 12).unwrap().len();
                assert!(size < 11 * 1024, "{} has {size} bytes of style sheets, compressed", template.display());
            }
        }
        let exported: String = super::super::export::STYLE_SHEETS.into_iter().map(super::text).collect();
        assert_eq!(
            exported,
            shared + &sheets(&folder.join("replay.html")),
            "an exported run has the style sheets of a replay"
        );
    }
}
