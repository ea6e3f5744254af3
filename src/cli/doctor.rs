use super::client::error_message;
use super::trust::install_tls_provider;
use super::{hub, output, startup};
use crate::config::flags::{DataFlags, EngineFlags, ServerFlags};
use crate::config::{Config, DEFAULT_ADDRESS, ModSandbox, bundled_model};
use crate::model::llama::{backend, devices, missing_gpu_reason};
use crate::mods::python::PythonMods;
use crate::mods::python::sandbox::SandboxLauncher;
use crate::server::Listeners;
use anyhow::bail;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use tokio::task::spawn_blocking;

/// Minimum free bytes on the disk of the data directory; with less, a warning is printed.
const MIN_FREE_BYTES: u128 = 2 << 30;
/// Maximum time until a running server responds; shorter than the timeout of the image's health check.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(4);

/// Check everything that `thunder serve` needs: model, devices, addresses, disk, database, Python and sandbox
///
/// Takes the flags of `thunder serve`. Starts the embedded database for the check and stops it again. Exits with 1 if a
/// check failed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Check of the running server only
    #[arg(long)]
    running: bool,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    server: ServerFlags,
}

/// The effect of a check's result on the start of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Works,
    /// Works with a restriction.
    Limited,
    /// The server cannot start.
    Fails,
}

/// The result of a check, with its reason.
#[derive(Debug)]
struct Finding {
    verdict: Verdict,
    text: String,
}

impl Finding {
    fn works(text: impl fmt::Display) -> Self {
        Self { verdict: Verdict::Works, text: text.to_string() }
    }

    fn limited(text: impl fmt::Display) -> Self {
        Self { verdict: Verdict::Limited, text: text.to_string() }
    }

    fn fails(text: impl fmt::Display) -> Self {
        Self { verdict: Verdict::Fails, text: text.to_string() }
    }
}

