use super::config_file::ConfigFile;
use super::output;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};
use std::fmt::Write as _;
use std::process::ExitCode;
use toml::Value;

/// Print the flags of `thunder serve` as a configuration file, with the values that apply now
///
/// A flag at its default is a comment. Secrets are not printed.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Prints the configuration.
pub fn config(file: Option<&ConfigFile>) -> anyhow::Result<ExitCode> {
    let words = ["thunder".into(), "serve".into()];
    let command = super::command();
    let without_file = command.clone().try_get_matches_from(&words)?;
    let with_file = match file {
        Some(file) => command.clone().try_get_matches_from(file.add_to(&words, &command, &without_file)?)?,
        None => without_file,
    };
    let (Some(serve), Some(matches)) = (command.find_subcommand("serve"), with_file.subcommand_matches("serve")) else {
        anyhow::bail!("the command serve is missing");
    };
    let mut text = String::new();
    let mut heading = None;
    for flag in serve.get_arguments().filter(|flag| flag.get_long().is_some_and(|name| name != "help")) {
        if flag.is_hide_set() || flag.is_global_set() {
            continue;
        }
        if heading != Some(flag.get_help_heading()) {
            heading = Some(flag.get_help_heading());
            writeln!(text, "## {}\n", flag.get_help_heading().unwrap_or("General"))?;
        }
        write_flag(&mut text, flag, matches, file)?;
    }
    output::print(text)?;
    Ok(ExitCode::SUCCESS)
}

fn write_flag(text: &mut String, flag: &Arg, matches: &ArgMatches, file: Option<&ConfigFile>) -> std::fmt::Result {
    let id = flag.get_id().as_str();
    let name = flag.get_long().unwrap_or(id);
    for line in flag.get_help().map(ToString::to_string).unwrap_or_default().lines() {
        writeln!(text, "# {line}")?;
    }
    let source = match matches.value_source(id) {
        Some(ValueSource::CommandLine) => file.map(|file| file.path().display().to_string()),
        Some(ValueSource::EnvVariable) => flag.get_env().map(|name| name.to_string_lossy().into_owned()),
        _ => None,
    };
    let values: Vec<String> = matches
        .get_raw(id)
        .map(|values| values.map(|value| value.to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    let value = match (&source, flag.is_hide_env_values_set()) {
        (Some(source), true) => return writeln!(text, "# {name} = (secret of {source})\n"),
        _ if !flag.get_action().takes_values() => Value::Boolean(matches.get_flag(id)).to_string(),
        _ if values.is_empty() => return writeln!(text, "# {name} =\n"),
        _ => match <[String; 1]>::try_from(values) {
            Ok([single]) => literal(&single),
            Err(several) => format!("[{}]", several.iter().map(|value| literal(value)).collect::<Vec<_>>().join(", ")),
        },
    };
    match source {
        Some(source) => writeln!(text, "{name} = {value} # {source}\n"),
        None => writeln!(text, "# {name} = {value}\n"),
    }
}

/// Returns a value in TOML's notation: a number if it is written exactly like the text, else a string.
fn literal(text: &str) -> String {
    let integer = text.parse().ok().map(Value::Integer);
    let number = integer.or_else(|| text.parse().ok().filter(|number: &f64| number.is_finite()).map(Value::Float));
    let exact = number.filter(|number| number.to_string() == text);
    exact.unwrap_or_else(|| Value::String(text.to_owned())).to_string()
}

#[cfg(test)]
mod tests {
    use super::literal;

    #[test]
    fn only_exact_numbers_are_numbers() {
        for number in ["0", "-1", "8192", "0.8", "-0.5", "1.0"] {
            assert_eq!(literal(number), number);
        }
        for text in ["1.10", "007", "inf", "nan", "+5", "1e3", ".5", "-0", "12345678901234567890", "a\"b", ""] {
            let line = format!("value = {}", literal(text));
            let table: toml::Table = line.parse().unwrap();
            assert_eq!(table["value"].as_str(), Some(text), "{line}");
        }
    }
}
