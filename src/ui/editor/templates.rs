//! Templates of new mods.

use crate::mods::python::{TEMPLATE, TEMPLATE_NAME};

/// A mod from which a new one can be made.
pub(super) struct ModTemplate {
    pub name: &'static str,
    pub description: &'static str,
    source: &'static str,
    /// Name of the mod's function in the source.
    function: &'static str,
}

/// All templates; the first is the default.
pub(super) static TEMPLATES: [ModTemplate; 5] = [
    ModTemplate {
        name: "calm",
        description: "Changes the ends of sentences",
        source: TEMPLATE,
        function: TEMPLATE_NAME,
    },
    ModTemplate {
        name: "ban-phrase",
        description: "Removes a phrase as soon as it is complete",
        source: include_str!("../../../fixtures/mods/ban_phrase.py"),
        function: "ban_phrase",
    },
    ModTemplate {
        name: "json-prefix",
        description: "Forces the start of an answer",
        source: include_str!("../../../fixtures/mods/json_prefix.py"),
        function: "json_prefix",
    },
    ModTemplate {
        name: "temperature",
        description: "Samples conservatively when the model is certain",
        source: include_str!("../../../fixtures/mods/temperature_by_entropy.py"),
        function: "temperature_by_entropy_py",
    },
    ModTemplate {
        name: "log-top5",
        description: "Logs the model's top candidates",
        source: include_str!("../../../fixtures/mods/log_top5.py"),
        function: "log_top5",
    },
];

impl ModTemplate {
    /// Returns the template with this name, or the default.
    pub(super) fn find(name: Option<&str>) -> &'static Self {
        TEMPLATES.iter().find(|template| Some(template.name) == name).unwrap_or(&TEMPLATES[0])
    }

    /// Returns the source of a new mod with this name.
    pub(super) fn source_of(&self, mod_name: &str) -> String {
        self.source.replace(self.function, &mod_name.replace('-', "_"))
    }
}
