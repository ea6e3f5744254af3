//! The list of a mod's versions.

use crate::mods::RegisteredVersion;
use crate::server::encode_component;
use crate::ui::shell::TimeView;

/// Number of displayed digits of a version's hash.
const SHORT_HASH_CHARS: usize = 12;

/// A version in the list.
pub(super) struct VersionView {
    pub short: String,
    pub hash: String,
    pub href: String,
    pub at: Option<TimeView>,
    pub by: String,
    pub current: bool,
    pub displayed: bool,
}

impl VersionView {
    /// Returns a version of the mod `name`, whose displayed and current versions have these hashes.
    pub(super) fn new(version: RegisteredVersion, name: &str, displayed: &str, current: Option<&str>) -> Self {
        let current = current == Some(version.hash.as_str());
        Self {
            short: short_hash(&version.hash),
            href: if current {
                format!("/mods/{}", encode_component(name))
            } else {
                format!("/mods/{}?version={}", encode_component(name), version.hash)
            },
            at: version.registered_at.map(TimeView::from),
            by: version.registered_by.unwrap_or_default(),
            current,
            displayed: version.hash == displayed,
            hash: version.hash,
        }
    }
}

/// Returns the displayed digits of a hash.
pub(super) fn short_hash(hash: &str) -> String {
    hash.chars().take(SHORT_HASH_CHARS).collect()
}
