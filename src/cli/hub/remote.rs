//! Requests to the hub, and to other file servers by URL.

use super::is_safe_path;
use super::selection::{FileSelector, HasPath, is_gguf};
use crate::cli::trust::install_tls_provider;
use crate::config::flags::Secret;
use crate::events::hex;
use crate::model::{SplitName, split_name};
use crate::server::root_cause;
use anyhow::{Context as _, anyhow, bail};
use reqwest::header::HeaderMap;
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url, redirect};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::time::Duration;

/// Maximum time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum time without a byte from the server.
const READ_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum size of a list of files or branches, all pages together.
const MAX_LIST_BYTES: usize = 32 << 20;
/// Maximum pages of a list of files. The hub sends up to 1000 files on a page.
const MAX_LIST_PAGES: usize = 1000;

/// A server to download models from.
#[derive(Debug)]
pub struct Remote {
    http: Client,
    /// Does not follow redirects, because a file's checksum is in the header of the redirect.
    direct: Client,
    endpoint: Url,
    token: Option<Secret>,
}

/// A version of a repository.
#[derive(Debug)]
pub struct RemoteVersion {
    /// 40 hexadecimal digits.
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

/// A file that can be downloaded.
#[derive(Debug, Clone)]
pub struct RemoteFile {
    /// Path below the version's folder; safe to append.
    pub path: String,
    /// The name of the blob: a hash as hexadecimal digits.
    pub hash: String,
    pub size: Option<u64>,
    pub sha256: Option<String>,
    pub url: Url,
    pub validators: Validators,
}

/// The identification of a file's version by its server, in headers. Without any, every version is accepted.
#[derive(Debug, Clone, Default)]
pub struct Validators {
    etag: Option<String>,
    last_modified: Option<String>,
}

impl Validators {
    fn from_headers(headers: &HeaderMap) -> Self {
        let value = |name| text(headers, name).map(str::to_owned);
        Self { etag: value("etag"), last_modified: value("last-modified") }
    }

    /// Returns true if a response belongs to another version.
    pub fn differ(&self, headers: &HeaderMap) -> bool {
        let found = Self::from_headers(headers);
        match (&self.etag, &found.etag) {
            (Some(expected), Some(found)) => opaque(expected) != opaque(found),
            _ => {
                matches!((&self.last_modified, &found.last_modified), (Some(expected), Some(found)) if expected != found)
            }
        }
    }

    /// Returns the value of `If-Range`, for which a weak `ETag` is not valid.
    fn if_range(&self) -> Option<&str> {
        match &self.etag {
            Some(etag) => Some(etag.as_str()).filter(|etag| !etag.starts_with("W/")),
            None => self.last_modified.as_deref(),
        }
    }
}

impl HasPath for RemoteFile {
    fn path(&self) -> &str {
        &self.path
    }
}

#[derive(Debug, Deserialize)]
struct Refs {
    branches: Vec<Branch>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Branch {
    name: String,
    target_commit: String,
}

#[derive(Debug, Deserialize)]
struct TreeEntry {
    r#type: String,
    path: String,
    oid: Option<String>,
    size: Option<u64>,
    lfs: Option<LfsPointer>,
}

#[derive(Debug, Deserialize)]
struct LfsPointer {
    oid: String,
    size: Option<u64>,
}

impl Remote {
    /// Creates a client for the server at `endpoint`.
    pub fn new(endpoint: Url, token: Option<Secret>) -> anyhow::Result<Self> {
        install_tls_provider();
        let build = |redirects: redirect::Policy| {
            let builder = Client::builder().redirect(redirects).connect_timeout(CONNECT_TIMEOUT);
            // Ranges and checksums refer to the uncompressed file.
            let builder = builder.read_timeout(READ_TIMEOUT).no_gzip().no_zstd();
            builder.build().context("https needs CA certificates, and the system has none; install ca-certificates")
        };
        Ok(Self {
            http: build(redirect::Policy::limited(10))?,
            direct: build(redirect::Policy::none())?,
            endpoint,
            token,
        })
    }

