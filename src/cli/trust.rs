//! Certificates that the commands trust over https.

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

/// Creates a client for the server at an address. Over https it trusts the certificates in the file, else the system's CA
/// certificates.
pub fn client(base: &str, authority: Option<&Path>) -> anyhow::Result<Client> {
    install_tls_provider();
    let builder = Client::builder();
    let builder = match authority {
        // The system may have no CA certificates.
        _ if !base.starts_with("https://") => builder.tls_certs_only([]),
        None => builder,
        Some(path) => builder.tls_backend_preconfigured(trusting_config(path)?),
    };
    builder.build().map_err(|error| {
        let error = anyhow::Error::new(error);
        error.context(
            "https needs CA certificates, and the system has none; pass the server's certificate with --server-ca FILE",
        )
    })
}

/// Makes *ring* the cryptography of every HTTP client of this process.
pub fn install_tls_provider() {
    // An error means that a provider is already installed.
    let _ = ring::default_provider().install_default();
}

fn trusting_config(path: &Path) -> anyhow::Result<ClientConfig> {
    let certificates_in_file = certificates("--server-ca", path)?;
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates_in_file.iter().cloned());
    let roots = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let roots = roots.with_context(|| format!("cannot use the certificates in {}", path.display()))?;
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let verifier = Arc::new(TrustedCertificates { trusted: certificates_in_file, roots });
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

/// A verifier that accepts the trusted certificates and certificates signed by them. The standard verifier rejects a
/// server's self-signed certificate that is marked as an authority, as most self-signed certificates are.
#[derive(Debug)]
struct TrustedCertificates {
    trusted: Vec<CertificateDer<'static>>,
    roots: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for TrustedCertificates {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.trusted.iter().any(|trusted| trusted == certificate) {
            return Ok(ServerCertVerified::assertion());
        }
        self.roots.verify_server_cert(certificate, intermediates, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.roots.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.roots.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.roots.supported_verify_schemes()
    }
}
