//! Access control: hashed API keys with their tenants and rights, web origins, and host names of the server.

use super::ConfigError;
use super::flags::ServerFlags;
use crate::events::{Scope, Tenant, hex};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::net::SocketAddr;
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
    pub(super) fn merge_duplicates(keys: &mut Vec<Self>) -> Result<(), ConfigError> {
        keys.sort_by_key(|key| key.hash);
        let mut merged = Ok(());
        keys.dedup_by(|key, first| {
            let is_same = key.hash == first.hash;
            if is_same {
                first.rights = first.rights.union(key.rights);
                first.ingest_only &= key.ingest_only;
                match (&first.name, key.name.take()) {
                    (Some(name), Some(other)) if *name != other => {
                        merged = Err(ConfigError::KeyNames { names: [name.clone(), other] });
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
            None => format!("key-{}", hex(&self.hash[..16])).into(),
        }
    }

    /// Returns a name for the key that does not reveal it.
    #[must_use]
    pub fn label(&self) -> String {
        self.name.clone().unwrap_or_else(|| format!("key-{}", hex(&self.hash[..3])))
    }
}

impl SecurityConfig {
    /// Returns true if pages of all origins may call the API.
    #[must_use]
    pub fn allows_any_origin(&self) -> bool {
        self.cors_origins.iter().any(|allowed| allowed == "*")
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

impl ServerFlags {
    /// Validates keys, origins and host names.
    pub(super) fn security(&self, listen: &[SocketAddr]) -> Result<SecurityConfig, ConfigError> {
        let secrets = [&self.api_keys, &self.mod_keys, &self.admin_keys, &self.ingest_keys];
        if secrets.into_iter().flatten().any(|key| key.0.is_empty()) {
            return Err(ConfigError::EmptyKey);
        }
        let mod_rights = Rights { mods: true, ..Rights::default() };
        let with_rights =
            [(&self.admin_keys, Rights::ALL), (&self.mod_keys, mod_rights), (&self.api_keys, Rights::default())];
        let mut keys: Vec<KeyHash> = with_rights
            .into_iter()
            .flat_map(|(keys, rights)| keys.iter().map(move |key| KeyHash::new(&key.0).with_rights(rights)))
            .collect();
        keys.extend(self.ingest_keys.iter().map(|key| KeyHash::for_ingest(&key.0)));
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::KeyFile { path: path.display().to_string(), source })?;
            let before = keys.len();
            let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
            for (line, text) in lines.filter(|(_, text)| !text.is_empty() && !text.starts_with('#')) {
                let path = path.display().to_string();
                keys.push(KeyHash::from_line(text).map_err(|word| ConfigError::KeyLine { path, line, word })?);
            }
            if keys.len() == before {
                return Err(ConfigError::NoKeyInFile { path: path.display().to_string() });
            }
        }
        KeyHash::merge_duplicates(&mut keys)?;
        let (ingest_keys, keys): (Vec<_>, Vec<_>) = keys.into_iter().partition(KeyHash::is_ingest_only);
        if self.allow_mod_upload && !keys.iter().any(|key| key.rights().mods) {
            return Err(ConfigError::NoModKey);
        }
        if let Some(&address) = listen.iter().find(|address| !address.ip().is_loopback()) {
            if keys.is_empty() && !self.allow_unauthenticated {
                return Err(ConfigError::Unauthenticated { address });
            }
            if self.ingest_open {
                return Err(ConfigError::IngestOpen { address });
            }
        }
        for origin in &self.cors_origins {
            let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
            if origin != "*"
                && origin != LOCALHOST
                && !rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*']))
            {
                return Err(ConfigError::Origin { origin: origin.clone() });
            }
        }
        Ok(SecurityConfig {
            keys,
            ingest_keys,
            ingest_open: self.ingest_open,
            cors_origins: self.cors_origins.clone(),
            trusted_hosts: self.trusted_hosts.iter().map(|host| host.trim().to_ascii_lowercase()).collect(),
        })
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
