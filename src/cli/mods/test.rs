use super::dry_run;
use crate::cli::given_flags::GivenFlags;
use crate::cli::run_target::RunTargetArgs;
use crate::cli::{export, hub, mod_source, output, startup};
use crate::config::flags::{DataFlags, EngineFlags, default_flags};
use crate::config::{Config, EngineConfig, bundled_model};
use crate::events::system;
use crate::mods::ModFactory;
use crate::mods::python::{PythonMods, unpack_sdk};
use crate::trace::document::Document;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

/// Run a mod's tests, or replay recorded runs to it and compare its actions
///
/// Tests are the functions `test_…` of a file or of a package's files, and of `test_NAME.py` next to it. The model and
/// server flags apply only with `--against`. Exit codes: 0 all tests passed, or the actions match the recorded ones;
/// 1 otherwise; 2 the command could not run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Python file or package folder
    #[arg(value_name = "FILE.py|DIR")]
    file: PathBuf,
    /// Recorded run: run id, `request_id`, or a file of `thunder export`; repeatable
    #[arg(long, value_name = "RUN", num_args = 1..)]
    against: Vec<String>,
    /// Name of the mod, if the file has several
    #[arg(long, value_name = "NAME", requires = "against")]
    name: Option<String>,
    /// Configuration of the mod as JSON; default: the one of the recorded run
    #[arg(long, value_name = "JSON", requires = "against")]
    config: Option<String>,
    /// Result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: RunTargetArgs,
}

/// Runs the tests, or the dry run.
pub async fn test(args: Args, given: &GivenFlags) -> anyhow::Result<ExitCode> {
    if !args.file.exists() {
        bail!("there is no file or folder {}", args.file.display());
    }
    if args.against.is_empty() {
        return run_python_tests(&args.file, args.json).await;
    }
    let mods = args.target.engine.mods.clone().config()?;
    let factory = match mod_source::load(&args.file, None, startup::python_mods(&mods)).await? {
        Ok(found) => choose(found, args.name.as_deref())?,
        Err(error) => bail!("{}", startup::describe_error(&error)),
    };
    let config: Option<Value> = match &args.config {
        Some(text) => Some(serde_json::from_str(text).context("--config takes JSON")?),
        None => None,
    };
    let mut documents = Vec::new();
    for run in &args.against {
        documents.push((run.clone(), read_run(run, &args.target, given).await?));
    }
    let (model, engine) = model(args.target.engine.clone(), &args.target.data).await?;
    let execute = move || dry_run::dry_run_all(&model, &engine, &*factory, config.as_ref(), &documents);
    let reports = tokio::task::spawn_blocking(execute).await??;
    let same = reports.iter().all(|report| report.difference.is_none());
    if args.json {
        output::print_line(json!({ "same": same, "runs": reports }))?;
    } else {
        reports.iter().try_for_each(dry_run::print)?;
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
        _ => bail!("choose one of the file's mods with --name: {}", names.join(", ")),
    }
}

async fn read_run(run: &str, target: &RunTargetArgs, given: &GivenFlags) -> anyhow::Result<Document> {
    if Path::new(run).is_file() {
        let bytes = std::fs::read(run).with_context(|| format!("cannot read {run}"))?;
        return Document::parse(&bytes).with_context(|| run.to_owned());
    }
    export::document(run, &target.server, target.data.clone(), given).await
}

/// Returns the file of the model that provides the vocabulary, and the settings of the engine.
async fn model(mut engine: EngineFlags, data: &DataFlags) -> anyhow::Result<(PathBuf, EngineConfig)> {
    hub::set_model(&mut engine).await?;
    // Validates the flags like the server.
    let engine = Config::new(engine, data.clone(), &default_flags())?.engine;
    if let Some(path) = engine.model.clone() {
        return Ok((path, engine));
    }
    let cache = data.clone().config()?.dir.join("cache");
    let path = bundled_model(&cache);
    let path = path.with_context(|| format!("cannot unpack the bundled model into {}", cache.display()))?;
    Ok((path, engine))
}

/// Python code like `python -m thunder_mods.testing`, but without the current folder in the module path, where a file
/// `json.py` would replace Python's module.
const TESTING: &str = "import sys; sys.path[:] = [path for path in sys.path if path]; \
                       from thunder_mods.testing.__main__ import main; sys.exit(main(sys.argv[1:]))";

/// Runs the functions `test_…` in Python with this program's SDK.
async fn run_python_tests(file: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let file = std::path::absolute(file)?;
    let run = move || -> anyhow::Result<ExitCode> {
        let python = PythonMods::default().interpreter()?;
        let sdk = std::env::temp_dir().join(format!("thunder-sdk-{}", system::new_id().simple()));
        let status = unpack_sdk(&sdk).and_then(|()| {
            let mut command = Command::new(&python);
            command.args(["-B", "-X", "utf8", "-c", TESTING]).arg(&file);
            if json {
                command.arg("--json");
            }
            // This SDK precedes an installed one, because the server runs the mod with this SDK.
            command.env("PYTHONPATH", &sdk).status()
        });
        let _ = std::fs::remove_dir_all(&sdk);
        let status = status.with_context(|| format!("cannot run {}", python.display()))?;
        Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(2)))
    };
    tokio::task::spawn_blocking(run).await?
}