    /// Returns the files of a repository's branch main, else of its first branch.
    pub async fn files_of_repository(&self, repository: &str) -> anyhow::Result<RemoteVersion> {
        let mut list = ListReader { remote: self, repository, bytes: 0 };
        let (refs, _) = list.read::<Refs>(self.url(&["api", "models", repository, "refs"])).await?;
        let valid = || refs.branches.iter().filter(|branch| is_commit(&branch.target_commit));
        let branch = valid().find(|branch| branch.name == "main").or_else(|| valid().next());
        let commit = branch.with_context(|| format!("{repository} has no branch"))?.target_commit.to_ascii_lowercase();
        let mut url = self.url(&["api", "models", repository, "tree", &commit]);
        url.set_query(Some("recursive=true"));
        let mut entries: Vec<TreeEntry> = Vec::new();
        let mut next = Some(url);
        for _ in 0..MAX_LIST_PAGES {
            let Some(url) = next else { break };
            let (page, following) = list.read::<Vec<TreeEntry>>(url).await?;
            entries.extend(page);
            next = following;
        }
        if next.is_some() {
            bail!("the list of {repository} has more than {MAX_LIST_PAGES} pages");
        }
        let file = |entry: TreeEntry| {
            let (sha256, size) = match entry.lfs {
                Some(lfs) => (Some(lfs.oid), lfs.size.or(entry.size)),
                None => (None, entry.size),
            };
            let hash = sha256.clone().or(entry.oid).filter(|hash| is_hash(hash));
            if entry.r#type != "file" || !is_safe_path(&entry.path) {
                return None;
            }
            let url = self.url(&[repository, "resolve", &commit, &entry.path]);
            let validators = Validators::default();
            Some(RemoteFile { path: entry.path, hash: hash?, size, sha256, url, validators })
        };
        let files = entries.into_iter().filter_map(file).collect();
        Ok(RemoteVersion { commit, files })
    }

    /// Returns the file at a URL, with the other parts of a split model.
    pub async fn files_of_url(&self, url: &str) -> anyhow::Result<RemoteVersion> {
        let parsed = Url::parse(url).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let first = parsed.with_context(|| format!("--model-url must be an http or https URL, got \"{url}\""))?;
        let name = file_name(&first).filter(|name| is_safe_path(name) && is_gguf(name));
        let name = name.with_context(|| format!("--model-url must end with the name of a GGUF file, got \"{url}\""))?;
        let names = match split_name(&name) {
            None => vec![name],
            Some(SplitName { prefix, index: 1, count }) if count > 0 => {
                (1..=count).map(|index| format!("{prefix}-{index:05}-of-{count:05}.gguf")).collect()
            }
            Some(_) => bail!("--model-url must name the first part of a split model, got \"{url}\""),
        };
        let mut files = Vec::new();
        for path in names {
            let mut url = first.clone();
            // Unlike segments, a path keeps the escapes of the name.
            if let Some((folder, _)) = first.path().rsplit_once('/') {
                url.set_path(&format!("{folder}/{path}"));
            }
            files.push(self.file_of_url(path, url).await?);
        }
        let commit = digest(files.iter().map(|file| file.hash.as_str()))[..40].to_owned();
        Ok(RemoteVersion { commit, files })
    }

    async fn file_of_url(&self, path: String, url: Url) -> anyhow::Result<RemoteFile> {
        let head = |client: &Client| self.authorize(client.request(Method::HEAD, url.clone()), &url).send();
        let mut response = head(&self.direct).await.map_err(|error| unreachable(&url, &error))?;
        let linked = response.headers().contains_key("x-linked-etag");
        if response.status().is_redirection() && !linked {
            response = head(&self.http).await.map_err(|error| unreachable(&url, &error))?;
        }
        if !response.status().is_redirection() {
            response = self.accept(response, &path)?;
        }
        let headers = response.headers();
        let (etag, size) = if linked { ("x-linked-etag", "x-linked-size") } else { ("etag", "content-length") };
        let (etag, size) = (text(headers, etag).map(opaque), text(headers, size));
        let sha256 = etag.filter(|etag| etag.len() == 64 && is_hash(etag)).map(str::to_owned);
        // The headers of a redirect do not describe the file.
        let validators = if linked { Validators::default() } else { Validators::from_headers(headers) };
        let version = etag.map_or_else(
            || format!("{} {}", validators.last_modified.as_deref().unwrap_or_default(), size.unwrap_or_default()),
            str::to_owned,
        );
        let hash = sha256.clone().unwrap_or_else(|| digest([url.as_str(), version.as_str()].into_iter()));
        let size = size.and_then(|size| size.parse().ok());
        Ok(RemoteFile { path, hash, size, sha256, url, validators })
    }

    /// Requests the bytes of a file from an offset, or the whole file if it has changed.
    pub async fn bytes(&self, file: &RemoteFile, offset: u64) -> reqwest::Result<Response> {
        let mut request = self.authorize(self.http.get(file.url.clone()), &file.url);
        if offset > 0 {
            request = request.header("range", format!("bytes={offset}-"));
            if let Some(validator) = file.validators.if_range() {
                request = request.header("if-range", validator);
            }
        }
        request.send().await
    }

