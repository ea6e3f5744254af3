//! Contents of events for a mod, and its logs.

use super::{HEADER, harness, lines, load, logits, no_exception, python_mods, raised, sampled};
use crate::events::LogLevel;
use crate::model::llama::NoHiddenStates;
use crate::mods::builtin::testing::word;
use crate::mods::{Action, CallEvent, EventSet};
use std::time::Duration;

#[test]
fn each_event_has_all_fields() {
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
    assert_eq!(description.language, "python");
    let mut harness = harness(&factory);
    assert_eq!(harness.instance.handles(), EventSet::ALL);
    let reply = harness.call(CallEvent::Prefilled);
    assert_eq!(lines(&reply), ["Prefilled 0 100 [62, 32] 2 request", "[62, 32] >  2 None"]);
    assert!(reply.action.is_none() && reply.elapsed > Duration::ZERO);
    let reply = harness.forward(&logits());
    assert_eq!(lines(&reply)[1..], ["'> ' (1, 265) True -inf", "[-0.288, -1.386] [98, 97] 0.8113"]);
    let reply = sampled(&mut harness, b'b');
    assert_eq!(lines(&reply)[1..], ["98 b -0.5"]);
    let reply = harness.append(&[word("Hello"), word(" the")], true);
    assert_eq!(lines(&reply)[1..], ["[263, 257] Hello the True [263, 257]"]);
    // A long sequence outgrows its memory region, and a shorter one follows.
    let long = vec![65; 5000];
    assert!(lines(&harness.append(&long, false))[0].ends_with("65] 2 request"));
    harness.sequence.truncate(3);
    assert!(lines(&harness.forward(&logits()))[0].contains("[62, 32, 263] 2"));
}

#[test]
fn tokens_are_read_only_during_the_call() {
    let factory = load(
        r"
kept = []
@mod
def keeps(event, actions):
    for earlier in kept:
        try: print(earlier.context_info.tokens)
        except RuntimeError as error: print(error)
    kept.append(event)
    print(event.context_info.evicted, event.context_info.evictions_end)
",
    );
    let mut harness = harness(&factory);
    assert_eq!(lines(&harness.add(65)), ["0 0"]);
    (harness.evicted, harness.evictions_end) = (3, 2);
    let late = "the tokens of an event can only be read during its call; read `context_info.tokens` there";
    assert_eq!(lines(&harness.add(66)), [late, "3 2"]);
}

#[test]
fn failures_of_the_sdk_are_reported() {
    let factory =
        load("import thunder_mods.worker.serve as serve\nserve.ContextInfo = None\n@mod\ndef f(e, a): pass\n");
    let reply = harness(&factory).add(65);
    assert_eq!(raised(&reply).0, "TypeError: 'NoneType' object is not callable");
    let factory = load("import thunder_mods.worker.serve as serve\nserve.Run = None\n@mod\ndef f(e, a): pass\n");
    let reply = harness(&factory).add(65);
    let (message, traceback) = raised(&reply);
    assert_eq!(message, "the worker ended with exit code 1");
    assert!(traceback.contains("in begin") && traceback.contains("TypeError: 'NoneType'"), "{traceback}");
}

#[test]
fn quote_imports_use_quote_steps() {
    let body = "@mod\ndef steps(e, a): print(type(e).__name__, e.step)\n";
    for (import, offset) in [
        ("from thunder_mods import mod", 0),
        ("from quote_mod_sdk import mod", 1),
        ("from thunder_mods import mod\nfrom shared.types import Added", 1),
        ("from thunder_mods import mod\ndef later():\n    from shared.types import Added", 1),
        // Without the decorator Quote calls a function with event and tokenizer.
        (
            "from shared.types import Noop\ndef mod(function):\n    def steps(event, tokenizer):\n        function(event, tokenizer.eos_token_id)\n        return Noop()\n    return steps",
            1,
        ),
    ] {
        let factory = python_mods().load_one("steps", &format!("{import}\n{body}"), Some("steps")).unwrap();
        let seen = [
            harness(&factory).forward(&logits()),
            sampled(&mut harness(&factory), b'b'),
            harness(&factory).append(&[65], false),
        ];
        let steps: Vec<&str> = seen.iter().flat_map(lines).collect();
        let expected = ["ForwardPass", "Sampled", "Added"].map(|kind| format!("{kind} {}", 1 - offset));
        assert_eq!(steps, expected, "{import}");
    }
}

