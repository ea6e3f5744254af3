//! A server with the routes of the Hugging Face Hub and with faults that tests choose.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

/// The commit of the repository, unless [`Faults::commit`] replaces it.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The only repository that exists.
pub const REPOSITORY: &str = "user/some-model.GGUF";

/// Deviations from a working server.
#[derive(Debug, Default)]
pub struct Faults {
    /// Number of bytes after which each of the next responses ends.
    pub cuts: Vec<usize>,
    /// Status of the next responses.
    pub statuses: Vec<u16>,
    /// Status and text of the next responses to requests for bytes, after the cut ones.
    pub replies: Vec<(u16, &'static str)>,
    /// Header that identifies the version of the file in the next responses, instead of an `ETag`.
    pub versions: Vec<(&'static str, &'static str)>,
    /// True if the server sends bytes that do not match the checksum.
    pub is_corrupt: bool,
    /// Token that requests must have; others get a 401.
    pub token: Option<String>,
    /// Entries of the list of files besides the real ones.
    pub additional_files: Vec<Value>,
    /// Files on a page of the list; `None` for all.
    pub page_size: Option<usize>,
    /// Commit in place of [`COMMIT`].
    pub commit: Option<String>,
}

#[derive(Debug)]
struct Shared {
    files: Vec<(String, Vec<u8>)>,
    faults: Mutex<Faults>,
    /// A line for each request: method, host, path, range, with the condition of the range if there is one, and token.
    requests: Mutex<Vec<String>>,
    port: u16,
}

/// A running server.
#[derive(Debug)]
pub struct Hub(Arc<Shared>);

impl Hub {
    /// Starts a server with these files. It has its own thread, because tests block while processes use it.
    pub fn start(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::new(Shared {
            files: files.iter().map(|(path, bytes)| ((*path).to_owned(), bytes.clone())).collect(),
            faults: Mutex::default(),
            requests: Mutex::default(),
            port: listener.local_addr().unwrap().port(),
        });
        let app = Router::new().fallback(respond).with_state(Arc::clone(&shared));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                axum::serve(listener, app).await.unwrap();
            });
        });
        Self(shared)
    }

    /// Returns its address.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.0.port)
    }

    /// Sets the faults of the next requests.
    pub fn set(&self, faults: Faults) {
        *self.0.faults.lock().unwrap() = faults;
    }

    /// Returns the requests since the last call.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.requests.lock().unwrap())
    }
}

/// Returns the SHA-256 of bytes as hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

