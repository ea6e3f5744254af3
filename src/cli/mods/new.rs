use crate::cli::output;
use crate::mods::python::{TEMPLATE, TEMPLATE_NAME};
use anyhow::{Context, bail};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const TESTS: &str = include_str!("template_tests.py");
/// Python keywords, and names of modules that a mod must not replace.
const RESERVED_NAMES: &[&str] = &[
    "False",
    "None",
    "True",
    "and",
    "as",
    "assert",
    "async",
    "await",
    "break",
    "class",
    "continue",
    "def",
    "del",
    "elif",
    "else",
    "except",
    "finally",
    "for",
    "from",
    "global",
    "if",
    "import",
    "in",
    "is",
    "lambda",
    "nonlocal",
    "not",
    "or",
    "pass",
    "raise",
    "return",
    "try",
    "while",
    "with",
    "yield",
    "mod",
    "thunder_mods",
    "thunder",
    "quote_mod_sdk",
    "shared",
    "max",
];

/// Create a mod: write NAME.py and its tests
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the mod and of its function
    name: String,
    /// Folder to write into
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

/// Writes both files. If one of them exists, none is written.
pub fn new(args: &Args) -> anyhow::Result<ExitCode> {
    let name = &args.name;
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if name.is_empty() || name.len() > 64 || !is_plain || name.starts_with(|c: char| c.is_ascii_digit() || c == '_') {
        bail!("'{name}' is not a valid name; expected a letter followed by up to 63 letters, digits and '_'");
    }
    if name.starts_with("test_") {
        bail!("'{name}' is the name of a test, because it begins with test_; choose another name");
    }
    if RESERVED_NAMES.contains(&name.as_str()) {
        bail!("'{name}' is a Python keyword or the name of a Python module; choose another name");
    }
    let files = [(format!("{name}.py"), TEMPLATE), (format!("test_{name}.py"), TESTS)];
    if let Some((file, _)) = files.iter().find(|(file, _)| args.dir.join(file).exists()) {
        bail!("{} exists already", args.dir.join(file).display());
    }
    std::fs::create_dir_all(&args.dir).with_context(|| format!("cannot create the folder {}", args.dir.display()))?;
    for (file, text) in &files {
        let path = args.dir.join(file);
        write(&path, &text.replace(TEMPLATE_NAME, name)).with_context(|| format!("cannot write {}", path.display()))?;
        output::print_line(path.display())?;
    }
    let path = args.dir.join(&files[0].0);
    let path = path.display();
    eprintln!("test it with `thunder mods test {path}`, try it with `thunder run \"Hello!\" --mod {path}`");
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    std::fs::File::create_new(path)?.write_all(text.as_bytes())
}
