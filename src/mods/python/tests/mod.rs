//! Real workers: these tests start Python.

mod actions;
mod events;
mod fixtures;
mod limits;
mod loading;
mod workers;

use crate::mods::builtin::testing::ModHarness;
use crate::mods::python::{LoadError, PythonMods};
use crate::mods::{CallEvent, ModFactory, Reply};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const VOCABULARY: usize = 265;
const HEADER: &str = "from quote_mod_sdk import mod, Prefilled, ForwardPass, Sampled, Added\nimport os, sys, time\n";

fn load(source: &str) -> Arc<dyn ModFactory> {
    with_call_limit(source, python_mods().limits.call)
}

/// Returns a loader whose time limits are exceeded only by mods that hang, also on a loaded machine.
fn python_mods() -> PythonMods {
    let mut mods = PythonMods::default();
    mods.limits.call = Duration::from_secs(30);
    mods
}

fn with_call_limit(source: &str, call: Duration) -> Arc<dyn ModFactory> {
    let mut mods = python_mods();
    mods.limits.call = call;
    match mods.load_one("test", &format!("{HEADER}{source}"), None) {
        Ok(factory) => factory,
        Err(error) => panic!("{error}\n{}", error.traceback().unwrap_or_default()),
    }
}

fn load_error(source: &str, entrypoint: Option<&str>) -> LoadError {
    python_mods().load_one("broken", source, entrypoint).err().expect("it was loaded")
}

fn harness(factory: &Arc<dyn ModFactory>) -> ModHarness {
    ModHarness::new(factory.as_ref(), &Value::Null)
}

fn logits() -> Vec<f32> {
    let mut logits = vec![f32::NEG_INFINITY; VOCABULARY];
    logits[usize::from(b'a')] = 0.0;
    logits[usize::from(b'b')] = 3.0_f32.ln();
    logits
}

fn sampled(harness: &mut ModHarness, token: u8) -> Reply {
    let text = char::from(token).to_string();
    harness.call(CallEvent::Sampled { token: i32::from(token), text: &text, logprob: -0.5 })
}

fn no_exception(reply: &Reply) {
    assert!(reply.exception.is_none(), "{:?}", reply.exception);
}

fn lines(reply: &Reply) -> Vec<&str> {
    no_exception(reply);
    reply.logs.iter().map(|log| log.message.as_str()).collect()
}

fn raised(reply: &Reply) -> (&str, &str) {
    let exception = reply.exception.as_ref().expect("an exception");
    assert!(reply.action.is_none());
    (&exception.message, exception.traceback.as_deref().unwrap_or(""))
}

fn fixture(name: &str) -> Arc<dyn ModFactory> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/mods").join(name);
    let source = std::fs::read_to_string(path).unwrap();
    let mut mods = python_mods().load_all(name.to_owned(), source).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(mods.len(), 1);
    mods.remove(0)
}
