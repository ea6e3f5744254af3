//! Who may call the API: keys, of which only hashes are kept, web origins, and names of the server.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The word for pages of this machine, at any port, among the origins that may call the API.
pub const LOCALHOST: &str = "localhost";

/// Who may do what.
#[derive(Debug, Clone, Default)]
pub struct SecurityConfig {
    /// Hashes of the keys; when empty, no key is asked for.
    pub keys: Vec<KeyHash>,
    /// Hashes of keys that are good for sending traces and for nothing else.
    pub ingest_keys: Vec<KeyHash>,
    /// True if traces are accepted without a key.
    pub ingest_open: bool,
    /// Web origins whose pages may call the API; `*` for all, [`LOCALHOST`] for this machine's.
    pub cors_origins: Vec<String>,
    /// Names under which browsers may reach the server, in lower case.
    pub trusted_hosts: Vec<String>,
}

/// SHA-256 of an API key, and what its owner may do; the key itself is not kept.
#[derive(Clone)]
pub struct KeyHash {
    hash: [u8; 32],
    name: Option<String>,
    mods: bool,
}

impl KeyHash {
    /// The hash of a key without a name and without rights beyond everybody's.
    #[must_use]
    pub fn of(key: &str) -> Self {
        Self { hash: Sha256::digest(key.as_bytes()).into(), name: None, mods: false }
    }

    /// The same key, whose owner may register, switch and remove mods.
    #[must_use]
    pub fn with_mods(self) -> Self {
        Self { mods: true, ..self }
    }

    /// A line of a key file: the key, then `mods` if its owner may change mods, then `name=` and what it is called.
    ///
    /// # Errors
    /// The word that is neither.
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

    /// The hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.hash
    }

    /// Whether its owner may register, switch and remove mods.
    #[must_use]
    pub const fn may_change_mods(&self) -> bool {
        self.mods
    }

    /// A name for the key that does not give it away.
    #[must_use]
    pub fn label(&self) -> String {
        let [a, b, c, ..] = self.hash;
        self.name.clone().unwrap_or_else(|| format!("key-{a:02x}{b:02x}{c:02x}"))
    }
}

impl SecurityConfig {
    /// Whether pages of that origin may call the API.
    #[must_use]
    pub fn allows_origin(&self, origin: &str) -> bool {
        self.cors_origins
            .iter()
            .any(|allowed| allowed == "*" || allowed == origin || (allowed == LOCALHOST && is_local(origin)))
    }

    /// The one of the keys that was sent, if any. Takes the same time for every wrong key.
    #[must_use]
    pub fn known(&self, sent: &str) -> Option<&KeyHash> {
        find(self.keys.iter(), sent)
    }

    /// The same among all keys that traces may be sent with.
    #[must_use]
    pub fn known_for_ingest(&self, sent: &str) -> Option<&KeyHash> {
        find(self.ingest_keys.iter().chain(&self.keys), sent)
    }
}

fn find<'a>(keys: impl Iterator<Item = &'a KeyHash>, sent: &str) -> Option<&'a KeyHash> {
    let sent = KeyHash::of(sent);
    // Every hash is compared, so that the time does not tell which key came close.
    keys.fold(None, |found, key| if bool::from(key.hash.ct_eq(&sent.hash)) { Some(key) } else { found })
}

/// Whether an origin is a page of this machine.
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
