//! Real workers: these tests start Python.

use super::sandbox::{Launcher, Policy};
use super::{LoadError, PythonMods};
use crate::events::LogLevel;
use crate::mods::builtin::testing::{EOG, PROMPT, Scene, word};
use crate::mods::{Action, CallEvent, EventSet, Factory, LogitEdit, Origin, Reply};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const VOCABULARY: usize = 265;
const HEADER: &str = "from quote_mod_sdk import mod, Prefilled, ForwardPass, Sampled, Added\nimport os, sys, time\n";

fn load(source: &str) -> Arc<dyn Factory> {
    with_call_limit(source, Duration::from_secs(5))
}

fn with_call_limit(source: &str, call: Duration) -> Arc<dyn Factory> {
    let mut mods = PythonMods::default();
    mods.limits.call = call;
    mods.limits.import = Duration::from_secs(20);
    match mods.source("test", &format!("{HEADER}{source}"), None) {
        Ok(factory) => factory,
        Err(error) => panic!("{error}\n{}", error.traceback().unwrap_or_default()),
    }
}

fn load_error(source: &str, entrypoint: Option<&str>) -> LoadError {
    PythonMods::from_source("broken", source, entrypoint).err().expect("it was loaded")
}

fn scene(factory: &Arc<dyn Factory>) -> Scene {
    Scene::new(factory.as_ref(), &Value::Null)
}

fn logits() -> Vec<f32> {
    let mut logits = vec![f32::NEG_INFINITY; VOCABULARY];
    logits[usize::from(b'a')] = 0.0;
    logits[usize::from(b'b')] = 3.0_f32.ln();
    logits
}

fn sampled(scene: &mut Scene, token: u8) -> Reply {
    let text = char::from(token).to_string();
    scene.call(CallEvent::Sampled { token: i32::from(token), text: &text, logprob: -0.5 })
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

fn fixture(name: &str) -> Arc<dyn Factory> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/mods").join(name);
    let mut mods = PythonMods::from_file(path).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(mods.len(), 1);
    mods.remove(0)
}

#[test]
fn every_event_has_its_fields() {
    let factory = load(
        r#"
@mod
def fields(event, actions, tokenizer):
    """First sentence.

    More."""
    c = event.context_info
    print(type(event).__name__, event.step, event.max_steps, c.tokens, c._prompt_len, event.request_id)
    if isinstance(event, Prefilled): print(event.prompt_tokens, event.prompt_text, event.prompt_length, event.conversation)
    if isinstance(event, ForwardPass):
        print(repr(event.input_text), event.logits.shape, event.logits[98] > event.logits[97], event.logits[0, 0])
        logprobs, tokens = event.top_k_logprob(2)
        print([round(float(l), 3) for l in logprobs[0]], [int(t) for t in tokens[0]], round(event.logits.entropy(), 4))
    if isinstance(event, Sampled): print(event.sampled_token, event.text, event.logprob)
    if isinstance(event, Added): print(event.added_tokens, event.text, event.forced, c.generated)
"#,
    );
    let description = factory.describe();
    assert_eq!((description.name.as_str(), description.description.as_str()), ("test", "First sentence."));
    assert_eq!((description.language.as_str(), description.version.len()), ("python", 12));
    let mut scene = scene(&factory);
    assert_eq!(scene.session.handles(), EventSet::ALL);
    let reply = scene.call(CallEvent::Prefilled);
    assert_eq!(lines(&reply), ["Prefilled 1 100 [62, 32] 2 request", "[62, 32] >  2 None"]);
    assert!(reply.action.is_none() && reply.elapsed > Duration::ZERO);
    let reply = scene.forward(&logits());
    assert_eq!(lines(&reply)[1..], ["'> ' (1, 265) True -inf", "[-0.288, -1.386] [98, 97] 0.8113"]);
    let reply = sampled(&mut scene, b'b');
    assert_eq!(lines(&reply)[1..], ["98 b -0.5"]);
    let reply = scene.append(&[word("Hello"), word(" the")], true);
    assert_eq!(lines(&reply)[1..], ["[263, 257] Hello the True [263, 257]"]);
    // A long sequence outgrows its slot, and a shorter one follows.
    let long = vec![65; 5000];
    assert!(lines(&scene.append(&long, false))[0].ends_with("65] 2 request"));
    scene.sequence.truncate(3);
    assert!(lines(&scene.forward(&logits()))[0].contains("[62, 32, 263] 2"));
}

