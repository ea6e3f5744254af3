use super::{dry_run, source};
use crate::cli::client::ServerArgs;
use crate::cli::place::PlaceArgs;
use crate::cli::{export, startup};
use crate::config::flags::{DataFlags, EngineFlags};
use crate::config::{Config, DataConfig, bundled_model};
use crate::mods::ModFactory;
use crate::mods::python::{PythonMods, unpack_sdk};
use crate::trace::document::Document;
use anyhow::{Context, bail};
use dry_run::Report;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

/// Runs a mod's own tests, or feeds it recorded runs and tells what it would have done
///
/// Its tests are the functions `test_…` of the file and of `test_FILE.py` beside it; no server and no model is needed.
/// Exit codes: 0 all passed, or the mod did what was recorded; 1 not so; 2 it could not be found out.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The Python file
    #[arg(value_name = "FILE.py")]
    file: PathBuf,
    /// Recorded run: its id or `request_id`, or a file that `thunder export` wrote; again for more
    #[arg(long, value_name = "RUN", num_args = 1..)]
    against: Vec<String>,
    /// The mod, where the file has several
    #[arg(long, value_name = "NAME", requires = "against")]
    name: Option<String>,
    /// Its configuration, as JSON; without it the one of the recorded run
    #[arg(long, value_name = "JSON", requires = "against")]
    config: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Runs the tests, or the dry run.
pub async fn test(args: Args) -> anyhow::Result<ExitCode> {
    if !args.file.is_file() {
        bail!("there is no file {}", args.file.display());
    }
    if args.against.is_empty() {
        return own_tests(&args.file, args.json).await;
    }
    let factory = match source::load(&args.file, None).await? {
        Ok(found) => choose(found.into_iter().flat_map(|found| found.mods).collect(), args.name.as_deref())?,
        Err(error) => bail!("{}", startup::described(&error)),
    };
    let config: Option<Value> = match &args.config {
        Some(text) => Some(serde_json::from_str(text).context("--config takes JSON")?),
        None => None,
    };
    let mut documents = Vec::new();
    for run in &args.against {
        documents.push((run.clone(), recorded(run, &args.place.server, &args.place.data).await?));
    }
    let model = model(&args.place.engine, &args.place.data)?;
    let feed = move || dry_run::feed_all(&model, &*factory, config.as_ref(), &documents);
    let reports = tokio::task::spawn_blocking(feed).await??;
    let same = reports.iter().all(|report| report.difference.is_none());
    if args.json {
        println!("{}", json!({ "same": same, "runs": reports }));
    } else {
        reports.iter().for_each(Report::print);
    }
    Ok(ExitCode::from(u8::from(!same)))
}

fn choose(mut found: Vec<Arc<dyn ModFactory>>, name: Option<&str>) -> anyhow::Result<Arc<dyn ModFactory>> {
    let names: Vec<String> = found.iter().map(|factory| factory.describe().name).collect();
    if let Some(name) = name {
        found.retain(|factory| factory.describe().name == name);
    }
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        _ => bail!("which of its mods is meant? give one with --name: {}", names.join(", ")),
    }
}

async fn recorded(run: &str, server: &ServerArgs, data: &DataFlags) -> anyhow::Result<Document> {
    if Path::new(run).is_file() {
        let bytes = std::fs::read(run).with_context(|| format!("cannot read {run}"))?;
        return Document::parse(&bytes).with_context(|| run.to_owned());
    }
    export::document(run, server, data.clone()).await
}

/// The model whose vocabulary the runs have.
fn model(engine: &EngineFlags, data: &DataFlags) -> anyhow::Result<PathBuf> {
    // Checks the flags as the server does.
    let config = Config::new(engine.clone(), data.clone(), &crate::config::flags::ServerFlags::default())?;
    if let Some(path) = config.engine.model {
        return Ok(path);
    }
    let cache = DataConfig::try_from(data.clone())?.dir.join("cache");
    bundled_model(&cache).with_context(|| format!("cannot unpack the bundled model into {}", cache.display()))
}

/// `python -m thunder_mods.testing`, but for what lies in the present folder: a `json.py` there is not Python's own.
const TESTING: &str = "import sys; sys.path[:] = [path for path in sys.path if path]; \
                       from thunder_mods.testing.__main__ import main; sys.exit(main(sys.argv[1:]))";

/// Runs the functions test_… in Python, with this program's SDK.
async fn own_tests(file: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let file = std::path::absolute(file)?;
    let run = move || -> anyhow::Result<ExitCode> {
        let python = PythonMods::default().interpreter()?;
        let sdk = std::env::temp_dir().join(format!("thunder-sdk-{}", uuid::Uuid::now_v7().simple()));
        let ran = unpack_sdk(&sdk).and_then(|()| {
            let mut command = Command::new(&python);
            command.args(["-B", "-X", "utf8", "-c", TESTING]).arg(&file);
            if json {
                command.arg("--json");
            }
            // Before whatever SDK is installed: the mod will run with this one.
            command.env("PYTHONPATH", &sdk).status()
        });
        let _ = std::fs::remove_dir_all(&sdk);
        let status = ran.with_context(|| format!("cannot run {}", python.display()))?;
        Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(2)))
    };
    tokio::task::spawn_blocking(run).await?
}
