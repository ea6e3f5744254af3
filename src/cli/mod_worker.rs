use crate::mods::python::sandbox;
use std::process::ExitCode;

/// Run a Python mod's worker in a sandbox; started by the server
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Check of this system's sandbox features, without a worker
    #[arg(long, conflicts_with = "profile")]
    check: bool,
    /// Limits of the worker, as JSON from the server
    #[arg(value_name = "PROFILE", required_unless_present = "check")]
    profile: Option<String>,
}

/// Becomes a worker, or tests the sandbox. Returns only after the test or on failure.
pub fn run_worker(args: &Args) -> ExitCode {
    let done = match &args.profile {
        Some(profile) => sandbox::enter(profile).map(|never| match never {}),
        None => sandbox::check().map(|found| println!("{found}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the sandbox cannot be entered: {error}");
            ExitCode::FAILURE
        }
    }
}
