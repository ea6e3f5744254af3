//! Names of mods.

/// Maximum length of a name, in characters.
const MAX_NAME_CHARS: usize = 64;

/// Checks the name of a mod.
///
/// # Errors
/// The rule, as the rest of a sentence about the name, and the name.
pub fn check_mod_name(name: &str) -> Result<(), String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let len = name.chars().count();
    if (1..=MAX_NAME_CHARS).contains(&len) && name.chars().all(is_allowed) && !name.starts_with(['.', '-']) {
        return Ok(());
    }
    let shown: String = name.chars().take(MAX_NAME_CHARS).collect();
    Err(format!(
        "must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' and '.', and begin with a letter, a digit or '_', got \
         {shown:?}"
    ))
}
