use crate::cli::startup;
use crate::mods::python::{LoadError, PythonMods};
use crate::mods::{Factory, SourceText, Sourced};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Imports Python files and tells which mods they hold, or what is wrong and in which line
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The files
    #[arg(required = true, value_name = "FILE.py")]
    files: Vec<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Checks every file; 1 when one of them cannot be a mod.
pub async fn check(args: Args) -> anyhow::Result<ExitCode> {
    let (mut results, mut wrong) = (Vec::new(), false);
    for file in &args.files {
        let shown = file.display().to_string();
        match load(file).await? {
            Ok((_, found)) => {
                let mods: Vec<_> = found.iter().map(|factory| factory.describe()).collect();
                if !args.json {
                    for found in &mods {
                        println!("{shown}: {} {} {}", found.name, found.version, found.description);
                    }
                }
                results.push(json!({ "file": shown, "mods": mods, "error": null }));
            }
            Err(error) => {
                wrong = true;
                let line = line_of(file, &error);
                if !args.json {
                    let place = line.map_or_else(|| shown.clone(), |line| format!("{shown}:{line}"));
                    eprintln!("{place}: {}", startup::described(&error));
                }
                let error = json!({ "message": error.to_string(), "traceback": error.traceback(), "line": line });
                results.push(json!({ "file": shown, "mods": [], "error": error }));
            }
        }
    }
    if args.json {
        println!("{}", Value::from(results));
    }
    Ok(ExitCode::from(u8::from(wrong)))
}

type Loaded = Result<(String, Vec<Arc<dyn Factory>>), LoadError>;

/// A file's text and its mods. What is wrong with the file is an answer; that it is not there, or Python is not, is an error.
pub async fn load(file: &Path) -> anyhow::Result<Loaded> {
    if !file.is_file() {
        bail!("there is no file {}", file.display());
    }
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let path = file.to_owned();
    let found = tokio::task::spawn_blocking(move || PythonMods::default().file(path)).await?;
    let source = SourceText::Text(text.clone());
    match found {
        Ok(found) => {
            let found = found.into_iter().map(|factory| Sourced::wrap(factory, source.clone())).collect();
            Ok(Ok((text, found)))
        }
        Err(error @ LoadError::Failed { .. }) => Ok(Err(error)),
        Err(error) => Err(error.into()),
    }
}

/// The line of the file that an error is about: the last one that the traceback names.
fn line_of(file: &Path, error: &LoadError) -> Option<u32> {
    let name = file.file_name()?.to_string_lossy();
    let place = format!("File \"{name}\", line ");
    let (_, after) = error.traceback()?.rsplit_once(&place)?;
    after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
