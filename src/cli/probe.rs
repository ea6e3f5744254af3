use std::path::PathBuf;
use std::process::ExitCode;

/// Check that llama.cpp can load a GGUF file, without reading its weights
///
/// `thunder serve` does this in a separate process before it loads a file, because llama.cpp aborts on some damaged files.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Checks the file, and prints the reason on standard output if it cannot be loaded.
pub fn probe(args: &Args) -> ExitCode {
    match crate::model::llama::probe(&args.file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