/// Runs all checks and prints a line for each.
pub async fn doctor(mut args: Args) -> anyhow::Result<ExitCode> {
    if args.running {
        let finding = match check_running(args).await {
            Ok(url) => Finding::works(format!("{url} is healthy")),
            Err(error) => Finding::fails(super::with_causes(&error)),
        };
        return Ok(if print("server", &finding)? { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let (os, machine) = (std::env::consts::OS, std::env::consts::ARCH);
    output::print_line(format_args!("thunder {} on {os}, {machine}", env!("CARGO_PKG_VERSION")))?;
    let missing_model = match set_cached_model(&mut args.engine).await {
        Ok(missing) => missing,
        Err(error) => {
            print("model", &Finding::fails(super::with_causes(&error)))?;
            return Ok(ExitCode::FAILURE);
        }
    };
    let config = match Config::new(args.engine, args.data, &args.server) {
        Ok(config) => config,
        Err(error) => {
            print("configuration", &Finding::fails(error))?;
            return Ok(ExitCode::FAILURE);
        }
    };
    let checked = startup::check_request_defaults(&config.server, None).await;
    let flags = checked.map_or_else(Finding::fails, |()| Finding::works("all flags are valid"));
    let mut can_start = print("configuration", &flags)?;
    let path = || match &config.engine.model {
        Some(path) => Ok(path.clone()),
        None => bundled_model(&config.data.dir.join("cache")),
    };
    let model = match missing_model {
        _ if config.server.cluster.no_model => Finding::works("none (--no-model)"),
        Some(name) => Finding::limited(format!(
            "not in the cache; the server downloads it when it starts, and `thunder models pull {name}` before that"
        )),
        None => match path() {
            Ok(path) => spawn_blocking(move || check_model(&path)).await?,
            Err(error) => Finding::fails(format!("cannot unpack the bundled model: {error}")),
        },
    };
    can_start &= print("model", &model)?;
    can_start &= print("devices", &spawn_blocking(check_devices).await?)?;
    can_start &= print("addresses", &check_addresses(&config).await)?;
    can_start &= print("data directory", &check_data_dir(&config))?;
    can_start &= print("database", &check_database(&config).await)?;
    let python = startup::python_mods(&config.engine.mods);
    let (interpreter, launcher) = (python.interpreter().is_ok(), python.launcher.clone());
    can_start &= print("Python", &spawn_blocking(move || check_python(&python)).await?)?;
    if interpreter {
        let policy = config.engine.mods.sandbox;
        can_start &= print("mod sandbox", &spawn_blocking(move || check_sandbox(policy, launcher.as_ref())).await?)?;
    }
    Ok(if can_start { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sets the model that the flags name as the model file if it is in the cache. Otherwise returns the arguments of `thunder
/// models pull` for it: a check does not download a model.
async fn set_cached_model(engine: &mut EngineFlags) -> anyhow::Result<Option<String>> {
    let missing = hub::missing_model(&engine.hub)?;
    if missing.is_none() {
        engine.hub.offline = true;
        hub::set_model(engine).await?;
    }
    Ok(missing)
}

/// Checks the health of the server that runs with these flags. Returns its address.
async fn check_running(mut args: Args) -> anyhow::Result<String> {
    // The server may have its keys from flags that this process does not have.
    args.server.allow_unauthenticated = true;
    let server = Config::new(args.engine, args.data, &args.server)?.server;
    let mut address = server.listen.first().copied().unwrap_or(DEFAULT_ADDRESS);
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    let scheme = if server.credentials.tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{address}{}", server.prefix);
    install_tls_provider();
    // The request contains nothing secret, and few certificates are valid for the address.
    let client = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).no_proxy().timeout(RESPONSE_TIMEOUT);
    let response = client.build()?.get(format!("{url}/healthz")).send().await?;
    let status = response.status();
    if !status.is_success() {
        let message = error_message(&response.text().await.unwrap_or_default());
        bail!("{url} is not healthy: {}", message.unwrap_or_else(|| status.to_string()));
    }
    Ok(url)
}

/// Prints a finding. Returns false if it prevents a start.
fn print(subject: &str, finding: &Finding) -> std::io::Result<bool> {
    let verdict = match finding.verdict {
        Verdict::Works => "ok",
        Verdict::Limited => "warning",
        Verdict::Fails => "FAILED",
    };
    output::print_line(format_args!("{verdict:<8} {subject:<14} {}", finding.text))?;
    Ok(finding.verdict != Verdict::Fails)
}

/// Checks the file in another process, because llama.cpp aborts on some damaged files.
fn check_model(path: &Path) -> Finding {
    let path_text = path.display();
    let probe = std::env::current_exe().and_then(|program| Command::new(program).arg("probe").arg(path).output());
    match probe {
        Err(error) => Finding::fails(format!("{path_text}: the check cannot be started: {error}")),
        Ok(output) if output.status.success() => {
            let mib = std::fs::metadata(path).map_or(0, |file| file.len()) >> 20;
            Finding::works(format!("{path_text}, {mib} MiB"))
        }
        Ok(output) if output.status.code().is_none() => {
            Finding::fails(format!("{path_text}: llama.cpp aborts on this file; it may be damaged"))
        }
        Ok(output) => Finding::fails(String::from_utf8_lossy(&output.stdout).trim()),
    }
}

fn check_devices() -> Finding {
    if let Err(error) = backend() {
        return Finding::fails(error);
    }
    let (gpus, others): (Vec<_>, Vec<_>) = devices().into_iter().partition(|device| device.gpu);
    let list = |devices: &[_]| devices.iter().map(startup::describe_device).collect::<Vec<_>>().join(", ");
    if gpus.is_empty() {
        Finding::works(format!("{}; no GPU: {}", list(&others), missing_gpu_reason()))
    } else {
        Finding::works(format!("{}, {}", list(&gpus), list(&others)))
    }
}

async fn check_addresses(config: &Config) -> Finding {
    match Listeners::bind(&config.server.listen).await {
        Ok(_) => {
            let free: Vec<String> = config.server.listen.iter().map(ToString::to_string).collect();
            Finding::works(format!("{} free", free.join(", ")))
        }
        Err(error) => Finding::fails(error),
    }
}

fn check_data_dir(config: &Config) -> Finding {
    let folder = config.data.dir.as_path();
    if let Err(error) = startup::database(&config.data).check_data_dir() {
        return Finding::fails(error);
    }
    let path_text = folder.display();
    // A folder that does not exist yet is created on the disk of its parent.
    let existing = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
    match nix::sys::statvfs::statvfs(existing) {
        Err(error) => Finding::fails(format!("{path_text}: {error}")),
        Ok(disk) => {
            let free = u128::from(disk.blocks_available()) * u128::from(disk.fragment_size());
            let gib = free as f64 / f64::from(1 << 30);
            if free < MIN_FREE_BYTES {
                Finding::limited(format!("{path_text}: only {gib:.1} GiB free; --keep-size limits the recordings"))
            } else {
                Finding::works(format!("{path_text}, {gib:.1} GiB free"))
            }
        }
    }
}

async fn check_database(config: &Config) -> Finding {
    let kind = if config.data.database_url.is_some() { "external" } else { "embedded" };
    let versions = async {
        let mut admin = super::db::connect(startup::database(&config.data)).await?;
        let checked = async {
            let version = admin.version().await?;
            admin.check_writable().await.map(|()| version)
        };
        let checked = checked.await;
        admin.close().await;
        anyhow::Ok(checked?)
    };
    match versions.await {
        Err(error) => Finding::fails(super::with_causes(&error)),
        Ok(version) => {
            let schema = version.schema.map_or_else(
                || "the next start creates or updates the schema".to_owned(),
                |schema| format!("schema {schema}"),
            );
            Finding::works(format!("{kind}, PostgreSQL {}, {schema}", version.server))
        }
    }
}

/// Checks the interpreter for mods. numpy is optional.
fn check_python(mods: &PythonMods) -> Finding {
    const VERSIONS: &str = "import platform; print(platform.python_version())
try:
    import numpy
    print('numpy', numpy.__version__)
except ImportError:
    print('without numpy')";
    let interpreter = match mods.interpreter() {
        Ok(interpreter) => interpreter,
        Err(error) => return Finding::limited(format!("no Python mods: {error}")),
    };
    let path_text = interpreter.display();
    match Command::new(&interpreter).args(["-I", "-c", VERSIONS]).output() {
        Ok(output) if output.status.success() => {
            let versions = String::from_utf8_lossy(&output.stdout).trim().replace('\n', ", ");
            Finding::works(format!("{path_text}, {versions}"))
        }
        Ok(output) => Finding::limited(format!("{path_text}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Finding::limited(format!("{path_text}: {error}")),
    }
}

fn check_sandbox(policy: ModSandbox, launcher: Option<&SandboxLauncher>) -> Finding {
    let support = launcher.map_or(Err("the path of this program is unknown"), SandboxLauncher::support);
    match (policy, support) {
        (ModSandbox::Off, _) => Finding::limited("off: mods that clients upload run with the rights of the server"),
        (_, Ok(found)) => Finding::works(found),
        (_, Err(reason)) => Finding::limited(format!("mods that clients upload are rejected: {reason}")),
    }
}
