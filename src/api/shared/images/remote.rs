//! Images that the server fetches from a URL, which it does only with `--allow-image-urls`.
//!
//! A client must not reach services of the server's own network in this way. So a name is resolved first, its addresses
//! are checked, and the connection goes to a checked address. Redirects are followed one by one, with the same checks.

use crate::api::shared::fields::abbreviate;
use crate::config::{ImageUrlConfig, UrlHost};
use crate::model::llama::MAX_IMAGE_BYTES;
use crate::server::{ApiError, client_tls};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, Url, header};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

/// Maximum redirects of an image.
const MAX_REDIRECTS: usize = 5;
/// Maximum time for all images of a request.
const FETCH_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time to resolve a name, and to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of all fetched images of a request.
const MAX_FETCHED_BYTES: usize = 64 << 20;

/// Permits for images that are fetched at the same time.
static FETCHES: Semaphore = Semaphore::const_new(8);

/// Parses the URL of an image, which the client sent in the field `at`.
///
/// # Errors
/// The server fetches no images, or no image can have this URL.
pub(super) fn parse(url: &str, at: &str, config: Option<&ImageUrlConfig>) -> Result<Url, ApiError> {
    let is_web = |scheme: &str| scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https");
    if !url.split_once(':').is_some_and(|(scheme, _)| is_web(scheme)) {
        let detail = format!(
            "{at}: an image must be a data URL or an http: or https: URL, got {}; send the image itself as a data URL: \
             data:image/png;base64,…",
            abbreviate(&url.into())
        );
        return Err(ApiError::invalid(at, detail));
    }
    if config.is_none() {
        return Err(not_allowed(url, at));
    }
    let parsed =
        Url::parse(url).map_err(|error| ApiError::invalid(at, format!("{at}: the URL is invalid: {error}")))?;
    check_form(&parsed).map_err(|reason| fetch_error(at, &reason))?;
    Ok(parsed)
}

/// Returns the error of a server that fetches no images.
pub(super) fn not_allowed(url: &str, at: &str) -> ApiError {
    let scheme = url.split_once(':').map_or("http", |(scheme, _)| scheme);
    let detail = format!(
        "{at}: the server does not fetch images from {scheme}: URLs; start it with --allow-image-urls, or send the image \
         itself as a data URL: data:image/png;base64,…"
    );
    ApiError::invalid(at, detail)
}

fn fetch_error(at: &str, reason: &str) -> ApiError {
    ApiError::invalid(at, format!("{at}: the image cannot be fetched: {reason}"))
}

/// Checks the parts of a URL that need no name resolution.
fn check_form(url: &Url) -> Result<(), String> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("the URL must begin with http: or https:, got {}:", url.scheme()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("the URL must have no user name and no password".into());
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err("the URL has no host".into());
    }
    Ok(())
}

/// Fetcher of the images of one request.
#[derive(Debug)]
pub(super) struct ImageFetcher<'a> {
    config: &'a ImageUrlConfig,
    deadline: Instant,
    /// Bytes that may still be fetched.
    remaining_bytes: usize,
}

impl<'a> ImageFetcher<'a> {
    pub(super) fn new(config: &'a ImageUrlConfig) -> Self {
        Self { config, deadline: Instant::now() + FETCH_TIMEOUT, remaining_bytes: MAX_FETCHED_BYTES }
    }

    /// Fetches an image, which the client sent in the field `at`.
    ///
    /// # Errors
    /// The URL leads to a private address, or the server there does not send an image in time.
    pub(super) async fn fetch(&mut self, url: Url, at: &str) -> Result<Vec<u8>, ApiError> {
        let fetch = async {
            let _permit = FETCHES.acquire().await.map_err(|error| error.to_string())?;
            let response = self.open(url).await?;
            read(response, self.remaining_bytes.min(MAX_IMAGE_BYTES)).await
        };
        let file = timeout_at(self.deadline, fetch).await.unwrap_or_else(|_| {
            Err(format!("the images of the request were not received within {} s", FETCH_TIMEOUT.as_secs()))
        });
        let file = file.map_err(|reason| fetch_error(at, &reason))?;
        self.remaining_bytes -= file.len();
        Ok(file)
    }

    /// Returns the response that the URL leads to.
    async fn open(&self, mut url: Url) -> Result<Response, String> {
        for _ in 0..=MAX_REDIRECTS {
            check_form(&url)?;
            let response = self.request(&url).await?;
            let status = response.status();
            if !status.is_redirection() {
                return if status.is_success() { Ok(response) } else { Err(format!("the server answered {status}")) };
            }
            let target = response.headers().get(header::LOCATION).and_then(|target| target.to_str().ok());
            let target = target.ok_or_else(|| format!("the server answered {status} without a target"))?;
            url = url.join(target).map_err(|error| format!("the target of a redirect is invalid: {error}"))?;
        }
        Err(format!("there are more than {MAX_REDIRECTS} redirects"))
    }

    /// Sends a request to a checked address of the URL's host.
    async fn request(&self, url: &Url) -> Result<Response, String> {
        let addresses = self.addresses(url).await?;
        let client = client(url.host_str().unwrap_or_default(), &addresses)?;
        let request = client.get(url.clone()).header(header::ACCEPT, "image/png, image/jpeg, image/*;q=0.8");
        request.send().await.map_err(|error| format!("the connection failed: {}", error.without_url()))
    }