#[test]
fn logs_belong_to_the_call_that_wrote_them() {
    let factory = load(
        r#"
import logging, warnings
print("while importing")
@mod
def talk(event, actions, tokenizer):
    if isinstance(event, Sampled): return
    print("one\n1"); print("no", end=" "); print("newline", end="")
    logging.getLogger(__name__).debug("mine"); logging.getLogger("asyncio").debug("not mine")
    logging.warning("careful %s", 3); logging.getLogger("x").critical("bad"); logging.info("wrong %d %d", 1)
    print("to stderr \udc80", file=sys.stderr)
    os.write(1, b"past python")
"#,
    );
    let mut scene = scene(&factory);
    let reply = scene.add(65);
    no_exception(&reply);
    let logs: Vec<(LogLevel, &str)> = reply.logs.iter().map(|log| (log.level, log.message.as_str())).collect();
    assert_eq!(
        logs,
        [
            (LogLevel::Info, "one\n1"),
            (LogLevel::Info, "no newline"),
            (LogLevel::Debug, "mine"),
            (LogLevel::Warning, "careful 3"),
            (LogLevel::Error, "bad"),
            (LogLevel::Error, "a log line could not be formatted: not enough arguments for format string"),
            (LogLevel::Warning, "to stderr ?"),
        ]
    );
    assert!(lines(&sampled(&mut scene, b'a')).is_empty());
}

#[test]
fn an_endless_log_is_cut() {
    let factory = load("@mod\ndef flood(event, actions):\n    for i in range(100000): print('x' * 100)\n");
    let reply = scene(&factory).add(65);
    no_exception(&reply);
    assert!(reply.logs.len() < 3000, "{}", reply.logs.len());
    assert!(reply.logs.last().unwrap().message.ends_with("more lines were dropped; a call can log 256 KiB"));
}

#[test]
fn exceptions_carry_the_mods_own_traceback() {
    let factory = load(
        r#"
def inner(event): raise ValueError("no such thing\nsecond line")
@mod
def failing(event, actions, tokenizer):
    print("before")
    if isinstance(event, Sampled): sys.exit(3)
    inner(event)
"#,
    );
    let mut scene = scene(&factory);
    let reply = scene.add(65);
    let (message, traceback) = raised(&reply);
    assert_eq!(message, "ValueError: no such thing");
    assert!(traceback.contains("File \"test.py\", line 4, in inner"), "{traceback}");
    assert!(traceback.contains("raise ValueError(\"no such thing"), "the source line is shown: {traceback}");
    assert!(!traceback.contains("thunder/"), "{traceback}");
    assert_eq!(reply.logs[0].message, "before");
    let reply = sampled(&mut scene, b'a');
    assert_eq!(raised(&reply).0, "SystemExit: 3");
}

const STATE: &str = r"
calls = []
@mod
def stateful(event, actions, tokenizer):
    calls.append(event.step)
    print(len(calls))
";

#[test]
fn a_call_that_never_returns_is_ended_and_other_runs_go_on() {
    let source = STATE.replace(
        "    print(len(calls))",
        "    print(len(calls))\n    if isinstance(event, Sampled): spin()\n\ndef spin():\n    while True: pass\n",
    );
    let factory = with_call_limit(&source, Duration::from_millis(400));
    let (mut first, mut second) = (scene(&factory), scene(&factory));
    assert_eq!(lines(&first.add(65)), ["1"]);
    assert_eq!(lines(&second.add(65)), ["2"]);
    let began = Instant::now();
    let stuck = std::thread::spawn(move || {
        let reply = sampled(&mut first, b'a');
        (first, reply)
    });
    std::thread::sleep(Duration::from_millis(100));
    // Waits at the keeper behind the stuck call, and gets the next worker, whose state is new.
    let reply = second.add(66);
    assert_eq!(lines(&reply), ["1"]);
    let (mut first, reply) = stuck.join().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5));
    let (message, traceback) = raised(&reply);
    assert_eq!(message, "deadline of 400 ms exceeded");
    assert!(traceback.contains("in spin") && traceback.contains("test.py"), "{traceback}");
    assert!(!traceback.contains("bootstrap"), "{traceback}");
    assert_eq!(reply.logs[0].message, "3", "what it printed before is kept");
    assert_eq!(lines(&first.add(67)), ["2"]);
}

