use std::path::PathBuf;
use std::process::ExitCode;

/// Tries whether llama.cpp takes a GGUF, without reading its weights
///
/// `thunder serve` does this in a process of its own before it loads a file: over some damages llama.cpp ends its process.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The GGUF
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Says on standard output why the file is refused, if it is.
pub fn probe(args: &Args) -> ExitCode {
    match crate::model::llama::probe(&args.file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
