//! Access control: hashed API keys with their tenants and rights, web origins, and host names of the server.

use crate::events::{Scope, Tenant};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use subtle::ConstantTimeEq;

/// Name in the allowed origins that permits pages of this machine at any port.
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

/// Rights beyond running models and reading one's own runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a word of the key file")]
pub struct Rights {
    /// Seeing and changing the runs of all tenants; includes the other rights.
    pub admin: bool,
    /// Uploading, enabling, disabling and removing mods.
    pub mods: bool,
    /// Loading and unloading models.
    pub models: bool,
    /// Changing the server's properties and the scales of its adapters.
    pub props: bool,
}

impl Rights {
    /// All rights.
    pub const ALL: Self = Self { admin: true, mods: true, models: true, props: true };

    /// Returns the rights of both.
    const fn union(self, other: Self) -> Self {
        Self {
            admin: self.admin || other.admin,
            mods: self.mods || other.mods,
            models: self.models || other.models,
            props: self.props || other.props,
        }
    }
}

/// SHA-256 of an API key, with its name and its rights; the key itself is not stored.
#[derive(Clone)]
pub struct KeyHash {
    hash: [u8; 32],
    name: Option<String>,
    rights: Rights,
    /// True if the key only permits sending traces.
    ingest_only: bool,
}

impl KeyHash {
    /// Hashes a key without a name and without further rights.
    #[must_use]
    pub fn new(key: &str) -> Self {
        let hash = Sha256::digest(key.as_bytes()).into();
        Self { hash, name: None, rights: Rights::default(), ingest_only: false }
    }

    /// Returns the hash of a key that only permits sending traces.
    #[must_use]
    pub fn for_ingest(key: &str) -> Self {
        Self { ingest_only: true, ..Self::new(key) }
    }

    /// Sets the rights of the key.
    #[must_use]
    pub fn with_rights(self, rights: Rights) -> Self {
        Self { rights, ..self }
    }

    /// Parses a line of a key file: the key, then the words `admin`, `mods`, `models`, `props`, `ingest` and `name=NAME` in
    /// any order. A key with `ingest` has no rights.
    ///
    /// # Errors
    /// The first unknown word.
    pub(super) fn from_line(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let mut key = Self::new(words.next().unwrap_or_default());
        for word in words {
            match word.strip_prefix("name=") {
                Some(name) if !name.is_empty() && name.len() <= 64 => key.name = Some(name.to_owned()),
                Some(_) => return Err(word.to_owned()),
                None => match word {
                    "admin" => key.rights = Rights::ALL,
                    "mods" => key.rights.mods = true,
                    "models" => key.rights.models = true,
                    "props" => key.rights.props = true,
                    "ingest" => key.ingest_only = true,
                    _ => return Err(word.to_owned()),
                },
            }
        }
        if key.ingest_only {
            key.rights = Rights::default();
        }
        Ok(key)
    }

    /// Merges keys that are set several times, e.g. by a flag and in the key file: such a key has the rights of all of them
    /// and the name of one.
    ///
    /// # Errors
    /// A key has two names.
    pub(super) fn merge_duplicates(keys: &mut Vec<Self>) -> Result<(), super::ConfigError> {
        keys.sort_by_key(|key| key.hash);
        let mut merged = Ok(());
        keys.dedup_by(|key, first| {
            let is_same = key.hash == first.hash;
            if is_same {
                first.rights = first.rights.union(key.rights);
                first.ingest_only &= key.ingest_only;
                match (&first.name, key.name.take()) {
                    (Some(name), Some(other)) if *name != other => {
                        merged = Err(super::ConfigError::KeyNames { names: [name.clone(), other] });
                    }
                    (None, name) => first.name = name,
                    (Some(_), _) => {}
                }
            }
            is_same
        });
        merged
    }

    /// Returns the hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.hash
    }

    /// Returns its rights.
    #[must_use]
    pub const fn rights(&self) -> Rights {
        self.rights
    }

    /// Returns true if the key only permits sending traces.
    #[must_use]
    pub(super) const fn is_ingest_only(&self) -> bool {
        self.ingest_only
    }

    /// Returns the tenant that the key belongs to: its name, or a name made from its hash.
    #[must_use]
    pub fn tenant(&self) -> Tenant {
        match &self.name {
            Some(name) => name.as_str().into(),
            None => self.hash[..16].iter().fold("key-".to_owned(), |text, byte| format!("{text}{byte:02x}")).into(),
        }
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
        self.lists_origin(origin) || self.cors_origins.iter().any(|allowed| allowed == "*")
    }

    /// Returns true if pages of this origin may also use the login of the dashboard: it is listed, not only permitted by
    /// `*`.
    #[must_use]
    pub fn lists_origin(&self, origin: &str) -> bool {
        self.cors_origins.iter().any(|allowed| allowed == origin || (allowed == LOCALHOST && is_local(origin)))
    }

    /// Returns the tenant of all keys, if there is exactly one. A key that only sends traces counts if it has a name.
    #[must_use]
    pub fn only_tenant(&self) -> Option<Tenant> {
        let named = self.ingest_keys.iter().filter(|key| key.name.is_some());
        let tenants: BTreeSet<Tenant> = self.keys.iter().chain(named).map(KeyHash::tenant).collect();
        if tenants.len() == 1 { tenants.into_iter().next() } else { None }
    }

    /// Returns the owner of runs that are recorded for `key`. Runs sent without a key, or with an ingest key without a name,
    /// belong to the only tenant, or to none if there are several.
    #[must_use]
    pub fn owner(&self, key: Option<&KeyHash>) -> Option<Tenant> {
        match key {
            Some(key) if !key.ingest_only || key.name.is_some() => Some(key.tenant()),
            _ => self.only_tenant(),
        }
    }

    /// Returns the scope of a client with `key`. Runs without an owner are visible to admins, and to the tenant if it is the
    /// only one.
    #[must_use]
    pub fn scope(&self, key: Option<&KeyHash>) -> Scope {
        if self.keys.is_empty() || key.is_some_and(|key| key.rights.admin) {
            return Scope::All;
        }
        let tenant = self.owner(key);
        Scope::Owned { includes_unowned: tenant.is_none() || tenant == self.only_tenant(), tenant }
    }

    /// Finds the key that a client sent. Takes the same time for every wrong key.
    #[must_use]
    pub fn find_key(&self, key_text: &str) -> Option<&KeyHash> {
        find(self.keys.iter(), key_text)
    }

    /// Finds a key among all keys that permit sending traces.
    #[must_use]
    pub fn find_ingest_key(&self, key_text: &str) -> Option<&KeyHash> {
        find(self.ingest_keys.iter().chain(&self.keys), key_text)
    }
}

fn find<'a>(keys: impl Iterator<Item = &'a KeyHash>, key_text: &str) -> Option<&'a KeyHash> {
    let key_hash = KeyHash::new(key_text);
    // Compares every hash, so that the duration does not depend on the keys.
    keys.fold(None, |found, key| if bool::from(key.hash.ct_eq(&key_hash.hash)) { Some(key) } else { found })
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
