//! TLS of the connections that the server opens.

use rustls_platform_verifier::Verifier;
use std::sync::{Arc, OnceLock};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

/// Returns the TLS settings with the CA certificates of the system. The first call reads them, which takes a while.
///
/// # Errors
/// The library supports no TLS version.
pub(crate) fn client_tls() -> Result<ClientConfig, rustls::Error> {
    static CONFIG: OnceLock<Result<ClientConfig, rustls::Error>> = OnceLock::new();
    let read = || {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let builder = match Verifier::new(provider) {
            Ok(verifier) => builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)),
            // Plain http also works on a system without CA certificates.
            Err(_) => builder.with_root_certificates(RootCertStore::empty()),
        };
        Ok(builder.with_no_client_auth())
    };
    CONFIG.get_or_init(read).clone()
}
