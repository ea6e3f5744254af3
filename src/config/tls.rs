//! TLS: the server's certificate and key, loaded and validated at start and when a service is reloaded.

use super::ConfigError;
use clap::Args;
use memchr::memmem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

const CERTIFICATE: &str = "--ssl-cert-file";
const KEY: &str = "--ssl-key-file";
/// The ALPN name of the protocol served over TLS.
const PROTOCOL: &[u8] = b"http/1.1";

/// Files of the server's certificate and key.
#[derive(Debug, Clone, Args)]
pub struct TlsFlags {
    /// Private key of the server's certificate, in PEM without a passphrase; together with --ssl-cert-file it enables
    /// HTTPS
    #[arg(long, env = "THUNDER_SSL_KEY_FILE", value_name = "FILE")]
    ssl_key_file: Option<PathBuf>,
    /// Certificate of the server in PEM, followed by its intermediate certificates
    #[arg(long, env = "THUNDER_SSL_CERT_FILE", value_name = "FILE")]
    ssl_cert_file: Option<PathBuf>,
}

/// A certificate with its key, as a TLS server configuration.
#[derive(Debug, Clone)]
pub struct TlsConfig(Arc<ServerConfig>);

impl TlsConfig {
    /// Returns the configuration for accepting connections.
    #[must_use]
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0)
    }
}

/// The reason why certificate and key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// One flag is set without the other.
    #[error("{given} needs {missing}; set both, or neither for plain HTTP")]
    MissingPart {
        /// The flag that is set.
        given: &'static str,
        /// The flag that is missing.
        missing: &'static str,
    },
    /// The file does not contain the expected item.
    #[error("{flag}: {path} contains no {item}; expected PEM, that is text with a line '-----BEGIN {label}-----'")]
    MissingItem {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: String,
        /// The expected item.
        item: &'static str,
        /// PEM label of the expected item.
        label: &'static str,
    },
    /// The key is encrypted.
    #[error("{KEY}: the key in {path} has a passphrase; remove it with 'openssl pkey -in FILE -out PLAIN'")]
    Encrypted {
        /// The path.
        path: String,
    },
    /// The file is damaged.
    #[error("{flag}: {path} is not valid PEM: {reason}")]
    Damaged {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: String,
        /// The error.
        reason: String,
    },
    /// The key does not belong to the certificate.
    #[error(
        "the key in {key} does not match the first certificate in {certificate}; {KEY} and {CERTIFICATE} must be a pair"
    )]
    KeyMismatch {
        /// Path of the key.
        key: String,
        /// Path of the certificate.
        certificate: String,
    },
    /// Any other error of TLS.
    #[error("certificate {certificate} and key {key} cannot be used: {reason}")]
    Unusable {
        /// Path of the key.
        key: String,
        /// Path of the certificate.
        certificate: String,
        /// The error.
        reason: String,
    },
}

impl TlsFlags {
    /// Returns the certificate with its key; `None` for plain HTTP.
    pub(super) fn config(&self) -> Result<Option<TlsConfig>, ConfigError> {
        match (&self.ssl_cert_file, &self.ssl_key_file) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(TlsError::MissingPart { given: CERTIFICATE, missing: KEY }.into()),
            (None, Some(_)) => Err(TlsError::MissingPart { given: KEY, missing: CERTIFICATE }.into()),
            (Some(certificate), Some(key)) => tls(certificate, key).map(Some),
        }
    }
}

fn tls(certificate: &Path, key: &Path) -> Result<TlsConfig, ConfigError> {
    let chain = certificates(CERTIFICATE, certificate)?;
    let secret = private_key(key)?;
    let (key, certificate) = (key.display().to_string(), certificate.display().to_string());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret));
    let mut config = config.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => TlsError::KeyMismatch { key, certificate },
        other => TlsError::Unusable { key, certificate, reason: other.to_string() },
    })?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(TlsConfig(Arc::new(config)))
}

/// Returns the certificates in a file; one or more.
///
/// # Errors
/// The file cannot be read, is not PEM, or holds no certificate.
pub fn certificates(flag: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let text = read(flag, path)?;
    let path_text = || path.display().to_string();
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| TlsError::Damaged { flag, path: path_text(), reason: error.to_string() })?;
    if found.is_empty() {
        return Err(TlsError::MissingItem { flag, path: path_text(), item: "certificate", label: "CERTIFICATE" }.into());
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, ConfigError> {
    let text = read(KEY, path)?;
    let path_text = || path.display().to_string();
    let has = |mark: &str| memmem::find(&text, mark.as_bytes()).is_some();
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        match error {
            pem::Error::NoItemsFound if has("ENCRYPTED PRIVATE KEY") => TlsError::Encrypted { path: path_text() },
            pem::Error::NoItemsFound => {
                TlsError::MissingItem { flag: KEY, path: path_text(), item: "private key", label: "PRIVATE KEY" }
            }
            // The traditional encrypted format has a header inside the key's section.
            _ if has("Proc-Type: 4,ENCRYPTED") => TlsError::Encrypted { path: path_text() },
            other => TlsError::Damaged { flag: KEY, path: path_text(), reason: other.to_string() },
        }
        .into()
    })
}

fn read(flag: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    std::fs::read(path).map_err(|source| ConfigError::File { flag, path: path.display().to_string(), source })
}
