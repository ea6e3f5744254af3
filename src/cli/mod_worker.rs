use crate::mods::python::sandbox;
use std::process::ExitCode;

/// Becomes a worker of a Python mod in a sandbox; the server starts it
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Try what this system can keep a worker in, and say it
    #[arg(long, conflicts_with = "profile")]
    check: bool,
    /// What the worker may have, as the server writes it
    #[arg(value_name = "PROFILE", required_unless_present = "check")]
    profile: Option<String>,
}

/// Returns only when it cannot, or was to try.
pub fn become_worker(args: &Args) -> ExitCode {
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
