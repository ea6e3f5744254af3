//! The parts of the page: the mod with its versions, and the form with the source.

use super::versions::{VersionView, short_hash};
use crate::mods::{ModInfo, ModOrigin, ModSource};
use crate::server::mods::VersionList;
use crate::server::{Caller, encode_component};
use crate::ui::mods::{Field, fields};
use crate::ui::shell::runs_href;

/// An existing or deleted mod, and the displayed version.
pub(super) struct StoredMod {
    pub name: String,
    pub description: String,
    /// Documentation and fields of the configuration of a built-in mod.
    pub documentation: String,
    pub fields: Vec<Field>,
    /// `built in`, `a file`, `uploaded`, `removed`.
    pub origin: &'static str,
    pub enabled: bool,
    /// True if the caller may disable and enable the mod.
    pub may_switch: bool,
    /// True if the caller may remove the mod.
    pub may_remove: bool,
    pub versions: Vec<VersionView>,
    /// The displayed version; empty for a mod without source.
    pub hash: String,
    pub short_hash: String,
    pub is_current: bool,
    /// Reason why the mod is not loaded; empty if it is.
    pub load_problem: String,
    /// Path of the mod's page.
    pub href: String,
    pub try_href: String,
    pub runs_href: String,
}

/// The form with the source of the displayed version or of a new mod.
pub(super) struct SourceForm {
    /// Path that the form is sent to.
    pub href: String,
    /// Empty for a new mod.
    pub name: String,
    /// Default of the name field, if the mod can be saved under another name.
    pub new_name: String,
    /// The displayed version; empty for a new mod.
    pub hash: String,
    /// The version that runs use; empty for a new and for a deleted mod.
    pub current: String,
    /// Other fields of the displayed version, as JSON.
    pub previous: String,
    /// The source, if it is a single text.
    pub source: String,
    /// The files of a package.
    pub files: Vec<FileView>,
}

/// A file of a package.
pub(super) struct FileView {
    pub path: String,
    pub text: String,
}

impl StoredMod {
    /// `info` is `None` for a deleted mod; `hash` is the displayed version.
    pub(super) fn new(
        list: VersionList,
        hash: String,
        info: Option<ModInfo>,
        is_loaded: bool,
        caller: &Caller,
    ) -> Self {
        let VersionList { name, current, versions } = list;
        let current = current.as_deref();
        let has_info = info.is_some();
        let enabled = info.as_ref().is_none_or(|info| info.enabled);
        let origin = match info.as_ref().map(|info| info.current.origin) {
            Some(ModOrigin::Builtin) => "built in",
            Some(ModOrigin::File) => "a file",
            Some(ModOrigin::Uploaded) => "uploaded",
            None => "removed",
        };
        let (known, problem) = info.map(|info| (info.description, info.problem)).unwrap_or_default();
        let problem = problem.map(|problem| problem.message);
        let load_problem =
            problem.unwrap_or_else(|| "uploads of mods are disabled, or its import has not ended yet".to_owned());
        Self {
            origin,
            enabled,
            may_switch: has_info && caller.rights.mods,
            may_remove: origin == "uploaded" && caller.rights.mods,
            versions: versions.into_iter().map(|one| VersionView::new(one, &name, &hash, current)).collect(),
            short_hash: short_hash(&hash),
            is_current: current == Some(hash.as_str()),
            hash,
            load_problem: if has_info && !is_loaded { load_problem } else { String::new() },
            fields: fields(&known.schema),
            description: known.description,
            documentation: known.documentation,
            href: mod_href(&name),
            try_href: if is_loaded { format!("/playground?mod={}", encode_component(&name)) } else { String::new() },
            runs_href: runs_href(&format!("mod:{name}")),
            name,
        }
    }
}

impl SourceForm {
    /// Returns the form of a mod without versions.
    pub(super) fn new(href: String, name: &str, source: ModSource) -> Self {
        let (source, files) = match source {
            ModSource::Text(text) => (text, Vec::new()),
            ModSource::Files(files) => {
                (String::new(), files.into_iter().map(|(path, text)| FileView { path, text }).collect())
            }
        };
        Self {
            href,
            name: name.to_owned(),
            new_name: String::new(),
            hash: String::new(),
            current: String::new(),
            previous: "{}".to_owned(),
            source,
            files,
        }
    }
}

/// Returns the path of a mod's page.
pub(super) fn mod_href(name: &str) -> String {
    format!("/mods/{}", encode_component(name))
}
