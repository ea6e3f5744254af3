use crate::cli::client::{ErrorResponse, ServerArgs};
use crate::cli::{mod_source, output, startup};
use crate::mods::python::PythonMods;
use anyhow::bail;
use reqwest::{Method, StatusCode};
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;

/// Register the mods of Python files and folders with a server, which needs --allow-mod-upload
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Python files or package folders, whose modules can import each other
    #[arg(required = true, value_name = "FILE.py|DIR")]
    files: Vec<PathBuf>,
    /// Module of a folder with the mods; default: all modules with mods
    #[arg(long, value_name = "MODULE")]
    module: Option<String>,
    /// Name to register, for a file with one mod
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Description to register, for a file with one mod
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// Registered mods as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Imports every file locally, then sends each mod.
pub async fn push(args: Args) -> anyhow::Result<ExitCode> {
    let server = args.server.require().await?;
    let mut uploads = Vec::new();
    for file in &args.files {
        match mod_source::load(file, args.module.as_deref(), PythonMods::default()).await? {
            Ok(found) => uploads.extend(found.iter().filter_map(|factory| factory.upload().cloned())),
            Err(error) => {
                eprintln!("thunder: {}", startup::describe_error(&error));
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    if uploads.len() != 1 && (args.name.is_some() || args.description.is_some()) {
        bail!("--name and --description are for one mod; there are {}", uploads.len());
    }
    let mut answers = Vec::new();
    for mut upload in uploads {
        let name = args.name.clone().or(upload.name).unwrap_or_default();
        upload.name = Some(name.clone());
        upload.description.clone_from(&args.description);
        let request = server.request(Method::POST, "/v1/mods").json(&upload);
        let answer: Value = match server.send(request).await {
            Ok(response) => response.json().await?,
            Err(error) if is_about_mod(&error) => {
                eprintln!("thunder: {name}: {error:#}");
                return Ok(ExitCode::FAILURE);
            }
            Err(error) => return Err(error.context(name)),
        };
        if args.json {
            answers.push(answer);
            continue;
        }
        let hash: String = answer["hash"].as_str().unwrap_or_default().chars().take(12).collect();
        let status = match (&answer["replaced"], &answer["unchanged"]) {
            (_, Value::Bool(true)) => "unchanged",
            (Value::Bool(true), _) => "a new version of a mod",
            _ => "a new mod",
        };
        let suffix = if answer["enabled"] == false { "; it is disabled" } else { "" };
        output::print_line(format_args!("{name} {hash}: {status} on {}{suffix}", server.base()))?;
    }
    if args.json {
        output::print_line(Value::from(answers))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns true if the server rejects the mod itself, and not the request, for example because of the API key.
fn is_about_mod(error: &anyhow::Error) -> bool {
    let status = error.downcast_ref::<ErrorResponse>().map(|response| response.status);
    status.is_some_and(|status| {
        matches!(
            status,
            StatusCode::BAD_REQUEST
                | StatusCode::CONFLICT
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::UNPROCESSABLE_ENTITY
        )
    })
}