#[test]
fn a_worker_that_dies_is_replaced() {
    let source = STATE.replace(
        "    print(len(calls))",
        "    print(len(calls))\n    if isinstance(event, Sampled): os._exit(3)\n    if isinstance(event, ForwardPass): os.kill(os.getpid(), 9)",
    );
    let factory = load(&source);
    let mut scene = scene(&factory);
    let reply = sampled(&mut scene, b'a');
    assert_eq!(raised(&reply).0, "the worker ended with exit code 3");
    assert_eq!(lines(&scene.add(65)), ["1"]);
    let reply = scene.forward(&logits());
    assert_eq!(raised(&reply).0, "the worker was ended by signal 9 (SIGKILL)");
    assert_eq!(lines(&scene.add(65)), ["1"]);
}

#[test]
fn a_worker_that_dies_between_calls_takes_none_with_it() {
    let factory = load(
        r"
import threading
@mod
def later(event, actions):
    if isinstance(event, Sampled): threading.Timer(0.1, lambda: os._exit(1)).start()
    print(event.step)
",
    );
    let mut scene = scene(&factory);
    no_exception(&sampled(&mut scene, b'a'));
    std::thread::sleep(Duration::from_millis(500));
    no_exception(&scene.add(65));
}

#[test]
fn logits_are_edited_in_shared_memory() {
    let factory = load(
        r#"
from max.driver import Tensor
@mod
def edit(event, actions, tokenizer):
    if not isinstance(event, ForwardPass): return
    step = len(event.context_info.generated)
    if step == 0:
        event.logits.to_numpy()[0, 97] = 7.5
        return actions.adjust_logits(event.logits)
    if step == 1: return actions.adjust_logits(token_temp=0.25)
    if step == 2: return actions.adjust_logits(set={97: float("-inf"), 98: 2}, token_temp=0)
    if step == 3: return actions.adjust_logits(add={97: 1.5})
    if step == 4: return actions.adjust_logits(Tensor.from_numpy([[float(i) for i in range(265)]]))
    if step == 5:
        event.logits[97] = 1.0  # and then it does not say so
    if step == 6: return actions.adjust_logits([1.0] * 3)
    if step == 7: return actions.adjust_logits([float("nan")] * 265)
    if step == 8: return actions.adjust_logits([float("-inf")] * 265)
    if step == 9: return actions.adjust_logits(set={999: 1.0})
    if step == 10: return actions.adjust_logits(token_temp=-1)
"#,
    );
    let mut scene = scene(&factory);
    let next = |scene: &mut Scene| {
        let reply = scene.forward(&logits());
        scene.sequence.push(65);
        reply
    };
    let edited = |edit, temperature| Some(Action::AdjustedLogits { edit, temperature });
    let mut expected = logits();
    expected[97] = 7.5;
    assert_eq!(next(&mut scene).action, edited(LogitEdit::Replace(expected), None));
    assert_eq!(next(&mut scene).action, edited(LogitEdit::Keep, Some(0.25)));
    let set = LogitEdit::Set(vec![(97, f32::NEG_INFINITY), (98, 2.0)]);
    assert_eq!(next(&mut scene).action, edited(set, Some(0.0)));
    assert_eq!(next(&mut scene).action, edited(LogitEdit::Add(vec![(97, 1.5)]), None));
    let ramp = (0..VOCABULARY).map(|index| index as f32).collect();
    assert_eq!(next(&mut scene).action, edited(LogitEdit::Replace(ramp), None));
    let reply = next(&mut scene);
    no_exception(&reply);
    assert_eq!(reply.action, None);
    for message in [
        "InvalidActionError: adjust_logits takes 265 logits, one per token of the vocabulary, not 3",
        "InvalidActionError at ForwardPass: the logit of token 0 cannot be NaN",
        "InvalidActionError at ForwardPass: all tokens are banned: every logit is -inf",
        "InvalidActionError at ForwardPass: 999 is not a token; the ids of this model are 0 to 264",
        "InvalidActionError at ForwardPass: token_temp must be 0 or more, not -1",
    ] {
        assert_eq!(raised(&next(&mut scene)).0, message);
    }
}