    /// Returns the addresses of the URL's host to which the server may connect.
    async fn addresses(&self, url: &Url) -> Result<Vec<SocketAddr>, String> {
        let host = url.host_str().unwrap_or_default();
        let port = url.port_or_known_default().unwrap_or(0);
        // The URL has an IPv6 address in brackets.
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let found = timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((name, port))).await;
        let is_listed = self.config.private_hosts.iter().any(|listed| is_named(listed, host, port));
        let usable = |address: &SocketAddr| is_listed || is_public(address.ip());
        let addresses: Vec<SocketAddr> =
            found.map_or_else(|_| Vec::new(), |found| found.into_iter().flatten().filter(usable).collect());
        if addresses.is_empty() {
            // The same for both: a client must not learn which names exist in the server's own network.
            return Err(format!(
                "the host {host} is unknown or has no public address; for a private host start the server with \
                 --image-url-hosts {host}:{port}, or send the image itself as a data URL"
            ));
        }
        Ok(addresses)
    }
}

fn is_named(listed: &UrlHost, host: &str, port: u16) -> bool {
    listed.host.eq_ignore_ascii_case(host) && listed.port.is_none_or(|listed| listed == port)
}

/// Creates a client that connects only to these addresses, follows no redirects, and ignores proxies, which would resolve
/// the name again.
fn client(host: &str, addresses: &[SocketAddr]) -> Result<Client, String> {
    let tls = client_tls().map_err(|error| error.to_string())?;
    let builder = Client::builder().no_proxy().redirect(Policy::none()).connect_timeout(CONNECT_TIMEOUT);
    let builder = builder.no_gzip().no_zstd().resolve_to_addrs(host, addresses).tls_backend_preconfigured(tls);
    builder.build().map_err(|error| error.to_string())
}

/// Reads an image of up to `max` bytes.
async fn read(mut response: Response, max: usize) -> Result<Vec<u8>, String> {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if !(kind.is_empty() || kind.starts_with("image/") || kind == "application/octet-stream") {
        return Err(format!("the server sent {kind}, not an image"));
    }
    let too_large = || format!("the image has more than {max} bytes; send a smaller one");
    if response.content_length().is_some_and(|length| length > max as u64) {
        return Err(too_large());
    }
    let mut file = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| "the connection ended within the image".to_owned())? {
        if file.len() + chunk.len() > max {
            return Err(too_large());
        }
        file.extend_from_slice(&chunk);
    }
    Ok(file)
}

/// Returns true for an address on the public internet.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => address.to_ipv4_mapped().map_or_else(|| is_public_v6(address), is_public_v4),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = matches!(
        (a, b, c),
        // This network, shared addresses, protocol assignments, 6to4 relays, benchmarks, multicast and reserved.
        (0 | 224.., ..) | (100, 64..=127, _) | (192, 0, 0) | (192, 88, 99) | (198, 18 | 19, _)
    );
    // Azure's wire server, which answers only inside of Azure.
    let is_wire_server = address.octets() == [168, 63, 129, 16];
    !(is_special
        || is_wire_server
        || address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation())
}

/// Returns true for global unicast addresses without those that contain an IPv4 address (Teredo, 6to4).
fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, ..] = address.segments();
    a & 0xe000 == 0x2000 && a != 0x2002 && !(a == 0x2001 && (b < 0x200 || b == 0xdb8)) && a != 0x3fff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_permitted() {
        for public in
            ["1.1.1.1", "100.63.0.1", "168.63.129.17", "172.32.0.1", "198.20.0.1", "2606:4700::1111", "::ffff:8.8.8.8"]
        {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for private in [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.8.0.1",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "192.0.0.1",
            "192.0.2.1",
            "192.168.0.1",
            "198.18.0.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "fc00::1",
            "fd00::1",
            "fd00:ec2::254",
            "::ffff:168.63.129.16",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
    }

    #[test]
    fn urls_are_checked_before_they_are_fetched() {
        let config = ImageUrlConfig { private_hosts: Vec::new() };
        let parsed = |url: &str| parse(url, "p", Some(&config)).map_err(|error| error.problem().detail);
        assert_eq!(parsed("HTTPS://example.org/a.png").unwrap().as_str(), "https://example.org/a.png");
        for (url, expected) in [
            ("file:///etc/passwd", "must be a data URL or an http: or https: URL"),
            ("aGk=", "must be a data URL or an http: or https: URL"),
            ("http://", "the URL is invalid"),
            ("http://ann:x@example.org/", "must have no user name"),
        ] {
            let error = parsed(url).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let error = parse("https://example.org/a.png", "p", None).unwrap_err().problem().detail;
        assert!(error.contains("from https: URLs; start it with --allow-image-urls"), "{error}");
    }

    #[tokio::test]
    async fn unknown_and_private_hosts_have_the_same_error() {
        let config = ImageUrlConfig { private_hosts: Vec::new() };
        let mut details = Vec::new();
        for host in ["missing.invalid", "localhost", "10.0.0.1"] {
            let url = Url::parse(&format!("http://{host}/a.png")).unwrap();
            let error = ImageFetcher::new(&config).fetch(url, "p").await.unwrap_err();
            details.push(error.problem().detail.replace(host, "HOST"));
        }
        assert!(details[0].contains("the host HOST is unknown or has no public address"), "{}", details[0]);
        assert!(details.iter().all(|detail| *detail == details[0]), "{details:?}");
    }

    #[test]
    fn listed_hosts_match_with_their_port() {
        let listed = |port| UrlHost { host: "Images.local".into(), port };
        assert!(is_named(&listed(None), "images.local", 80));
        assert!(is_named(&listed(Some(8080)), "images.local", 8080));
        assert!(!is_named(&listed(Some(8080)), "images.local", 80));
        assert!(!is_named(&listed(None), "other.local", 80));
    }
}