async fn respond(State(hub): State<Arc<Shared>>, request: Request) -> Response {
    let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("-");
    let (host, token) = (header("host"), header("authorization"));
    let mut range = header("range").to_owned();
    if let Some(condition) = request.headers().get("if-range") {
        range = format!("{range} if {}", condition.to_str().unwrap());
    }
    let host = host.split(':').next().unwrap();
    let escaped = request.uri().path();
    let line = format!("{} {host} {escaped} {range} {token}", request.method());
    hub.requests.lock().unwrap().push(line);
    let path = &*escaped.replace("%20", " ");
    let mut faults = hub.faults.lock().unwrap();
    if !faults.statuses.is_empty() {
        return StatusCode::from_u16(faults.statuses.remove(0)).unwrap().into_response();
    }
    let is_download = request.method() == "GET" && (path.starts_with("/storage/") || path.starts_with("/plain/"));
    if is_download && faults.cuts.is_empty() && !faults.replies.is_empty() {
        let (status, text) = faults.replies.remove(0);
        return (StatusCode::from_u16(status).unwrap(), text).into_response();
    }
    // The files are on another host, which must not receive the token.
    if let Some(path) = path.strip_prefix("/storage/") {
        return send(&hub, &mut faults, path, request.headers());
    }
    if faults.token.as_ref().is_some_and(|expected| token != format!("Bearer {expected}")) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let commit = faults.commit.as_deref().unwrap_or(COMMIT);
    let branches = json!([{"name": "other", "targetCommit": "f".repeat(40)}, {"name": "main", "targetCommit": commit}]);
    if path == format!("/api/models/{REPOSITORY}/refs") {
        axum::Json(json!({"branches": branches, "tags": []})).into_response()
    } else if path == format!("/api/models/{REPOSITORY}/tree/{commit}") {
        let file = |(path, bytes): &(String, Vec<u8>)| {
            json!({"type": "file", "path": path, "size": bytes.len(), "oid": "a".repeat(40),
                   "lfs": {"oid": sha256(bytes), "size": bytes.len(), "pointerSize": 134}})
        };
        let mut files: Vec<Value> = faults.additional_files.clone();
        files.extend(hub.files.iter().map(file));
        let query = request.uri().query().unwrap_or_default();
        let from = query.split_once("cursor=").map_or(0, |(_, cursor)| cursor.parse::<usize>().unwrap());
        let to = from + faults.page_size.unwrap_or(files.len());
        let is_last = to >= files.len();
        let page: Vec<Value> = files.into_iter().skip(from).take(to - from).collect();
        let mut response = axum::Json(page).into_response();
        if !is_last {
            let next = format!("<http://127.0.0.1:{}{path}?recursive=true&cursor={to}>; rel=\"next\"", hub.port);
            response.headers_mut().insert("link", next.parse().unwrap());
        }
        response
    } else if let Some(path) = path.strip_prefix(&format!("/{REPOSITORY}/resolve/")) {
        let path = path.split_once('/').unwrap().1;
        let Some((_, bytes)) = hub.files.iter().find(|(name, _)| name == path) else {
            return StatusCode::NOT_FOUND.into_response();
        };
        let location = format!("http://localhost:{}/storage/{}", hub.port, path.replace(' ', "%20"));
        let linked = [("x-linked-etag", format!("\"{}\"", sha256(bytes))), ("x-linked-size", bytes.len().to_string())];
        (StatusCode::FOUND, [("location", location)], linked).into_response()
    } else if let Some(path) = path.strip_prefix("/plain/") {
        send(&hub, &mut faults, path, request.headers())
    } else {
        StatusCode::NOT_FOUND.into_response()
    }
}

fn send(hub: &Shared, faults: &mut Faults, path: &str, headers: &HeaderMap) -> Response {
    let Some((_, bytes)) = hub.files.iter().find(|(name, _)| name == path) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let mut bytes = bytes.clone();
    let etag = format!("\"{}\"", &sha256(&bytes)[..32]);
    let (version, value) = if faults.versions.is_empty() { ("etag", &*etag) } else { faults.versions.remove(0) };
    if faults.is_corrupt {
        *bytes.last_mut().unwrap() ^= 1;
    }
    let size = bytes.len();
    let is_current = headers.get("if-range").is_none_or(|condition| condition == value);
    let range = headers.get("range").filter(|_| is_current).map(|range| range.to_str().unwrap().to_owned());
    let from = range.as_ref().map_or(0, |range| range["bytes=".len()..].trim_end_matches('-').parse().unwrap());
    let rest = bytes.split_off(from);
    let length = rest.len();
    let end = if faults.cuts.is_empty() { length } else { faults.cuts.remove(0).min(length) };
    let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let content_range = [("content-range", format!("bytes {from}-{}/{size}", size - 1))];
    let content_range = range.is_some().then_some(content_range).into_iter().flatten();
    let mut response = Response::builder().status(status).header("content-length", length).header(version, value);
    for (name, value) in content_range {
        response = response.header(name, value);
    }
    let sent = Ok(Bytes::copy_from_slice(&rest[..end]));
    // The delay lets the connection send the bytes before it is cut.
    let cut = (end < length).then_some(async {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        Err(std::io::Error::other("cut"))
    });
    let cut = futures::stream::iter(cut).then(|error| error);
    response.body(Body::from_stream(futures::stream::iter([sent]).chain(cut))).unwrap()
}
