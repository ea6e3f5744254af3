//! `thunder chat`: a conversation in the terminal, or, one message a line, in a pipe.

mod answer;
mod command;
mod conversation;
mod input;
mod keys;
mod screen;
mod state;
mod talk;

use super::place::PlaceArgs;
use super::signals::EndSignals;
use crate::config::DataConfig;
use conversation::Conversation;
use input::Reader;
use nix::sys::termios::{self, SetArg};
use screen::Screen;
use serde_json::Value;
use std::io::stdin;
use std::path::PathBuf;
use std::process::ExitCode;
use talk::Talk;

/// Talks with the model: answers as they come, history, mods, tools, replays; /help lists the commands
///
/// Where it runs is decided as for `thunder run`: on the server named by --server; else on the one that runs on
/// 127.0.0.1:6767; else in this process, and with --model, --data-dir, --database-url or a mod given as a file in any
/// case. From a pipe it reads one message a line and writes the answers to standard output.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What the system says before everything else
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Mod to talk with, by name or as a Python file, again for more
    #[arg(long = "mod", value_name = "NAME|FILE.py")]
    mods: Vec<String>,
    /// Conversation to go on with, as /save wrote it
    #[arg(long, value_name = "FILE")]
    restore: Option<PathBuf>,
    /// Tools that the model may call, in OpenAI's shape
    #[arg(long, value_name = "FILE.json")]
    tools: Option<PathBuf>,
    /// Most tokens of an answer; without it as many as fit
    #[arg(long, short = 'n', value_name = "N", alias = "n-predict")]
    max_tokens: Option<u32>,
    /// 0 always takes the most probable token; without it 0.8
    #[arg(long, value_name = "T", alias = "temp")]
    temperature: Option<f64>,
    /// Seed of the draw; the same seed gives the same answers
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// Do not capture attention
    #[arg(long)]
    no_attention: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Talks until the person leaves. `said` tells whether a flag stood on the command line.
pub async fn chat(args: Args, said: impl Fn(&str) -> bool, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    let conversation = beginning(&args)?;
    let reader = Reader::new(DataConfig::try_from(args.place.data.clone())?.dir.join("chat_history"))?;
    let (place, mods) = match signals.abandon(args.place.open(&args.mods, said)).await {
        Ok(opened) => opened?,
        Err(code) => return Ok(code),
    };
    // From here on Ctrl-C stops an answer, or leaves at the prompt.
    let mut signals = signals.without_interrupt();
    let attention = !args.no_attention && args.place.engine.captures_attention() && place.keeps_attention();
    let terminal = termios::tcgetattr(stdin()).ok();
    let mut talk = Talk::new(place, conversation, reader, Screen::new(), attention);
    talk.add_mods(mods);
    let talked = signals
        .abandon(async {
            if let Some(path) = &args.restore {
                talk.restore_state(path).await;
            }
            talk.run().await
        })
        .await;
    if let (Err(_), Some(before)) = (&talked, terminal) {
        // The line editor is abandoned in the middle of a line. A terminal that is gone needs nothing.
        let _ = termios::tcsetattr(stdin(), SetArg::TCSANOW, &before);
    }
    let closed = signals.abandon(talk.close()).await;
    closed.and(talked).unwrap_or_else(Ok)
}

/// The conversation that the flags describe.
fn beginning(args: &Args) -> anyhow::Result<Conversation> {
    let mut conversation = match &args.restore {
        Some(path) => Conversation::restore(path)?,
        None => Conversation::default(),
    };
    if let Some(system) = &args.system {
        conversation.system = Some(system.clone());
    }
    if let Some(path) = &args.tools {
        conversation.tools = talk::tools(path)?;
    }
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            conversation.parameters.insert(name.into(), value);
        }
    };
    set("max_tokens", args.max_tokens.map(Value::from));
    set("temperature", args.temperature.map(Value::from));
    set("seed", args.seed.map(Value::from));
    Ok(conversation)
}
