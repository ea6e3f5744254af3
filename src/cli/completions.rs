use super::{documented_command, output};
use clap_complete::Shell;
use std::process::ExitCode;

/// Print the completions for a shell
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shell to print completions for
    shell: Shell,
}

/// Prints the completions.
pub fn completions(args: &Args) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut documented_command(), "thunder", &mut script);
    output::print(script)?;
    Ok(ExitCode::SUCCESS)
}
