use crate::model::llama::PROBE_STEP_PREFIX;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::path::PathBuf;
use std::process::ExitCode;

/// Maximum processor time of the check in seconds. Waiting for a slow disk does not count. It leaves room for processors
/// without vector instructions.
const MAX_CPU_S: u64 = 120;

/// Check that llama.cpp can load a GGUF file
///
/// The check of a file up to 1 GiB reads the weights and decodes a few tokens; that of a larger file reads all but the weights.
/// `thunder serve` does this in a separate process before it loads a file, because llama.cpp aborts on some damaged files.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Projector (GGUF) to load with the file
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
}

/// Checks the file. Prints each step on standard error, and the reason on standard output if the file cannot be loaded.
pub fn probe(args: &Args) -> ExitCode {
    limit_processor_time();
    match crate::model::llama::probe(&args.file, args.mmproj.as_deref(), |step| eprintln!("{PROBE_STEP_PREFIX}{step}"))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Makes the system end this process with the signal SIGXCPU if it uses too much processor time: some damaged files make
/// llama.cpp compute without end.
fn limit_processor_time() {
    // Without a limit, the server's time limit ends the check.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_CPU) {
        let _ = setrlimit(Resource::RLIMIT_CPU, MAX_CPU_S.min(hard), hard);
    }
}
