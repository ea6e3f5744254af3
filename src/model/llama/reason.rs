//! Extraction of llama.cpp's reason for rejecting a model from its log.

/// Lines after the reason that contain no information.
const UNINFORMATIVE: &[&str] = &["failed to load model", "error loading model", "failed to read key-value pairs"];

/// Extracts the reason from the error lines of a load.
pub fn from_log(lines: &[String]) -> String {
    let messages: Vec<&str> = lines.iter().map(|line| without_function(line)).filter(|line| !line.is_empty()).collect();
    let informative: Vec<&str> = messages
        .iter()
        .copied()
        .filter(|line| !UNINFORMATIVE.iter().any(|empty| line.trim_end_matches('.') == *empty))
        .collect();
    let mut chosen = if informative.is_empty() { messages } else { informative };
    chosen.dedup();
    if chosen.is_empty() { "no reason given".to_owned() } else { chosen.join("; ") }
}

/// Removes the function name: `llama_model_load: error loading model: missing tensor 'x'` becomes `missing tensor 'x'`.
fn without_function(line: &str) -> &str {
    let rest = match line.split_once(": ") {
        Some((function, rest)) if function.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => rest,
        _ => line,
    };
    rest.strip_prefix("error loading model: ").unwrap_or(rest).trim()
}

#[cfg(test)]
mod tests {
    use super::from_log;

    #[test]
    fn informative_line_is_the_reason() {
        let lines = |lines: &[&str]| from_log(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            lines(&[
                "llama_model_load: error loading model: missing tensor 'output.weight'",
                "llama_model_load_from_file_impl: failed to load model",
            ]),
            "missing tensor 'output.weight'"
        );
        assert_eq!(lines(&["llama_model_load_from_file_impl: failed to load model"]), "failed to load model");
        assert_eq!(lines(&[]), "no reason given");
    }
}
