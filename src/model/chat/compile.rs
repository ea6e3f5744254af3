//! Compilation of a template. minijinja's compiler recurses once per operator of an expression and once per `elif`, so
//! both are limited, and the stack has room for them.

use super::jinja_syntax::Translation;
use super::{ChatTemplateError, python};
use minijinja::Environment;

/// Maximum number of words and operators of a tag. The longest tags of known templates have some hundred.
const MAX_TAG_TOKENS: usize = 10_000;
/// Maximum number of `elif` tags.
const MAX_ELIFS: usize = 1000;
/// Stack of the compiling thread; the system only allocates the used part.
const STACK_BYTES: usize = 128 << 20;

/// Compiles a template and adds it to an environment under this name.
///
/// # Errors
/// [`ChatTemplateError::Template`].
pub(super) fn add_template(
    environment: &mut Environment<'static>,
    name: &'static str,
    translation: Translation,
) -> Result<(), ChatTemplateError> {
    let Translation { source, longest_tag, elifs, .. } = translation;
    if longest_tag > MAX_TAG_TOKENS {
        return Err(ChatTemplateError::Template(format!(
            "it has a tag with {longest_tag} words and operators; the maximum is {MAX_TAG_TOKENS}"
        )));
    }
    if elifs > MAX_ELIFS {
        return Err(ChatTemplateError::Template(format!("it has {elifs} `elif` tags; the maximum is {MAX_ELIFS}")));
    }
    let compile = || environment.add_template_owned(name, source);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, compile);
        let thread =
            thread.map_err(|error| ChatTemplateError::Template(format!("it cannot be compiled now: {error}")))?;
        let compiled = thread.join().map_err(|_| ChatTemplateError::Template("its compilation failed".into()))?;
        compiled.map_err(|error| ChatTemplateError::Template(describe_error(&error)))
    })
}

/// Returns the message of `raise_exception`, or the error with its line.
pub(super) fn describe_error(error: &minijinja::Error) -> String {
    match (error.detail(), error.line()) {
        (Some(detail), _) if python::is_raised(error) => detail.to_owned(),
        (_, Some(line)) => format!("line {line}: {error}"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use crate::model::chat::{ChatTemplate, ChatTemplateError};

    fn compile(template: &str) -> Result<(), ChatTemplateError> {
        ChatTemplate::new(Some(template), "", "").map(drop)
    }

    #[test]
    fn long_chains_are_compiled_or_rejected() {
        let sum = |operands: usize| format!("{{{{ {} }}}}", vec!["1"; operands].join(" - "));
        let branches = |count: usize| format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}b".repeat(count));
        let logic = |operands: usize| format!("{{% if {} %}}{{% endif %}}", vec!["a"; operands].join(" and "));
        for template in [sum(5000), branches(1000), logic(5000)] {
            compile(&template).unwrap();
        }
        for (template, expected) in [
            (sum(100_000), "it has a tag with 199999 words and operators; the maximum is 10000"),
            (logic(100_000), "it has a tag with 200000 words and operators; the maximum is 10000"),
            (branches(100_000), "it has 100000 `elif` tags; the maximum is 1000"),
        ] {
            let error = compile(&template).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}");
        }
    }
}
