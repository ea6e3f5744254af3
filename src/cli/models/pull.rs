use crate::cli::hub::{self, CacheFallback};
use crate::cli::output;
use crate::cli::progress::Progress;
use crate::config::hub::HubFlags;
use std::process::ExitCode;

/// Download a model into the cache of Hugging Face's tools, and print the path of its file
///
/// Resumes an interrupted download, verifies the checksum, and does nothing if the newest version is in the cache. `HF_HOME`
/// or `HF_HUB_CACHE` sets another cache, `HF_ENDPOINT` another server with the API of the Hugging Face Hub.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Hugging Face repository, e.g. `ggml-org/gemma-3-1b-it-GGUF:Q8_0`
    #[arg(value_name = "USER/MODEL[:QUANT]", conflicts_with_all = ["hf_repo", "model_url"],
          required_unless_present_any = ["hf_repo", "model_url"])]
    repository: Option<String>,
    #[command(flatten)]
    hub: HubFlags,
}

/// Downloads the model.
pub async fn pull(args: Args) -> anyhow::Result<ExitCode> {
    let mut flags = args.hub;
    flags.hf_repo = args.repository.or(flags.hf_repo);
    let progress = Progress::new(None);
    let files = hub::download(&flags, CacheFallback::Never, &progress.task()).await;
    progress.end();
    if let Some(first) = files?.first() {
        output::print_line(first.display())?;
    }
    Ok(ExitCode::SUCCESS)
}
