//! Access control: hashed API keys, web origins, and host names of the server.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The name, among the allowed origins, for pages of this machine at any port.
pub const LOCALHOST: &str = "localhost";

/// Keys, origins and host names of the server.
#[derive(Debug, Clone, Default)]
pub struct SecurityConfig {
    /// Hashes of the API keys; if empty, no key is required.
    pub keys: Vec<KeyHash>,
    /// Hashes of keys that only permit sending traces.
    pub ingest_keys: Vec<KeyHash>,
    /// True if traces are accepted without a key.
    pub ingest_open: bool,
    /// Web origins whose pages may call the API; `*` for all, [`LOCALHOST`] for this machine's.
    pub cors_origins: Vec<String>,
    /// Names under which browsers may reach the server, in lower case.
    pub trusted_hosts: Vec<String>,
}

/// SHA-256 of an API key, and the rights of its owner; the key itself is not stored.
#[derive(Clone)]
pub struct KeyHash {
    hash: [u8; 32],
    name: Option<String>,
    mods: bool,
}

impl KeyHash {
    /// Hashes a key without a name and without further rights.
    #[must_use]
    pub fn of(key: &str) -> Self {
        Self { hash: Sha256::digest(key.as_bytes()).into(), name: None, mods: false }
    }

    /// Adds the right to register, switch and remove mods.
    #[must_use]
    pub fn with_mods(self) -> Self {
        Self { mods: true, ..self }
    }

    /// Parses a line of a key file: the key, then optionally `mods` for the right to change mods, then `name=` and a
    /// label.
    ///
    /// # Errors
    /// The unknown word.
    pub(super) fn from_line(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let mut key = Self::of(words.next().unwrap_or_default());
        for word in words {
            match word.strip_prefix("name=") {
                Some(name) if !name.is_empty() && name.len() <= 64 => key.name = Some(name.to_owned()),
                None if word == "mods" => key.mods = true,
                _ => return Err(word.to_owned()),
            }
        }
        Ok(key)
    }

    /// Returns the hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.hash
    }

    /// Returns true if its owner may register, switch and remove mods.
    #[must_use]
    pub const fn may_change_mods(&self) -> bool {
        self.mods
    }

    /// Returns a name for the key that does not reveal it.
    #[must_use]
    pub fn label(&self) -> String {
        let [a, b, c, ..] = self.hash;
        self.name.clone().unwrap_or_else(|| format!("key-{a:02x}{b:02x}{c:02x}"))
    }
}

impl SecurityConfig {
    /// Returns true if pages of this origin may call the API.
    #[must_use]
    pub fn allows_origin(&self, origin: &str) -> bool {
        self.cors_origins
            .iter()
            .any(|allowed| allowed == "*" || allowed == origin || (allowed == LOCALHOST && is_local(origin)))
    }

    /// Finds the key that a client sent. Takes the same time for every wrong key.
    #[must_use]
    pub fn known(&self, sent: &str) -> Option<&KeyHash> {
        find(self.keys.iter(), sent)
    }

    /// Finds a key among all keys that permit sending traces.
    #[must_use]
    pub fn known_for_ingest(&self, sent: &str) -> Option<&KeyHash> {
        find(self.ingest_keys.iter().chain(&self.keys), sent)
    }
}

fn find<'a>(keys: impl Iterator<Item = &'a KeyHash>, sent: &str) -> Option<&'a KeyHash> {
    let sent = KeyHash::of(sent);
    // Comparing every hash keeps the time independent of the keys.
    keys.fold(None, |found, key| if bool::from(key.hash.ct_eq(&sent.hash)) { Some(key) } else { found })
}

/// Returns true if an origin is a page of this machine.
fn is_local(origin: &str) -> bool {
    let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    rest.is_some_and(|authority| {
        let host = match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => authority,
        };
        matches!(host, "localhost" | "127.0.0.1" | "[::1]")
    })
}

impl std::fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.label())
    }
}
