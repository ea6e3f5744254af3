//! `thunder mods enable`, `disable` and `remove`.

use crate::cli::client::{ErrorResponse, Server, ServerArgs, path_with_name};
use crate::cli::output;
use reqwest::{Method, StatusCode};
use std::process::ExitCode;

// The help of the commands is that of the enum's variants.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the mod
    name: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// A change of a registered mod.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    Enable,
    Disable,
    Remove,
}

/// Changes a mod of a running server.
pub async fn change(args: Args, change: Change) -> anyhow::Result<ExitCode> {
    let (server, name) = (args.server.require().await?, &args.name);
    match send(&server, name, change).await {
        Ok(()) => {
            let done = match change {
                Change::Enable => "enabled on",
                Change::Disable => "disabled on",
                Change::Remove => "removed from",
            };
            output::print_line(format_args!("{name}: {done} {}", server.base()))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) if is_about_mod(&error) => {
            eprintln!("thunder: {error:#}");
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error),
    }
}

async fn send(server: &Server, name: &str, change: Change) -> anyhow::Result<()> {
    let path = path_with_name("/v1/mods", name)?;
    let request = match change {
        Change::Enable => server.request(Method::POST, &format!("{path}/enable")),
        Change::Disable => server.request(Method::POST, &format!("{path}/disable")),
        Change::Remove => server.request(Method::DELETE, &path),
    };
    server.send(request).await.map(drop)
}

/// Returns true if the server does not know the mod, or cannot remove it.
fn is_about_mod(error: &anyhow::Error) -> bool {
    let status = error.downcast_ref::<ErrorResponse>().map(|response| response.status);
    matches!(status, Some(StatusCode::NOT_FOUND | StatusCode::CONFLICT))
}
