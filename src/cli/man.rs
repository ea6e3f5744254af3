use super::documented_command;
use anyhow::Context as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write the manual pages of all commands to a folder: thunder.1, thunder-serve.1, …
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder, e.g. ~/.local/share/man/man1; created if it does not exist
    folder: PathBuf,
}

/// Writes the manual pages.
pub fn man(args: &Args) -> anyhow::Result<ExitCode> {
    let written = std::fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(documented_command().disable_help_subcommand(true), &args.folder));
    written.with_context(|| format!("cannot write manual pages to {}", args.folder.display()))?;
    Ok(ExitCode::SUCCESS)
}
