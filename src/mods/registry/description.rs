use super::version::ModOrigin;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Description of a mod for its users.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ModDescription {
    /// Name used by runs.
    pub name: String,
    /// Description in one sentence.
    pub description: String,
    /// `rust` or `python`.
    pub language: String,
    /// First 12 hexadecimal digits of the version's hash for a Python mod; the release for a built-in one.
    pub version: String,
    /// Example of the configuration; `null` if the mod takes none.
    pub config: Value,
    /// Origin of the code. Lists show it with the version.
    #[serde(default, skip_serializing)]
    #[schema(ignore)]
    pub origin: ModOrigin,
    /// Description in a paragraph; may be empty.
    #[serde(default)]
    pub documentation: String,
    /// JSON schema of the configuration, with a default and a description for each field; `null` without a schema.
    #[serde(default)]
    pub schema: Value,
}