#[test]
fn logs_are_attached_to_their_call() {
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
    let mut harness = harness(&factory);
    let reply = harness.add(65);
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
    assert!(lines(&sampled(&mut harness, b'a')).is_empty());
}

#[test]
fn log_of_call_is_limited() {
    let factory = load("@mod\ndef flood(event, actions):\n    for i in range(100000): print('x' * 100)\n");
    let reply = harness(&factory).add(65);
    no_exception(&reply);
    assert!(reply.logs.len() < 3000, "{}", reply.logs.len());
    assert!(reply.logs.last().unwrap().message.ends_with("more lines were dropped; the maximum per call is 256 KiB"));
}

#[test]
fn log_of_run_is_limited() {
    let mut mods = python_mods();
    mods.limits.run_log_bytes = 1000;
    let source = format!("{HEADER}@mod\ndef talks(e, a): print('x' * 99)\n");
    let factory = mods.load_one("talks", &source, None).unwrap();
    let mut talking = harness(&factory);
    let counts: Vec<usize> = (0..13).map(|_| lines(&talking.add(65)).len()).collect();
    assert_eq!(counts.iter().sum::<usize>(), 11, "ten lines and a notice: {counts:?}");
    assert_eq!(lines(&harness(&factory).add(65)), ["x".repeat(99)], "another run has its own limit");
}

#[test]
fn exceptions_have_traceback_of_mod() {
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
    let mut harness = harness(&factory);
    let reply = harness.add(65);
    let (message, traceback) = raised(&reply);
    assert_eq!(message, "ValueError: no such thing");
    assert!(traceback.contains("File \"test.py\", line 4, in inner"), "{traceback}");
    assert!(traceback.contains("raise ValueError(\"no such thing"), "the source line is shown: {traceback}");
    assert!(!traceback.contains("thunder/"), "{traceback}");
    assert_eq!(reply.logs[0].message, "before");
    let reply = sampled(&mut harness, b'a');
    assert_eq!(raised(&reply).0, "SystemExit: 3");
}

#[test]
fn tokenizer_matches_model() {
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
    let reply = harness(&factory).add(65);
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
fn failing_exception_text_is_handled() {
    let factory = load(
        r#"
class Silent(BaseException):
    def __str__(self): raise self
class Long(Exception):
    def __str__(self): return "m" * (1 << 22)
@mod
def raises(event, actions):
    raise (Silent if isinstance(event, Sampled) else Long)()
"#,
    );
    let mut harness = harness(&factory);
    assert_eq!(raised(&sampled(&mut harness, b'a')).0, "Silent: the text of the exception cannot be read");
    let reply = harness.add(65);
    let (message, traceback) = raised(&reply);
    assert!(message.starts_with("Long: mmm") && message.len() < 10_000 && traceback.len() < 300_000);
}

#[test]
fn declared_layers_must_exist() {
    let factory = load("@mod(hidden_states=[0, -1])\ndef reads(event, actions): pass\n");
    let started = |hidden_layers| {
        let view = crate::mods::RunView { hidden_layers, ..(*crate::mods::builtin::testing::run()).clone() };
        let instance = factory.start(&serde_json::Value::Null, &std::sync::Arc::new(view))?;
        Ok::<_, String>(instance.hidden_layers().to_vec())
    };
    assert_eq!(started(Ok(12)).unwrap(), [0, 11]);
    assert_eq!(
        started(Err(NoHiddenStates::CaptureOff)).unwrap_err(),
        "the mod reads hidden states, but the server was started with --attention off; start it with --attention auto or on"
    );
    let far = load("@mod(hidden_states=-5)\ndef reads(event, actions): pass\n");
    let view = crate::mods::RunView { hidden_layers: Ok(4), ..(*crate::mods::builtin::testing::run()).clone() };
    assert_eq!(
        far.start(&serde_json::Value::Null, &std::sync::Arc::new(view)).err().unwrap(),
        "the mod reads the hidden states of layer -5, but the model has 4 layers: 0 to 3, or -4 to -1"
    );
}