#[test]
fn the_tokenizer_is_the_models() {
    let factory = load(
        r#"
from quote_mod_sdk import tokenize
@mod
def tokens(event, actions, tokenizer):
    print(tokenizer.encode("Hello the<end>"), tokenize("Hi", tokenizer), tokenize("Hi"), tokenizer("a")["input_ids"])
    print(tokenizer.decode([263, 257]), repr(tokenizer.decode([0xc3, 0xa4, 0xc3])), tokenizer.decode(98))
    print(len(tokenizer), tokenizer.eos_token_id, tokenizer.end_of_generation, tokenizer.all_special_ids)
    print(tokenizer.get_vocab()["Hello"], tokenizer.convert_ids_to_tokens([263, 65]), tokenizer.convert_tokens_to_ids("A"))
    print(repr(tokenizer.decode([263, 256])), repr(tokenizer.decode([263, 256], skip_special_tokens=True)))
    return actions.force_tokens(tokenizer.encode(" bad"))
"#,
    );
    let reply = scene(&factory).add(65);
    assert_eq!(
        lines(&reply),
        [
            "[263, 257, 256] [72, 105] [72, 105] [97]",
            "Hello the 'ä\u{fffd}' b",
            "265 None [256] [256]",
            "263 ['Hello', 'A'] 65",
            "'Hello<end>' 'Hello'",
        ]
    );
    assert_eq!(reply.action, Some(Action::ForceTokens(vec![word(" bad")])));
}

