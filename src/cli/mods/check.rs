use crate::cli::{mod_source, output, startup};
use crate::mods::python::{LoadError, PythonMods};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Import Python files and folders and list their mods, or the error with its line
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Python files or package folders
    #[arg(required = true, value_name = "FILE.py|DIR")]
    files: Vec<PathBuf>,
    /// Result as JSON
    #[arg(long)]
    json: bool,
}

/// Checks every file. The exit code is 1 if one of them is invalid.
pub async fn check(args: Args) -> anyhow::Result<ExitCode> {
    let (mut results, mut is_invalid) = (Vec::new(), false);
    for file in &args.files {
        let path_text = file.display().to_string();
        match mod_source::load(file, None, PythonMods::default()).await? {
            Ok(found) => {
                let mods: Vec<_> = found.iter().map(|factory| factory.describe()).collect();
                if !args.json {
                    for found in &mods {
                        let (name, version) = (&found.name, &found.version);
                        output::print_line(format_args!("{path_text}: {name} {version} {}", found.description))?;
                    }
                }
                results.push(json!({ "file": path_text, "mods": mods, "error": null }));
            }
            Err(error) => {
                is_invalid = true;
                let line = error_line(file, &error);
                if !args.json {
                    let location = line.map_or_else(|| path_text.clone(), |line| format!("{path_text}:{line}"));
                    let (description, name) = (startup::describe_error(&error), file.file_name().unwrap_or_default());
                    let prefix = format!("{}: ", name.to_string_lossy());
                    eprintln!("{location}: {}", description.strip_prefix(&prefix).unwrap_or(&description));
                }
                let error = json!({ "message": error.to_string(), "traceback": error.traceback(), "line": line });
                results.push(json!({ "file": path_text, "mods": [], "error": error }));
            }
        }
    }
    if args.json {
        output::print_line(Value::from(results))?;
    }
    Ok(ExitCode::from(u8::from(is_invalid)))
}

/// Returns the line of an error in a file: the last one in the traceback.
fn error_line(file: &Path, error: &LoadError) -> Option<u32> {
    let name = file.file_name()?.to_string_lossy();
    let location = format!("File \"{name}\", line ");
    let (_, after) = error.traceback()?.rsplit_once(&location)?;
    after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
