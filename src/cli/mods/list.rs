use crate::cli::client::ServerArgs;
use crate::cli::given_flags::GivenFlags;
use crate::cli::output;
use crate::cli::table::format_table;
use crate::mods::{ModFolder, ModRegistry};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// List the mods of the running server, or the local ones if there is no server or --mods-dir is given
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of Python mods to list with the built-in mods, instead of a server's mods
    #[arg(long, env = "THUNDER_MODS_DIR", value_name = "DIR")]
    mods_dir: Option<PathBuf>,
    /// List as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Prints the list.
pub async fn list(args: Args, given: &GivenFlags) -> anyhow::Result<ExitCode> {
    let list: Value = match args.server.find_unless(given.engine.as_deref(), given).await? {
        Some(server) => server.send(server.request(Method::GET, "/v1/mods")).await?.json().await?,
        None => local_mods(args.mods_dir).await?,
    };
    if args.json {
        output::print_line(list)?;
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["NAME", "ORIGIN", "VERSION", "STATE", "CALLS", "DESCRIPTION"].map(str::to_owned);
    let mods = list["mods"].as_array().into_iter().flatten().map(row);
    output::print(format_table(&std::iter::once(head).chain(mods).collect::<Vec<_>>(), 0))?;
    for problem in list["problems"].as_array().into_iter().flatten() {
        eprintln!("thunder: {}", problem["message"].as_str().unwrap_or("?"));
    }
    Ok(ExitCode::SUCCESS)
}

async fn local_mods(dir: Option<PathBuf>) -> anyhow::Result<Value> {
    let registry = ModRegistry::with_builtin();
    let list = move || {
        if let Some(dir) = dir {
            ModFolder::new(dir, registry.python()).sync(&registry)?;
        }
        Ok::<_, crate::mods::python::LoadError>(
            json!({ "mods": registry.list_info(None), "problems": registry.problems() }),
        )
    };
    Ok(tokio::task::spawn_blocking(list).await??)
}

fn row(entry: &Value) -> [String; 6] {
    let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    let calls = match (entry["calls"].as_u64().unwrap_or(0), entry["failures"].as_u64().unwrap_or(0)) {
        (0, _) => String::new(),
        (calls, 0) => calls.to_string(),
        (calls, failures) => format!("{calls}, {failures} failed"),
    };
    let state = match (entry["enabled"].as_bool(), entry["problem"].is_object()) {
        (Some(false), _) => "disabled",
        (_, true) => "outdated: the new source cannot be loaded",
        _ => "enabled",
    };
    [text("name"), text("origin"), text("version"), state.to_owned(), calls, text("description")]
}
