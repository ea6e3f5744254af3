//! Names of the files of a split model.

/// The name of a part of a split model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitName<'a> {
    /// The path up to the number.
    pub prefix: &'a str,
    /// Number of this part, from 1.
    pub index: u32,
    /// Number of parts.
    pub count: u32,
}

/// Parses the path `PREFIX-00001-of-00003.gguf`.
#[must_use]
pub fn split_name(path: &str) -> Option<SplitName<'_>> {
    let (rest, count) = path.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, index) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let is_number = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse().ok())?
    };
    Some(SplitName { prefix, index: number(index)?, count: number(count)? })
}
