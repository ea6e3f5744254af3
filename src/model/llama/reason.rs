//! What llama.cpp said when it refused a model, as one sentence for a person.

/// Lines that follow the reason and say nothing of their own.
const EMPTY: &[&str] = &["failed to load model", "error loading model", "failed to read key-value pairs"];

/// The reason out of the error lines of a load.
pub fn reason(lines: &[String]) -> String {
    let bare: Vec<&str> = lines.iter().map(|line| without_function(line)).filter(|line| !line.is_empty()).collect();
    let telling: Vec<&str> =
        bare.iter().copied().filter(|line| !EMPTY.iter().any(|empty| line.trim_end_matches('.') == *empty)).collect();
    let mut chosen = if telling.is_empty() { bare } else { telling };
    chosen.dedup();
    if chosen.is_empty() { "it gives no reason".to_owned() } else { chosen.join("; ") }
}

/// `llama_model_load: error loading model: missing tensor 'x'` without what comes before the tensor.
fn without_function(line: &str) -> &str {
    let rest = match line.split_once(": ") {
        Some((function, rest)) if function.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => rest,
        _ => line,
    };
    rest.strip_prefix("error loading model: ").unwrap_or(rest).trim()
}

#[cfg(test)]
mod tests {
    use super::reason;

    #[test]
    fn the_line_that_tells_something_is_the_reason() {
        let lines = |lines: &[&str]| reason(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            lines(&[
                "llama_model_load: error loading model: missing tensor 'output.weight'",
                "llama_model_load_from_file_impl: failed to load model",
            ]),
            "missing tensor 'output.weight'"
        );
        assert_eq!(lines(&["llama_model_load_from_file_impl: failed to load model"]), "failed to load model");
        assert_eq!(lines(&[]), "it gives no reason");
    }
}