#[test]
fn actions_come_through_and_wrong_ones_are_refused() {
    let factory = load(
        r#"
from shared.types import ForceTokens
@mod(config={"do": "nothing"})
def act(event, actions, tokenizer):
    return eval(event.config["do"])
"#,
    );
    let act = |what: &str, event: CallEvent<'_>| Scene::new(factory.as_ref(), &json!({ "do": what })).call(event);
    let prefilled = || CallEvent::Prefilled;
    let drawn = || CallEvent::Sampled { token: 65, text: "A", logprob: -1.0 };
    for (what, action) in [
        (
            "actions.adjust_prefill([65, 66], max_steps=5)",
            Action::AdjustedPrefill { tokens: vec![65, 66], max_steps: Some(5) },
        ),
        ("actions.force_output((65,))", Action::ForceOutput(vec![65])),
        ("actions.tool_calls({'id': 'ä'})", Action::ToolCalls(json!({"id": "ä"}))),
        ("actions.emit_error('no')", Action::EmitError("no".into())),
    ] {
        let reply = act(what, prefilled());
        no_exception(&reply);
        assert_eq!(reply.action, Some(action));
    }
    assert_eq!(act("ForceTokens([65])", drawn()).action, Some(Action::ForceTokens(vec![65])));
    assert_eq!(act("actions.backtrack(2)", drawn()).action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
    assert_eq!(act("actions.noop()", drawn()).action, None);
    for (what, message) in [
        (
            "actions.force_tokens([65])",
            "InvalidActionError: Action 'force_tokens' not permitted for event type Prefilled; it is permitted for ForwardPass, Sampled, Added",
        ),
        ("ForceTokens([65])", "InvalidActionError: Action 'ForceTokens' not permitted for event type Prefilled"),
        (
            "actions.force_output('text')",
            "InvalidActionError: force_output takes token ids, not text; tokenizer.encode(text) makes them",
        ),
        (
            "actions.force_output([9999])",
            "InvalidActionError at Prefilled: 9999 is not a token; the ids of this model are 0 to 264",
        ),
        ("actions.tool_calls(object)", "TypeError: Object of type type is not JSON serializable"),
        (
            "3",
            "InvalidActionError: a mod returns an action or None, not int; make one with the builder, e.g. actions.noop()",
        ),
    ] {
        assert_eq!(raised(&act(what, prefilled())).0, message);
    }
    let message = factory.start(&json!({"doo": 1}), &crate::mods::builtin::testing::run()).err().unwrap();
    assert_eq!(message, "unknown field 'doo'; known fields: do");
}

#[test]
fn runs_interleave_and_are_told_when_they_end() {
    let factory = load(
        r#"
from quote_mod_sdk import get_conversation, tool_call_pairs
texts, ended = {}, []
@mod(events=["Added"])
def collect(event, actions, tokenizer):
    texts.setdefault(event.config["who"], []).append(event.text)
    print(texts[event.config["who"]], ended, get_conversation(), tool_call_pairs())
def finished(request_id):
    ended.append(request_id)
"#,
    );
    let mut first = Scene::new(factory.as_ref(), &json!({"who": "a"}));
    let mut second = Scene::new(factory.as_ref(), &json!({"who": "b"}));
    assert!(!first.session.handles().contains(crate::events::EventType::ForwardPass));
    assert_eq!(lines(&first.add(65)), ["['A'] [] [] []"]);
    assert_eq!(lines(&second.add(66)), ["['B'] [] [] []"]);
    assert_eq!(lines(&first.add(67)), ["['A', 'C'] [] [] []"]);
    first.session.finished();
    drop(first);
    assert_eq!(lines(&second.add(68)), ["['B', 'D'] ['request'] [] []"]);
}

#[test]
fn many_runs_at_once() {
    let factory = load("@mod\ndef echo(event, actions):\n    print(event.context_info.generated)\n");
    let threads: Vec<_> = (0..8)
        .map(|index| {
            let mut scene = scene(&factory);
            std::thread::spawn(move || {
                for count in 1..=20 {
                    let reply = scene.add(index);
                    assert_eq!(lines(&reply), [format!("{:?}", vec![index; count])]);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_mod_that_cannot_be_loaded_says_why() {
    let error = load_error("def f(:\n    pass\n", None);
    assert!(error.to_string().starts_with("broken.py: SyntaxError: "), "{error}");
    assert!(error.traceback().unwrap().contains("def f(:"), "{:?}", error.traceback());
    let error = load_error("x = 1\n", None);
    assert!(error.to_string().contains("has no mod; put @mod"), "{error}");
    let error = load_error(&format!("{HEADER}@mod\ndef f(e, a): pass\n"), Some("g"));
    assert!(error.to_string().ends_with("broken.py has no function 'g'; its mods are: f"), "{error}");
    let two = format!("{HEADER}@mod\ndef f(e, a): pass\n@mod\ndef g(e, a): pass\n");
    let error = load_error(&two, None);
    assert!(error.to_string().ends_with("name one as the entrypoint: f, g"), "{error}");
    assert!(PythonMods::from_source("one", &two, Some("g")).is_ok());
    let error = load_error("import nowhere\n", None);
    assert!(error.to_string().ends_with("ModuleNotFoundError: No module named 'nowhere'"), "{error}");
    assert!(error.traceback().unwrap().contains("File \"broken.py\", line 1"));
    let error = load_error("import sys; sys.exit(1)\n", None);
    assert!(error.to_string().ends_with("SystemExit: 1"), "{error}");
    let mut mods = PythonMods::default();
    mods.limits.import = Duration::from_secs(2);
    let error = mods.source("slow", "import time\ntime.sleep(60)\n", None).err().unwrap();
    assert!(error.to_string().ends_with("the import failed: deadline of 2000 ms exceeded"), "{error}");
    assert!(error.traceback().unwrap().contains("slow.py"), "{:?}", error.traceback());
    assert!(matches!(PythonMods::from_file("/nowhere/x.py"), Err(LoadError::Unreadable { .. })));
}

#[test]
fn a_directory_loads_what_it_can() {
    let dir = std::env::temp_dir().join(format!("thunder-test-{}", uuid::Uuid::now_v7()));
    std::fs::create_dir(&dir).unwrap();
    let good = format!("{HEADER}@mod\ndef one(e, a): pass\n@mod(name='second')\ndef two(e, a): pass\n");
    for (name, text) in
        [("a.py", good.as_str()), ("b.py", "1/0"), ("c.py", good.as_str()), ("_d.py", "1/0"), ("e.txt", "")]
    {
        std::fs::write(dir.join(name), text).unwrap();
    }
    let loaded = PythonMods::load_dir(&dir).unwrap();
    let names: Vec<String> = loaded.mods.iter().map(|found| found.describe().name).collect();
    assert_eq!(names, ["one", "second"]);
    let failed: Vec<String> = loaded.failed.iter().map(ToString::to_string).collect();
    assert_eq!(failed.len(), 3, "{failed:?}");
    assert_eq!(failed[0], "b.py: ZeroDivisionError: division by zero");
    assert!(failed[1].contains("a mod 'one' is in"), "{failed:?}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_worker_has_nothing_of_the_servers() {
    let factory = load(
        r#"
import json, resource
@mod
def look(event, actions):
    fds = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    print(json.dumps({"env": sorted(os.environ), "fds": len(fds), "cwd": os.getcwd(), "pgid": os.getpgid(0) == os.getpid(),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0], "stdin": sys.stdin.read(), "pid": os.getpid()}))
"#,
    );
    let mut scene = scene(&factory);
    let reply = scene.add(65);
    let seen: Value = serde_json::from_str(lines(&reply)[0]).unwrap();
    let expected = ["HOME", "LANG", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"];
    let extra = seen["env"].as_array().unwrap().iter().filter(|name| {
        let name = name.as_str().unwrap();
        // What Python itself or macOS may set.
        !expected.contains(&name) && name != "LC_CTYPE" && !name.starts_with("__CF")
    });
    assert_eq!(extra.count(), 0, "{seen}");
    // 0, 1, 2, the socket, the memory, its map, and the directory that is being listed.
    assert!(seen["fds"].as_u64().unwrap() <= 7, "{seen}");
    assert_eq!((&seen["pgid"], &seen["core"], &seen["stdin"]), (&json!(true), &json!(0), &json!("")));
    let cwd = PathBuf::from(seen["cwd"].as_str().unwrap());
    assert!(cwd.exists());
    drop(scene);
    drop(factory);
    let until = Instant::now() + Duration::from_secs(5);
    while cwd.exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!cwd.exists(), "the worker and its directory end with the mod");
}

#[test]
fn memory_is_bounded() {
    let mut mods = PythonMods::default();
    mods.limits.address_space_bytes = 256 << 20;
    let source = format!("{HEADER}@mod\ndef eat(e, a): x = bytearray(1 << 30)\n");
    let factory = mods.source("eat", &source, None).unwrap();
    if cfg!(target_os = "linux") {
        assert!(raised(&scene(&factory).add(65)).0.starts_with("MemoryError"));
    }
}

#[test]
fn works_with_the_oldest_python() {
    let Some(python) = std::env::var_os("THUNDER_TEST_OLDEST_PYTHON") else {
        eprintln!("skipped: THUNDER_TEST_OLDEST_PYTHON names no Python 3.9");
        return;
    };
    let mods = PythonMods { python: Some(python.into()), ..PythonMods::default() };
    let source = format!("{HEADER}@mod\ndef v(e, a, t):\n    print(sys.version_info[:2], t.encode('Hello'), e.text)\n");
    let factory = mods.source("v", &source, None).unwrap();
    assert_eq!(lines(&scene(&factory).add(65)), ["(3, 9) [263] A"]);
}

#[test]
fn fixture_ban_phrase() {
    let factory = fixture("ban_phrase.py");
    let mut scene = Scene::new(factory.as_ref(), &json!({"phrase": "bad idea"}));
    assert_eq!(scene.session.holdback(), 32);
    let reply = scene.say("Hello a bad idea").expect("it backtracks");
    assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
    assert_eq!(reply.logs[0].message, "took back ' bad idea'");
    assert_eq!(scene.text(), "Hello a");
    let ban = LogitEdit::Set(vec![(word(" bad"), f32::NEG_INFINITY)]);
    assert_eq!(scene.forward(&logits()).action, Some(Action::AdjustedLogits { edit: ban, temperature: None }));
    scene.say("x");
    assert_eq!(scene.forward(&logits()).action, None);
}

#[test]
fn fixture_json_prefix() {
    let mut scene = scene(&fixture("json_prefix.py"));
    let forced: Vec<i32> = b"{\"".iter().map(|&byte| i32::from(byte)).collect();
    assert_eq!(scene.forward(&logits()).action, Some(Action::ForceTokens(forced.clone())));
    scene.sequence.extend(forced);
    assert_eq!(scene.forward(&logits()).action, None);
    assert_eq!(scene.sequence.len(), PROMPT + 2);
}

#[test]
fn fixture_log_top5() {
    let mut scene = scene(&fixture("log_top5.py"));
    let reply = scene.forward(&logits());
    assert_eq!(lines(&reply)[..2], ["'b' -0.288", "'a' -1.386"]);
    assert_eq!(reply.logs.len(), 5);
    assert!(lines(&scene.add(EOG)).is_empty());
}

#[test]
fn fixture_temperature_by_entropy() {
    let mut scene = scene(&fixture("temperature_by_entropy.py"));
    let Some(Action::AdjustedLogits { edit: LogitEdit::Keep, temperature: Some(temperature) }) =
        scene.forward(&logits()).action
    else {
        panic!("no temperature");
    };
    let expected = 0.2 + 0.8 * (0.8113 - 0.5) / 3.5;
    assert!((temperature - expected).abs() < 1e-3, "{temperature}");
}

#[test]
fn source_that_needs_a_sandbox_is_refused_without_one() {
    let source = format!("{HEADER}@mod\ndef f(e, a): pass\n");
    let missing = Launcher::new("/nowhere/thunder".into());
    for (launcher, reason) in
        [(None, "this program cannot start one"), (Some(missing), "/nowhere/thunder cannot be started")]
    {
        let mods = PythonMods { origin: Origin::Uploaded, launcher, ..PythonMods::default() };
        let error = mods.source("f", &source, None).err().unwrap();
        assert!(matches!(error, LoadError::NoSandbox { .. }) && error.to_string().contains(reason), "{error}");
        assert!(error.to_string().contains("--mod-sandbox off"), "{error}");
        let off = PythonMods { policy: Policy::Off, ..mods };
        assert!(off.source("f", &source, None).is_ok());
    }
}

#[test]
fn workers_that_are_lost_one_after_another_come_back_after_a_pause() {
    let factory = load("@mod\ndef dies(e, a):\n    if isinstance(e, Sampled): os._exit(3)\n");
    let mut scene = scene(&factory);
    for _ in 0..2 {
        assert_eq!(raised(&sampled(&mut scene, b'a')).0, "the worker ended with exit code 3");
    }
    let reply = scene.add(65);
    assert!(
        raised(&reply).0.starts_with("the worker ended with exit code 3; the next try is in "),
        "{:?}",
        reply.exception
    );
    std::thread::sleep(Duration::from_millis(600));
    no_exception(&scene.add(65));
    assert_eq!(raised(&sampled(&mut scene, b'a')).0, "the worker ended with exit code 3");
    no_exception(&scene.add(65));
}

#[test]
fn the_log_of_a_run_has_an_end() {
    let mut mods = PythonMods::default();
    mods.limits.run_log_bytes = 1000;
    let source = format!("{HEADER}@mod\ndef talks(e, a): print('x' * 99)\n");
    let factory = mods.source("talks", &source, None).unwrap();
    let mut talking = scene(&factory);
    let counts: Vec<usize> = (0..13).map(|_| lines(&talking.add(65)).len()).collect();
    assert_eq!(counts.iter().sum::<usize>(), 11, "ten lines and one that says so: {counts:?}");
    assert_eq!(lines(&scene(&factory).add(65)), ["x".repeat(99)], "another run has its own");
}

#[test]
fn several_workers_have_their_own_runs() {
    let factory = load("@mod(workers=2)\ndef who(e, a): print(os.getpid())\n");
    let mut scenes: Vec<Scene> = (0..4).map(|_| scene(&factory)).collect();
    let mut pids: Vec<String> = scenes.iter_mut().map(|scene| lines(&scene.add(65))[0].to_owned()).collect();
    for (scene, pid) in scenes.iter_mut().zip(&pids) {
        assert_eq!(lines(&scene.add(66)), [pid.as_str()], "a run stays where it is");
    }
    pids.sort();
    pids.dedup();
    assert_eq!(pids.len(), 2);
}
