use crate::cli::hub::{self, CachedModel};
use crate::cli::output;
use std::process::ExitCode;

/// List the models in the cache with their sizes and files
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Prints a line for each model. The first column is what --hf-repo takes.
pub fn list() -> anyhow::Result<ExitCode> {
    let (dir, models) = hub::cached_models()?;
    if models.is_empty() {
        eprintln!("thunder: no models in {}; `thunder models pull USER/MODEL` downloads one", dir.display());
    }
    let width = models.iter().map(|model| model.name.len()).max().unwrap_or(0);
    for CachedModel { name, bytes, file } in models {
        let size = hub::readable_size(bytes);
        output::print_line(format_args!("{name:<width$}  {size:>9}  {}", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
