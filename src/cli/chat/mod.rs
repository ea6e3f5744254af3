//! `thunder chat`: a conversation in the terminal, or in a pipe with one message per line.

mod answer;
mod chat_loop;
mod command;
mod conversation;
mod input;
mod keys;
mod screen;
mod state;
mod tools;

use super::given_flags::GivenFlags;
use super::numbers::finite;
use super::run_target::{DatabaseUse, RunTargetArgs};
use super::signals::EndSignals;
use chat_loop::ChatLoop;
use conversation::ChatTranscript;
use input::InputReader;
use nix::sys::termios::{self, SetArg};
use screen::Screen;
use serde_json::Value;
use std::io::stdin;
use std::path::PathBuf;
use std::process::ExitCode;

/// Chat with the model: streamed answers, history, mods, tools, replays; /help lists the commands
///
/// Runs on the server of --server, else on a server at 127.0.0.1:6767, else in this process. With a mod given as a file, or
/// a flag of the engine or the database on the command line, such as --model, --ctx-size or --data-dir, it always runs in
/// this process. From a pipe it reads one message per line and writes the answers to standard output.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Mod by name, as a Python file or as a package folder like `./pack`; repeatable
    #[arg(long = "mod", value_name = "NAME|FILE.py")]
    mods: Vec<String>,
    /// File with a conversation to continue, saved by /save
    #[arg(long, value_name = "FILE")]
    restore: Option<PathBuf>,
    /// Tools that the model may call, in OpenAI's format
    #[arg(long, value_name = "FILE.json")]
    tools: Option<PathBuf>,
    /// Maximum tokens of an answer; -1 (default) for as many as fit into the context
    #[arg(long, short = 'n', value_name = "N", alias = "n-predict", allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1..))]
    max_tokens: Option<i32>,
    /// Sampling temperature; 0 always takes the most probable token; default: 0.8
    #[arg(long, value_name = "T", alias = "temp", allow_negative_numbers = true, value_parser = finite)]
    temperature: Option<f64>,
    /// Seed of the random generator; the same seed gives the same answers
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// No attention capture
    #[arg(long)]
    no_attention: bool,
    #[command(flatten)]
    target: RunTargetArgs,
}

/// Runs the chat until the user ends it.
pub async fn chat(args: Args, given: GivenFlags, mut signals: EndSignals) -> anyhow::Result<ExitCode> {
    let conversation = build_conversation(&args)?;
    let reader = InputReader::new(given.data(args.target.data.clone()).config()?.dir.join("chat_history"))?;
    let open = args.target.open(&args.mods, DatabaseUse::LeaveToServer, &given);
    let (target, mods) = signals.run_until_signal(open).await??;
    // From now on, Ctrl-C stops an answer; at the prompt it ends the program.
    let mut signals = signals.without_interrupt();
    let attention = !args.no_attention && args.target.engine.captures_attention() && target.can_record_attention();
    let terminal = termios::tcgetattr(stdin()).ok();
    let mut chat = ChatLoop::new(target, conversation, reader, Screen::new(), attention);
    chat.add_mods(mods);
    let result = signals
        .run_until_signal(async {
            if let Some(path) = &args.restore {
                chat.restore_state(path).await;
            }
            chat.run().await
        })
        .await;
    if let (Err(_), Some(before)) = (&result, terminal) {
        // The line editor was interrupted within a line. Restoring the terminal settings fails if the terminal is
        // closed.
        let _ = termios::tcsetattr(stdin(), SetArg::TCSANOW, &before);
    }
    signals.run_until_signal(Box::pin(chat.close())).await?;
    result?
}

/// Builds the conversation from the flags.
fn build_conversation(args: &Args) -> anyhow::Result<ChatTranscript> {
    let mut conversation = match &args.restore {
        Some(path) => ChatTranscript::restore(path)?,
        None => ChatTranscript::default(),
    };
    if let Some(system) = &args.system {
        conversation.system = Some(system.clone());
    }
    if let Some(path) = &args.tools {
        conversation.tools = tools::read_tools(path)?;
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
