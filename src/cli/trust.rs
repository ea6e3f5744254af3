//! Certificates that the command line trusts over https.

use crate::config::certificates;
use anyhow::Context;
use reqwest::Client;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

/// Creates a client for the server at an address. Over https it trusts the certificates in the file, else the system's
/// authorities.
pub fn client(base: &str, authority: Option<&Path>) -> anyhow::Result<Client> {
    // An error means that a provider is already installed.
    let _ = ring::default_provider().install_default();
    let builder = Client::builder();
    let builder = match authority {
        // The system may have no certificates of authorities.
        _ if !base.starts_with("https://") => builder.tls_certs_only([]),
        None => builder,
        Some(path) => builder.tls_backend_preconfigured(trusting(path)?),
    };
    builder.build().map_err(|error| {
        let error = anyhow::Error::new(error);
        error.context(
            "https needs certificates of authorities, and the system has none; give the server's with --server-ca FILE",
        )
    })
}

fn trusting(path: &Path) -> anyhow::Result<ClientConfig> {
    let known = certificates("--server-ca", path)?;
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(known.iter().cloned());
    let roots = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let roots = roots.with_context(|| format!("cannot use the certificates in {}", path.display()))?;
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let verifier = Arc::new(TrustedCertificates { trusted: known, roots });
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

/// A verifier that accepts the trusted certificates themselves and certificates signed by them. The standard verifier
/// rejects a self-signed certificate of a server that is marked as an authority, as most of them are.
#[derive(Debug)]
struct TrustedCertificates {
    trusted: Vec<CertificateDer<'static>>,
    roots: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for TrustedCertificates {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.trusted.iter().any(|trusted| trusted == shown) {
            return Ok(ServerCertVerified::assertion());
        }
        self.roots.verify_server_cert(shown, between, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.roots.verify_tls12_signature(message, shown, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.roots.verify_tls13_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.roots.supported_verify_schemes()
    }
}