    /// Returns the response unless its status is an error.
    pub fn accept(&self, response: Response, subject: &str) -> anyhow::Result<Response> {
        let url = response.url();
        let host = url.host_str().unwrap_or_default();
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(anyhow!(
                "{subject} does not exist on {host}, or {}",
                match self.token {
                    _ if url.origin() != self.endpoint.origin() => "is not public",
                    None => "is private or gated; set a token with --hf-token or HF_TOKEN",
                    Some(_) => "the token of --hf-token or HF_TOKEN has no access to it",
                }
            )),
            StatusCode::NOT_FOUND => Err(anyhow!("{subject} does not exist on {host}")),
            status => Err(anyhow!("{host} answered {status} for {subject}")),
        }
    }

    /// Adds the token, but only for the hub, since a URL may lead anywhere. The HTTP client drops it when a redirect leads to
    /// another host.
    fn authorize(&self, request: RequestBuilder, url: &Url) -> RequestBuilder {
        match &self.token {
            Some(token) if url.origin() == self.endpoint.origin() => request.bearer_auth(token.reveal()),
            _ => request,
        }
    }

    /// Returns a URL below the endpoint. The parts may contain slashes.
    fn url(&self, parts: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(parts.iter().flat_map(|part| part.split('/')));
        }
        url
    }
}

/// A reader of lists of a repository, which may have several pages.
struct ListReader<'a> {
    remote: &'a Remote,
    repository: &'a str,
    /// Bytes of all pages so far.
    bytes: usize,
}

impl ListReader<'_> {
    /// Reads a list. Returns the URL of its next page, too; `None` on the last one.
    async fn read<T: DeserializeOwned>(&mut self, url: Url) -> anyhow::Result<(T, Option<Url>)> {
        let Self { remote, repository, .. } = self;
        let sent = remote.authorize(remote.http.get(url.clone()), &url).send().await;
        let mut response = remote.accept(sent.map_err(|error| unreachable(&url, &error))?, repository)?;
        let next = text(response.headers(), "link").and_then(|links| next_page(response.url(), links));
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(&url, &error))? {
            body.extend_from_slice(&chunk);
            self.bytes += chunk.len();
            if self.bytes > MAX_LIST_BYTES {
                bail!("the list of {repository} is larger than {} MiB", MAX_LIST_BYTES >> 20);
            }
        }
        let list = serde_json::from_slice(&body)
            .with_context(|| format!("{url} is not a hub: its list of {repository} is invalid"))?;
        Ok((list, next))
    }
}

/// Returns the URL of the next page in the header `Link` of the page `current`, such as `<https://…>; rel="next"`.
fn next_page(current: &Url, links: &str) -> Option<Url> {
    let is_next = |parameter: &str| matches!(parameter.trim(), "rel=\"next\"" | "rel=next");
    // A URL may contain commas and semicolons, but no `>`.
    links.split('<').find_map(|link| {
        let (url, parameters) = link.split_once('>')?;
        let parameters = parameters.split(',').next()?;
        parameters.split(';').any(is_next).then(|| current.join(url).ok()).flatten()
    })
}

/// Returns the name of the cached repository for a URL, and the selector of its file. No repository on a hub can have this
/// name.
pub fn select_url(url: &str) -> (String, FileSelector) {
    let name = Url::parse(url).ok().and_then(|url| file_name(&url)).unwrap_or_default();
    let stem: String = name.trim_end_matches(".gguf").chars().filter(char::is_ascii_alphanumeric).take(40).collect();
    (format!("url/{stem}_{}", &digest(std::iter::once(url))[..12]), FileSelector::File(name))
}

/// Returns true for a Git commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hash(text)
}

fn is_hash(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn digest<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    texts.for_each(|text| {
        hash.update(text);
        hash.update([0]);
    });
    hex(&hash.finalize())
}

fn file_name(url: &Url) -> Option<String> {
    // Escapes such as %2F stay, so the name has no slash.
    Some(url.path_segments()?.next_back()?.to_owned())
}

/// Returns an `ETag` without the mark of a weak one and without its quotes.
fn opaque(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Describes a failed request by its innermost cause.
pub fn unreachable(url: &Url, error: &reqwest::Error) -> anyhow::Error {
    anyhow!("{} does not answer: {}", url.host_str().unwrap_or_default(), root_cause(error))
}

#[cfg(test)]
mod tests {
    use super::{Url, next_page};

    #[test]
    fn next_page_is_found_among_links() {
        let current: Url = "https://hub.example/api/models/a/tree/main?recursive=true".parse().unwrap();
        for (links, next) in [
            (r#"<https://hub.example/api/x?cursor=a,b;c>; rel="next""#, Some("https://hub.example/api/x?cursor=a,b;c")),
            (
                r#"<https://hub.example/1>; rel="first", </api/x?cursor=a>; rel=next"#,
                Some("https://hub.example/api/x?cursor=a"),
            ),
            (r#"<https://hub.example/1>; rel="first""#, None),
            ("rel=next", None),
            ("", None),
        ] {
            assert_eq!(next_page(&current, links).as_ref().map(Url::as_str), next, "{links}");
        }
    }
}
